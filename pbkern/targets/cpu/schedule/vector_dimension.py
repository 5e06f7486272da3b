"""Nest, dimension -> how well vectors along it suit the nest: contiguous accesses gain, strided ones lose."""

from __future__ import annotations

import math

from pbkern.lower.mlir.element_types import BITS, compute_el
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import (
    Accumulator,
    Gather,
    IndexValue,
    InRange,
    Load,
    Nest,
    Op,
    nodes,
)
from pbkern.targets.cpu.math.op_cycles import COST

from .interleaved_access import MAX_STEP, is_interleaved_row, is_strided, joint_stores
from .register_transpose import is_transposed, transposable_dims
from .short_rows import SHORTEST_ROW, batched_rows

# Vector operations of a point beyond which a few points fill the processor's window.
LONG_POINT = 8.0
# The score of a load of every c-th element, made of whole vectors, compared with one of neighbours.
STRIDED_SCORE = 0.2
# The score that is gained if vectors hold several short rows
# (targets/cpu/emit/interleaved_rows.py), which one by one would not fill the widest vectors.
# Source: not recorded.
PARTLY_FILLED_SCORE = 0.5
# Bits of the widest vectors (AVX-512).
WIDEST_VECTOR_BITS = 512
# The part that is left of the gain of vectors along short rows after the step across their lanes,
# one row at a time. Measured with 4 to 16 elements: vectors over several rows take less time for
# sums and extremes of up to 7 elements, and for indices of all.
SUMS_LEFT = 0.75
LEFT_ACROSS = {
    **dict.fromkeys(("sum", "max", "min", "prod"), SUMS_LEFT),
    **dict.fromkeys(("argmax", "argmin"), 0.5),
}
# The score of a square of rows that is transposed in registers.
TRANSPOSED = -0.5
# The score of a store that waits for so many others that they do not fit in the registers with what they are made of: less
# than what a store of neighbours gains beside a square. Measured on Zen 3, transposes of 8 x 4000 float16 75 -> 15 us,
# 16 x 4000 bytes 30 -> 15, 16 x 4000 float32 the same; panels of 16 of 64 rows of 512 floats 46 -> 35 ms of the product.
SPILLED_JOINT_STORE = 0.0
# The score of elements at computed places: the places are computed in vectors.
GATHERED_SCORE = 0.05
# Terms of a reduction beside which its store counts less and less.
DEEP_TERMS = 32
# Terms of maxima and minima of narrow elements from which on vectors hold as many of these as a register does, although what
# follows is wider. Measured on Zen 3: minima of columns, 1000 x 1001 bfloat16, eight rows at a time: 102 -> 73 us.
WIDE_EPILOGUE_TERMS = 8


def register_bits(nest: Nest, along: str | None = None) -> int:
    """Width of the widest element that vectors of this nest hold, if they run along `along`.

    An epilogue behind a reduced dimension is scalar, and so is what stays the same along `along`, such as the place of a row.
    One behind many terms of maxima and minima counts for nothing: its wide values take several registers.
    """
    if along in nest.rdims or _is_deep_extreme(nest):
        nest = Nest(
            nest.dims,
            nest.rdims,
            nest.reductions,
            tuple(store for store in nest.stores if store.inner),
        )
    widths = [
        BITS[compute_el(node.dtype)]
        for node in nest.nodes()
        if not isinstance(node, IndexValue | InRange | Accumulator)
        and (along is None or nest.reductions or along in node.symbols)
    ]
    widths += [BITS[compute_el(reduction.dtype)] for reduction in nest.reductions]
    widths += [BITS[compute_el(store.buf.dtype)] for store in nest.stores]
    return max([width for width in widths if width > 1], default=8)


def _terms(nest: Nest) -> int:
    """Terms of the nest's reductions."""
    return math.prod(nest.dims[dim] for dim in nest.rdims)


def _is_deep_extreme(nest: Nest) -> bool:
    """Whether its reductions are maxima and minima of many terms, whose types alone tell how many lanes pay."""
    extremes = all(reduction.op in ("max", "min") for reduction in nest.reductions)
    return extremes and _terms(nest) >= WIDE_EPILOGUE_TERMS


def is_long_point(nest: Nest) -> bool:
    """Whether one point of the reductions is so much work that out-of-order execution overlaps few of them; more only spill."""
    inside = Nest({}, reductions=nest.reductions).nodes()
    return sum(COST[expr.info.primitive] for expr in inside if isinstance(expr, Op)) >= LONG_POINT


# Reductions of floats whose results depend on the order of the elements.
ROUNDED = ("sum", "dot", "prod")


def score(nest: Nest, dim: str, reassociate: bool, registers: int) -> float:
    """Scores vectors along `dim` for the nest: contiguous accesses gain, strided ones lose."""
    size = nest.dims[dim]
    reduced = dim in nest.rdims
    if (
        reduced
        and not reassociate
        and any(
            reduction.op in ROUNDED and reduction.dtype.kind not in "iub"
            for reduction in nest.reductions
        )
    ):
        return -1.0  # lanes would be partial sums
    if nest.ordered and reduced:
        return -1.0
    if reduced and any(reduction.op == "logaddexp" for reduction in nest.reductions):
        return -1.0
    score = 0.0
    inner = nest_frequency(nest)
    joint_writes, steps = joint_stores(nest, dim)
    joint = {id(store) for store in joint_writes}
    interleaved = bool(joint) and all(
        is_interleaved_row(nest, store, dim, steps) for store in nest.stores
    )
    joint_score = SPILLED_JOINT_STORE if 2 * math.prod(steps.values()) >= registers else 1.0
    if interleaved and math.prod(steps.values()) * register_bits(nest) % WIDEST_VECTOR_BITS:
        score += PARTLY_FILLED_SCORE
    for load in nest.loads():
        score += inner(load) * (
            1.0
            if interleaved and not load.symbols.isdisjoint((dim, *steps))
            else _load_score(nest, load, dim)
        )
    depth = _terms(nest)
    for store in nest.stores:
        coeff = flat_coefficient(store.buf, store.index, dim)
        weight = 4.0 if store.inner and nest.rdims else min(1.0, DEEP_TERMS / max(depth, 1))
        if reduced and not store.inner:
            score += 0.0
        else:
            score += weight * (
                2.0 if coeff == 1 or interleaved else joint_score if id(store) in joint else -3.0
            )
    if score <= 0:
        return score
    if not reduced or size > MAX_STEP:
        # Lanes that are left empty cost little beside a load, and as much as full ones where values
        # and places are compared.
        compares = any(reduction.op in ("argmax", "argmin") for reduction in nest.reductions)
        return score * min(
            1.0,
            size / (WIDEST_VECTOR_BITS // register_bits(nest) if compares and not reduced else 8),
        )
    left = min((LEFT_ACROSS.get(reduction.op, 1.0) for reduction in nest.reductions), default=1.0)
    if left < SUMS_LEFT or is_long_point(nest) or batched_rows(nest, dim) is None:
        return score * min(1.0, size / 8) * left
    return score * min(1.0, size / SHORTEST_ROW)


def _load_score(nest: Nest, expr: Load | Gather, dim: str) -> float:
    buf, index = expr.access
    coeff = flat_coefficient(buf, index, dim)
    if coeff == 1:
        return 1.0
    if coeff == -1:
        return 0.35
    if isinstance(expr, Gather) and any(dim in arg.symbols for arg in expr.args):
        windows = any(
            size > 1 and flat_coefficient(buf, index, other) == 1
            for other, size in nest.dims.items()
        )
        return -1.0 if windows else GATHERED_SCORE
    if coeff == 0 and dim not in expr.symbols:
        return 0.0
    if any(is_transposed(expr, dim, other) for other in transposable_dims(nest, dim)):
        return TRANSPOSED
    return STRIDED_SCORE if isinstance(expr, Load) and is_strided(buf, index, dim) else -1.0


def nest_frequency(nest: Nest):
    """Weight of a load: those that every step of a reduction makes again count more than those before and behind it."""
    terms = nodes(arg for reduction in nest.reductions for arg in reduction.args)
    inside, reduced = set(map(id, terms)), set(nest.rdims)
    return lambda expr: 4.0 if id(expr) in inside and reduced & expr.symbols else 1.0
