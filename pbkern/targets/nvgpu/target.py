"""The NVIDIA GPU target: HostProgram -> PTX of its kernels, and what this code says of itself."""

from __future__ import annotations

from typing import Any

from pbkern.core import config
from pbkern.core.machine import Machine
from pbkern.targets.simt.emit.kernel import ThreadFunction
from pbkern.targets.simt.target import ThreadTarget

from . import driver, machine, ptxas
from .backend import NvgpuBackend
from .devices import NvDeviceKind, device_kind, of_capability
from .params import CompilerParams
from .program import NvKernelCode, NvProgram


class NvgpuTarget(ThreadTarget):
    """See targets.target.Target."""

    name = "nvgpu"
    params = CompilerParams
    STAGES = ("nests", "mlir", "llvm", "ptx", "sass")
    compiled_class = NvProgram

    @property
    def platform(self) -> str:
        """JAX's platform of the arrays that programs run on: the CPU's, if launches are simulated."""
        return "cpu" if config.current().gpu_driver == "simulator" else "cuda"

    def machine(self, device: str | None = None) -> Machine:
        kind = self.backend_of(device).kind
        assert isinstance(kind, NvDeviceKind)
        return machine.machine(kind)

    def backend_of(self, device: str | None) -> NvgpuBackend:
        """Without a name: for this computer's device, if there is one that programs run on."""
        capability = None if device or config.current().gpu_driver else driver.present_capability()
        return NvgpuBackend(of_capability(*capability) if capability else device_kind(device))

    def make(
        self, function: ThreadFunction, kind: NvDeviceKind, image: bytes | None
    ) -> NvKernelCode:
        code = NvKernelCode(function, kind)
        if image is not None:
            code.ptx = image.decode()
        return code

    def image(self, code: NvKernelCode) -> bytes:
        return code.ptx.encode()

    def driver(self) -> Any:
        return driver.driver(config.current().gpu_driver)

    def show(self, code: NvKernelCode, stage: str) -> str:
        match stage:
            case "llvm":
                return code.llvm
            case "ptx":
                return code.ptx
        return ptxas.disassembled(code.assembled.cubin)
