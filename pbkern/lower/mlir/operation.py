"""One MLIR operation as a record: emitters write it; outlining, merging of functions and instruction scheduling read it.

An emitter gives the parts of an operation: its name, operands, types and regions, and a syntax where
MLIR's form is not a list of operands. Operations become text once, when a function is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

# How operands and attributes are printed behind the names of operations whose operands are no list.
SYNTAX = {
    "memref.load": " %s[%s]",
    "memref.store": " %s, %s[%s]",
    "memref.view": " %s[%s][]",
    "scf.condition": "(%s)",
    "vector.gather": " %s[%s] [%s], %s, %s",
    "vector.load": " %s[%s]",
    "vector.maskedload": " %s[%s], %s, %s",
    "vector.maskedstore": " %s[%s], %s, %s",
    "vector.scatter": " %s[%s] [%s], %s, %s",
    "vector.store": " %s, %s[%s]",
}

# The operation that calls a function of the module.
CALL = "func.call"

# LLVM's type of a tile register. LLVM forgets to configure some of the registers that an unrolled loop of tiles uses, which
# processors refuse: such loops stay loops.
TILE = "!llvm.x86_amx"
# The attribute of a loop that LLVM leaves as it is.
NOT_UNROLLED = "{llvm.loop_annotation = #llvm.loop_annotation<unroll = <disable = true>>}"
# Appends an operation with these parts, of Operation's up to `arguments`, and one result; returns the result's name.
Emit = Callable[..., str]


class Region(NamedTuple):
    """Operations between braces. word: `else` or `do`, where it is not the first of its operation."""

    operations: list[Operation]
    word: str = ""


class OpenRegion(NamedTuple):
    """A region that is being written.

    operations: those that it holds so far; emit: appends to them; name: makes a name for one of its arguments.
    """

    operations: list[Operation]
    emit: Emit
    name: Callable[[], str]


class Operation:
    """An operation.

    Attributes:
      name: which operation, such as `arith.addf`.
      operands: names in the order in which they are printed: operands, and arguments of regions where
        these stand between them. Result k of an operation with several is `%name#k`.
      types: what is printed behind the last colon; empty where there is nothing.
      syntax: what follows the name: attributes, and `%s` for each operand. None: operands with
        commas between them, or as SYNTAX says.
      regions: operations that it holds.
      arguments: those of `operands` that are arguments of regions, which it defines.
      result: the name of what it defines, if anything.
      count: of results that share the name; 0 for one result, which is printed without a number.
      location: the line of the user's program, as MLIR writes it, or nothing.
      attributes: what is printed behind its regions, or nothing.
    """

    __slots__ = (
        "arguments",
        "attributes",
        "count",
        "location",
        "name",
        "operands",
        "regions",
        "result",
        "syntax",
        "types",
    )

    def __init__(
        self,
        name: str,
        operands: tuple[str, ...] = (),
        types: str = "",
        syntax: str | None = None,
        regions: tuple[Region, ...] = (),
        arguments: tuple[str, ...] = (),
        *,
        result: str | None = None,
        count: int = 0,
        attributes: str = "",
    ):
        self.name, self.operands, self.types, self.syntax = name, operands, types, syntax
        self.regions, self.result, self.count, self.arguments = regions, result, count, arguments
        self.location, self.attributes = "", attributes

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    @property
    def text(self) -> str:
        """The operation as it is printed, without results and regions."""
        syntax = SYNTAX.get(self.name) if self.syntax is None else self.syntax
        if syntax is not None:
            text = self.name + syntax % self.operands
        elif self.operands:
            text = f"{self.name} {', '.join(self.operands)}"
        else:
            text = self.name
        return f"{text} : {self.types}" if self.types else text

    @property
    def head(self) -> str:
        """The operation as it is printed, without regions."""
        text = self.text + self.location
        if self.result is None:
            return text
        return f"{self.result}:{self.count} = {text}" if self.count else f"{self.result} = {text}"

    @property
    def names(self) -> list[str]:
        """All names, in the order in which they are printed, without numbers of results."""
        names = [operand.partition("#")[0] for operand in self.operands]
        return names if self.result is None else [self.result, *names]

    @property
    def defined(self) -> tuple[str, ...]:
        """Names of results and of arguments of regions."""
        return self.arguments if self.result is None else (self.result, *self.arguments)

    @property
    def value(self) -> str | None:
        """The one result's name, or None where there is none or several."""
        return None if self.count else self.result

    @property
    def literal(self) -> str:
        """The number of a constant, as it is printed."""
        return (self.syntax or "").strip()

    @property
    def callee(self) -> str | None:
        """The function that a call calls, by `call_syntax`; None for all other operations."""
        return (self.syntax or "")[2:].partition("(")[0] if self.name == CALL else None

    @property
    def indexes(self) -> bool:
        """Whether an operand stands in brackets, as the index of a read or write."""
        syntax = SYNTAX.get(self.name) if self.syntax is None else self.syntax
        return syntax is not None and "[%s]" in syntax

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

    def lines(self) -> list[str]:
        printed: list[str] = []
        self._print(printed)
        return printed

    def _print(self, lines: list[str]) -> None:
        """Adds this operation's lines."""
        if not self.regions:
            lines.append(self.head)
            return
        for n, region in enumerate(self.regions):
            lines.append(f"}} {region.word} {{" if n else f"{self.head} {{")
            for op in region.operations:
                op._print(lines)
        lines.append(f"}} {self.attributes}" if self.attributes else "}")

    def walk(self) -> list[Operation]:
        """This operation and all that it holds, in the order of the text."""
        met: list[Operation] = []
        self._walk(met)
        return met

    def _walk(self, met: list[Operation]) -> None:
        met.append(self)
        for region in self.regions:
            for op in region.operations:
                op._walk(met)

    def with_regions(self, change: Callable[[list[Operation]], list[Operation]]) -> Operation:
        """This operation with other operations in its regions."""
        regions = tuple(Region(change(region.operations), region.word) for region in self.regions)
        return Operation(
            self.name, self.operands, self.types, self.syntax, regions, self.arguments,
            result=self.result, count=self.count, attributes=self.attributes,
        )  # fmt: skip

    def with_operand(self, number: int, name: str) -> Operation:
        """This operation with another operand."""
        operands = (*self.operands[:number], name, *self.operands[number + 1 :])
        return Operation(
            self.name, operands, self.types, self.syntax, self.regions, self.arguments,
            result=self.result, count=self.count, attributes=self.attributes,
        )  # fmt: skip

    def renamed(self, renaming: Callable[[Operation], Callable[[str], str]]) -> Operation:
        """This operation with other names, also within.

        `renaming` sees operations in the order of the text, and what it returns sees their names in
        that order.
        """
        rename = renaming(self)

        def operand(name: str) -> str:
            base, mark, number = name.partition("#")
            return rename(base) + mark + number

        result = None if self.result is None else rename(self.result)
        operands = tuple(map(operand, self.operands))
        place = dict(zip(self.operands, operands))
        arguments = tuple(place[argument] for argument in self.arguments)
        regions = tuple(
            Region([op.renamed(renaming) for op in region.operations], region.word)
            for region in self.regions
        )
        return Operation(
            self.name, operands, self.types, self.syntax, regions, arguments,
            result=result, count=self.count, attributes=self.attributes,
        )  # fmt: skip


def places(count: int) -> str:
    """The syntax of a list of operands within another syntax."""
    return ", ".join(["%s"] * count)


def call_syntax(function: str, count: int) -> str:
    """The syntax of a call with so many operands."""
    return f" @{function}({places(count)})"


def called(operations: Iterable[Operation]) -> frozenset[str]:
    """Names of the functions that operations call."""
    return frozenset(name for op in walk(operations) if (name := op.callee) is not None)


def for_syntax(carried: Sequence[str]) -> str:
    """The syntax of scf.for with carried values of these types.

    Operands: counter, lower bound, upper bound, step, then an argument and a start for each value.
    """
    syntax = " %s = %s to %s step %s"
    if not carried:
        return syntax
    pairs = ", ".join(["%s = %s"] * len(carried))
    return f"{syntax} iter_args({pairs}) -> ({', '.join(carried)})"


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
    changed: list[Operation] = []
    for op in operations:
        replacement = by(op)
        if replacement is not None:
            changed += replacement
        elif op.regions:
            changed.append(op.with_regions(lambda inside: replaced(inside, by)))
        else:
            changed.append(op)
    return changed
