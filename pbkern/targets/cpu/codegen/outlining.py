"""Long lists of statements -> functions of their own, which LLVM compiles in time that is proportional to their number.

MLIR's passes and LLVM take more than twice the time for a function of twice the length; functions
also compile on threads, and LLVM's optimiser runs only on those that have scalar loops
(docs/decisions/019-large-bodies.md).

What a piece of text uses from outside are constants, which its function defines again, memory and
indices, which it is passed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from pbkern.core.errors import InternalError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir import operation, range_reports
from pbkern.lower.mlir.operation import CALL, Operation, replaced, walk
from pbkern.lower.mlir.text import Block, Text

from .merge_functions import Differences, Form, differences, form

# Most lines of a piece. Time for a longer function more than doubles with its length (measured:
# docs/decisions/019-large-bodies.md).
LONGEST_PIECE = 4000
# Lines of the shortest piece. Source: not recorded.
SHORTEST_PIECE = 400
# Lines of the shortest piece that becomes a function because others are equal to it.
SHORTEST_COPY = 40
# The type of the scratch memory, which is not known before all of a kernel is lowered.
ARENA_TYPE = "memref<arena>"
ARENA = "%arena"
# Without a frame pointer, LLVM cannot align the stack once it has given registers to values, and
# spills vectors across cache lines: a chain of 100 operations takes 380 or 690 us, depending on the
# caller's stack.
FRAME = "llvm.frame_pointer = #llvm.framePointerKind<all>"
FRAMED = f"attributes {{{FRAME}}}"


@dataclass(frozen=True)
class StatementRange:
    """Operations [start, end) of a block, which one statement wrote. lines: how many they print; scalar: with scalar loops."""

    start: int
    end: int
    lines: int
    scalar: bool

    def __len__(self) -> int:
        return self.lines


@dataclass(frozen=True)
class Piece:
    """A function that a kernel calls. passed: what it is passed, with types; constants: what it defines."""

    name: str
    operations: tuple[Operation, ...]
    passed: Mapping[str, str]
    constants: Mapping[str, Operation]
    views: tuple[str, ...]  # scratch buffers that it takes from the arena
    scalar: bool
    form: Form | None  # None: nothing repeats it

    @property
    def call(self) -> Operation:
        return call(self.name, tuple(self.passed), tuple(self.passed.values()))


@dataclass(frozen=True)
class EmittedFunction:
    """A function of one or more pieces: its text, by which declaration others call it, and what it calls."""

    name: str
    text: str
    declaration: str
    scalar: bool
    calls: frozenset[str]


class Outliner:
    """Makes the pieces of one kernel.

    operands: types of its arrays, by name; repair: rewrites what is printed into what LLVM compiles
    (targets/llvm/repairs.py).
    """

    def __init__(
        self,
        kernel: str,
        text: Text,
        operands: Mapping[str, str],
        repair: Callable[[Iterable[Operation]], Iterable[Operation]] = iter,
    ):
        self.kernel, self.text, self.operands, self.repair = kernel, text, operands, repair
        self.pieces: list[Piece] = []
        self.calls: dict[
            str, list[Operation]
        ] = {}  # of pieces, as blocks hold them -> of functions

    def outline(
        self,
        block: Block,
        runs: list[list[StatementRange]],
        buffers: Callable[[], Mapping[str, str]],
    ) -> bool:
        """Puts calls in the place of segments that are long together: of scalar loops, repeated and long ones.

        Index arithmetic between the segments of a run goes before them. buffers(): types of scratch
        buffers. Returns whether it did so.
        """
        if sum(len(segment) for run in runs for segment in run) <= LONGEST_PIECE:
            return False
        constants, scratch = self.text.constants, buffers()
        copies = self._copies(
            block, [segment for run in runs for segment in run], constants, scratch
        )
        groups = [piece for run in runs for piece in _groups(run, copies)]
        groups = [
            piece
            for piece in groups
            if piece[0].scalar or piece[0] in copies or sum(map(len, piece)) >= SHORTEST_PIECE
        ]
        calls = [
            self._piece(
                _operations(block, piece), piece[0].scalar, constants, scratch, copies.get(piece[0])
            )
            for piece in groups
        ]
        for group, call in reversed(list(zip(groups, calls))):
            between = [
                op
                for before, after in itertools.pairwise(group)
                for op in block.operations[before.end : after.start]
            ]
            block.operations[group[0].start : group[-1].end] = [*between, call]
        return True

    def _copies(
        self, block: Block, segments: list[StatementRange], constants, scratch: Mapping[str, str]
    ) -> dict[StatementRange, Form]:
        """Segments that repeat others, but for places."""
        alike: dict[str, list[tuple[StatementRange, Form]]] = {}
        for segment in segments:
            operations = _operations(block, [segment])
            if (
                len(segment) >= SHORTEST_COPY
                and (like := form(operations, constants, scratch, self.operands)) is not None
            ):
                alike.setdefault(like.common, []).append((segment, like))
        return {piece: like for same in alike.values() if len(same) > 1 for piece, like in same}

    def _piece(
        self,
        operations: list[Operation],
        scalar: bool,
        constants,
        scratch: Mapping[str, str],
        like: Form | None,
    ) -> Operation:
        """The call of a new piece.

        Raises InternalError for operations that use a value from outside which is no index.
        """
        used = dict.fromkeys(n for op in walk(operations) for n in op.names)
        defined = {n for op in walk(operations) for n in op.defined}
        like = like or form(operations, constants, scratch, self.operands)
        constants = _used(operations, constants)
        views = tuple(n for n in used if n in scratch)
        passed = {}
        for symbol in used.keys() - defined - constants.keys() - {*views, ARENA}:
            if symbol not in self.operands and symbol not in self.text.indices:
                raise InternalError(
                    f"a part of kernel {self.kernel} uses {symbol} of another part, which is no index"
                )
            passed[symbol] = self.operands.get(symbol, "index")
        passed = {n: passed[n] for n in used if n in passed} | (
            {ARENA: ARENA_TYPE} if views or ARENA in used else {}
        )
        return self._added(operations, passed, constants, views, scalar, like).call

    def function(
        self, operations: Sequence[Operation], passed: Mapping[str, str], scalar: bool
    ) -> str:
        """Makes a piece of operations that use nothing but what it is passed, by these names, and constants.

        Returns its name.
        """
        constants = _used(operations, self.text.constants)
        return self._added(operations, passed, constants, (), scalar, None).name

    def _added(
        self,
        operations: Sequence[Operation],
        passed: Mapping[str, str],
        constants: Mapping[str, Operation],
        views: tuple[str, ...],
        scalar: bool,
        like: Form | None,
    ) -> Piece:
        name = f"{self.kernel}_{len(self.pieces)}"
        piece = Piece(name, tuple(operations), passed, constants, views, scalar, like)
        self.pieces.append(piece)
        return piece

    def functions(
        self, attributes: Mapping[str, str], views: Mapping[str, str], offsets: Mapping[str, int]
    ) -> list[EmittedFunction]:
        """Functions of all pieces; copies share one.

        attributes: of what they are passed, by name; views: definitions of scratch buffers, by
        `<name>_at`; offsets: where.
        """
        alike: dict[object, list[Piece]] = {}
        for piece in self.pieces:
            alike.setdefault(
                (piece.form.common, piece.scalar) if piece.form else piece.name, []
            ).append(piece)
        return [self._function(copies, attributes, views, offsets) for copies in alike.values()]

    def _function(
        self, copies: list[Piece], attributes: Mapping[str, str], views: Mapping[str, str], offsets
    ) -> EmittedFunction:
        first, forms = copies[0], [piece.form for piece in copies if piece.form]
        parts = differences(forms, offsets) if len(copies) > 1 else Differences({}, {}, ((),))
        places = dict.fromkeys(parts.names, "index")
        for copy, values in zip(copies, parts.values):
            names = {f"%{copy.name}_place{k}": value for k, value in enumerate(values)}
            given = [
                Operation("arith.constant", (), "index", f" {value}", result=name)
                for name, value in names.items()
            ]
            passed = {**copy.passed, **dict.fromkeys(names, "index")}
            self.calls[copy.call.text] = [
                *given,
                call(first.name, tuple(passed), tuple(passed.values())),
            ]
        arguments = ", ".join(
            f"{n}: {kind}{attributes.get(n, '')}"
            for n, kind in (*first.passed.items(), *places.items())
        )
        constants, at_end = range_reports.definitions(first.constants.values())
        constants += [
            f"{view}_at = arith.constant {offsets[view]} : index"
            for view in first.views
            if view not in parts.views
        ]
        taken = [
            views[view].replace(f"{view}_at", parts.views.get(view, f"{view}_at"))
            for view in first.views
        ]
        operations = (
            parts.operations(first.operations, first.constants) if places else first.operations
        )
        body, calls = self.printed(operations)
        text = "\n".join(
            [
                f"func.func @{first.name}({arguments}) {FRAMED} {{",
                *constants,
                *taken,
                *body,
                *at_end,
                "return",
                "}",
            ]
        )
        types = ", ".join((*first.passed.values(), *places.values()))
        declaration = f"func.func private @{first.name}({types})"
        calls |= range_reports.calls(at_end)
        return EmittedFunction(first.name, text, declaration, first.scalar, calls)

    def printed(self, operations: Iterable[Operation]) -> tuple[Iterator[str], frozenset[str]]:
        """(operations as they are printed, functions that they call): with calls of functions in place of calls of pieces."""
        final = replaced(operations, self._called)
        return operation.lines(self.repair(final)), operation.called(final)

    def _called(self, op: Operation) -> list[Operation] | None:
        return self.calls.get(op.text) if op.name == CALL else None


def _used(
    operations: Sequence[Operation], constants: Mapping[str, Operation]
) -> dict[str, Operation]:
    names = dict.fromkeys(n for op in walk(operations) for n in op.names)
    return {n: constants[n] for n in names if n in constants}


def _operations(block: Block, segments: list[StatementRange]) -> list[Operation]:
    return [op for segment in segments for op in block.operations[segment.start : segment.end]]


def call(name: str, operands: tuple[str, ...], types: Sequence[str]) -> Operation:
    """The call of a function without results."""
    syntax = operation.call_syntax(name, len(operands))
    return Operation(CALL, operands, f"({', '.join(types)}) -> ()", syntax)


def _groups(
    run: list[StatementRange], copies: Collection[StatementRange]
) -> list[list[StatementRange]]:
    """Neighbours that make one piece: alike, and not much longer than LONGEST_PIECE together.

    Copies are pieces of their own.
    """
    groups: list[list[StatementRange]] = []
    for segment in run:
        last = groups[-1] if groups and segment not in copies else None
        if (
            last
            and last[-1] not in copies
            and last[-1].scalar == segment.scalar
            and sum(map(len, last)) + len(segment) <= LONGEST_PIECE
        ):
            last.append(segment)
        else:
            groups.append([segment])
    return groups
