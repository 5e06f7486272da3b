"""Facts that rewrites remember about values while equations are bound again."""

from __future__ import annotations

from pbkern._jax import bind_again


class Notes:
    """Facts of several kinds about values, by identity of the value."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], tuple] = {}

    def note(self, kind: str, value, *what) -> list:
        """Notes facts about a value under `kind`, and returns [value]."""
        self._kept[kind, id(value)] = (
            value,
            *what,
        )  # keeps the value alive, so that its id stays unique
        return [value]

    def bound(self, kind: str, eqn, operands, *what) -> list:
        """The result of an equation on these operands, noted."""
        return self.note(kind, *bind_again(eqn, operands), *what)

    def find(self, kind: str, x) -> tuple | None:
        """The noted facts, or None."""
        entry = self._kept.get((kind, id(x)))
        return entry and entry[1:]
