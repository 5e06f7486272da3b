"""Contraction of bfloat16 or integers of up to 16 bits -> products of pairs, one instruction for two multiply-adds.

Before -> after:  acc += a[m, k] * b[k, n]   ->   acc += pair(a[m, 2k:2k+2]) . pair(b[2k:2k+2, n])
A pair is a 32-bit word, the lower half first. The operand along the vectors is interleaved while it is packed.

bfloat16 (AVX512-BF16 vdpbf16ps): the operand that is broadcast is read as words in place.
Accumulation is in float32; the instruction flushes subnormals (Intel SDM, VDPBF16PS). int16 and
what becomes it, with sums in int32 (AVX512-VNNI vpdpwssd): sums wrap as those of single products
do. Of bytes alone, quad_products.py makes words of four.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from pbkern.core.affine import Affine
from pbkern.lower.nest.addresses import flat_coefficient, flat_index
from pbkern.lower.nest.instructions import ProductInstruction
from pbkern.lower.nest.ir import (
    Accumulator,
    Buf,
    Expr,
    Load,
    Nest,
    Op,
    Reduction,
    Stmt,
    Store,
    nodes,
)
from pbkern.targets.cpu.machine import ROW_PADDING
from pbkern.targets.cpu.schedule.instructions import DPBF16PS, VPDPWSSD

UINT8 = np.dtype(np.uint8)
UINT16 = np.dtype(np.uint16)
UINT32 = np.dtype(np.uint32)
INT32 = np.dtype(np.int32)
NARROW = ("int8", "uint8", "int16")
# Elements of 16 bits in a word of 32 bits.
PAIR = 2
# Words of the shallowest product that takes elements left over for itself. Source: not recorded.
SHALLOWEST_WORDS = 4


@dataclass
class Words:
    """A contraction over words; each holds several elements of an operand.

    before: statements that copy operands; packed: the operand that is to be packed; stationary: the
    other one; shift: what is to be subtracted from the results, as a reduction of packed words, if
    anything.
    """

    before: list[Stmt]
    nest: Nest
    packed: Expr
    stationary: Expr
    shift: Reduction | None = None

    @property
    def depth(self) -> int:
        return math.prod(self.nest.dims[rdim] for rdim in self.nest.rdims)


def pair_products(nest: Nest, streamed: Expr, stationary: Expr, context, options) -> Words | None:
    """None if the operands are not of 16 bits, or cannot be widened to them, or of odd depth."""
    reduction, k_dim = nest.reductions[0], depth_dim(nest, stationary, 2)
    if k_dim is None:
        return None
    if (
        DPBF16PS.is_available(options)
        and reduction.dtype == DPBF16PS.accumulator
        and isinstance(streamed, Load)
        and isinstance(stationary, Load)
        and _is_plain_bfloat16(streamed)
        and _is_plain_bfloat16(stationary)
    ):
        broadcast = _words_in_place(stationary, k_dim, context)
        if broadcast is None:
            return None
        return _over_pairs(
            nest, DPBF16PS, k_dim, stationary, _interleaved(streamed, k_dim, context), broadcast, []
        )
    if (
        VPDPWSSD.is_available(options)
        and reduction.dtype == VPDPWSSD.accumulator
        and is_narrow_integer(streamed)
        and is_narrow_integer(stationary)
    ):
        copy, broadcast = _staged_words(nest, stationary, k_dim, context)
        return _over_pairs(
            nest,
            VPDPWSSD,
            k_dim,
            stationary,
            _integer_pair(streamed, k_dim, context),
            broadcast,
            [copy],
        )
    return None


def depth_dim(nest: Nest, stationary: Expr, count: int) -> str | None:
    """The reduced dimension whose `count` neighbours are a word.

    It is the one along which the broadcast operand is contiguous, so that its words can be read in
    place, or else the innermost one that words divide.
    """
    divided = [
        rdim
        for rdim in reversed(nest.rdims)
        if nest.dims[rdim] > 1 and nest.dims[rdim] % count == 0
    ]
    loads = [node for node in nodes([stationary]) if isinstance(node, Load)]
    inner = [
        dim
        for dim in divided
        if loads and all(flat_coefficient(load.buf, load.index, dim) == 1 for load in loads)
    ]
    return next(iter(inner or divided), None)


def over_words(nest: Nest, k_dim: str, count: int) -> tuple[dict[str, int], tuple[str, ...]]:
    """(dimensions, reduced ones) of a product over words of `count` elements along k_dim, which come one after the other."""
    return {dim: size for dim, size in nest.dims.items() if dim != k_dim} | {
        k_dim: nest.dims[k_dim] // count
    }, (
        *(rdim for rdim in nest.rdims if rdim != k_dim),
        k_dim,
    )


def in_whole_words(nest: Nest, count: int, context) -> Nest:
    """A product of integers whose depth words of `count` elements divide: what is left over is added to the sums."""
    reduction, inner = nest.reductions[0], [rdim for rdim in nest.rdims if nest.dims[rdim] > 1]
    rest = nest.dims[inner[0]] % count if len(inner) == 1 else 0
    if (
        not rest
        or nest.dims[inner[0]] < SHALLOWEST_WORDS * count
        or reduction.dtype != INT32
        or any(store.inner for store in nest.stores)
    ):
        return nest
    depth = nest.dims[inner[0]] - rest
    places: list[dict[str, Affine]] = [{inner[0]: Affine((), depth + j)} for j in range(rest)]
    terms = [
        context.op("mul", INT32, *(context.pool.rename(arg, at) for arg in reduction.args))
        for at in places
    ]

    def added(expr: Expr) -> Expr | None:
        return (
            functools.reduce(lambda x, y: context.op("add", INT32, x, y), terms, expr)
            if isinstance(expr, Accumulator)
            else None
        )

    whole = context.pool.rewriter(added)
    stores = [
        replace(store, value=whole(store.value), mask=store.mask and whole(store.mask))
        for store in nest.stores
    ]
    return replace(nest, dims={**nest.dims, inner[0]: depth}, stores=tuple(stores))


def _over_pairs(
    nest: Nest,
    instruction: ProductInstruction,
    k_dim: str,
    stationary: Expr,
    packed: Expr,
    broadcast: Expr,
    before: list[Stmt],
) -> Words:
    reduction = nest.reductions[0]
    args = tuple(broadcast if arg is stationary else packed for arg in reduction.args)
    product = Nest(
        *over_words(nest, k_dim, instruction.shape[-1]),
        (replace(reduction, args=args, by=instruction),),
        nest.stores,
        nest.ordered,
        nest.at,
    )
    return Words(before, product, packed, broadcast)


# ---------------------------------------------------------------- bfloat16


def _words_in_place(stationary: Load, k_dim: str, context) -> Expr | None:
    """The pair at 2k, read as one word, if pairs start at even places."""
    flat = flat_index(*stationary.access)
    rest = flat - Affine.symbol(k_dim, flat.coefficient(k_dim))
    if flat.coefficient(k_dim) != 1 or rest.const % 2 or any(coeff % 2 for _, coeff in rest.terms):
        return None
    words = Buf(
        f"{stationary.buf.name}.words",
        (max(stationary.buf.root.size // 2, 1),),
        INT32,
        storage=stationary.buf.root,
    )
    half = Affine.make(
        {symbol: coeff // 2 for symbol, coeff in rest.terms}, rest.const // 2
    ) + Affine.symbol(k_dim)
    return context.pool.load(INT32, words, (half,), False)


def _is_plain_bfloat16(expr: Expr) -> bool:
    return (
        isinstance(expr, Load)
        and not expr.guard
        and expr.buf.dtype.name == "bfloat16"
        and expr.buf.root.dtype.name == "bfloat16"
    )


def _interleaved(streamed: Load, k_dim: str, context) -> Expr:
    """streamed[2k] in the lower half of a word, streamed[2k + 1] in the upper one."""
    buf, pool = streamed.buf, context.pool
    bits = Buf(f"{buf.name}.bits", buf.shape, UINT16, storage=buf)
    halves = []
    for offset in (0, 1):
        index = tuple(
            i.substitute({k_dim: Affine.symbol(k_dim, 2) + offset}.get) for i in streamed.index
        )
        element = pool.load(UINT16, bits, index, False)
        halves.append(
            context.op("convert_element_type", UINT32, element, params={"new_dtype": UINT32})
        )
    upper = context.op("shift_left", UINT32, halves[1], context.const(16, UINT32))
    return context.op("or", UINT32, halves[0], upper)


# ---------------------------------------------------------------- narrow integers


def is_narrow_integer(expr: Expr) -> bool:
    """A conversion of a load of int8, uint8 or int16 to int32."""
    return (
        isinstance(expr, Op)
        and expr.info.primitive == "convert_element_type"
        and expr.dtype == INT32
        and isinstance(expr.args[0], Load)
        and expr.args[0].dtype.name in NARROW
    )


def _integer_pair(expr: Expr, k_dim: str, context) -> Expr:
    """expr[2k] in the lower half of a word, expr[2k + 1] in the upper one, both as int16."""
    low, high = (
        context.pool.rename(expr, {k_dim: Affine.symbol(k_dim, 2) + offset}) for offset in (0, 1)
    )
    low = context.op("and", INT32, low, context.const(0xFFFF, INT32))
    return context.op(
        "or", INT32, low, context.op("shift_left", INT32, high, context.const(16, INT32))
    )


def _staged_words(nest: Nest, stationary: Expr, k_dim: str, context) -> tuple[Nest, Expr]:
    """A copy of the broadcast operand as words, and the word at its place."""
    dims = {
        dim: size // 2 if dim == k_dim else size
        for dim, size in nest.dims.items()
        if dim in stationary.symbols and dim != k_dim
    } | {k_dim: nest.dims[k_dim] // 2}
    *rows, depth = dims.values()
    buf = context.new_buffer((*rows, depth + ROW_PADDING), INT32)
    index = tuple(map(Affine.symbol, dims))
    copy = Nest(
        dims, stores=(Store(buf, index, _integer_pair(stationary, k_dim, context)),), at=nest.at
    )
    return copy, context.pool.load(INT32, buf, index, False)
