"""Public names of the AMD GPU target."""

from pbkern.targets.amdgpu.params import CompilerParams

__all__ = ["CompilerParams"]
