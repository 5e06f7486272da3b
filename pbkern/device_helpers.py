"""What programs ask of devices."""

from pbkern.targets.nvgpu.driver import synchronize as cuda_synchronize

__all__ = ["cuda_synchronize"]
