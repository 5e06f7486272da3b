"""CompilerParams: what a kernel's author tells the CPU target."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pbkern._jax import current_line
from pbkern.core.errors import OptionError
from pbkern.core.options import nearest

SEMANTICS = ("parallel", "arbitrary", "sequential")
VECTOR_WIDTHS = (128, 256, 512)


@dataclass(frozen=True)
class CompilerParams:
    """Choices for one kernel on the CPU; `kernel(..., compiler_params=pbkern.cpu.CompilerParams(...))`.

    Attributes:
      approx_math: allow cheaper, less exact implementations of functions such as exp. Default False.
      dimension_semantics: one entry per grid dimension. "parallel": programs may run in any order, on several
        threads. "arbitrary" and "sequential": programs run in order on one thread (the CPU does not distinguish
        the two). None, the default: a dimension is parallel where its programs provably write disjoint blocks and
        keep nothing in scratch.
      num_threads: most threads that run programs of this kernel. None: every core the process may use.
      vector_width: bits of the vectors in generated code: 128, 256 or 512. None: the machine's widest.
      max_concurrent_steps: sequential grid steps whose blocks are on their way at the same time. The CPU has no
        asynchronous copies; it prefetches the blocks of the next max_concurrent_steps - 1 steps. Default 1: none.
      allow_input_fusion: per operand, whether a producer outside may be computed in this kernel in place of being
        read. A permission, not an order, and one that this target does not use yet: producers of hand-written
        kernels run as kernels of their own. None, the default: permitted for all.
    """

    approx_math: bool = False
    dimension_semantics: tuple[str, ...] | None = None
    num_threads: int | None = None
    vector_width: int | None = None
    max_concurrent_steps: int = 1
    allow_input_fusion: tuple[bool, ...] | None = None

    target_name: ClassVar[str] = "cpu"

    def __new__(cls, *args: Any, **fields: Any) -> CompilerParams:
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise OptionError(
                    f"cpu.CompilerParams has no field `{name}`", at=current_line(),
                    why=f"{name}={fields[name]!r}; the fields are {', '.join(known)}", hint=nearest(name, known),
                )  # fmt: skip
        return super().__new__(cls)

    def __post_init__(self):
        self._check("approx_math", isinstance(self.approx_math, bool), "True or False")
        threads = self.num_threads
        self._check("num_threads", threads is None or _is_count(threads), "an integer of at least 1, or None")
        self._check("vector_width", self.vector_width in (None, *VECTOR_WIDTHS), "128, 256, 512 or None")
        self._check("max_concurrent_steps", _is_count(self.max_concurrent_steps), "an integer of at least 1")
        words = ", ".join(map(repr, SEMANTICS))
        self._sequence("dimension_semantics", lambda s: s in SEMANTICS, f"a sequence of {words}")
        self._sequence("allow_input_fusion", lambda b: isinstance(b, bool), "a sequence of True or False")

    def replace(self, **changes: Any) -> CompilerParams:
        """A copy with fields changed. Raises OptionError for bad values."""
        return dataclasses.replace(self, **changes)

    def _check(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise OptionError(
                f"cpu.CompilerParams field `{name}` has a bad value", at=current_line(),
                why=f"{name}={getattr(self, name)!r}", hint=f"{allowed}",
            )  # fmt: skip

    def _sequence(self, name: str, good, allowed: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        self._check(name, isinstance(value, Sequence) and not isinstance(value, str) and all(map(good, value)), allowed)
        object.__setattr__(self, name, tuple(value))


CompilerParams.__module__ = "pbkern.cpu"  # where people import it from, and so how kernels print it


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
