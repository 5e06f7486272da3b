"""Which values of a body are still to be read from a buffer: asked before every statement that writes one.

They are found from the buffer: the values that it holds, then what is computed from those, up to
uses that are still to come. A body of many stores costs a look at a few values for each, not a look
at all the rest of the body.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pbkern.lower.nest.ir import Buf

from . import materialise
from .values import Stored, Value

# Where an item stands: its number in its region, behind that of the item which the region belongs
# to.
Order = tuple


class _Use(NamedTuple):
    """A use by the item at `order`, as its operand number `position`. user: the item, where it is a value."""

    order: Order
    position: int
    user: Value | None


class PendingReads:
    """Uses of values, and which buffer holds which values.

    Args:
      resolve: what a value is now: a Stored one once it is in memory.
      order: where a value was defined.
    """

    def __init__(self, resolve: Callable[[Value], Value], order: Callable[[Value], Order]):
        self._resolve, self._order = resolve, order
        self._uses: dict[Value, list[_Use]] = defaultdict(list)
        self._inside: dict[Buf, dict[Value, None]] = defaultdict(
            dict
        )  # in the order in which they came there
        self._to_come: dict[Buf, list[tuple[Order, int, Value]]] = defaultdict(
            list
        )  # heaps, by when they are defined
        self._count = itertools.count()

    def add(self, items: Sequence, prefix: Order) -> None:
        """Takes in the items of a region."""
        for k, item in enumerate(items):
            self._add(item, (*prefix, k))

    def _add(self, item, order: Order) -> None:
        user = item if isinstance(item, Value) else None
        for position, use in enumerate(materialise.uses(item)):
            if use not in self._uses:
                self._add(
                    use, ()
                )  # no effect where it is an item itself; some values are made on the way and are none
            self._uses[use].append(_Use(order, position, user))
            self.record(use)

    def record(self, value: Value) -> None:
        """Notes in which buffer a value is, if it is in memory."""
        place = self._resolve(value)
        if isinstance(place, Stored):
            heapq.heappush(
                self._to_come[place.buf.root], (self._order(value), next(self._count), value)
            )

    def reading(self, written: Iterable[Buf], now: Order) -> list[Value]:
        """Values defined by `now` that are read from `written` and used later, in the order of those uses."""
        readers: dict[Value, tuple] = {}
        for buf in written:
            inside, to_come = self._inside[buf], self._to_come[buf]
            seen: dict = {}
            while to_come and to_come[0][0] <= now:
                inside[heapq.heappop(to_come)[2]] = None
            for value in list(inside):
                place = self._resolve(value)
                if (
                    not isinstance(place, Stored)
                    or place.buf.root is not buf
                    or not self._is_used(value, now, readers, seen)
                ):
                    del inside[value]
        return sorted(readers, key=readers.__getitem__)

    def _is_used(
        self, value: Value, now: Order, readers: dict[Value, tuple], seen: dict[Value, bool]
    ) -> bool:
        """Whether anything to come needs `value`.

        Puts into `readers` what it is read through; forgets uses that are over.
        """
        if value in seen:
            return seen[value]
        if self._order(value) > now:
            return True
        left = []
        for use in self._uses[value]:
            if use.order > now:
                left.append(use)
                key = (len(use.order), use.order, use.position)
                readers[value] = min(key, readers.get(value, key))
            elif now[: len(use.order)] == use.order != () or (
                use.user is not None
                and self._resolve(use.user) is use.user
                and self._is_used(use.user, now, readers, seen)
            ):  # under way: regions inside may use it
                left.append(use)
        self._uses[value] = left
        seen[value] = bool(left)
        return seen[value]
