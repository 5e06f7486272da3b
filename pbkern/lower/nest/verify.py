"""Statements -> InternalError where they break the rules of lower/nest/ir/."""

from __future__ import annotations

from collections.abc import Sequence

from pbkern.core.errors import InternalError

from . import effects
from .async_copies import copied, is_product
from .ir import (
    Accumulator,
    AsyncCopy,
    AsyncProduct,
    Buf,
    For,
    Gather,
    If,
    Let,
    Load,
    Nest,
    Prefetch,
    Stmt,
    Wait,
    While,
    nodes,
    show,
)
from .tiles.axes import row_major, tile_axes, tile_shape
from .tiles.chunking import Chunking
from .tiles.tiling import Tiling


def verify(stmts: Sequence[Stmt], symbols: frozenset[str] = frozenset()) -> None:
    """Checks ranks, known symbols, layouts of tiles and static bounds of unguarded accesses. Raises InternalError."""
    tiles: dict[str, Buf] = {}
    for buf in sorted(effects.touched(stmts), key=str):
        other = tiles.setdefault(buf.name, buf) if buf.space else buf
        if str(other) != str(buf):
            raise InternalError(f"nest: one tile has two layouts, {other} and {buf}")
    _verify(stmts, symbols)


def _verify(stmts: Sequence[Stmt], symbols: frozenset[str]) -> None:
    known = set(symbols)
    for stmt in stmts:
        match stmt:
            case Nest():
                _verify_nest(stmt, known)
            case Let(name=n, value=v):
                if not v.symbols <= known:
                    raise InternalError(
                        f"nest: unknown symbols {sorted(v.symbols - known)} in let {n}"
                    )
                known.add(n)
            case Prefetch(index=index):
                if not all(position.symbols <= known for position in index):
                    raise InternalError(f"nest: unknown symbols in {show([stmt])}")
            case AsyncCopy(body=body):
                _verify(body, frozenset(known))
                if not all(isinstance(inner, Nest) and copied(inner) for inner in body):
                    raise InternalError("nest: a copy computes", why=show([stmt]))
            case AsyncProduct(body=body):
                _verify(body, frozenset(known))
                if not all(isinstance(inner, Nest) and is_product(inner) for inner in body):
                    raise InternalError("nest: no product to begin", why=show([stmt]))
            case Wait(groups=groups):
                if groups < 0:
                    raise InternalError(f"nest: a wait for {groups} groups")
            case If(branches=bs):
                for b in bs:
                    _verify(b, frozenset(known))
            case For(counter=c, body=b):
                _verify(b, frozenset(known | {c}))
            case While(condition=c, body=b):
                _verify(c, frozenset(known))
                _verify(b, frozenset(known))


def _verify_nest(nest: Nest, known: set[str]) -> None:
    symbols, reaches = known | nest.dims.keys(), nest.reaches()
    if nest.reductions and not nest.rdims:
        raise InternalError(
            "nest: reductions without a reduced dimension", at=nest.at, why=str(nest)
        )

    def check(buf: Buf, index: tuple, guard: bool, what: str, reach: dict[str, int]) -> None:
        if len(index) != len(buf.shape):
            raise InternalError(
                f"nest: {what} {buf} with {len(index)} indices", at=nest.at, why=str(nest)
            )
        for axis, (position, extent) in enumerate(zip(index, buf.shape)):
            if position is None:
                continue
            if not position.symbols <= symbols:
                raise InternalError(
                    f"nest: unknown symbols {sorted(position.symbols - symbols)}",
                    at=nest.at,
                    why=str(nest),
                )
            is_stage = buf.circular and axis == 0
            if not (guard or is_stage) and position.symbols <= nest.dims.keys():
                low, high = position.bounds(lambda dim: nest.dims[dim] + reach.get(dim, 0))
                if (low < 0 or high >= extent) and all(nest.dims.values()):
                    raise InternalError(
                        f"nest: {what} {buf} at {position}, outside 0..{extent - 1}",
                        at=nest.at,
                        why=str(nest),
                    )

    if isinstance(nest.by, Tiling):
        _verify_tiling(nest, nest.by)
    elif nest.by is not None:
        _verify_chunks(nest, nest.by)
    for load in nest.loads():
        guard = isinstance(load, Gather) or load.guard  # gathers clamp
        check(load.buf, load.index, guard, "load of", reaches.get(id(load), {}))
    for store in nest.stores:
        check(store.buf, store.index, store.guard, "store to", {})
        if (
            store.inner
            and nest.rdims
            and not nest.ordered
            and any(isinstance(node, Accumulator) for node in Nest({}, stores=(store,)).nodes())
        ):
            raise InternalError(
                "nest: an inner write uses an unfinished accumulator", at=nest.at, why=str(nest)
            )


def _verify_chunks(nest: Nest, by: Chunking) -> None:
    """Checks that threads copy a tile by chunks, and hold what they touch of arrays in registers."""
    axes = tile_axes(nest)
    index = tuple(map(row_major, axes))
    accesses = [(load.buf, load.index) for load in nest.loads()]
    accesses += [(store.buf, store.index) for store in nest.stores]
    wrong = ""
    if nest.reductions or not by.fits(tile_shape(axes)):
        wrong = f"its points are not those of one tile by {by}"
    for buf, place in accesses:
        if buf.space == "registers" and (buf.layout != by or place != index):
            wrong = f"its threads do not hold {buf.name} at {', '.join(map(str, place))}"
    if wrong:
        raise InternalError(f"nest: {wrong}", at=nest.at, why=str(nest))


def _verify_tiling(nest: Nest, by: Tiling) -> None:
    """Checks that the tile fits the instruction, and that threads hold what they touch of arrays in registers."""
    free = [dim for dim in nest.dims if dim not in nest.rdims]
    products = [reduction for reduction in nest.reductions if reduction.is_product]
    axes = tile_axes(nest)
    shape = tile_shape(axes)
    wrong = ""
    if products and (len(free) < 2 or len(nest.rdims) != 1 or len(nest.reductions) != 1):
        wrong = "a product has rows, columns, a depth and no other reduction"
    elif products and any(
        dim in arg.symbols for axis, arg in zip(axes[1::-1], products[0].args) for dim in axis
    ):
        wrong = "the first operand has no columns, the second one no rows"
    elif not products and not set(nest.rdims) <= set(list(nest.dims)[1:]):
        wrong = "its dimensions are rows and columns, of which columns may be reduced"
    elif not by.fits(shape):
        wrong = f"its tile of {shape} does not fit {by}"
    ways = [tuple(map(row_major, axes[:count])) for count in (1, 2)]
    operands = nodes([arg for product in products for arg in product.args])
    accesses = [(load.buf, load.index) for load in nest.loads() if load not in operands]
    accesses += [(store.buf, store.index) for store in nest.stores]
    if products and not wrong:
        first, second = products[0].args
        if isinstance(first, Load) and first.buf.space == "registers":
            order = by.held_first(shape[0], shape[2])
            if not by.holds_like(first.buf.layout) or order is None:
                wrong = "its lanes do not hold the first operand as the instruction takes it"
        if any(
            isinstance(node, Load) and node.buf.space == "registers" for node in nodes([second])
        ):
            wrong = "the second operand is in registers"
    for buf, index in accesses if not wrong else ():
        if buf.space == "registers" and (not by.holds_like(buf.layout) or index not in ways):
            wrong = f"its threads do not hold {buf.name} at {', '.join(map(str, index))}"
    if wrong:
        raise InternalError(f"nest: {wrong}", at=nest.at, why=str(nest))
