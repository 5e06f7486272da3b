"""Overlapping loads of a stencil -> whole vectors and shuffles.

    a[i], a[i + 1], a[i + 2] for lanes 0..15     ->     low = a[0..15], high = a[16..31], lanes 1..16 and 2..17 of both

A load that straddles two cache lines takes two accesses of the cache, and all but those at multiples of a vector do.
Rows of scratch that is read so are made whole vectors long (scratch_rows.py): then the same loads of every row are aligned.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable

from .costs import COST
from .flat import flat_coefficient, flat_index
from .nest import Expr, Nest
from .schedule import NestSchedule, choose

VECTOR_BYTES = 64
# Cache accesses that a shuffle costs.
SHUFFLE = 0.7
# Vector operations per cycle and access of the cache: two pipes for sums, two for products.
OPERATIONS = 1.7


def shifted_loads(nest: Nest, sched: NestSchedule) -> dict[tuple, set[int]]:
    """(buffer, moving part of the place) -> constant parts that are to be made of aligned vectors.

    {} where arithmetic, which shuffles compete with, would take longer than the loads did.
    """
    if nest.reductions or sched.vector is None or sched.transpose:
        return {}
    points = list(itertools.product(*(range(n) for n in sched.jam.values()), range(sched.unroll)))
    places: dict[tuple, set[int]] = {}
    for e in _candidates(nest, sched.vector):
        buf, index, _ = e.info
        flat = flat_index(buf, index)
        if buf.dtype.itemsize * sched.lanes != VECTOR_BYTES or any(c % sched.lanes for d, c in flat.terms if d != sched.vector):
            continue
        steps = [*map(flat.coefficient, sched.jam), sched.lanes]
        key = (buf.root, flat.linear())
        places.setdefault(key, set()).update(flat.const + sum(map(operator.mul, steps, p)) for p in points)
    chosen = {key: set().union(*(run for run in _runs(found, sched.lanes) if _pays(run, sched.lanes)))
              for key, found in places.items()}
    before = sum(_accesses(found, sched.lanes) for found in places.values())
    shuffles = sum(p % sched.lanes > 0 for found in chosen.values() for p in found)
    arithmetic = sum(COST.get(e.info.primitive, 1.0) for e in nest.nodes() if e.kind == "op") * len(points)
    return chosen if arithmetic / OPERATIONS + shuffles < before else {}


def _candidates(nest: Nest, vector: str) -> Iterable[Expr]:
    """Loads of scratch, of which a little more may be read than is used."""
    written = {w.buf.root for w in nest.writes}
    for e in nest.loads():
        if e.kind == "load" and not e.info[2] and e.info[0].arena and e.info[0].root not in written:
            if e.info[0].dtype == e.info[0].root.dtype and flat_coefficient(e.info[0], e.info[1], vector) == 1:
                yield e


def _accesses(places: set[int], lanes: int) -> int:
    """Cache lines that vectors loaded from these places touch."""
    return sum(2 if p % lanes else 1 for p in places)


def _pays(places: set[int], lanes: int) -> bool:
    whole = {p // lanes for p in places} | {-(-p // lanes) for p in places}
    return len(whole) + SHUFFLE * sum(p % lanes > 0 for p in places) < _accesses(places, lanes)


def _runs(places: set[int], lanes: int) -> Iterable[set[int]]:
    """Places that share aligned vectors."""
    run: set[int] = set()
    end = None  # the last aligned vector that the run needs
    for p in sorted(places):
        if run and p // lanes > end:
            yield run
            run = set()
        run.add(p)
        end = -(-p // lanes)
    if run:
        yield run


def overlapping(nest: Nest, vector_bits: int) -> Iterable[Expr]:
    """Loads of scratch at three places of a row, at least, within a nest without reductions."""
    if nest.reductions:
        return
    vector = choose(nest, vector_bits).vector
    rows: dict[tuple, dict[int, Expr]] = {}
    for e in _candidates(nest, vector) if vector else ():
        buf, index, _ = e.info
        if buf.storage is None and len(buf.shape) > 1 and index[-1].coefficient(vector) == 1:
            rows.setdefault((buf, *index[:-1], index[-1].linear()), {})[index[-1].const] = e
    for places in rows.values():
        if len(places) > 1:
            yield from places.values()
