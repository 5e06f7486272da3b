"""Targets by name. A target is imported when it is first asked for."""

from __future__ import annotations

import functools

from pbkern.core.errors import TargetError

from .target import Target

NAMES = ("cpu", "nvgpu", "amdgpu")
# What stands between these names and a target.
MISSING = {
    "amdgpu": "code generation for AMD GPUs is not implemented yet",
}


@functools.cache
def get_target(name: str, device: str | None = None) -> Target:
    """The target of this name; for a device that is not in this computer, one that makes plans and texts for it.

    Raises TargetError if it is unknown or missing, OptionError for a device that there is not.
    """
    if name == "cpu":
        from pbkern.targets.cpu.devices import device_of
        from pbkern.targets.cpu.target import CpuTarget

        return CpuTarget(device and device_of(device))
    if name == "nvgpu":
        from pbkern.targets.nvgpu.target import NvgpuTarget

        return NvgpuTarget()
    if name in MISSING:
        hint = "compile_options={'target': 'cpu'}"
        raise TargetError(f"target `{name}` cannot compile", why=MISSING[name], hint=hint)
    raise TargetError(f"there is no target `{name}`", why=f"the targets are {', '.join(NAMES)}")
