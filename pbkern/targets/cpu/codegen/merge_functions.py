"""Pieces of text that are alike but for places -> one function, which is passed where they differ.

Authors of kernels unroll loops while they are traced, so that one product of tiles comes sixty-four
times, each of other slices. Of such copies MLIR and LLVM see one. What may differ are starts of
scratch buffers, and constants that are added to an index or are one. Bounds of loops, divisors and
strides may not: LLVM makes better loops of constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir import operation
from pbkern.lower.mlir.operation import CALL, Operation, walk
from pbkern.lower.mlir.text import STACK


@dataclass(frozen=True)
class Form:
    """Parts of a piece that its copies have as well, and those of its own.

    common: its text, with names by order of appearance. places: its index constants that may
    differ, in order. views: its scratch buffers, in order.
    """

    common: str
    places: tuple[int, ...]
    views: tuple[str, ...]


def form(
    operations: Iterable[Operation],
    constants: Mapping[str, Operation],
    views: Mapping[str, str],
    operands: Iterable[str],
) -> Form | None:
    """The form of a piece; None for one that calls others. constants: definitions by name; views: types of scratch buffers."""
    known = {name: name for name in operands}
    places: list[int] = []
    own_views: list[str] = []

    def common(name: str) -> str:
        if name not in known:
            constant = constants.get(name)
            known[name] = constant.text if constant else f"%{len(known)}"
            if constant and constant.name == STACK:  # the remark is each copy's own
                known[name] = f"%{len(known)} : {constant.text.partition(' //')[0]}"
            if name in views:
                own_views.append(name)
                known[name] += f" : {views[name]}"
        return known[name]

    def place(name: str, value: int) -> str:
        places.append(value)
        return "%place"

    operations = list(operations)
    if any(op.name == CALL for op in walk(operations)):
        return None
    renamed = _renamed(operations, constants, place, common)
    return Form("\n".join(operation.lines(renamed)), tuple(places), tuple(own_views))


def _renamed(
    operations: Iterable[Operation],
    constants: Mapping[str, Operation],
    place: Callable[[str, int], str],
    other: Callable[[str], str],
) -> list[Operation]:
    """Operations with other names: index constants that may differ are place(name, value), the rest is other(name)."""

    def rename(name: str) -> str:
        constant = constants.get(name)
        if constant is None or constant.types != "index":
            return other(name)
        return place(name, int(constant.literal))

    renaming = lambda op: rename if _has_places(op) else other
    return [op.renamed(renaming) for op in operations]


def _has_places(op: Operation) -> bool:
    """Whether index constants in it may differ: in sums of indices, and in reads and writes."""
    return op.indexes or (op.name == "arith.addi" and op.types == "index")


@dataclass(frozen=True)
class Differences:
    """Arguments that copies are passed, by name: for numbers of places, and for the first copy's scratch buffers.

    values: of the arguments, in each copy.
    """

    places: Mapping[int, str]
    views: Mapping[str, str]
    values: tuple[tuple[int, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.places.values(), *self.views.values()]))

    def operations(
        self, operations: Iterable[Operation], constants: Mapping[str, Operation]
    ) -> list[Operation]:
        """Operations of the first copy, in which arguments stand for the places that differ."""
        count = iter(range(1 << 62))
        return _renamed(
            operations,
            constants,
            lambda literal, _: self.places.get(next(count), literal),
            lambda name: name,
        )


def differences(copies: list[Form], offsets: Mapping[str, int]) -> Differences:
    """Finds where copies differ.

    Places that always have one value together are one argument. offsets: of scratch buffers.
    """
    arguments: dict[tuple[int, ...], str] = {}

    def argument(values: tuple[int, ...]) -> str:
        return arguments.setdefault(values, f"%place{len(arguments)}")

    by_place = enumerate(zip(*(copy.places for copy in copies)))
    places = {k: argument(values) for k, values in by_place if len(set(values)) > 1}
    starts = [
        tuple(offsets[name] for name in same) for same in zip(*(copy.views for copy in copies))
    ]
    views = {
        view: argument(values)
        for view, values in zip(copies[0].views, starts)
        if len(set(values)) > 1
    }
    return Differences(places, views, tuple(zip(*arguments)) or ((),) * len(copies))
