"""Targets by name. A target is imported when it is first asked for."""

from __future__ import annotations

import functools

from pbkern.core.errors import TargetError
from pbkern.core.process import recursion

from .target import Target

NAMES = ("cpu", "nvgpu", "amdgpu")


def get_target(name: str, device: str | None = None) -> Target:
    """The target of this name; on CPUs, for a device that is not in this computer, one that makes plans and texts for it.

    Raises TargetError if it is unknown, OptionError for a device that there is not.
    """
    return _target(name, device)


@functools.cache
def _target(name: str, device: str | None) -> Target:
    with recursion.headroom():  # imports nest
        if name == "cpu":
            from pbkern.targets.cpu.machines.devices import device_of
            from pbkern.targets.cpu.target import CpuTarget

            return CpuTarget(device_of(device) if device else None)
        if name == "nvgpu":
            from pbkern.targets.nvgpu.target import NvgpuTarget

            return NvgpuTarget()
        if name == "amdgpu":
            from pbkern.targets.amdgpu.target import AmdgpuTarget

            return AmdgpuTarget()
    raise TargetError(f"there is no target `{name}`", why=f"the targets are {', '.join(NAMES)}")
