"""Nest IR: the small explicit form between a kernel's body and MLIR text.

A body becomes a list of statements over buffers. A `Nest` is an iteration space, expressions over
affine accesses, accumulators kept in registers and writes; `If`, `For` and `While` hold further
statements and their values travel through scratch buffers. Views (slice, transpose, broadcast, ...)
are only index maps and leave no trace here. lower/build.py makes nests, lower/passes/merge_nests.py
merges them, targets/cpu/emit/nests.py writes them as scf + vector text.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.errors import InternalError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.ops.elementwise_row import TRUTH

from .tiles.chunking import Chunking
from .tiles.instructions import ProductInstruction
from .tiles.layout import Swizzle
from .tiles.tiling import Tiling

if TYPE_CHECKING:
    from pbkern.lower.math.elementwise import EqnInfo

# Nested operations that a line of printed nests may show.
TALLEST_PRINTED = 8
# Nested operations of an expression: what is taller is stored in between. Far below Python's limit
# of nested calls, of which walks over expressions take a few for each operation.
MAX_HEIGHT = 160


BOOL = np.dtype(bool)
INT32 = np.dtype(np.int32)
FLOAT32 = np.dtype(np.float32)
# Parameters that the text of an operation leaves out: the node's type says the first, no code depends on the others.
UNWRITTEN_PARAMS = frozenset(("new_dtype", "sharding", "weak_type"))
# Memories of scratch: that of a thread block, registers of its threads, matrix registers of a CPU.
SPACES = ("shared", "registers", "tiles")
# Words before the layouts of buffers in texts.
LAYOUTS: dict[type, str] = {Swizzle: "swizzle", Tiling: "by", Chunking: "by"}
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


@dataclass(frozen=True, eq=False)
class Buf:
    """A contiguous array: a kernel operand (`arena` False) or scratch of one task (`arena` True).

    space: memory of scratch, one of SPACES; "" where the target decides.
    layout: of shared memory, where elements lie if not in order; of registers, which threads hold them,
      if not those that compute the points at which they are touched.
    circular: the first axis counts stages, and places along it are taken modulo its size.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    arena: bool = False
    storage: Buf | None = None  # another buffer whose bytes this one reinterprets (a reshape)
    # how far its elements move along the last axis but for bends, where known
    # (lower/values/dynamic_strides.py)
    step: int | None = None
    space: str = ""
    layout: Swizzle | Tiling | Chunking | None = None
    circular: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Element strides, row major."""
        return (
            tuple(itertools.accumulate(self.shape[:0:-1], operator.mul, initial=1))[::-1]
            if self.shape
            else ()
        )

    @property
    def index_dtype(self) -> np.dtype:
        """Integers in which the places of its elements can be computed."""
        return np.dtype(np.int32 if self.size < 1 << 31 else np.int64)

    @property
    def root(self) -> Buf:
        return self.storage.root if self.storage is not None else self

    def __str__(self) -> str:
        scratch = " scratch" if self.arena else ""
        storage = f" of {self.storage.name}" if self.storage is not None else ""
        step = f" step {self.step}" if self.step is not None else ""
        shape = ",".join(map(str, self.shape))
        space = f" {self.space}" if self.space else ""
        layout = "" if self.layout is None else f" {LAYOUTS[type(self.layout)]} {self.layout}"
        circular = " circular" if self.circular else ""
        return f"{self.name}: {self.dtype.name}[{shape}]{scratch}{storage}{step}{space}{layout}{circular}"


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

    def accumulator(self, dtype: Any, number: int) -> Expr:
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

    def rewriter(self, replace: Callable[[Expr], Expr | None]) -> Callable[[Expr], Expr]:
        """Rebuilds expressions bottom up; `replace(node with new args)` may exchange a node.

        Each node is seen once.
        """
        memo: dict[Expr, Expr] = {}

        def go(expr: Expr) -> Expr:
            if expr not in memo:
                args = tuple(map(go, expr.args))
                same = all(arg is b for arg, b in zip(args, expr.args))
                y = expr if same else expr.with_args(args, self)
                memo[expr] = replace(y) or y
            return memo[expr]

        return go

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


def _renamed(dim: str, dims: dict[str, Affine]) -> str:
    """A symbol by which places move as they did by `dim`."""
    if dim not in dims:
        return dim
    steps = [symbol for symbol, coefficient in dims[dim].terms if coefficient == 1]
    if not steps:
        raise InternalError(f"nest: {dim}, along which values move, becomes {dims[dim]}")
    return steps[-1]


@dataclass(frozen=True, slots=True)
class Reduction:
    """accumulator = op(accumulator, args), computed `by` an instruction where that is decided.

    `dot` multiplies and adds; argmax and argmin take (value, index).

    `maxnum` is max without NaN, of zeros either one.
    """

    op: str
    args: tuple[Expr, ...]
    dtype: np.dtype
    by: ProductInstruction | None = None

    @property
    def is_product(self) -> bool:
        """Whether it sums products, by whatever instruction."""
        return self.op == "dot"

    @property
    def is_search(self) -> bool:
        """Whether it finds the index of the largest or smallest value."""
        return self.op in ("argmax", "argmin")

    @property
    def is_plain_product(self) -> bool:
        """Whether it sums products of operands as they are, not of words that hold several elements."""
        return self.op == "dot" and self.by is None

    def mapped(self, change: Callable[[Expr], Expr]) -> Reduction:
        """The reduction of changed operands."""
        return replace(self, args=tuple(map(change, self.args)))


@dataclass(frozen=True, slots=True)
class Store:
    """buf[index] = value.

    `inner` writes run at every point, others once the reduction dimensions are done.

    `mask` (an Expr) and `guard` (indices may be outside: such points are dropped) make it
    conditional.
    """

    buf: Buf
    index: tuple[Affine, ...]
    value: Expr
    inner: bool = True
    guard: bool = False
    mask: Expr | None = None

    def moved(self, places: Mapping[str, Affine], change: Callable[[Expr], Expr]) -> Store:
        """The store with symbols of its index replaced by places, its value and its mask changed."""
        index = tuple(position.substitute(places.get) for position in self.index)
        return self.mapped(change, index=index)

    def mapped(
        self,
        change: Callable[[Expr], Expr],
        *,
        buf: Buf | None = None,
        index: tuple[Affine, ...] | None = None,
        inner: bool | None = None,
    ) -> Store:
        """The write with its value and its mask changed, and with the fields that are given replaced."""
        return Store(
            self.buf if buf is None else buf,
            self.index if index is None else index,
            change(self.value),
            self.inner if inner is None else inner,
            self.guard,
            None if self.mask is None else change(self.mask),
        )


@dataclass(frozen=True)
class Nest:
    """for dims: update accumulators, store.

    `rdims` are reduced; `ordered` keeps them sequential (cumulative ops).

    A point reads all that its stores need before any of them stores: they may read what another one
    overwrites.

    `by`: which threads compute which points, the dimensions being rows, columns and depth of its
    tile; None: the target decides.
    """

    dims: Mapping[str, int]
    rdims: tuple[str, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    stores: tuple[Store, ...] = ()
    ordered: bool = False
    at: str | None = None
    by: Tiling | Chunking | None = None

    def expressions(self) -> list[Expr]:
        operands = [arg for reduction in self.reductions for arg in reduction.args]
        values = [store.value for store in self.stores]
        return operands + values + [store.mask for store in self.stores if store.mask is not None]

    def nodes(self) -> tuple[Expr, ...]:
        """Every distinct node, operands before users."""
        return self._nodes

    @functools.cached_property
    def _nodes(self) -> tuple[Expr, ...]:  # passes ask for it many times
        return tuple(nodes(self.expressions()))

    def loads(self) -> list[Load | Gather]:
        return [node for node in self.nodes() if isinstance(node, Load | Gather)]

    def mapped(self, change: Callable[[Expr], Expr]) -> Nest:
        """The nest with what it reduces, stores and masks changed."""
        return replace(
            self,
            reductions=tuple(reduction.mapped(change) for reduction in self.reductions),
            stores=tuple(store.mapped(change) for store in self.stores),
        )

    def reuse(self, expr: Expr) -> int:
        """Points of results that use one value of an expression."""
        return math.prod(
            size
            for dim, size in self.dims.items()
            if dim not in self.rdims and dim not in expr.symbols
        )

    def moves(self) -> bool:
        """Whether it takes values at a distance: what its loads read is not at their indices alone."""
        return any(isinstance(node, Shifted) for node in self.nodes())

    def reaches(self) -> dict[int, dict[str, int]]:
        """id of an expression -> how far from the nest's points, at most, it is taken, by dimension; {} if at them only."""
        reaches: dict[int, dict[str, int]] = {}
        for node in reversed(self.nodes()) if self.moves() else ():
            here = dict(reaches.get(id(node), {}))
            for dim, distance in node.moves if isinstance(node, Shifted) else ():
                here[dim] = here.get(dim, 0) + distance
            for arg in node.args:
                there = reaches.setdefault(id(arg), {})
                for dim, distance in here.items():
                    there[dim] = max(there.get(dim, 0), distance)
        return reaches

    def extents(self) -> dict[str, int]:
        """dimension -> number of places at which expressions are taken: the nest's points, and those at a distance."""
        far = list(self.reaches().values())
        return {
            dim: size + max((reach.get(dim, 0) for reach in far), default=0)
            for dim, size in self.dims.items()
        }

    def decisions(self) -> str:
        """Text of what a target has decided about the nest; a target's subclass says it."""
        return ""

    def __str__(self) -> str:
        in_order = self.rdims == tuple(dim for dim in self.dims if dim in self.rdims)
        rank = {dim: "*" if in_order else f"*{k}" for k, dim in enumerate(self.rdims)}
        head = ", ".join(f"{dim}<{size}{rank.get(dim, '')}" for dim, size in self.dims.items())
        ordered, by = " ordered" if self.ordered else "", f" by {self.by}" if self.by else ""
        rows = [f"nest [{head}]{ordered}{by}{self.decisions()}"]
        names = _name_shared(self.nodes(), rows, "  ")
        rows += [
            f"  acc{k}{typed(reduction.dtype, reduction.args[0].dtype)} {reduction.op}"
            + (f" by {reduction.by.name}= " if reduction.by else "= ")
            + ", ".join(arg.text(names) for arg in reduction.args)
            for k, reduction in enumerate(self.reductions)
        ]
        for store in self.stores:
            tail = ("" if store.inner else "  (after)") + (
                f"  if {store.mask.text(names)}" if store.mask is not None else ""
            )
            target = (
                f"{store.buf.name}[{', '.join(map(str, store.index))}]{'?' if store.guard else ''}"
            )
            rows.append(f"  {target} = {store.value.text(names)}{tail}")
        return "\n".join(rows)


def nodes(expressions: Iterable[Expr]) -> list[Expr]:
    """Every distinct node of expressions, operands before users."""
    seen: dict[int, Expr] = {}

    def visit(node: Expr) -> None:
        if id(node) not in seen:
            for arg in node.args:
                visit(arg)
            seen[id(node)] = node

    for expr in expressions:
        visit(expr)
    return list(seen.values())


def _name_shared(every: Sequence[Expr], rows: list[str], indent: str) -> dict[int, str]:
    """Adds a row per operation that is used twice or stands on a tall stack of unnamed ones."""
    uses = Counter(id(arg) for node in every for arg in node.args)
    names: dict[int, str] = {}
    height: dict[int, int] = {}
    for expr in every:
        height[id(expr)] = 1 + max((height[id(arg)] for arg in expr.args), default=0)
        if isinstance(expr, Op | Gather) and (
            uses[id(expr)] > 1 or height[id(expr)] > TALLEST_PRINTED
        ):
            rows.append(f"{indent}v{len(names)} = {expr.text(names)}")
            names[id(expr)], height[id(expr)] = f"v{len(names)}", 0
    return names


@dataclass(frozen=True, slots=True)
class Let:
    """A scalar evaluated here; its name may stand in index expressions."""

    name: str
    value: Expr


@dataclass(frozen=True, slots=True)
class If:
    """Runs branches[clamp(index)]; `index` names an integer Let."""

    index: str
    branches: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class For:
    """for counter in 0 .. trips - 1; `trips` is an int or names a Let."""

    counter: str
    trips: int | str
    body: Block


@dataclass(frozen=True, slots=True)
class While:
    """Runs `condition` (which defines the Let `predicate`), then body and condition again while it is true."""

    condition: Block
    predicate: str
    body: Block


@dataclass(frozen=True, slots=True)
class Sort:
    """Sorts lines of equal length in place, stably, ascending by the first `num_keys` buffers.

    `buffers` are contiguous arrays [lines, length]; `spare` is what sort.scratch asks for. Of each
    line only the `first` elements are read.
    """

    buffers: tuple[Buf, ...]
    spare: tuple[Buf, ...]
    num_keys: int
    first: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Hands contiguous scratch buffers to the process that runs the kernel (lower/rules/debug_callbacks.py)."""

    site: int
    buffers: tuple[Buf, ...]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Asks for the cache lines of `count` elements from `index` on, which will be written.

    It may be outside the buffer.
    """

    buf: Buf
    index: tuple[Affine, ...]
    count: int


@dataclass(frozen=True, slots=True)
class AsyncCopy:
    """Begins copies that the device makes by itself, as one group; each is a nest of one store.

    What they store is there behind the Wait that waits for the group. Until then nobody may touch it,
    and nobody may change what they read.
    """

    body: Block


@dataclass(frozen=True, slots=True)
class AsyncProduct:
    """Begins products that the device makes by itself, as one group; each is a nest that adds to sums in registers.

    The sums are there behind the Wait that waits for the group. Until then only further products may touch them, and nobody
    may store to the tiles that the products read.
    """

    body: Block


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits until at most the last `groups` groups of copies, or of products, are under way."""

    groups: int
    products: bool = False


Stmt = Nest | Let | If | For | While | Sort | Trace | Prefetch | AsyncCopy | AsyncProduct | Wait
# Statements that run one after the other, as a statement holds them.
Block = tuple[Stmt, ...]


def bodies(stmt: Stmt) -> tuple[Block, ...]:
    """The blocks inside a statement."""
    match stmt:
        case If(branches=branches):
            return branches
        case For(body=body) | AsyncCopy(body=body) | AsyncProduct(body=body):
            return (body,)
        case While(condition=condition, body=body):
            return (condition, body)
    return ()


def every(stmts: Sequence[Stmt]) -> Iterator[Stmt]:
    """All statements, inner ones too."""
    for stmt in stmts:
        yield stmt
        for inner in bodies(stmt):
            yield from every(inner)


def with_bodies(stmt: Stmt, change: Callable[[Block], Sequence[Stmt]]) -> Stmt:
    """The statement with each block inside it changed."""
    match stmt:
        case If():
            return replace(stmt, branches=tuple(tuple(change(block)) for block in stmt.branches))
        case For() | AsyncCopy() | AsyncProduct():
            return replace(stmt, body=tuple(change(stmt.body)))
        case While():
            condition = tuple(change(stmt.condition))
            return replace(stmt, condition=condition, body=tuple(change(stmt.body)))
    return stmt


def with_nests(stmts: Sequence[Stmt], change: Callable[[Nest], Sequence[Stmt]]) -> list[Stmt]:
    """The statements with others in the place of each nest, inner ones too."""
    out: list[Stmt] = []
    for stmt in stmts:
        if isinstance(stmt, Nest):
            out += change(stmt)
        else:
            out.append(with_bodies(stmt, lambda block: with_nests(block, change)))
    return out


def show(stmts: Sequence[Stmt], indent: str = "") -> str:
    """Readable text of a statement list."""
    rows: list[str] = []
    for stmt in stmts:
        match stmt:
            case Nest():
                rows += [indent + line for line in str(stmt).splitlines()]
            case Let(name=n, value=v):
                names = _name_shared(nodes([v]), rows, indent)
                rows.append(f"{indent}let {n} = {v.text(names)}")
            case If(index=i, branches=bs):
                for n, b in enumerate(bs):
                    rows += [f"{indent}case {i} == {n}:", show(b, indent + "  ")]
            case For(counter=c, trips=t, body=b):
                rows += [f"{indent}for {c} < {t}:", show(b, indent + "  ")]
            case While(condition=c, predicate=p, body=b):
                rows += [
                    f"{indent}while {p}:",
                    show(c, indent + "    "),
                    f"{indent}do:",
                    show(b, indent + "  "),
                ]
            case AsyncCopy(body=b):
                rows += [f"{indent}async:", show(b, indent + "  ")]
            case AsyncProduct(body=b):
                rows += [f"{indent}async product:", show(b, indent + "  ")]
            case Wait(groups=n, products=of_products):
                rows.append(f"{indent}wait {n}{' of products' if of_products else ''}")
            case Trace(site=k, buffers=bufs):
                rows.append(f"{indent}trace {k}: {', '.join(buf.name for buf in bufs)}")
            case Prefetch(buf=b, index=i, count=n):
                rows.append(f"{indent}prefetch {n} of {b.name}[{', '.join(map(str, i))}]")
            case Sort(buffers=bufs, spare=spare, num_keys=k, first=n):
                which = f", first {n}" if n < bufs[0].shape[1] else ""
                beside = f" spare {', '.join(buf.name for buf in spare)}" if spare else ""
                buffers = ", ".join(buf.name for buf in bufs)
                rows.append(f"{indent}sort {buffers}{beside} by {k}{which}")
    return "\n".join(row for row in rows if row)


class Names:
    """Fresh names of one kernel, numbered from `first`."""

    def __init__(self, first: int = 0) -> None:
        self._count = itertools.count(first)

    def __call__(self, prefix: str) -> str:
        return f"{prefix}{next(self._count)}"
