"""Public names of the CPU target: CompilerParams for kernels, machine(), the CPU that code is made for, and calibrate()."""

from pbkern.targets.cpu.machines.detect import calibrate
from pbkern.targets.cpu.machines.devices import jit_machine as machine
from pbkern.targets.cpu.params import CompilerParams

__all__ = ["CompilerParams", "calibrate", "machine"]
