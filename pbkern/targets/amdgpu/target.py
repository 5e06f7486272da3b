"""The AMD GPU target: HostProgram -> code objects of its kernels, and what this code says of itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.machine import Machine
from pbkern.targets.simt.emit.kernel import ThreadFunction
from pbkern.targets.simt.target import ThreadTarget

from . import compile as codegen
from . import machine
from .backend import AmdgpuBackend
from .devices import AmdDeviceKind, device_kind, kind_of_architecture
from .driver import HipDriver, driver, present_architecture
from .params import CompilerParams


@dataclass(eq=False)
class AmdKernelCode:
    """One kernel's code: its function as MLIR, with the numbers of its launch, and what LLVM and lld make of it."""

    function: ThreadFunction
    kind: AmdDeviceKind

    @functools.cached_property
    def llvm(self) -> str:
        return codegen.llvm_ir(self.function)

    @functools.cached_property
    def assembled(self) -> codegen.CodeObject:
        return codegen.assemble(self.llvm, self.kind)

    @functools.cached_property
    def image(self) -> bytes:
        return self.assembled.image

    def images(self, refused: list[str]) -> Iterator[tuple[str, bytes]]:
        """Yields what a driver may load."""
        yield f"code object for {self.kind.architecture}", self.image

    def made_for(self, kind: AmdDeviceKind) -> AmdKernelCode | None:
        """Makes the kernel for another kind of device; None if that is the same, or has other wavefronts or less memory."""
        if (
            kind == self.kind
            or kind.device != self.kind.device
            or self.function.shared_bytes > kind.shared_bytes
        ):
            return None
        return AmdKernelCode(self.function, kind)


class AmdgpuTarget(ThreadTarget):
    """See targets.target.Target."""

    name = "amdgpu"
    platform = "rocm"
    params = CompilerParams
    STAGES = ("nests", "mlir", "llvm", "asm")

    def machine(self, device: str | None = None) -> Machine:
        kind = self.backend_of(device).kind
        assert isinstance(kind, AmdDeviceKind)
        return machine.machine(kind)

    def backend_of(self, device: str | None) -> AmdgpuBackend:
        """Without a name: for this computer's device, if there is one."""
        present = None if device else present_architecture()
        return AmdgpuBackend(kind_of_architecture(present) if present else device_kind(device))

    def make(
        self, function: ThreadFunction, kind: AmdDeviceKind, image: bytes | None
    ) -> AmdKernelCode:
        code = AmdKernelCode(function, kind)
        if image is not None:
            code.image = image
        return code

    def image(self, code: AmdKernelCode) -> bytes:
        return code.image

    def driver(self) -> HipDriver:
        return driver()

    def show(self, code: AmdKernelCode, stage: str) -> str:
        return code.llvm if stage == "llvm" else code.assembled.text
