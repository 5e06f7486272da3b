"""Expressions of nests: frozen nodes, interned by the Pool of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.errors import InternalError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.ops.elementwise_row import TRUTH

from .buffers import Buf

if TYPE_CHECKING:
    from pbkern.lower.math.elementwise import EqnInfo

# Nested operations of an expression: what is taller is stored in between. Far below Python's limit
# of nested calls, of which walks over expressions take a few for each operation.
MAX_HEIGHT = 160
BOOL = np.dtype(bool)
INT32 = np.dtype(np.int32)
FLOAT32 = np.dtype(np.float32)
# Parameters that the text of an operation leaves out: the node's type says the first, no code depends on the others.
UNWRITTEN_PARAMS = frozenset(("new_dtype", "sharding", "weak_type"))
# Types of constants that are written without one, by kind.
_DEFAULT_CONSTANTS = {"f": FLOAT32, "i": INT32, "b": BOOL}


def typed(dtype: np.dtype, expected: np.dtype | None) -> str:
    """Text of a type where it is not the expected one."""
    return "" if dtype == expected else f":{dtype.name}"


def result_type(primitive: str, args: Sequence[Expr]) -> np.dtype | None:
    """The type that the text of an operation leaves out."""
    row = ELEMENTWISE.get(primitive)
    if row is not None and row.result is TRUTH:
        return BOOL
    deciding = 0 if row is None else row.deciding_operand
    return args[deciding].dtype if len(args) > deciding else None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Expr:
    """A node of a nest's expression DAG, interned by `Pool`: equal nodes are one object.

    args: operands. symbols: those that its places and its operands depend on. height: how many
    nodes stand on each other.
    """

    dtype: np.dtype
    args: tuple[Expr, ...]
    symbols: frozenset[str]
    height: int

    def __str__(self) -> str:
        return self.text({})

    def text(self, names: dict[int, str]) -> str:
        """Nested text; nodes that `names` names are written by name (a DAG as a tree is exponential)."""
        if id(self) in names:
            return names[id(self)]
        return self.written(*(arg.text(names) for arg in self.args))

    def written(self, *operands: str) -> str:
        """The node's own text around those of its operands."""
        raise NotImplementedError(type(self).__name__)

    def with_args(self, args: tuple[Expr, ...], pool: Pool) -> Expr:
        """Makes the node anew with other operands."""
        raise NotImplementedError(type(self).__name__)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Const(Expr):
    """A number: a NumPy scalar."""

    value: np.generic

    def written(self, *operands: str) -> str:
        if self.value != self.value and self.value.tobytes() != self.dtype.type("nan").tobytes():
            bits = int.from_bytes(self.value.tobytes(), "little")
            return f"{bits:#x}:{self.dtype.name}"
        return f"{self.value}{typed(self.dtype, _DEFAULT_CONSTANTS.get(self.dtype.kind))}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Scalar(Expr):
    """The value of a Let."""

    name: str

    def written(self, *operands: str) -> str:
        return self.name + typed(self.dtype, INT32)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IndexValue(Expr):
    """An affine place as an integer."""

    affine: Affine

    def written(self, *operands: str) -> str:
        return f"({self.affine})" + typed(self.dtype, INT32)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class InRange(Expr):
    """low <= affine < high."""

    affine: Affine
    low: int
    high: int

    def written(self, *operands: str) -> str:
        return f"({self.low} <= {self.affine} < {self.high})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Load(Expr):
    """buf[index]. guard: an index may be outside of the buffer."""

    buf: Buf
    index: tuple[Affine, ...]
    guard: bool

    @property
    def access(self) -> tuple[Buf, tuple[Affine, ...]]:
        return self.buf, self.index

    def written(self, *operands: str) -> str:
        guard = "?" if self.guard else ""
        place = ", ".join(map(str, self.index))
        return f"{self.buf.name}[{place}]{guard}{typed(self.dtype, self.buf.dtype)}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Gather(Expr):
    """buf[index] with an operand for each None of `index`, clamped into the buffer."""

    buf: Buf
    index: tuple[Affine | None, ...]

    @property
    def access(self) -> tuple[Buf, tuple[Affine | None, ...]]:
        return self.buf, self.index

    def written(self, *operands: str) -> str:
        gathered = iter(operands)
        place = (f"gather {next(gathered)}" if i is None else str(i) for i in self.index)
        return f"{self.buf.name}[{', '.join(place)}]{typed(self.dtype, self.buf.dtype)}"

    def with_args(self, args: tuple[Expr, ...], pool: Pool) -> Expr:
        return pool.gather(self.dtype, self.buf, self.index, args)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Op(Expr):
    """An operation on its operands. info: the facts of its equation."""

    info: EqnInfo

    def written(self, *operands: str) -> str:
        primitive = self.info.primitive
        params = [
            f"{name}={int(value) if isinstance(value, int) else repr(value)}"
            for name, value in self.info.params.items()
            if name not in UNWRITTEN_PARAMS and value is not None
        ]
        if self.info.in_dtypes != tuple(arg.dtype for arg in self.args):
            params.append(f"of={'/'.join(dtype.name for dtype in self.info.in_dtypes)}")
        type_ = typed(self.dtype, result_type(primitive, self.args))
        return f"{primitive}{type_}({', '.join((*operands, *params))})"

    def with_args(self, args: tuple[Expr, ...], pool: Pool) -> Expr:
        return pool.op(self.dtype, self.info, args)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Accumulator(Expr):
    """The result of the nest's reduction of this number."""

    number: int

    def written(self, *operands: str) -> str:
        return f"acc{self.number}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Shifted(Expr):
    """The value of its operand some way along dimensions. moves: (dimension, distance) pairs."""

    moves: tuple[tuple[str, int], ...]

    def written(self, *operands: str) -> str:
        return f"({operands[0]} at {', '.join(f'{dim} + {by}' for dim, by in self.moves)})"

    def with_args(self, args: tuple[Expr, ...], pool: Pool) -> Expr:
        return pool.shifted(self.dtype, self.moves, args)


Node = TypeVar("Node", bound=Expr)
NO_SYMBOLS: frozenset[str] = frozenset()


class Pool:
    """Interns expressions of one kernel."""

    def __init__(self) -> None:
        self._nodes: dict[tuple, Expr] = {}

    def const(self, dtype: Any, value: Any) -> Expr:
        return self._node(Const, dtype, (), (np.asarray(value).tobytes(),), (value,))

    def scalar(self, dtype: Any, name: str) -> Expr:
        return self._node(Scalar, dtype, (), (name,), (name,))

    def index(self, dtype: Any, affine: Affine) -> Expr:
        return self._node(IndexValue, dtype, (), (affine,), (affine,), affine.symbols)

    def in_range(self, affine: Affine, low: int, high: int) -> Expr:
        fields = affine, low, high
        return self._node(InRange, BOOL, (), fields, fields, affine.symbols)

    def load(self, dtype: Any, buf: Buf, index: tuple[Affine, ...], guard: bool = False) -> Load:
        symbols = NO_SYMBOLS.union(*(i.symbols for i in index))
        return self._node(Load, dtype, (), (id(buf), index, guard), (buf, index, guard), symbols)

    def gather(
        self, dtype: Any, buf: Buf, index: tuple[Affine | None, ...], args: tuple[Expr, ...]
    ) -> Gather:
        symbols = NO_SYMBOLS.union(*(i.symbols for i in index if i is not None))
        return self._node(Gather, dtype, args, (id(buf), index), (buf, index), symbols)

    def op(self, dtype: Any, info: EqnInfo, args: tuple[Expr, ...]) -> Expr:
        return self._node(Op, dtype, args, (id(info),), (info,))

    def accumulator(self, dtype: Any, number: int) -> Accumulator:
        return self._node(Accumulator, dtype, (), (number,), (number,))

    def shifted(self, dtype: Any, moves: tuple, args: tuple[Expr, ...]) -> Expr:
        return self._node(Shifted, dtype, args, (moves,), (moves,))

    def _node(
        self,
        cls: type[Node],
        dtype: Any,
        args: tuple[Expr, ...],
        key: tuple,
        fields: tuple,
        symbols: frozenset[str] = NO_SYMBOLS,
    ) -> Node:
        """The one node of a class, dtype, operands and `key`, which stands for its `fields`."""
        dtype = np.dtype(dtype)
        whole = (cls, dtype, *key, *map(id, args))
        node = self._nodes.get(whole)
        if node is None:
            if args:
                symbols = symbols.union(*(arg.symbols for arg in args))
            height = 1 + max((arg.height for arg in args), default=0)
            node = self._nodes[whole] = cls(dtype, args, symbols, height, *fields)
        return cast(Node, node)

    def rewriter(
        self, replace: Callable[[Expr], Expr | None], memo: dict[Expr, Expr] | None = None
    ) -> Callable[[Expr], Expr]:
        """Rebuilds expressions bottom up; `replace(node with new args)` may exchange a node.

        Each node is seen once. memo: the nodes that rewriters with equal `replace` have rebuilt, to which this one adds.
        """
        return _Rewriter(self, replace, {} if memo is None else memo)

    def rewrite(self, expr: Expr, replace: Callable[[Expr], Expr | None]) -> Expr:
        """One expression rebuilt; see `rewriter`."""
        return self.rewriter(replace)(expr)

    def with_access(self, expr: Load | Gather, buf: Buf, index: tuple) -> Expr:
        """Makes a load or gather anew that reads other elements."""
        if isinstance(expr, Load):
            return self.load(expr.dtype, buf, index, expr.guard)
        return self.gather(expr.dtype, buf, index, expr.args)

    def with_places(self, expr: Expr, change: Callable[[Affine], Affine]) -> Expr | None:
        """The expression with its own affine places changed, None if it has none."""
        match expr:
            case IndexValue():
                return self.index(expr.dtype, change(expr.affine))
            case InRange():
                return self.in_range(change(expr.affine), expr.low, expr.high)
            case Load() | Gather():
                index = tuple(i if i is None else change(i) for i in expr.index)
                return self.with_access(expr, expr.buf, index)
        return None

    def renamer(self, dims: dict[str, Affine]) -> Callable[[Expr], Expr]:
        """Replaces dimension symbols of expressions by affine ones."""

        def replace(expr: Expr) -> Expr | None:
            if isinstance(expr, Shifted):
                moves = tuple((_renamed(dim, dims), by) for dim, by in expr.moves)
                return self.shifted(expr.dtype, moves, expr.args)
            return self.with_places(expr, lambda a: a.substitute(dims.get))

        rewrite = self.rewriter(replace)
        return lambda expr: rewrite(expr) if expr.symbols & dims.keys() else expr

    def rename(self, expr: Expr, dims: dict[str, Affine]) -> Expr:
        """One expression with its symbols replaced; see `renamer`."""
        return self.renamer(dims)(expr)


class _Rewriter:
    """Rebuilds expressions bottom up, each node once.

    A local function that calls itself is a cycle, which only the garbage collector frees, with all that it has seen.
    """

    def __init__(
        self, pool: Pool, replace: Callable[[Expr], Expr | None], memo: dict[Expr, Expr]
    ) -> None:
        self.pool, self.replace, self.memo = pool, replace, memo

    def __call__(self, expr: Expr) -> Expr:
        rewritten = self.memo.get(expr)
        if rewritten is None:
            args = tuple(map(self, expr.args))
            same = all(arg is b for arg, b in zip(args, expr.args))
            y = expr if same else expr.with_args(args, self.pool)
            rewritten = self.memo[expr] = self.replace(y) or y
        return rewritten


def _renamed(dim: str, dims: dict[str, Affine]) -> str:
    """A symbol by which places move as they did by `dim`."""
    if dim not in dims:
        return dim
    steps = [symbol for symbol, coefficient in dims[dim].terms if coefficient == 1]
    if not steps:
        raise InternalError(f"nest: {dim}, along which values move, becomes {dims[dim]}")
    return steps[-1]


def nodes(expressions: Iterable[Expr], before: Iterable[Expr] = ()) -> list[Expr]:
    """Every distinct node of expressions, operands before users; first the nodes `before`, which have their operands."""
    seen = {id(node): node for node in before}
    _visit(expressions, seen)
    return list(seen.values())


def _visit(expressions: Iterable[Expr], seen: dict[int, Expr]) -> None:
    """Adds the nodes of expressions that are not in `seen`, by id."""
    for node in expressions:
        if id(node) not in seen:
            _visit(node.args, seen)
            seen[id(node)] = node
