"""Budget: lines of text and seconds that one kernel's code may take, beyond which simpler code is made.

    budget = Budget(lines=400_000, seconds=120)
    budget.spend(lines)          raises Declined where one is used up
    with budget.at_most(30_000): the same for a part; what the part used stays used

Special ways of lowering multiply text: tiles repeat a body for each of their points. Simpler code
has less of it (core/process/fallback.py).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from .process.fallback import Declined

CHECKED_LINES = 4096  # lines between two looks at the clock


class Budget:
    """`lines` and `seconds` from now on; without limits if they are not given."""

    def __init__(self, lines: float = math.inf, seconds: float = math.inf):
        self.spent = 0
        self._limit, self._seconds, self._start, self._next = (
            lines,
            seconds,
            time.monotonic(),
            CHECKED_LINES,
        )

    def spend(self, lines: int = 1) -> None:
        self.spent += lines
        if self.spent > self._limit:
            raise Declined(f"the text is longer than {self._limit:,.0f} lines")
        if self.spent >= self._next:
            self._next = self.spent + CHECKED_LINES
            if time.monotonic() - self._start > self._seconds:
                raise Declined(f"the text took longer than {self._seconds:g} s")

    @contextlib.contextmanager
    def at_most(self, lines: float) -> Iterator[None]:
        """A limit for the work inside a `with` block, beside the limit around it."""
        around, self._limit = self._limit, min(self._limit, self.spent + lines)
        try:
            yield
        finally:
            self._limit = around

    @property
    def is_spent(self) -> bool:
        """Whether the limit in force here is reached."""
        return self.spent > self._limit
