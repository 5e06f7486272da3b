"""Whether programs of a kernel access results at elements of their own, as its body tells.

Kernels in the style of Triton are given whole arrays, and choose by program_id what of them they
store to: that such programs do not meet is not seen from block mappings. Two ways show it for a
grid dimension. An index is c times the program's number there, and everything else in it covers
less than c elements. Or, where programs are few, all of them are tried: arrays are cut into cells
as large as the largest access, and no cell is touched by two programs that differ in that
dimension. Masks are not looked at, loads count like stores.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.errors import UnsupportedOp
from pbkern.core.jaxprs.walks import equations
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.kernel import Kernel, Squeezed
from pbkern.lower.build import BodyBuilder
from pbkern.lower.build_options import BuildOptions
from pbkern.lower.nest.conditions.index_tests import interval
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.ir import Buf, Gather, Let, Load, Nest, Sort, Stmt, every, nodes
from pbkern.lower.operand_buffers import operand_buffers
from pbkern.lower.rules.views import index_value
from pbkern.lower.values.items import RefView
from pbkern.lower.values.scalar_evolution import MOST_TRIED_POINTS, values_at
from pbkern.lower.values.values import Literal

INT32 = np.dtype(np.int32)
# Programs with these in their bodies keep their order.
IN_ORDER = ("debug_print", "check_failed", "breakpoint")


@dataclass(frozen=True)
class _StoredElements:
    """Elements `index` of an array, with the `bounds` of symbols other than grid indices."""

    index: tuple[Affine, ...]
    bounds: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class _BodyAccesses:
    """Accesses of a kernel's body.

    Attributes:
      by_result: number of a result -> accesses to it; None where one of them is not affine.
      lets: scalars evaluated on the way.
    """

    by_result: dict[int, list[_StoredElements] | None]
    lets: list[Let]


def moves_apart(kernel: Kernel, output: int, dim: int, options: BuildOptions) -> bool:
    """Whether programs that differ in grid dimension `dim` never access the same element of a result."""
    body = _accesses(kernel, options)
    if body is None:
        return False
    accesses = body.by_result.get(output)
    if not accesses:
        return False
    return _by_multiples(kernel, accesses, dim) or _by_trying(kernel, accesses, body.lets, dim)


def _grid_symbols(kernel: Kernel) -> list[str]:
    return [f"%g{axis}" for axis in range(len(kernel.grid))]


def _by_multiples(kernel: Kernel, accesses: list[_StoredElements], dim: int) -> bool:
    symbol, grid = f"%g{dim}", set(_grid_symbols(kernel))
    for axis in range(len(accesses[0].index)):
        indices = [access.index[axis] for access in accesses]
        factors = {index.coefficient(symbol) for index in indices}
        if (
            len(factors) > 1
            or factors == {0}
            or any(index.symbols & grid != {symbol} for index in indices)
        ):
            continue
        (factor,) = factors
        ranges = [
            interval(index - Affine.symbol(symbol, factor), access.bounds)
            for index, access in zip(indices, accesses)
        ]
        known = [ends for ends in ranges if ends is not None]
        if len(known) == len(ranges) and (
            max(high for _, high in known) - min(low for low, _ in known) < abs(factor)
        ):
            return True
    return False


def _by_trying(kernel: Kernel, accesses: list[_StoredElements], lets: list[Let], dim: int) -> bool:
    if not 0 < math.prod(kernel.grid) <= MOST_TRIED_POINTS:
        return False
    points = np.indices(kernel.grid).reshape(len(kernel.grid), -1)
    symbols = dict(zip(_grid_symbols(kernel), points))
    for let in lets:
        values = values_at(let.value, symbols) if let.value.symbols <= symbols.keys() else None
        if values is not None:
            symbols[let.name] = np.broadcast_to(values, points.shape[1:])
    boxes: list[list[tuple[np.ndarray, np.ndarray]]] = []
    for access in accesses:
        extents = [_extent(position, access.bounds, symbols) for position in access.index]
        box = [extent for extent in extents if extent is not None]
        if len(box) < len(extents):
            return False
        boxes.append(box)
    owners: dict[tuple, int] = {}
    starts = [min(int(box[axis][0].min()) for box in boxes) for axis in range(len(boxes[0]))]
    sizes = [
        max(int((box[axis][1] - box[axis][0]).max()) + 1 for box in boxes)
        for axis in range(len(boxes[0]))
    ]
    for box in boxes:
        first, last = (
            [(end[which] - start) // size for end, start, size in zip(box, starts, sizes)]
            for which in (0, 1)
        )
        if any((low != high).any() for low, high in zip(first, last)):
            return False
        for owner, *cell in zip(points[dim].tolist(), *(column.tolist() for column in first)):
            if owners.setdefault(tuple(cell), owner) != owner:
                return False
    return True


def _extent(
    affine: Affine, bounds: dict, symbols: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray] | None:
    """(smallest, largest) value of an index for each program."""
    rest = interval(affine.substitute(lambda symbol: 0 if symbol in symbols else None), bounds)
    if rest is None:
        return None
    count = len(next(iter(symbols.values())))
    moved = sum(
        (
            symbols[symbol] * coefficient
            for symbol, coefficient in affine.terms
            if symbol in symbols
        ),
        np.zeros(count, np.int64),
    )
    return moved + rest[0], moved + rest[1]


# ---- what a body accesses


@functools.lru_cache(maxsize=8)
def _accesses(kernel: Kernel, options: BuildOptions) -> _BodyAccesses | None:
    """Accesses of the body's statements; None where they cannot be told."""
    if any(eqn.primitive.name in IN_ORDER for eqn in equations(kernel.body.jaxpr)):
        return None
    bufs = operand_buffers(kernel)
    results = {output.root: position for position, output in enumerate(bufs[len(kernel.inputs) :])}
    try:
        builder, stmts = _built(kernel, bufs, options)
    except UnsupportedOp:  # an error when the kernel is compiled
        return None
    stored: dict[int, list[_StoredElements] | None] = {}
    lets: list[Let] = []
    for stmt in every(stmts):
        if isinstance(stmt, Sort) and any(buffer.root in results for buffer in stmt.buffers):
            return None
        if isinstance(stmt, Let):
            lets.append(stmt)
        bounds = builder.bounds | (
            {dim: (0, size - 1) for dim, size in stmt.dims.items()}
            if isinstance(stmt, Nest)
            else {}
        )
        for buf, index in _touched(stmt):
            if buf.root in results:
                result = results[buf.root]
                accesses = stored.setdefault(result, [])
                affine = [place for place in index if place is not None]
                if buf.shape != buf.root.shape or len(affine) < len(index):
                    stored[result] = None
                elif accesses is not None:
                    accesses.append(_StoredElements(tuple(affine), bounds))
    return _BodyAccesses(stored, lets)


def _built(
    kernel: Kernel, bufs: list[Buf], options: BuildOptions
) -> tuple[BodyBuilder, list[Stmt]]:
    builder = BodyBuilder(NestContext(options))
    builder.kernel = kernel
    builder.operands = tuple(bufs[: len(kernel.inputs)])
    symbols = _grid_symbols(kernel)
    builder.grid = tuple(
        index_value((), INT32, lambda ix, name=symbol: Affine.symbol(name), builder)
        for symbol in symbols
    )
    dynamic = {dim for dim, _ in kernel.dynamic_grid}
    unknown = Affine.symbol(builder.names("%unknown"))
    builder.grid_sizes = tuple(
        index_value((), INT32, lambda ix: unknown, builder)
        if axis in dynamic
        else Literal((), INT32, size)
        for axis, size in enumerate(kernel.grid)
    )
    builder.bounds.update(
        {symbol: (0, max(size - 1, 0)) for symbol, size in zip(symbols, kernel.grid)}
    )
    refs = []
    for buf, mapping in zip(bufs, (*kernel.inputs, *kernel.outputs)):
        starts = [
            Affine.symbol(builder.names("%unknown")) if start is None else start
            for start in mapping.starts
        ]
        offsets = tuple(
            start.substitute(
                lambda grid_dim: (
                    Affine.symbol(f"%g{grid_dim}") if isinstance(grid_dim, int) else None
                )
            )
            for start in starts
        )
        axes = iter(range(len(mapping.ref_shape)))
        axes_of_ref = tuple(
            None if isinstance(dim, Squeezed) else next(axes) for dim in mapping.dims
        )
        refs.append(
            RefView(buf, mapping.ref_shape, mapping.array.dtype, offsets, axes_of_ref, True)
        )
    for scratch in kernel.scratch:
        buf = Buf(builder.names("%t"), scratch.shape, scratch.dtype, arena=True)
        refs.append(
            RefView(
                buf,
                scratch.shape,
                scratch.dtype,
                (Affine(),) * len(scratch.shape),
                tuple(range(len(scratch.shape))),
            )
        )
    builder.refs = dict(zip(kernel.body.jaxpr.invars, refs))
    return builder, builder.region(kernel.body.jaxpr, {})


def _touched(stmt: Stmt) -> Iterator[tuple[Buf, tuple[Affine | None, ...]]]:
    """(buffer, index) of every load and store of a statement."""
    expressions = (
        stmt.expressions()
        if isinstance(stmt, Nest)
        else [stmt.value]
        if isinstance(stmt, Let)
        else []
    )
    for node in nodes(expressions):
        if isinstance(node, Load | Gather):
            yield node.buf, node.index
    for store in stmt.stores if isinstance(stmt, Nest) else ():
        yield store.buf, store.index
