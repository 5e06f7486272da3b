"""CompilerParams: what a kernel's author tells the NVIDIA GPU target."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pbkern._jax import current_line
from pbkern.core.errors import OptionError
from pbkern.core.options import nearest

SEMANTICS = ("parallel", "arbitrary", "sequential")
LOWERINGS = ("Lane", "Warpgroup")
MOST_WARPS = 32


@dataclass(frozen=True)
class CompilerParams:
    """Choices for one kernel on an NVIDIA GPU; `kernel(..., compiler_params=pbkern.nvgpu.CompilerParams(...))`.

    Attributes:
      approx_math: allow cheaper, less exact implementations of functions such as exp. Default False.
      dimension_semantics: one entry per grid dimension. "parallel": programs run in any order, each on a thread block.
        "arbitrary" and "sequential": programs run in order, in a loop inside a block. None, the default: a dimension is
        parallel where its programs provably write disjoint blocks and keep nothing in scratch.
      max_concurrent_steps: sequential grid steps whose blocks are on their way at the same time. Default 1: none ahead. More
        are refused: this target does not fetch ahead yet.
      delay_release: sequential steps that the memory of a block is kept after its step. Default 0; less than
        max_concurrent_steps.
      unsafe_no_auto_barriers: place no barrier between statements whose threads meet in memory. Default False.
      profile_space: events that one launch may record. Default 0: none. More are refused: this target does not record yet.
      profile_dir: folder for the recorded events. Default "".
      lowering_semantics: "Lane", the default: code for single threads. "Warpgroup" is refused: there are no tensor cores yet.
      num_warps: warps of 32 threads in a block, a power of two up to 32. None, the default: 4.
    """

    approx_math: bool = False
    dimension_semantics: tuple[str, ...] | None = None
    max_concurrent_steps: int = 1
    delay_release: int = 0
    unsafe_no_auto_barriers: bool = False
    profile_space: int = 0
    profile_dir: str = ""
    lowering_semantics: str = "Lane"
    num_warps: int | None = None

    target_name: ClassVar[str] = "nvgpu"

    def __new__(cls, *args: Any, **fields: Any) -> CompilerParams:
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise OptionError(
                    f"nvgpu.CompilerParams has no field `{name}`", at=current_line(),
                    why=f"{name}={fields[name]!r}; the fields are {', '.join(known)}", hint=nearest(name, known),
                )  # fmt: skip
        return super().__new__(cls)

    def __post_init__(self):
        for name in ("approx_math", "unsafe_no_auto_barriers"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        self._check("max_concurrent_steps", _is_count(self.max_concurrent_steps, 1), "an integer of at least 1")
        below = _is_count(self.delay_release, 0) and self.delay_release < self.max_concurrent_steps
        most = self.max_concurrent_steps
        self._check("delay_release", below, f"an integer of at least 0 and less than max_concurrent_steps, here {most}")
        self._check("profile_space", _is_count(self.profile_space, 0), "an integer of at least 0")
        self._check("profile_dir", isinstance(self.profile_dir, str), "the name of a folder")
        self._check("lowering_semantics", self.lowering_semantics in LOWERINGS, " or ".join(map(repr, LOWERINGS)))
        warps = self.num_warps
        good = warps is None or (_is_count(warps, 1) and warps <= MOST_WARPS and warps & (warps - 1) == 0)
        self._check("num_warps", good, "1, 2, 4, 8, 16, 32 or None")
        self._semantics()

    def replace(self, **changes: Any) -> CompilerParams:
        """A copy with fields changed. Raises OptionError for bad values."""
        return dataclasses.replace(self, **changes)

    def _check(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise OptionError(f"nvgpu.CompilerParams field `{name}` has a bad value", at=current_line(),
                              why=f"{name}={getattr(self, name)!r}", hint=allowed)

    def _semantics(self) -> None:
        value = self.dimension_semantics
        if value is None:
            return
        good = isinstance(value, Sequence) and not isinstance(value, str) and all(s in SEMANTICS for s in value)
        self._check("dimension_semantics", good, f"a sequence of {', '.join(map(repr, SEMANTICS))}")
        object.__setattr__(self, "dimension_semantics", tuple(value))


CompilerParams.__module__ = "pbkern.nvgpu"  # where people import it from, and so how kernels print it


def _is_count(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
