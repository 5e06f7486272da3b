"""What rewrites remember of values while equations are bound anew."""

from __future__ import annotations


class Notes:
    """Facts of several kinds about values, which are told apart by identity."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], tuple] = {}

    def note(self, kind: str, value, *what) -> list:
        """[value], of which `what` is to be found under `kind`."""
        self._kept[kind, id(value)] = (value, *what)  # the value is kept alive: its id stays its own
        return [value]

    def bound(self, kind: str, eqn, operands, *what) -> list:
        """The result of an equation on these operands, noted."""
        return self.note(kind, eqn.primitive.bind(*operands, **eqn.params), *what)

    def find(self, kind: str, x) -> tuple | None:
        """What was noted."""
        kept = self._kept.get((kind, id(x)))
        return kept and kept[1:]
