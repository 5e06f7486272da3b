"""Contraction -> the same with vectors along rows of its other operand, and a copy that turns the sums, where that is less.

Before -> after, a convolution with channels first:
    out[o, y, x] = f(sum of image[i, y + h, x + w] * filter[o, i, h, w])       vectors along x
    sums[y, x, o] = sum of image[i, y + h, x + w] * filter[o, i, h, w]         vectors along o
    out[o, y, x] = f(sums[y, x, o])

Rows of images are short: of 7 pixels, 16 lanes lose more than half, of 28 an eighth. Channels fill them. What is contiguous
along the wrong dimension is transposed twice for that: one operand while it is packed into panels (panels.py), and the results.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pbkern.core.affine import Affine
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Buf, Expr, For, Nest, Reduction, Stmt, Write
from pbkern.targets.cpu.machine import TRANSPOSE_CYCLES
from pbkern.targets.cpu.schedule.register_tiles import choose, contraction_tile, is_product, product_cycles

from .operand_copies import OperandCopies, copy_dtype, stage

# Cycles per element that is copied from between others, one by one.
COPY = 1.5
# Neighbours that are worth turning in registers.
SHORTEST_RUN = 8
# Elements that panels are made of. Bytes are packed in words (quad_products.py).
FEWEST_BYTES = 2
# The part of the time that is left by turning, at most.
LESS = 0.95
# Panels of transposed operands: deeper products are cut into runs; each adds to the sums.
PANEL_BYTES = 192 << 10


def swapped_operands(nest: Nest, usual: str | None, context, options, staged: OperandCopies) -> tuple[list[Stmt], Nest] | None:
    """(products to be packed, the copy behind them), or None where vectors along `usual`, or as `choose` says, do as well."""
    if not is_product(nest) or any(w.inner for w in nest.writes):
        return None
    a, b = nest.reductions[0].args
    if not all(e.kind == "load" and e.dtype.itemsize >= FEWEST_BYTES for e in (a, b)):
        return None
    rows = [d for d, n in nest.dims.items() if n > 1 and d not in nest.rdims and (d in a.symbols) != (d in b.symbols)]
    others = {d: _cycles(_product(nest, d, context.pool), d, options.vector_bits) for d in rows if d != usual}
    vector = min(others, key=others.__getitem__, default=None)
    results = math.prod(n for d, n in nest.dims.items() if d not in nest.rdims)
    if vector is None or others[vector] + TRANSPOSE_CYCLES * results > LESS * _usual_cycles(nest, usual, options):
        return None
    moving, before = a if vector in a.symbols else b, list[Stmt]()
    if not _is_run(nest, moving):
        copy = stage(nest, moving, copy_dtype(moving.info[0].dtype), context, before, staged)
        (r,) = nest.reductions
        nest = replace(nest, reductions=[replace(r, args=tuple(copy or e if e is moving else e for e in r.args))])
    products, behind = summed_in_scratch(nest, vector, context, options)
    return before + products, behind


def summed_in_scratch(nest: Nest, vector: str, context, options) -> tuple[list[Stmt], Nest]:
    """(products whose sums are in an array of their own, contiguous along `vector`, the copy behind them)."""
    product = _product(nest, vector, context.pool)
    sums = context.new_buffer(product.writes[0].buf.shape, nest.reductions[0].dtype)
    product.writes = [replace(w, buf=sums) for w in product.writes]
    value = context.pool.make("load", sums.dtype, (sums, product.writes[0].index, False))
    rewrite = context.pool.rewriter(lambda e: value if e.kind == "acc" else None)
    writes = [replace(w, value=rewrite(w.value), inner=True, mask=w.mask and rewrite(w.mask)) for w in nest.writes]
    free = {d: n for d, n in nest.dims.items() if d not in nest.rdims}
    return _in_runs(product, vector, context, options), Nest(free, writes=writes, at=nest.at)


def _product(nest: Nest, vector: str, pool) -> Nest:
    """The product with its sums in an array whose last dimension is `vector`."""
    free = {d: n for d, n in nest.dims.items() if d not in nest.rdims and d != vector} | {vector: nest.dims[vector]}
    dims = free | {d: nest.dims[d] for d in nest.rdims}
    (r,) = nest.reductions
    sums = Buf("sums", tuple(free.values()), r.dtype, arena=True)
    write = Write(sums, tuple(map(Affine.symbol, free)), pool.make("acc", r.dtype, 0), inner=False)
    return Nest(dims, nest.rdims, [Reduction(r.op, r.args, r.dtype)], [write], at=nest.at)


def _cycles(nest: Nest, vector: str, vector_bits: int) -> float:
    """Cycles with vectors along `vector`, the operand that it moves packed where that is strided."""
    sched = contraction_tile(nest, vector, vector_bits)[1]
    (moving,) = (e for e in nest.reductions[0].args if vector in e.symbols)
    if flat_coefficient(moving.info[0], moving.info[1], vector) == 1:
        return product_cycles(nest, sched)
    elements = math.prod(n for d, n in nest.dims.items() if d in moving.symbols)
    packing = elements * (TRANSPOSE_CYCLES if _is_run(nest, moving) else COPY + TRANSPOSE_CYCLES)
    return min(product_cycles(nest, sched), product_cycles(nest, sched, packed=moving) + packing)


def _is_run(nest: Nest, load: Expr) -> bool:
    """Whether a load walks a run of neighbours along reduced dimensions: those are transposed in registers, others copied."""
    steps = sorted((abs(flat_coefficient(load.info[0], load.info[1], d)), nest.dims[d]) for d in nest.rdims if nest.dims[d] > 1)
    length = 1
    for step, n in steps:
        if step == length:
            length *= n
    return length >= SHORTEST_RUN


def _usual_cycles(nest: Nest, usual: str | None, options) -> float:
    """Cycles of the product as it is."""
    chosen = product_cycles(nest, choose(nest, options.vector_bits, options.contract))
    return chosen if usual is None else min(chosen, _cycles(nest, usual, options.vector_bits))


def _in_runs(product: Nest, vector: str, context, options) -> list[Stmt]:
    """The product itself, or runs of its outermost reduced dimension, whose panels stay near. Each adds to the sums."""
    (write,), (r,) = product.writes, product.reductions
    width, _ = contraction_tile(product, vector, options.vector_bits)
    depth = math.prod(product.dims[d] for d in product.rdims)
    outer = next((d for d in product.rdims if product.dims[d] > 1), None)
    size = product.dims[outer] if outer else 1
    trips = min(-(-depth * width * r.dtype.itemsize // PANEL_BYTES), size)
    if outer is None or trips == 1 or not options.contract:
        return [product]
    length = -(-size // trips)
    free = {d: n for d, n in product.dims.items() if d not in product.rdims}
    zero = Nest(free, writes=[replace(write, value=context.const(0, r.dtype), inner=True)], at=product.at)
    before = context.pool.make("load", r.dtype, (write.buf, write.index, False))
    added = replace(write, value=context.op("add", r.dtype, before, write.value))

    def run(start: Affine, length: int) -> Nest:
        moved = context.pool.renamer({outer: start + Affine.symbol(outer) if length > 1 else start})
        args = tuple(map(moved, r.args))
        return replace(product, dims=product.dims | {outer: length}, reductions=[replace(r, args=args)], writes=[added])

    counter = context.names("%i")
    out: list[Stmt] = [zero, For(counter, size // length, [run(Affine.symbol(counter, length), length)])]
    return out + ([run(Affine((), size - size % length), size % length)] if size % length else [])
