"""Copies and products that a device makes by itself: which nests they are, and what the interpreter knows of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import IntEnum
from typing import Any

import numpy as np

from pbkern.core.errors import InternalError
from pbkern.core.lazy_dataclass import dataclass

from .ir import Buf, Const, Expr, InRange, Load, Nest, Op
from .tiles.tiling import Tiling


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


def is_product(nest: Nest) -> bool:
    """Whether a nest only adds a product of tiles to sums in registers, by an instruction that reads the tiles by itself."""
    return (
        isinstance(nest.by, Tiling)
        and nest.by.instruction.row_bytes > 0
        and len(nest.reductions) == len(nest.stores) == 1
        and nest.reductions[0].is_plain_product
        and nest.stores[0].buf.space == "registers"
        and all(
            isinstance(arg, Load) and arg.buf.space == "shared" for arg in nest.reductions[0].args
        )
    )


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


@dataclass(frozen=True)
class ProductUnderWay:
    """One product: its sums, and of each tile the buffer with the first place that is read and one behind the last."""

    sums: Buf
    tiles: tuple[tuple[Buf, int, int], ...]

    @staticmethod
    def of(nest: Nest, symbols: Mapping[str, int]) -> ProductUnderWay:
        tiles = []
        for load in nest.loads():
            if load.buf.space == "shared":
                stages = load.buf.shape[0] if load.buf.circular else 1
                turn, stage = load.index[0], 0
                if load.buf.circular and turn is not None:
                    stage = turn.evaluate(symbols) % stages
                size = load.buf.size // stages
                tiles.append((load.buf.root, stage * size, (stage + 1) * size))
        return ProductUnderWay(nest.stores[0].buf.root, tuple(tiles))


@dataclass
class ProductsUnderWay:
    """groups: products that nobody has waited for, the oldest group first. begins: whether one is made just now."""

    groups: list[list[ProductUnderWay]] = field(default_factory=list)
    begins: bool = False

    def touch(self, buf: Buf, places: np.ndarray, deed: str, is_store: bool) -> None:
        """Raises InternalError where an access has to come behind the end of a product."""
        for product in (product for group in self.groups for product in group):
            if buf.root is product.sums and not self.begins:
                raise InternalError(f"nest: {deed} {buf.name} while a product adds to it")
            for tile, first, end in product.tiles if is_store else ():
                if buf.root is tile and ((places >= first) & (places < end)).any():
                    raise InternalError(f"nest: {deed} {buf.name} while a product reads it")

    def check_end(self) -> None:
        """Raises InternalError where a program ends before its products do."""
        if any(self.groups):
            raise InternalError("nest: a product is under way at the end of its program")
