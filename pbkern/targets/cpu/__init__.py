"""The CPU target's public names: pbkern.cpu.CompilerParams, pbkern.cpu.machine."""

from .machine import detected_machine as machine
from .params import CompilerParams

__all__ = ["CompilerParams", "machine"]
