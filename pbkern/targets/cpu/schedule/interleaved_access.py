"""Accesses of every c-th element that together are whole vectors.

    a[3 i], a[3 i + 1], a[3 i + 2] for lanes 0..15     <->     a[0..15], a[16..31], a[32..47]

Loads of neighbouring places share the whole vectors. Stores need all of the c places, from several
writes or several points of one. targets/cpu/emit/loads/strided.py emits both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from pbkern.core.affine import Affine
from pbkern.lower.mlir.element_types import storage_el
from pbkern.lower.nest.addresses import flat_coefficient, flat_index
from pbkern.lower.nest.ir import Buf, Const, Expr, Load, Nest, Op, Store, nodes

# Up to this step, shuffles are cheaper than addresses of single elements.
MAX_STEP = 16
# Nodes of straight-line code that points of one joint store may have.
MAX_JOINT_NODES = 420

Point = dict[str, int]
Run = tuple[int, int]  # the constant parts of the first and the last place that share vectors


def is_strided(buf: Buf, index, vector: str | None) -> bool:
    """Whether neighbours along the vector dimension are a few elements apart, in either direction."""
    same_size = storage_el(buf.dtype) == storage_el(buf.root.dtype)
    return (
        vector is not None
        and same_size
        and 2 <= abs(flat_coefficient(buf, index, vector)) <= MAX_STEP
    )


def runs_of_loads(
    nest: Nest, vector: str | None, points: list[Point]
) -> dict[tuple[Buf, Affine], dict[int, Run]]:
    """(buffer, moving part of the place) -> constant part -> those that it shares vectors with."""
    runs: dict[tuple[Buf, Affine], dict[int, Run]] = {}
    for load in nest.loads():
        if isinstance(load, Load) and not load.guard and is_strided(load.buf, load.index, vector):
            flat = flat_index(load.buf, load.index)
            known = runs.setdefault((load.buf.root, flat.linear()), {})
            known |= {place: (place, place) for place in places(flat, points)}
    for (_, flat), known in runs.items():
        for run in _grouped(sorted(known), abs(flat.coefficient(vector))):
            known |= dict.fromkeys(run, (run[0], run[-1]))
    return runs


def places(flat: Affine, points: Iterable[Point]) -> set[int]:
    return {
        flat.const + sum(flat.coefficient(dim) * offset for dim, offset in point.items())
        for point in points
    }


def _grouped(places: list[int], step: int) -> list[list[int]]:
    """Sorted places in runs that are shorter than the step."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place - runs[-1][0] < step:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def runs_of_stores(
    nest: Nest, vector: str | None, points: list[Point], inner: bool
) -> dict[tuple[int, int], tuple[Buf, Affine, int]]:
    """(number of a write, number of a point) -> (buffer, moving part, first constant part) of its joint store."""
    runs: dict[tuple[Buf, Affine], dict[int, tuple[int, int]]] = {}
    for n, store in enumerate(nest.stores):
        if store.inner == inner and _can_be_joint(nest, store, vector):
            flat = flat_index(store.buf, store.index)
            for k, point in enumerate(points):
                (place,) = places(flat, [point])
                runs.setdefault((store.buf.root, flat.linear()), {})[place] = n, k
    joint: dict[tuple[int, int], tuple[Buf, Affine, int]] = {}
    for (buf, flat), stores in runs.items():
        step = flat.coefficient(vector)
        joint |= {
            stores[position]: (buf, flat, run[0])
            for run in _grouped(sorted(stores), step)
            if len(run) == step
            for position in run
        }
    return joint


def _can_be_joint(nest: Nest, store: Store, vector: str | None) -> bool:
    """Whether the store may wait for others: nothing else touches the buffer."""
    return (
        vector is not None
        and not store.guard
        and store.mask is None
        and is_strided(store.buf, store.index, vector)
        and flat_coefficient(store.buf, store.index, vector) > 0
        and store.buf.root not in nest.roots_read()
    )


def _points(steps: dict[str, int]) -> list[Point]:
    """All points of dimensions with these sizes."""
    return [dict(zip(steps, offsets)) for offsets in itertools.product(*map(range, steps.values()))]


def joint_stores(nest: Nest, vector: str) -> tuple[list[Store], dict[str, int]]:
    """(writes that jointly store whole vectors, dimensions that take all their points in one step for that)."""
    strided = [store for store in nest.stores if store.inner and _can_be_joint(nest, store, vector)]
    steps = {
        dim: size
        for store in strided
        for dim, size in nest.dims.items()
        if dim != vector
        and dim not in nest.rdims
        and size > 1
        and 0
        < flat_coefficient(store.buf, store.index, dim)
        < flat_coefficient(store.buf, store.index, vector)
    }
    if not strided or math.prod(steps.values()) * len(nest.nodes()) > MAX_JOINT_NODES:
        return [], {}
    joint = {n for n, _ in runs_of_stores(nest, vector, _points(steps), inner=True)}
    if len(joint) < len(strided):
        return [], {}
    return strided, steps


def is_interleaved_row(nest: Nest, store: Store, vector: str, steps: dict[str, int]) -> bool:
    """Whether vectors of a joint store can be computed as they are stored.

    Each then holds elements of several points (targets/cpu/emit/interleaved_rows.py). The write
    alone fills the rows, its operations belong to single elements of them, and what it loads is
    close together.
    """
    step, streamed = flat_coefficient(store.buf, store.index, vector), {vector, *steps}
    flat = flat_index(store.buf, store.index)
    if places(flat.linear(), _points(steps)) != set(range(step)):
        return False
    written = {store.buf.root for store in nest.stores}

    def suits(expr: Expr) -> bool:
        if isinstance(expr, Load):
            buf, index, guard = expr.buf, expr.index, expr.guard
            return (
                not guard
                and buf.root not in written
                and _is_compact(buf, index, vector, steps, step)
            )
        return isinstance(expr, Const) or (
            isinstance(expr, Op) and (vector not in expr.symbols or streamed <= expr.symbols)
        )

    return all(map(suits, nodes([store.value])))


def _is_compact(buf: Buf, index, vector: str, steps: dict[str, int], step: int) -> bool:
    """Whether rows of `step` points each are within a few vectors, as many rows as fill one."""
    spread = sum(abs(flat_coefficient(buf, index, dim)) * (size - 1) for dim, size in steps.items())
    same_size = storage_el(buf.dtype) == storage_el(buf.root.dtype)
    return (
        same_size
        and spread < 2 * MAX_STEP
        and abs(flat_coefficient(buf, index, vector)) <= 2 * step
    )
