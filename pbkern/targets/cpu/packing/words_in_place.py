"""Contraction of bytes or bfloat16, both contiguous along the depth -> the same over words that are read where they are.

    acc += a[m, k] * b[n, k]     ->     acc += quad(a[m, 4k:4k+4]) . quad(b[n, 4k:4k+4])

Vectors run along the depth then, and nothing is packed: for products of few rows, whose large operand is read once.

Of bytes of one type, words of the operand along the columns have their sign bits flipped as they are read where vpdpbusd
multiplies them, which takes unsigned by signed bytes: b' = b + 128 if they are signed. Then sum a b = sum a b' - 128 sum a, and
the last sum is one number per row.
"""

from __future__ import annotations

from typing import cast

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.ir import Accumulator, Expr, Load, Nest, Reduction, Stmt, Store
from pbkern.targets.cpu.schedule.instructions import INT8, VPDPBUSD, word_product

from .pair_products import (
    INT32,
    UINT8,
    depth_dim,
    is_narrow_integer,
    over_words,
    pair_products,
    word_in_place,
)
from .quad_products import QUAD, SIGN_BITS


@dataclass(frozen=True)
class WordsInPlace:
    """A product and its operands; before: what it reads."""

    nest: Nest
    streamed: Expr
    stationary: Expr
    before: tuple[Stmt, ...] = ()


def words_in_place(nest: Nest, streamed: Expr, stationary: Expr, context) -> WordsInPlace:
    """The product over words, or over elements where an operand has no words or no instruction multiplies them."""
    quads = _quads(nest, streamed, stationary, context)
    if quads is not None:
        return quads
    pairs = (
        pair_products(nest, streamed, stationary, context)
        if stationary.dtype.name == "bfloat16"
        else None
    )
    if pairs is None or not isinstance(pairs.packed, Load):
        return WordsInPlace(nest, streamed, stationary)
    return WordsInPlace(pairs.nest, pairs.packed, pairs.stationary)


def _quads(nest: Nest, streamed: Expr, stationary: Expr, context) -> WordsInPlace | None:
    (reduction,), k_dim = nest.reductions, depth_dim(nest, stationary, QUAD)
    if k_dim is None:
        return None
    words = []
    for operand in (streamed, stationary):
        if not is_narrow_integer(operand) or operand.args[0].dtype.itemsize != 1:
            return None
        load = cast(Load, operand.args[0])
        word = None if load.guard else word_in_place(load, k_dim, context)
        if word is None:
            return None
        words.append(word)
    along, still = words
    types = streamed.args[0].dtype, stationary.args[0].dtype
    instruction = word_product(context.options, (UINT8, INT8), reduction.dtype)
    flips = types[0] == types[1] and instruction is VPDPBUSD
    if types[0] == types[1] and not flips:
        instruction = word_product(context.options, types, reduction.dtype)
    if instruction is None:
        return None

    def product(first: Expr, second: Expr, is_unsigned: bool) -> Reduction:
        """Words, the unsigned ones first; is_unsigned: whether `first` is."""
        args = (first, second) if is_unsigned else (second, first)
        return Reduction("dot", args, INT32, by=instruction)

    dims, rdims = over_words(nest, k_dim, QUAD)
    if not flips:
        quads = (product(along, still, types[0] == UINT8),)
        product_nest = Nest(dims, rdims, quads, nest.stores, nest.ordered, nest.at)
        return WordsInPlace(product_nest, along, still)
    bits = context.const(SIGN_BITS, INT32)
    along = context.op("xor", INT32, along, bits)
    is_unsigned = types[1] == INT8  # of the flipped operand, and of the bits alone
    sums_dims = {dim: size for dim, size in dims.items() if dim in still.symbols}
    rows = [dim for dim in sums_dims if dim not in rdims]
    sums = context.new_buffer(tuple(dims[dim] for dim in rows), INT32)
    index = tuple(map(Affine.symbol, rows))
    before = Nest(
        sums_dims,
        tuple(rdim for rdim in rdims if rdim in sums_dims),
        (product(bits, still, is_unsigned),),
        (Store(sums, index, context.pool.accumulator(INT32, 0), inner=False),),
        at=nest.at,
    )

    def shifted(expr: Expr) -> Expr | None:
        if not isinstance(expr, Accumulator):
            return None
        return context.op("sub", INT32, expr, context.pool.load(INT32, sums, index, False))

    change = context.pool.rewriter(shifted)
    stores = tuple(store.mapped(change) for store in nest.stores)
    quads = (product(along, still, is_unsigned),)
    product_nest = Nest(dims, rdims, quads, stores, nest.ordered, nest.at)
    return WordsInPlace(product_nest, along, still, (before,))
