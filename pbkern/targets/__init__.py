"""Targets by name. A target is imported when it is first asked for."""

from __future__ import annotations

import functools

from pbkern.core.errors import TargetError
from pbkern.core.process import recursion

from .target import Target

NAMES = ("cpu", "nvgpu", "amdgpu")
# What stands between these names and a target.
MISSING = {
    "amdgpu": "code generation for AMD GPUs is not implemented yet",
}


@functools.cache
def get_target(name: str) -> Target:
    """The target of this name. Raises TargetError if it is unknown or missing."""
    with recursion.headroom():  # imports nest
        if name == "cpu":
            from pbkern.targets.cpu.target import CpuTarget

            return CpuTarget()
        if name == "nvgpu":
            from pbkern.targets.nvgpu.target import NvgpuTarget

            return NvgpuTarget()
    if name in MISSING:
        hint = "compile_options={'target': 'cpu'}"
        raise TargetError(f"target `{name}` cannot compile", why=MISSING[name], hint=hint)
    raise TargetError(f"there is no target `{name}`", why=f"the targets are {', '.join(NAMES)}")
