"""Public names of the CPU target: `CompilerParams` for kernels, and `machine()`, the CPU this process runs on."""

from pbkern.targets.cpu.machines.devices import jit_machine as machine
from pbkern.targets.cpu.params import CompilerParams

__all__ = ["CompilerParams", "machine"]
