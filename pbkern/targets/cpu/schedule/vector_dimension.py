"""Nest, dimension -> how well vectors along it suit the nest: contiguous accesses gain, strided ones lose."""

from __future__ import annotations

import math

from pbkern.lower.mlir.element_types import BITS, compute_el
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Expr, Nest
from pbkern.targets.cpu.math.op_cycles import COST

from .interleaved_access import MAX_STEP, is_interleaved_row, is_strided, joint_stores
from .register_transpose import is_transposed, transposable_dims
from .short_rows import SHORTEST_ROW, batched_rows

# Vector operations of a point beyond which a few points fill the processor's window.
LONG_POINT = 8.0
# What a load of every c-th element, made of whole vectors, gains compared with one of neighbours.
STRIDED = 0.2
# What is gained if vectors hold several short rows (targets/cpu/emit/interleaved_rows.py), which
# one by one would not fill the widest vectors.
PARTLY_FILLED, WIDEST = 0.5, 512
# What is left of the gain of vectors along short rows after the step across their lanes, one row at
# a time. Measured with 4 to 16 elements: vectors over several rows take less time for sums and
# extremes of up to 7 elements, and for indices of all.
SUMS_LEFT = 0.75
LEFT_ACROSS = {
    **dict.fromkeys(("sum", "max", "min", "prod"), SUMS_LEFT),
    **dict.fromkeys(("argmax", "argmin"), 0.5),
}
# What a square of rows that is transposed in registers costs.
TRANSPOSED = -0.5
# What is gained for elements at computed places: the places are computed in vectors.
GATHERED = 0.05
# Terms of a reduction beside which its store counts less and less.
DEEP = 32


def register_bits(nest: Nest, along: str | None = None) -> int:
    """Width of the widest element that vectors of this nest hold, if they run along `along`: an
    epilogue behind a reduced dimension is scalar.
    """
    if along in nest.rdims:
        nest = Nest(nest.dims, nest.rdims, nest.reductions, [w for w in nest.writes if w.inner])
    widths = [
        BITS[compute_el(e.dtype)] for e in nest.nodes() if e.kind not in ("index", "range", "acc")
    ]
    widths += [BITS[compute_el(r.dtype)] for r in nest.reductions]
    widths += [BITS[compute_el(w.buf.dtype)] for w in nest.writes]
    return max([w for w in widths if w > 1], default=8)


def is_long_point(nest: Nest) -> bool:
    """Whether one point of the reductions is so much work that out-of-order execution overlaps few of them; more only spill."""
    inside = Nest({}, reductions=nest.reductions).nodes()
    return sum(COST.get(e.info.primitive, 1.0) for e in inside if e.kind == "op") >= LONG_POINT


# Reductions of floats whose results depend on the order of the elements.
ROUNDED = ("sum", "dot", "prod")


def score(nest: Nest, dim: str, reassociate: bool) -> float:
    """Scores vectors along `dim` for the nest: contiguous accesses gain, strided ones lose."""
    size = nest.dims[dim]
    reduced = dim in nest.rdims
    if (
        reduced
        and not reassociate
        and any(r.op in ROUNDED and r.dtype.kind not in "iub" for r in nest.reductions)
    ):
        return -1.0  # lanes would be partial sums
    if nest.ordered and reduced:
        return -1.0
    if reduced and any(r.op == "logaddexp" for r in nest.reductions):
        return -1.0
    score = 0.0
    inner = nest_frequency(nest)
    joint_writes, steps = joint_stores(nest, dim)
    joint = {id(w) for w in joint_writes}
    interleaved = bool(joint) and all(is_interleaved_row(nest, w, dim, steps) for w in nest.writes)
    if interleaved and math.prod(steps.values()) * register_bits(nest) % WIDEST:
        score += PARTLY_FILLED
    for e in nest.loads():
        score += inner(e) * (
            1.0
            if interleaved and not e.symbols.isdisjoint((dim, *steps))
            else _load_score(nest, e, dim)
        )
    depth = math.prod(nest.dims[d] for d in nest.rdims)
    for w in nest.writes:
        c = flat_coefficient(w.buf, w.index, dim)
        weight = 4.0 if w.inner and nest.rdims else min(1.0, DEEP / max(depth, 1))
        if reduced and not w.inner:
            score += 0.0
        else:
            score += weight * (2.0 if c == 1 or interleaved else 1.0 if id(w) in joint else -3.0)
    if score <= 0:
        return score
    if not reduced or size > MAX_STEP:
        # Lanes that are left empty cost little beside a load, and as much as full ones where values
        # and places are compared.
        compares = any(r.op in ("argmax", "argmin") for r in nest.reductions)
        return score * min(
            1.0, size / (WIDEST // register_bits(nest) if compares and not reduced else 8)
        )
    left = min((LEFT_ACROSS.get(r.op, 1.0) for r in nest.reductions), default=1.0)
    if left < SUMS_LEFT or is_long_point(nest) or batched_rows(nest, dim) is None:
        return score * min(1.0, size / 8) * left
    return score * min(1.0, size / SHORTEST_ROW)


def _load_score(nest: Nest, e: Expr, dim: str) -> float:
    buf, index = e.info[:2]
    c = flat_coefficient(buf, index, dim)
    if c == 1:
        return 1.0
    if c == -1:
        return 0.35
    if e.kind == "gather" and any(dim in a.symbols for a in e.args):
        windows = any(n > 1 and flat_coefficient(buf, index, d) == 1 for d, n in nest.dims.items())
        return -1.0 if windows else GATHERED
    if c == 0 and dim not in e.symbols:
        return 0.0
    if any(is_transposed(e, dim, d) for d in transposable_dims(nest, dim)):
        return TRANSPOSED
    return STRIDED if e.kind == "load" and is_strided(buf, index, dim) else -1.0


def nest_frequency(nest: Nest):
    """Weight of a load: those that every step of a reduction makes again count more than those before and behind it."""
    inside: set[int] = set()
    reduced = set(nest.rdims)

    def mark(e: Expr) -> None:
        if id(e) not in inside:
            inside.add(id(e))
            for a in e.args:
                mark(a)

    for r in nest.reductions:
        for e in r.args:
            mark(e)
    return lambda e: 4.0 if id(e) in inside and reduced & e.symbols else 1.0
