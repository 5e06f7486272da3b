"""CheckedParams: what the CompilerParams of all targets share: fields by name, checked when they are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal, Self, get_args

from pbkern._jax import current_line
from pbkern.core.errors import OptionError
from pbkern.core.options import nearest

DimensionSemantics = Literal["parallel", "arbitrary", "sequential"]
SEMANTICS: tuple[DimensionSemantics, ...] = get_args(DimensionSemantics)


@dataclass(frozen=True)
class CheckedParams:
    """A frozen dataclass that names unknown fields and bad values.

    `target_name`: that of the target it is for.
    """

    target_name: ClassVar[str]

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise OptionError(
                    f"{cls.target_name}.CompilerParams has no field `{name}`",
                    at=current_line(),
                    why=f"{name}={fields[name]!r}; the fields are {', '.join(known)}",
                    hint=nearest(name, known),
                )
        return super().__new__(cls)

    def replace(self, **changes: Any) -> Self:
        """A copy with fields changed. Raises OptionError for bad values."""
        return dataclasses.replace(self, **changes)

    def _check(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise OptionError(
                f"{self.target_name}.CompilerParams field `{name}` has a bad value",
                at=current_line(),
                why=f"{name}={getattr(self, name)!r}",
                hint=allowed,
            )

    def _check_flags(self, *names: str) -> None:
        for name in names:
            self._check(name, isinstance(getattr(self, name), bool), "True or False")

    def _check_sequence(self, name: str, good: Callable[[Any], bool], allowed: str) -> None:
        """None, or a sequence of such values, which becomes a tuple."""
        value = getattr(self, name)
        if value is None:
            return
        self._check(
            name,
            isinstance(value, Sequence) and not isinstance(value, str) and all(map(good, value)),
            allowed,
        )
        object.__setattr__(self, name, tuple(value))

    def _check_choice(self, name: str, choices: Sequence[str]) -> None:
        """One of `choices`, as a string, or as the member of an enumeration that has its name."""
        object.__setattr__(self, name, chosen := _name_of_member(getattr(self, name)))
        self._check(name, chosen in choices, " or ".join(map(repr, choices)))

    def _check_semantics(self) -> None:
        """Check `dimension_semantics`: strings, or members of Pallas's enumerations, whose names are in capitals."""
        given = self.dimension_semantics  # type: ignore[attr-defined]  # a field of each subclass that asks for this check
        if isinstance(given, Sequence) and not isinstance(given, str):
            names = tuple(
                _name_of_member(entry).lower() if isinstance(entry, Enum) else entry
                for entry in given
            )
            object.__setattr__(self, "dimension_semantics", names)
        allowed = f"a sequence of {', '.join(map(repr, SEMANTICS))}"
        self._check_sequence("dimension_semantics", lambda entry: entry in SEMANTICS, allowed)


def _name_of_member(value: Any) -> Any:
    """The name of an enumeration's member; another value as it is."""
    return value.name if isinstance(value, Enum) else value


def is_count(value: Any, low: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
