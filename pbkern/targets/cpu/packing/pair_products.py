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
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.addresses import flat_coefficient, flat_index
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
from pbkern.lower.nest.tiles.instructions import ProductInstruction
from pbkern.targets.cpu.machines.machine import ROW_PADDING
from pbkern.targets.cpu.schedule.instructions import INT16, word_product

from .limits import PackLimits

UINT8 = np.dtype(np.uint8)
UINT16 = np.dtype(np.uint16)
UINT32 = np.dtype(np.uint32)
INT32 = np.dtype(np.int32)
NARROW = ("int8", "uint8", "int16")
# Elements of 16 bits in a word of 32 bits.
PAIR = 2


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


def pair_products(nest: Nest, streamed: Expr, stationary: Expr, context) -> Words | None:
    """None if the operands are not of 16 bits, or cannot be widened to them, or of odd depth."""
    reduction, k_dim = nest.reductions[0], depth_dim(nest, stationary, 2)
    if k_dim is None:
        return None
    if _is_plain_half(streamed) and _is_plain_half(stationary):
        types = streamed.buf.dtype, stationary.buf.dtype
        instruction = word_product(context.options, types, reduction.dtype)
        broadcast = word_in_place(stationary, k_dim, context)
        if instruction is None or broadcast is None:
            return None
        packed = interleaved_word(streamed, k_dim, UINT16, UINT32, context)
        return _over_pairs(nest, instruction, k_dim, stationary, packed, broadcast, [])
    if is_narrow_integer(streamed) and is_narrow_integer(stationary):
        instruction = word_product(context.options, (INT16, INT16), reduction.dtype)
        if instruction is None:
            return None
        copy, broadcast = _staged_words(nest, stationary, k_dim, context)
        packed = _integer_pair(streamed, k_dim, context)
        return _over_pairs(nest, instruction, k_dim, stationary, packed, broadcast, [copy])
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


def in_whole_words(nest: Nest, count: int, context, limits: PackLimits) -> Nest:
    """A product of integers whose depth words of `count` elements divide: what is left over is added to the sums."""
    reduction, inner = nest.reductions[0], [rdim for rdim in nest.rdims if nest.dims[rdim] > 1]
    rest = nest.dims[inner[0]] % count if len(inner) == 1 else 0
    if (
        not rest
        or nest.dims[inner[0]] < limits.shallowest_words * count
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
    stores = tuple(store.mapped(whole) for store in nest.stores)
    return replace(nest, dims={**nest.dims, inner[0]: depth}, stores=stores)


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


# ---------------------------------------------------------------- words


def word_in_place(load: Load, k_dim: str, context) -> Expr | None:
    """The word of the elements from k * count on, if words start at each of these places."""
    buf, flat = load.buf, flat_index(*load.access)
    count = INT32.itemsize // buf.root.dtype.itemsize
    rest = flat - Affine.symbol(k_dim, flat.coefficient(k_dim))
    if (
        flat.coefficient(k_dim) != 1
        or buf.root.dtype.itemsize != buf.dtype.itemsize
        or rest.const % count
        or any(coeff % count for _, coeff in rest.terms)
    ):
        return None
    size = max(buf.root.size // count, 1)
    words = Buf(f"{buf.name}.words", (size,), INT32, buf.arena, storage=buf.root)
    place = Affine.make(
        {symbol: coeff // count for symbol, coeff in rest.terms}, rest.const // count
    )
    return context.pool.load(INT32, words, (place + Affine.symbol(k_dim),), False)


def interleaved_word(load: Load, k_dim: str, bits: np.dtype, word: np.dtype, context) -> Expr:
    """The elements from k * count on, which are anywhere, as one word, the first lowest.

    `bits`: unsigned integers of their size.
    """
    in_place = None if load.guard else word_in_place(load, k_dim, context)
    if in_place is not None:
        return in_place
    count = word.itemsize // bits.itemsize
    buf = load.buf
    if buf.dtype != bits:
        buf = Buf(f"{buf.name}.bits", buf.shape, bits, buf.arena, storage=buf)
    elements = []
    for number in range(count):
        place = {k_dim: Affine.symbol(k_dim, count) + number}
        index = tuple(position.substitute(place.get) for position in load.index)
        elements.append(context.pool.load(bits, buf, index, load.guard))
    return joined_word(elements, word, context)


def joined_word(elements: Sequence[Expr], word: np.dtype, context) -> Expr:
    """The word of unsigned integers, the first lowest."""
    parts = []
    for number, element in enumerate(elements):
        shift = context.const(8 * element.dtype.itemsize * number, word)
        element = context.op("convert_element_type", word, element, params={"new_dtype": word})
        parts.append(context.op("shift_left", word, element, shift) if number else element)
    return functools.reduce(lambda low, high: context.op("or", word, low, high), parts)


# ---------------------------------------------------------------- floats of 16 bits


def _is_plain_half(expr: Expr) -> TypeGuard[Load]:
    """A load without a guard of floats of 16 bits, as they are stored."""
    return (
        isinstance(expr, Load)
        and not expr.guard
        and expr.buf.dtype.name in ("bfloat16", "float16")
        and expr.buf.root.dtype == expr.buf.dtype
    )


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
