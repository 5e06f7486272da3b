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
from dataclasses import dataclass
from typing import cast

import numpy as np

from pbkern.core.affine import Affine
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.ir import Buf, Expr, Load, Nest, Reduction, Stmt, Store
from pbkern.targets.cpu.schedule.instructions import VPDPBUSD

from .pair_products import INT32, UINT8, Words, depth_dim, is_narrow_integer, over_words

# Elements of 8 bits in a word of 32 bits.
QUAD = 4
# Four bytes of 128 or, signed, of -128.
SIGN_BITS = 0x80808080 - (1 << 32)
# Bytes behind a row that keep rows from falling into one cache set.
ROW_PADDING_BYTES = 64


def quad_products(nest: Nest, streamed: Expr, stationary: Expr, context, options) -> Words | None:
    """None if the operands are not of 8 bits each, or not a multiple of four deep."""
    k_dim = depth_dim(nest, stationary, QUAD)
    if (
        not VPDPBUSD.is_available(options)
        or k_dim is None
        or nest.reductions[0].dtype != VPDPBUSD.accumulator
    ):
        return None
    if not all(
        is_narrow_integer(operand) and operand.args[0].dtype.itemsize == 1
        for operand in (streamed, stationary)
    ):
        return None
    flipped = streamed.args[0].dtype == stationary.args[0].dtype
    load, before = cast(Load, stationary.args[0]), list[Stmt]()
    words = None if flipped or load.guard else _words(load, k_dim, context)
    if words is None:
        copy, load = _copy(nest, load, k_dim, flipped, context)
        before, words = [copy], _words(load, k_dim, context)
        assert words is not None, "copies are made of whole words"
    packed = _interleaved(cast(Load, streamed.args[0]), k_dim, context)

    def product(first: Expr) -> Reduction:
        """Words of the operand that is not packed, times packed ones: the unsigned operand comes first."""
        args = (packed, first) if streamed.args[0].dtype == UINT8 else (first, packed)
        return Reduction("dot", args, INT32, by=VPDPBUSD)

    shift = product(context.const(SIGN_BITS, INT32)) if flipped else None
    quads = Nest(
        *over_words(nest, k_dim, QUAD), (product(words),), nest.stores, nest.ordered, nest.at
    )
    return Words(before, quads, packed, words, shift)


def _words(load: Load, k_dim: str, context) -> Expr | None:
    """The word of bytes 4k to 4k + 3, if words start at every fourth byte."""
    buf, index = load.access
    flat = flat_index(buf, index)
    rest = flat - Affine.symbol(k_dim, flat.coefficient(k_dim))
    if (
        flat.coefficient(k_dim) != 1
        or rest.const % QUAD
        or any(coeff % QUAD for _, coeff in rest.terms)
        or buf.root.dtype.itemsize != 1
    ):
        return None
    words = Buf(
        f"{buf.name}.words", (max(buf.root.size // QUAD, 1),), INT32, buf.arena, storage=buf.root
    )
    place = Affine.make(
        {symbol: coeff // QUAD for symbol, coeff in rest.terms}, rest.const // QUAD
    ) + Affine.symbol(k_dim)
    return context.pool.load(INT32, words, (place,), False)


def _interleaved(load: Load, k_dim: str, context) -> Expr:
    """Bytes 4k to 4k + 3 along the depth as one word, the first lowest."""
    buf, pool = load.buf, context.pool
    bits = (
        buf
        if buf.dtype == UINT8
        else Buf(f"{buf.name}.bits", buf.shape, UINT8, buf.arena, storage=buf)
    )
    word: Expr | None = None
    for byte in range(QUAD):
        index = tuple(
            i.substitute({k_dim: Affine.symbol(k_dim, QUAD) + byte}.get) for i in load.index
        )
        element = pool.load(UINT8, bits, index, load.guard)
        element = context.op("convert_element_type", INT32, element, params={"new_dtype": INT32})
        element = (
            context.op("shift_left", INT32, element, context.const(8 * byte, INT32))
            if byte
            else element
        )
        word = element if word is None else context.op("or", INT32, word, element)
    assert word is not None
    return word


# ---------------------------------------------------------------- copies


@dataclass
class _Box:
    """Part of a buffer: places from `start` on, `shape` of them, and where in it an index is."""

    start: tuple[Affine, ...]
    shape: tuple[int, ...]
    index: tuple[Affine, ...]


def _copy(nest: Nest, load: Load, k_dim: str, flipped: bool, context) -> tuple[Stmt, Load]:
    """A copy of what a nest loads whose words start at every fourth byte, and the load from it."""
    dims = {dim: nest.dims[dim] for dim in nest.dims if dim in load.symbols and dim != k_dim} | {
        k_dim: nest.dims[k_dim]
    }
    box = _touched(load, nest)
    if math.prod(box.shape) <= 2 * math.prod(dims.values()):
        symbols = [context.names("d") for _ in box.shape]
        source = tuple(origin + Affine.symbol(symbol) for origin, symbol in zip(box.start, symbols))
        copy, copied = _bytes(
            load, dict(zip(symbols, box.shape)), source, box.index, flipped, nest, context
        )
        if _words(copied, k_dim, context) is not None:
            return copy, copied
    return _bytes(load, dims, load.index, tuple(map(Affine.symbol, dims)), flipped, nest, context)


def _touched(load: Load, nest: Nest) -> _Box:
    """The smallest box of the buffer around all that a nest loads: windows overlap in it."""
    start, shape, index = [], [], []
    for affine in load.index:
        inner = Affine.make(
            {symbol: coeff for symbol, coeff in affine.terms if symbol in nest.dims}, 0
        )
        low, high = inner.bounds(nest.dims.__getitem__)
        start.append(affine - inner + low)
        shape.append(high - low + 1)
        index.append(inner - low)
    return _Box(tuple(start), tuple(shape), tuple(index))


def _bytes(
    load: Load, dims: dict[str, int], source, place, flipped: bool, nest: Nest, context
) -> tuple[Nest, Load]:
    """(nest over `dims` that copies the buffer at `source`, load of the copy at `place`)."""
    buf, _, guard = load.buf, load.index, load.guard
    *outer, length = dims.values()
    copied = context.new_buffer((*outer, -(-length // QUAD) * QUAD + ROW_PADDING_BYTES), buf.dtype)
    value = context.pool.load(buf.dtype, buf, source, guard)
    if flipped:
        value = context.op(
            "xor", buf.dtype, value, context.const(np.uint8(128).view(buf.dtype), buf.dtype)
        )
    copy = Nest(
        dict(dims), stores=(Store(copied, tuple(map(Affine.symbol, dims)), value),), at=nest.at
    )
    return copy, context.pool.load(buf.dtype, copied, place, False)
