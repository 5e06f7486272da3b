"""Target: what the rest of pbkern asks of a device family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..dsl.host import HostProgram
from ..dsl.kernel import Kernel
from ..machine import Machine


class Target(Protocol):
    """One device family.

    Attributes:
      name: as in compile_options: "cpu", "nvgpu", "amdgpu".
      platform: JAX's name of the platform whose lowerings it provides.
    """

    name: str
    platform: str

    def machine(self) -> Machine:
        """The device in this computer."""

    def supports(self, eqn) -> str | None:
        """None if kernel bodies can contain the equation, else why not."""

    def fused_params(self, semantics: tuple[str, ...], options) -> Mapping[str, Any]:
        """compiler_params of a kernel that fusion makes, from the semantics of its grid."""

    def check(self, kernel: Kernel) -> None:
        """Raises OptionError or ScheduleError where a kernel's compiler_params do not fit this device."""

    def compile(self, program: HostProgram, options) -> Any:
        """Machine code of a program, kept for the life of the process. Equal programs are compiled once."""

    def call(self, compiled: Any, *operands) -> list:
        """Runs compiled code as a JAX operation (traceable)."""

    def coverage(self) -> dict[str, list[str]]:
        """Primitives that kernel bodies may contain, by family."""
