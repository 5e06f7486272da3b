"""Contraction of 8-bit integers -> products of quads, one instruction for four multiply-adds (AVX512-VNNI vpdpbusd).

Before -> after:  acc += a[m, k] * b[k, n]   ->   acc += quad(a[m, 4k:4k+4]) . quad(b[4k:4k+4, n])
A quad is a 32-bit word, the first byte lowest. The operand that is packed is interleaved from four rows; words of the other one
are read in place, or from a copy.

The instruction multiplies unsigned by signed bytes. Of two operands of one type, the copy of the
one that is not packed has its sign bits flipped, which adds or subtracts 128: a' = a + 128 if they
are signed. Then sum a b = sum a' b - sum 128 b, and the last sum, one number per column, is taken
from the panel. Sums wrap as those of single products do, so all of this is exact.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from pbkern.core.affine import Affine
from pbkern.lower.nest.edit.stage import Box
from pbkern.lower.nest.ir import Buf, Expr, Load, Nest, Reduction, Stmt, Store
from pbkern.targets.cpu.schedule.instructions import INT8, VPDPBUSD, word_product

from .pair_products import (
    INT32,
    UINT8,
    Words,
    depth_dim,
    interleaved_word,
    is_narrow_integer,
    over_words,
    word_in_place,
)

# Elements of 8 bits in a word of 32 bits.
QUAD = 4
# Four bytes of 128 or, signed, of -128.
SIGN_BITS = 0x80808080 - (1 << 32)
# Bytes behind a row that keep rows from falling into one cache set.
ROW_PADDING_BYTES = 64


def quad_products(nest: Nest, streamed: Expr, stationary: Expr, context) -> Words | None:
    """None if the operands are not of 8 bits each, or not a multiple of four deep."""
    k_dim = depth_dim(nest, stationary, QUAD)
    instruction = word_product(context.options, (UINT8, INT8), nest.reductions[0].dtype)
    if instruction is not VPDPBUSD or k_dim is None:
        return None  # bytes that are widened are packed in pairs
    if not all(
        is_narrow_integer(operand) and operand.args[0].dtype.itemsize == 1
        for operand in (streamed, stationary)
    ):
        return None
    flipped = streamed.args[0].dtype == stationary.args[0].dtype
    load, before = cast(Load, stationary.args[0]), list[Stmt]()
    words = None if flipped or load.guard else word_in_place(load, k_dim, context)
    if words is None:
        copy, load = _copy(nest, load, k_dim, flipped, context)
        before, words = [copy], word_in_place(load, k_dim, context)
        assert words is not None, "copies are made of whole words"
    packed = interleaved_word(cast(Load, streamed.args[0]), k_dim, UINT8, INT32, context)

    def product(first: Expr) -> Reduction:
        """Words of the operand that is not packed, times packed ones: the unsigned operand comes first."""
        args = (packed, first) if streamed.args[0].dtype == UINT8 else (first, packed)
        return Reduction("dot", args, INT32, by=instruction)

    shift = product(context.const(SIGN_BITS, INT32)) if flipped else None
    quads = Nest(
        *over_words(nest, k_dim, QUAD), (product(words),), nest.stores, nest.ordered, nest.at
    )
    return Words(before, quads, packed, words, shift)


# ---------------------------------------------------------------- copies


def _copy(nest: Nest, load: Load, k_dim: str, flipped: bool, context) -> tuple[Stmt, Load]:
    """A copy of what a nest loads whose words start at every fourth byte, and the load from it."""
    dims = {dim: nest.dims[dim] for dim in nest.dims if dim in load.symbols and dim != k_dim} | {
        k_dim: nest.dims[k_dim]
    }

    def source(index: tuple[Affine, ...]) -> Expr:
        value = context.pool.load(load.buf.dtype, load.buf, index, load.guard)
        bits = context.const(np.uint8(128).view(load.buf.dtype), load.buf.dtype)
        return context.op("xor", load.buf.dtype, value, bits) if flipped else value

    box = Box.around(load.index, nest.dims)  # windows overlap in it
    if math.prod(box.shape) <= 2 * math.prod(dims.values()):
        names = [context.names("d") for _ in box.shape]
        buf = _rows_of_words(box.shape, load.buf.dtype, context)
        copy = context.pool.load(buf.dtype, buf, box.within(load.index), False)
        if word_in_place(copy, k_dim, context) is not None:
            return box.copied(source, buf, names, nest.at), copy
    buf = _rows_of_words(tuple(dims.values()), load.buf.dtype, context)
    index = tuple(map(Affine.symbol, dims))
    statement = Nest(dims, stores=(Store(buf, index, source(load.index)),), at=nest.at)
    return statement, context.pool.load(buf.dtype, buf, index, False)


def _rows_of_words(shape: tuple[int, ...], dtype: np.dtype, context) -> Buf:
    """Scratch whose rows are of whole words, and do not fall into one cache set."""
    *outer, length = shape
    return context.new_buffer((*outer, -(-length // QUAD) * QUAD + ROW_PADDING_BYTES), dtype)
