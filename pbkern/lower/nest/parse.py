"""Text -> statements of nests: the inverse of `ir.show`.

    parse(program_text(statements), context).statements      the same statements, but for the user's lines

A program begins with its buffers, one per line, as `str(buffer)` writes them; statements follow. A line that begins
with # is a comment.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

import ml_dtypes
import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.errors import InternalError
from pbkern.core.lazy_dataclass import dataclass

from .context import NestContext
from .effects import accessed
from .ir import (
    BOOL,
    FLOAT32,
    INT32,
    SPACES,
    AsyncCopy,
    AsyncProduct,
    Block,
    Buf,
    Expr,
    For,
    If,
    Let,
    Nest,
    Prefetch,
    Reduction,
    Sort,
    Stmt,
    Store,
    Trace,
    Wait,
    While,
    every,
    result_type,
    show,
)
from .tiles.chunking import Chunking
from .tiles.instructions import ProductInstruction
from .tiles.layout import Panels, Swizzle
from .tiles.tiling import Tiling

NAME = r"[A-Za-z_%@$][\w%@$.]*"
NUMBER = r"-?(?:0x[0-9a-f]+|(?:\d+\.?\d*(?:e[+-]?\d+)?|inf|nan)(?![\w.]))"
# A number, a name, or any other character.
TOKEN = re.compile(rf"\s*(?:{NUMBER}|{NAME}|\S)")
BUFFER = re.compile(
    rf"(?P<name>{NAME}): (?P<dtype>\w+)\[(?P<shape>[\d,]*)\](?P<scratch> scratch)?"
    rf"(?: of (?P<storage>{NAME}))?(?: step (?P<step>-?\d+))?(?: (?P<space>{'|'.join(SPACES)}))?"
    r"(?: swizzle (?P<mask>\d+)>>(?P<shift>\d+))?(?: panels (?P<panels>\d+x\d+/\d+))?"
    r"(?: by (?P<tiling>\S+ \d+x\d+))?(?P<circular> circular)?"
)
TILING = re.compile(r"(?:by (?P<name>\S+) (?P<rows>\d+)x(?P<columns>\d+))? ?(?P<rest>.*)")
# Primitives that take the type of their result as a parameter.
CONVERSIONS = frozenset(("convert_element_type", "bitcast_convert_type"))


@dataclass(frozen=True)
class Dialect:
    """Words that only one target's nests have.

    decide: (nest, text of decisions, buffers by name) -> the nest with these decisions.
    instructions: name -> the instruction by which reductions are computed.
    """

    decide: Callable[[Nest, str, Mapping[str, Buf]], Nest] | None = None
    instructions: Mapping[str, ProductInstruction] = field(default_factory=dict)


SHARED = Dialect()


class Program(NamedTuple):
    """Statements, and the buffers that they name."""

    statements: list[Stmt]
    buffers: dict[str, Buf]


def program_text(statements: Sequence[Stmt]) -> str:
    """The text of statements behind that of their buffers."""
    return "\n".join((*map(str, buffers_of(statements)), show(statements)))


def buffers_of(statements: Sequence[Stmt]) -> list[Buf]:
    """Every buffer that statements name, in their order, each after the one that holds its bytes."""
    named: dict[Buf, None] = {}

    def add(buf: Buf) -> None:
        if buf.storage is not None:
            add(buf.storage)
        named.setdefault(buf)

    for stmt in every(statements):
        for buf in (stmt.buf,) if isinstance(stmt, Prefetch) else accessed(stmt):
            add(buf)
    return list(named)


def parse(text: str, context: NestContext, dialect: Dialect = SHARED) -> Program:
    """Reads a program.

    Args:
      text: what `program_text` writes.
      context: where its expressions are made.
      dialect: a target's words.
    Raises InternalError that names the line.
    """
    buffers: dict[str, Buf] = {}
    lines = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        declared = BUFFER.fullmatch(line)
        if declared is None:
            lines.append(line)
        else:
            buffers[declared["name"]] = _buffer(declared, buffers, dialect)
    return Program(list(_Statements(lines, context, buffers, dialect).block(0)), buffers)


def _buffer(declared: re.Match, buffers: Mapping[str, Buf], dialect: Dialect) -> Buf:
    layout: Swizzle | Tiling | Chunking | None = None
    if declared["mask"]:
        panels = (
            Panels(*map(int, re.split("[x/]", declared["panels"]))) if declared["panels"] else None
        )
        layout = Swizzle(int(declared["mask"]), int(declared["shift"]), panels)
    elif declared["tiling"]:
        layout, _ = _tiling(f"by {declared['tiling']}", dialect)
    return Buf(
        declared["name"],
        tuple(map(int, filter(None, declared["shape"].split(",")))),
        _dtype(declared["dtype"]),
        arena=declared["scratch"] is not None,
        storage=buffers[declared["storage"]] if declared["storage"] else None,
        step=None if declared["step"] is None else int(declared["step"]),
        space=declared["space"] or "",
        layout=layout,
        circular=declared["circular"] is not None,
    )


def _tiling(text: str, dialect: Dialect) -> tuple[Tiling | Chunking | None, str]:
    """(the tiling or chunks that a text begins with, if it does, the rest of the text)."""
    written = TILING.fullmatch(text)
    assert written is not None
    if written["name"] is None:
        return None, text
    counts = int(written["rows"]), int(written["columns"])
    if written["name"] == "chunks":
        return Chunking(*counts), written["rest"]
    return Tiling(dialect.instructions[written["name"]], counts), written["rest"]


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


class _Statements:
    """Reads statements by their indentation."""

    def __init__(
        self,
        lines: list[str],
        context: NestContext,
        buffers: Mapping[str, Buf],
        dialect: Dialect,
    ) -> None:
        self.lines, self.context, self.buffers, self.dialect = lines, context, buffers, dialect
        self.at = 0  # the next line

    def block(self, indent: int) -> Block:
        """The statements from here that are indented by at least `indent`."""
        stmts: list[Stmt] = []
        while self.at < len(self.lines) and _indent(self.lines[self.at]) >= indent:
            stmts.append(self.statement(indent))
        return tuple(stmts)

    def rows(self, indent: int) -> list[str]:
        """The lines from here that are indented by at least `indent`."""
        start = self.at
        while self.at < len(self.lines) and _indent(self.lines[self.at]) >= indent:
            self.at += 1
        return [line.strip() for line in self.lines[start : self.at]]

    def next(self) -> str:
        self.at += 1
        return self.lines[self.at - 1].strip()

    def expressions(
        self, shared: Iterable[str] = (), dtypes: Sequence[np.dtype] = ()
    ) -> _Expressions:
        return _Expressions(
            self.context, self.buffers, dict(row.split(" = ", 1) for row in shared), dtypes
        )

    def statement(self, indent: int) -> Stmt:
        line = self.next()
        shared = []
        while re.match(r"v\d+ = ", line):
            shared.append(line)
            line = self.next()
        keyword, _, rest = line.partition(" ")
        match keyword:
            case "nest":
                return self.nest(rest, self.rows(indent + 2))
            case "let":
                name, value = rest.split(" = ", 1)
                return Let(name, self.expressions(shared).whole(value))
            case "case":
                return self.conditional(rest, indent)
            case "for":
                counter, trips = rest.removesuffix(":").split(" < ")
                return For(
                    counter, int(trips) if trips.isdigit() else trips, self.block(indent + 2)
                )
            case "while":
                condition = self.block(indent + 4)
                if self.next() != "do:":
                    raise InternalError(f"nest text: {line!r} has no `do:`")
                return While(condition, rest.removesuffix(":"), self.block(indent + 2))
            case "sort":
                return self.sort(rest)
            case "async:":
                return AsyncCopy(self.block(indent + 2))
            case "async" if rest == "product:":
                return AsyncProduct(self.block(indent + 2))
            case "wait":
                groups, _, what = rest.partition(" of ")
                return Wait(int(groups), what == "products")
            case "trace":
                site, names = rest.split(": ", 1)
                return Trace(int(site), self.named(names))
            case "prefetch":
                count, place = rest.split(" of ", 1)
                name, index = place.removesuffix("]").split("[", 1)
                return Prefetch(self.buffers[name], _affines(index), int(count))
        raise InternalError(f"nest text: {line!r} is no statement")

    def conditional(self, first: str, indent: int) -> If:
        index, _, _ = first.partition(" == ")
        branches = [self.block(indent + 2)]
        while (
            self.at < len(self.lines)
            and self.lines[self.at].strip() == f"case {index} == {len(branches)}:"
        ):
            self.at += 1
            branches.append(self.block(indent + 2))
        return If(index, tuple(branches))

    def named(self, names: str) -> tuple[Buf, ...]:
        return tuple(self.buffers[name] for name in names.split(", "))

    def sort(self, rest: str) -> Sort:
        names, _, how = rest.partition(" by ")
        names, _, spare = names.partition(" spare ")
        keys, _, first = how.partition(", first ")
        buffers = self.named(names)
        count = int(first) if first else buffers[0].shape[1]
        return Sort(buffers, self.named(spare) if spare else (), int(keys), count)

    def nest(self, head: str, rows: list[str]) -> Nest:
        inside, _, behind = head.removeprefix("[").partition("]")
        dims: dict[str, int] = {}
        ranks: dict[str, int] = {}
        for part in filter(None, inside.split(", ")):
            dimension = re.fullmatch(r"(.+)<(\d+)(\*?)(\d*)", part)
            if dimension is None:
                raise InternalError(f"nest text: {part!r} is no dimension")
            name, size, star, rank = dimension.groups()
            dims[name] = int(size)
            if star:
                ranks[name] = int(rank) if rank else len(ranks)
        shared = [row for row in rows if re.match(r"v\d+ = ", row)]
        sums = [row for row in rows if re.match(r"acc\d+(:\w+)? \w+( by \S+)?= ", row)]
        reader = self.expressions(shared)
        reductions = tuple(reader.reduction(row, self.dialect) for row in sums)
        reader = self.expressions(shared, [reduction.dtype for reduction in reductions])
        stores = tuple(reader.store(row) for row in rows if row not in shared and row not in sums)
        decisions = behind.strip()
        ordered = decisions.startswith("ordered")
        by, decisions = _tiling(decisions.removeprefix("ordered").strip(), self.dialect)
        rdims = tuple(sorted(ranks, key=ranks.__getitem__))
        nest = Nest(dims, rdims, reductions, stores, ordered, by=by)
        if not decisions:
            return nest
        if self.dialect.decide is None:
            raise InternalError(f"nest text: {decisions!r} belongs to a target")
        return self.dialect.decide(nest, decisions, self.buffers)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _affine(text: str) -> Affine:
    """Reads `d0 - 2*%i3 + 4`."""
    total: Affine = Affine()
    for sign, part in re.findall(rf"(?:^|\s)([+-]?)\s*((?:-?\d+\*)?{NAME}|-?\d+)", text):
        factor, _, symbol = part.rpartition("*")
        term = (
            Affine((), int(part))
            if re.fullmatch(r"-?\d+", part)
            else Affine.symbol(symbol, int(factor or 1))
        )
        total = total + term * (-1 if sign == "-" else 1)
    return total


def _affines(text: str) -> tuple[Affine, ...]:
    return tuple(map(_affine, filter(None, text.split(", "))))


class _Expressions:
    """Reads the expressions of one nest or Let.

    shared: name -> text of what the rows before define. dtypes: of the nest's reductions.
    """

    def __init__(
        self,
        context: NestContext,
        buffers: Mapping[str, Buf],
        shared: Mapping[str, str],
        dtypes: Sequence[np.dtype] = (),
    ) -> None:
        self.context, self.buffers, self.shared, self.dtypes = context, buffers, shared, dtypes
        self.known: dict[str, Expr] = {}
        self.text, self.at = "", 0

    def whole(self, text: str) -> Expr:
        """Reads an expression that is all of a text."""
        (expr,) = self.several(text)
        return expr

    def several(self, text: str) -> list[Expr]:
        """Reads expressions between commas."""
        before, self.text, self.at = (self.text, self.at), text, 0
        expressions = [self.expression()]
        while self.peek() == ",":
            self.take(",")
            expressions.append(self.expression())
        if self.text[self.at :].strip():
            raise InternalError(f"nest text: {self.text[self.at :]!r} is left of {text!r}")
        self.text, self.at = before
        return expressions

    def reduction(self, row: str, dialect: Dialect) -> Reduction:
        how, _, operands = row.partition("= ")
        target, op, *by = how.split(" ")
        args = tuple(self.several(operands))
        _, _, dtype = target.partition(":")
        instruction = dialect.instructions[by[-1]] if by else None
        return Reduction(op, args, _dtype(dtype) if dtype else args[0].dtype, instruction)

    def store(self, row: str) -> Store:
        target, _, rest = row.partition("] = ")
        guard = False
        if "]? = " in row and (not rest or row.index("]? = ") < row.index("] = ")):
            (target, _, rest), guard = row.partition("]? = "), True
        name, index = target.split("[", 1)
        value, _, mask = rest.partition("  if ")
        inner = not value.endswith("  (after)")
        return Store(
            self.buffers[name],
            _affines(index),
            self.whole(value.removesuffix("  (after)")),
            inner,
            guard,
            self.whole(mask) if mask else None,
        )

    # ---- tokens

    def peek(self) -> str:
        match = TOKEN.match(self.text, self.at)
        return "" if match is None else match[0].strip()

    def take(self, expected: str | None = None) -> str:
        match = TOKEN.match(self.text, self.at)
        token = "" if match is None else match[0].strip()
        if match is None or (expected is not None and token != expected):
            where = self.text[self.at :]
            raise InternalError(
                f"nest text: {expected or 'more'!r} expected at {where!r} of {self.text!r}"
            )
        self.at = match.end()
        return token

    def until(self, marks: str) -> str:
        """The text from here to the first of some marks."""
        end = re.compile(f"[{marks}]").search(self.text, self.at)
        if end is None:
            raise InternalError(f"nest text: one of {marks!r} expected in {self.text!r}")
        taken, self.at = self.text[self.at : end.start()], end.start()
        return taken

    def type(self, default: np.dtype | None) -> np.dtype:
        """The type that follows behind a colon, the default without one."""
        if self.peek() == ":":
            self.take(":")
            return _dtype(self.take())
        if default is None:
            raise InternalError(f"nest text: a type expected at {self.text[self.at :]!r}")
        return default

    # ---- expressions

    def expression(self) -> Expr:
        token = self.peek()
        if token == "(":
            return self.parenthesised()
        token = self.take()
        if token in ("True", "False"):
            return self.context.const(token == "True", BOOL)
        if re.match(r"-?(\d|inf\b|nan\b)", token):
            return self.constant(token)
        if self.peek() == "[":
            return self.access(self.buffers[token])
        if re.fullmatch(r"acc\d+", token):
            number = int(token.removeprefix("acc"))
            return self.context.pool.accumulator(self.dtypes[number], number)
        if token in self.shared:
            if token not in self.known:
                self.known[token] = self.whole(self.shared[token])
            return self.known[token]
        if re.match(r"\s*(:\s*\w+)?\(", self.text[self.at :]):
            return self.operation(token)
        return self.context.pool.scalar(self.type(INT32), token)

    def constant(self, token: str) -> Expr:
        is_bits = token.startswith("0x")
        is_float = not is_bits and re.search(r"[.einfa]", token) is not None
        dtype = self.type(None if is_bits else FLOAT32 if is_float else INT32)
        if is_bits:
            value = np.frombuffer(int(token, 16).to_bytes(dtype.itemsize, "little"), dtype)[0]
            return self.context.pool.const(dtype, value)
        number = float(token) if is_float else int(token)
        return self.context.pool.const(dtype, np.asarray(number).astype(dtype)[()])

    def parenthesised(self) -> Expr:
        """Reads a place as an integer, a test of a range, or a value at a distance."""
        self.take("(")
        start = self.at
        inside = self.until(r"()\[\]")
        if self.peek() == ")":
            self.take(")")
            limits = re.fullmatch(r"(-?\d+) <= (.*) < (-?\d+)", inside)
            if limits:
                return self.context.pool.in_range(
                    _affine(limits[2]), int(limits[1]), int(limits[3])
                )
            if " at " not in inside:
                return self.context.pool.index(self.type(INT32), _affine(inside))
        self.at = start
        operand = self.expression()
        self.take("at")
        moves = [part.rsplit(" + ", 1) for part in self.until(")").strip().split(", ")]
        self.take(")")
        distances = tuple((dim, int(by)) for dim, by in moves)
        return self.context.pool.shifted(operand.dtype, distances, (operand,))

    def access(self, buf: Buf) -> Expr:
        self.take("[")
        index: list[Affine | None] = []
        gathered = []
        while self.peek() != "]":
            if self.peek() == "gather":
                self.take("gather")
                gathered.append(self.expression())
                index.append(None)
            else:
                index.append(_affine(self.until(r",\]").strip()))
            if self.peek() == ",":
                self.take(",")
        self.take("]")
        guard = self.peek() == "?"
        if guard:
            self.take("?")
        dtype = self.type(buf.dtype)
        if gathered:
            return self.context.pool.gather(dtype, buf, tuple(index), tuple(gathered))
        places = tuple(place for place in index if place is not None)
        return self.context.pool.load(dtype, buf, places, guard)

    def operation(self, primitive: str) -> Expr:
        dtype = None
        if self.peek() == ":":
            dtype = self.type(None)
        self.take("(")
        args: list[Expr] = []
        params: dict[str, object] = {}
        in_dtypes = None
        while self.peek() != ")":
            named = re.compile(r"\s*(\w+)=([^,)]+)").match(self.text, self.at)
            if named and named[1] == "of":
                in_dtypes, self.at = tuple(map(_dtype, named[2].split("/"))), named.end()
            elif named:
                params[named[1]], self.at = ast.literal_eval(named[2]), named.end()
            else:
                args.append(self.expression())
            if self.peek() == ",":
                self.take(",")
        self.take(")")
        dtype = dtype or result_type(primitive, args)
        if primitive in CONVERSIONS:
            params["new_dtype"] = dtype
        info = self.context.info(
            primitive, dtype, in_dtypes or tuple(arg.dtype for arg in args), params
        )
        return self.context.pool.op(dtype, info, tuple(args))
