"""Targets by name. A target is imported when it is first asked for."""

from __future__ import annotations

import functools

from pbkern.core.errors import TargetError
from pbkern.core.process import recursion

from .target import Target

NAMES = ("cpu", "nvgpu", "amdgpu")


@functools.cache
def get_target(name: str) -> Target:
    """The target of this name. Raises TargetError if it is unknown."""
    with recursion.headroom():  # imports nest
        if name == "cpu":
            from pbkern.targets.cpu.target import CpuTarget

            return CpuTarget()
        if name == "nvgpu":
            from pbkern.targets.nvgpu.target import NvgpuTarget

            return NvgpuTarget()
        if name == "amdgpu":
            from pbkern.targets.amdgpu.target import AmdgpuTarget

            return AmdgpuTarget()
    raise TargetError(f"there is no target `{name}`", why=f"the targets are {', '.join(NAMES)}")
