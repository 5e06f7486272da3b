"""Public names of the NVIDIA GPU target."""

from pbkern.targets.nvgpu.params import CompilerParams

__all__ = ["CompilerParams"]
