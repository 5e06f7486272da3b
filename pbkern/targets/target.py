"""Target: what the rest of pbkern asks of a device family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pbkern.core.machine import Machine
from pbkern.core.process.disk_cache import DiskStore
from pbkern.dsl.host_program import HostProgram, ProgramSignature
from pbkern.dsl.kernel import Kernel
from pbkern.targets.params import DimensionSemantics

from .backend import KernelBackend

if TYPE_CHECKING:
    from pbkern.fuse.cost.model import CostModel


class Target(Protocol):
    """One device family.

    Attributes:
      name: as in compile_options: "cpu", "nvgpu", "amdgpu".
      platform: JAX's name of the platform whose lowerings it provides.
      STAGES: names of what `text` shows, in order.
      POOLED_BYTES: size from which a result is worth a place of its own, see api/result_pool.py.
    """

    @property
    def name(self) -> str: ...

    @property
    def platform(self) -> str: ...

    @property
    def STAGES(self) -> tuple[str, ...]: ...

    @property
    def POOLED_BYTES(self) -> int: ...

    @property
    def backend(self) -> KernelBackend:
        """Its half of lowering, see targets/backend.py."""

    def machine(self) -> Machine:
        """The device in this computer."""

    def costs(self, device: str | None = None) -> CostModel:
        """Its prices for fusion, for the device that compile_options name; None: for the one in this computer."""

    def supports(self, eqn) -> str | None:
        """None if kernel bodies can contain the equation, else why not."""

    def fused_params(
        self, semantics: tuple[DimensionSemantics, ...], options, **chosen: Any
    ) -> Mapping[str, Any]:
        """compiler_params of a kernel that fusion makes: the semantics of its grid, and fields that were tuned."""

    def variations(self) -> list[tuple[str, list]]:
        """Fields of compiler_params that are worth trying on a fused kernel, each with values beside the default."""

    def identity(self) -> str:
        """Differs between devices, and between versions of what makes code for them."""

    def product_instructions(self, kernel: Kernel, options) -> tuple[str, ...]:
        """Matrix instructions by which a kernel computes its products, by name."""

    def block_copies(self, kernel: Kernel, options) -> tuple[str, ...]:
        """Lines about blocks that are on their way while earlier steps compute, where the author asks for that."""

    def compile(self, program: HostProgram, options, recorded: bool = False) -> Any:
        """Machine code of a program, for as long as it is referred to or XLA may call it.

        Equal programs share it. `recorded`: its calls are recorded (targets/host/recording.py); raises
        TargetError where they cannot be.
        """

    def reference(self, store: DiskStore, compiled: Any) -> dict[str, Any] | None:
        """Data as JSON by which `load` finds a program's code in the store; None where later processes cannot have it."""

    def load(
        self, store: DiskStore, signature: ProgramSignature, reference: Mapping[str, Any]
    ) -> Any | None:
        """A program whose `reference` an earlier process has stored; None where its code is not there any more."""

    def call(self, compiled: Any, label: str, operands: Sequence) -> list:
        """Runs compiled code as a JAX operation (to be traced), which profiles show as `label`."""

    def call_into(
        self, compiled: Any, label: str, operands: Sequence, places: Sequence
    ) -> tuple[list, Any]:
        """`call` that overwrites `places` in place of new arrays.

        `places` has one array per result of POOLED_BYTES and more, in their order. Returns (the
        other results, an array that is there when all is written).
        """

    def lower_again(self, compiled: Any) -> Any:
        """Lowers the program of compiled code once more, so that passes can be watched."""

    def text(self, compiled: Any, stage: str) -> str:
        """One of STAGES of compiled code, for reading."""

    def memory(self, compiled: Any) -> tuple[int, int]:
        """(bytes that one call needs beside its operands and results, bytes of code)."""

    def coverage(self) -> dict[str, list[str]]:
        """Primitives that kernel bodies may contain, by family."""
