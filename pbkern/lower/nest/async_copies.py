"""Copies that a device makes by itself: which nests are some, and what the interpreter knows of those under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from pbkern.core.errors import InternalError

from .ir import Buf, Const, Expr, InRange, Load, Nest, Op


def copied(nest: Nest) -> tuple[Load, list[InRange]] | None:
    """(the load that a nest stores as it is, tests under which it does so); it stores zeros else. None: it computes."""
    if nest.reductions or len(nest.stores) != 1:
        return None
    (store,) = nest.stores
    source = masked_load(store.value)
    if source is None or store.mask is not None or store.guard:
        return None
    load, _ = source
    return source if load.dtype == load.buf.dtype == store.buf.dtype else None


def masked_load(value: Expr) -> tuple[Load, list[InRange]] | None:
    """The load that an expression is where tests hold, and the tests; it is zero else. None: it is another one."""
    tests: list[Any] = []
    while is_mask(value):
        tests.append(value.args[0])
        value = value.args[-1]
    return (value, tests) if isinstance(value, Load) else None


def is_mask(value: Expr) -> bool:
    """Whether an expression selects between zero and another one by a test of an index."""
    if not isinstance(value, Op) or value.info.primitive != "select_n":
        return False
    test, false, _ = value.args
    return isinstance(test, InRange) and isinstance(false, Const) and false.value == 0


class Contents(IntEnum):
    """State of an element to which copies are made."""

    USED = 0  # read, or never stored by a copy
    READY = 1  # a copy has stored it, and nothing has read it
    UNDER_WAY = 2  # a copy will store it
    OVERWRITTEN = 3  # a copy will store it, where nothing has read what an earlier one has stored


@dataclass(frozen=True)
class CopyUnderWay:
    """One copy: the places in its buffer, and what was to be stored there when it began."""

    nest: Nest
    symbols: dict[str, int]
    places: np.ndarray
    values: np.ndarray


@dataclass
class CopiesUnderWay:
    """groups: copies that nobody has waited for, the oldest group first. contents: of each root buffer that copies store to."""

    groups: list[list[CopyUnderWay]] = field(default_factory=list)
    contents: dict[Buf, np.ndarray] = field(default_factory=dict)

    def begin(self, copy: CopyUnderWay) -> None:
        """Marks what a copy will store."""
        buf = copy.nest.stores[0].buf.root
        if buf not in self.contents:
            self.contents[buf] = np.full(max(buf.size, 1), Contents.USED, np.uint8)
        before = self.contents[buf][copy.places]
        if (before >= Contents.UNDER_WAY).any():
            raise InternalError(
                f"nest: two copies to one place of {buf.name} are under way", why=str(copy.nest)
            )
        lost = before == Contents.READY
        self.contents[buf][copy.places] = np.where(lost, Contents.OVERWRITTEN, Contents.UNDER_WAY)

    def end(self, copy: CopyUnderWay, values: np.ndarray) -> None:
        """Marks what a copy has stored; `values`: what it copies now, when it ends."""
        if values.tobytes() != copy.values.tobytes():
            raise InternalError(
                "nest: the source of a copy is changed while it is under way", why=str(copy.nest)
            )
        self.contents[copy.nest.stores[0].buf.root][copy.places] = Contents.READY

    def check_end(self) -> None:
        """Raises InternalError where a program ends before its copies do."""
        left = [copy for group in self.groups for copy in group]
        if left:
            raise InternalError(
                "nest: a copy is under way at the end of its program", why=str(left[0].nest)
            )

    def touch(self, buf: Buf, places: np.ndarray, deed: str) -> None:
        """Notes an access by statements. Raises InternalError where a copy to there is under way."""
        contents = self.contents.get(buf.root)
        if contents is None:
            return
        state = contents[places].max(initial=Contents.USED)
        if state >= Contents.UNDER_WAY:
            late = state == Contents.OVERWRITTEN
            why = "overwrites it before it is read" if late else "has not been waited for"
            raise InternalError(
                f"nest: {deed} {buf.name} while a copy to there is under way, which {why}",
                why=f"{len(self.groups)} groups of copies are under way",
            )
        contents[places] = Contents.USED
