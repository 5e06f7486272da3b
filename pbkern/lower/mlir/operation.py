"""One MLIR operation as a record: what outlining, merging of functions and instruction scheduling work on.

An operation is written once, as text, where its emitter knows the operation's syntax; results,
operands and what stands between them are taken from there when a rewrite first asks. Regions hold
operations, not text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

_NAME = re.compile(r"%\w+")
# What is defined: results, with their number where there are several, and arguments of regions.
_DEFINED = re.compile(r"(%\w+)(?:(?::\d+)? =|: )")
# Results, their number where there are several, and the operation.
_HEAD = re.compile(r'(?:(%\w+)(:\d+)? = )?"?([\w.]+)')


class Region(NamedTuple):
    """Operations between braces. word: `else` or `do`, where it is not the first of its operation."""

    operations: list[Operation]
    word: str = ""


class Operation:
    """An operation, with the regions that follow its text.

    Attributes:
      text: as it is printed, without regions.
      name: which operation, such as `arith.addf`.
      names: all names, in the order in which they are printed; `between`: what is printed before,
        between and behind them.
      defined: names of results and of arguments of regions.
      result: the one result's name, or None where there is none or several.
      attributes: what is printed beside the name of the operation, its results and its operands:
        attributes and types.
    """

    __slots__ = ("_between", "_head", "_names", "regions", "text")

    def __init__(self, text: str, regions: tuple[Region, ...] = ()):
        self.text, self.regions = text, regions
        self._head: tuple[str | None, str | None, str] | None = None
        self._names: tuple[str, ...] | None = None
        self._between: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    @property
    def names(self) -> tuple[str, ...]:
        if self._names is None:
            self._names = tuple(_NAME.findall(self.text))
        return self._names

    @property
    def between(self) -> tuple[str, ...]:
        if not self._between:
            self._between = tuple(_NAME.split(self.text))
        return self._between

    @property
    def name(self) -> str:
        return self.head[2]

    @property
    def head(self) -> tuple[str | None, str | None, str]:
        """(name of the results or None, `:` and their number if several, name of the operation)"""
        if self._head is None:
            found = _HEAD.match(self.text)
            assert found is not None, self.text
            self._head = found[1], found[2], found[3]
        return self._head

    @property
    def attributes(self) -> str:
        return "".join(self.between).partition(self.name)[2]

    @property
    def defined(self) -> list[str]:
        return _DEFINED.findall(self.text)

    @property
    def result(self) -> str | None:
        results, number, _ = self.head
        return results if number is None else None

    @property
    def operands(self) -> tuple[str, ...]:
        return self.names[1:] if self.head[0] else self.names

    @property
    def size(self) -> int:
        """Lines that it prints."""
        if not self.regions:
            return 1
        return (
            1
            + len(self.regions)
            + sum(op.size for region in self.regions for op in region.operations)
        )

    def lines(self) -> Iterator[str]:
        if not self.regions:
            yield self.text
            return
        for n, region in enumerate(self.regions):
            yield f"}} {region.word} {{" if n else f"{self.text} {{"
            for op in region.operations:
                yield from op.lines()
        yield "}"

    def walk(self) -> Iterator[Operation]:
        """This operation and all that it holds, in the order of the text."""
        yield self
        for region in self.regions:
            for op in region.operations:
                yield from op.walk()

    def mapped(self, change: Callable[[Operation], str]) -> Operation:
        """Changes texts, also within: `change` sees operations in the order of the text."""
        text = change(self)
        regions = tuple(
            Region([op.mapped(change) for op in region.operations], region.word)
            for region in self.regions
        )
        return Operation(text, regions)

    def with_names(self, names: Iterable[str]) -> str:
        """The text with other names, in the order of `self.names`."""
        first, *rest = self.between
        return first + "".join(n + after for n, after in zip(names, rest))


def walk(operations: Iterable[Operation]) -> Iterator[Operation]:
    for op in operations:
        yield from op.walk()


def lines(operations: Iterable[Operation]) -> Iterator[str]:
    for op in operations:
        yield from op.lines()


def replaced(
    operations: Iterable[Operation], by: Callable[[Operation], list[Operation] | None]
) -> list[Operation]:
    """Puts other operations in place of those for which `by` returns some, also within regions."""
    found: list[Operation] = []
    for op in operations:
        others = by(op)
        if others is not None:
            found += others
        elif op.regions:
            found.append(
                Operation(
                    op.text,
                    tuple(
                        Region(replaced(region.operations, by), region.word)
                        for region in op.regions
                    ),
                )
            )
        else:
            found.append(op)
    return found
