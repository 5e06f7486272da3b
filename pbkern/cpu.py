"""What concerns the CPU target: `CompilerParams` for kernels, and `machine()`, the CPU this process runs on."""

from .targets.cpu.machine import detected_machine as machine
from .targets.cpu.params import CompilerParams

__all__ = ["CompilerParams", "machine"]
