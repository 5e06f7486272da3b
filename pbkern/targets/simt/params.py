"""ThreadParams: what a kernel's author may tell the targets that run threads; each vendor's CompilerParams add their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from pbkern._jax import current_line
from pbkern.core.errors import OptionError
from pbkern.core.options import nearest
from pbkern.dsl.kernel import Kernel

SEMANTICS = ("parallel", "arbitrary", "sequential")
MOST_WARPS = 32


@dataclass(frozen=True)
class ThreadParams:
    """Fields and checks that all vendors share; `target_name`: that of the target they are for."""

    approx_math: bool = False
    dimension_semantics: tuple[str, ...] | None = None
    unsafe_no_auto_barriers: bool = False
    num_warps: int | None = None

    target_name: ClassVar[str]

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise OptionError(
                    f"{cls.target_name}.CompilerParams has no field `{name}`", at=current_line(),
                    why=f"{name}={fields[name]!r}; the fields are {', '.join(known)}", hint=nearest(name, known),
                )  # fmt: skip
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("approx_math", "unsafe_no_auto_barriers"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        warps = self.num_warps
        good = warps is None or (is_count(warps, 1) and warps <= MOST_WARPS and warps & (warps - 1) == 0)
        self._check("num_warps", good, "1, 2, 4, 8, 16, 32 or None")
        value = self.dimension_semantics
        if value is None:
            return
        good = isinstance(value, Sequence) and not isinstance(value, str) and all(s in SEMANTICS for s in value)
        self._check("dimension_semantics", good, f"a sequence of {', '.join(map(repr, SEMANTICS))}")
        object.__setattr__(self, "dimension_semantics", tuple(value))

    def replace(self, **changes: Any) -> Self:
        """A copy with fields changed. Raises OptionError for bad values."""
        return dataclasses.replace(self, **changes)

    def _check(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise OptionError(f"{self.target_name}.CompilerParams field `{name}` has a bad value", at=current_line(),
                              why=f"{name}={getattr(self, name)!r}", hint=allowed)


P = TypeVar("P", bound=ThreadParams)


def of_kernel(kernel: Kernel, default: P) -> P:
    """The kernel's CompilerParams for the target of `default`. Kernels without any have the default ones, with the
    dimension_semantics that they have for another target: these say what programs do, not what a device does.

    Raises OptionError.
    """
    found = kernel.compiler_params.get(default.target_name)
    if found is None:
        every = (getattr(p, "dimension_semantics", None) for p in kernel.compiler_params.values())
        return default.replace(dimension_semantics=next(filter(None, every), None))
    if not isinstance(found, type(default)):
        raise OptionError(
            f"kernel `{kernel.name}` has compiler_params for {default.target_name} of another class",
            at=kernel.defined_at or None, why=repr(found), hint=f"pbkern.{default.target_name}.CompilerParams(...)",
        )  # fmt: skip
    return found


def is_count(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
