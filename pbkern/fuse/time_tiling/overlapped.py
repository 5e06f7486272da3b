"""Overlapped (ghost-zone) time tiling: the body of a counted loop -> several steps in one kernel, if the model gains.

A stencil iterated in time moves its arrays once per step. Several steps of one tile fit the cache:
the tile's halo grows step by step (fuse/access/blocks.py), neighbours compute it again, and `steps`
steps take one pass over memory. With periodic borders, the arrays are first continued beyond their
edges, as far as the halo of all steps (periodic_borders.py). fuse/emit/control_flow.py launches the
kernel length // steps times, and a shorter one for the rest. A wavefront
(fuse/tiling/time_skewing.py) may be cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
from jax import lax
from jax.extend import core as jex

from pbkern.core.errors import UnsupportedOp
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import leading_to
from pbkern.core.lazy_dataclass import dataclass
from pbkern.fuse.access.blocks import BlockRequests, Unfusable
from pbkern.fuse.access.rules import NeedsWhole, whole
from pbkern.fuse.cost.kinds import nbytes
from pbkern.fuse.cost.model import Cost, CostModel
from pbkern.fuse.graph import Edge, Inner, Node, Partition, order
from pbkern.fuse.simplify.driver import retrace
from pbkern.fuse.tiling.block_search import search
from pbkern.fuse.tiling.schedule import Schedule
from pbkern.fuse.tiling.time_skewing import ALONG, StoredRows, Wavefront, price, wavefronts

from .limits import TimeTilingLimits
from .local_operations import is_local
from .periodic_borders import continued, periodic_dimensions, reach, with_periodic_halos
from .step_values import StepValues, step_values
from .thin_slices import thin_ends_as_selects, with_thin_slices
from .windows_as_slices import as_slices

# Steps per kernel that are tried, in this order. More steps take longer to compile.
STEPS = (2, 4, 5, 8, 10)


@dataclass(frozen=True)
class TimeBlocks:
    """Several steps of a loop's body as one kernel; `rest`: the remaining steps, or None."""

    main: Inner
    rest: Inner | None


def is_stencil(parts: Partition, body: jex.Jaxpr, carries: int, limits: TimeTilingLimits) -> bool:
    """Whether a body has groups only, and cheap equations with small halos make its `carries`, one of which is an array."""
    results = [var for var in body.outvars[:carries] if not isinstance(var, jex.Literal)]
    local = all(is_local(eqn, limits) for eqn in leading_to(body.eqns, results))
    kinds = {node.kind for node in parts.nodes}
    ours = "group" in kinds and kinds <= {"group", "alias"}
    return ours and local and max((array_aval(var).ndim for var in results), default=0) > 0


def tile_time(
    body: jex.ClosedJaxpr,
    parts: Partition,
    counts: tuple[int, int],
    length: int,
    machine: CostModel,
    limits: TimeTilingLimits,
    partition: Callable[[jex.ClosedJaxpr], Partition],
) -> TimeBlocks | None:
    """The number of steps per kernel that the model prefers; None for one step.

    `body`: (*consts, *carries, *elements of xs) -> (*carries, *values of the step). `counts`: numbers of consts and
    carries. `parts`: its partition. `partition`: partitions what computes values of several steps.
    """
    if not is_stencil(parts, body.jaxpr, counts[1], limits):
        return None
    seconds = (sum(node.seconds for node in parts.nodes) + _copying(body.jaxpr, machine)) * length
    step = _step(body, counts, limits)
    fronts = list(fronts_of(body, step, counts, length, machine, limits, partition))
    # A wavefront of as many steps as a tile ever takes is less work than the tile: no search is
    # needed. Tiles have no values per step.
    tiles = len(body.jaxpr.outvars) == counts[1] and not any(
        tiled.wave.steps >= min(length, max(STEPS, default=0)) for tiled in fronts
    )
    best, seconds = _best_tile(step, length, seconds, machine, limits) if tiles else (None, seconds)
    for front in fronts:
        total = front.cost.seconds * -(-length // front.steps)
        if total < seconds * limits.steps_gain:
            best, seconds = front, total
    if best is None:
        return None
    left = length % best.steps
    rest = best.shorter(step, left, machine, limits) if left else None
    if left and rest is None:
        return None
    return TimeBlocks(best.inner(), None if rest is None else rest.inner())


def fronts_of(
    body: jex.ClosedJaxpr,
    step: _Step,
    counts: tuple[int, int],
    length: int,
    machine: CostModel,
    limits: TimeTilingLimits,
    partition: Callable[[jex.ClosedJaxpr], Partition],
) -> Iterator[_OverlappedBody]:
    """Wavefronts in every dimension; arguments as in `tile_time`. `step`: the body with its borders."""
    simple = None
    for along in ALONG:
        values = None
        if len(body.jaxpr.outvars) > counts[1]:
            values = step_values(body, counts, along)
            if values is None:
                continue
            step = _step(values.body, counts, limits)
        stored = values.stored if values else ()
        if simple is None or values:
            simple = retrace(step.body, thin_ends_as_selects(limits))
        for wave, cost in wavefronts(simple, counts, step.periodic, length, machine, along, stored):
            yield _OverlappedBody(wave, cost, values, partition)


def _best_tile(
    step: _Step, length: int, seconds: float, machine: CostModel, limits: TimeTilingLimits
) -> tuple[_Unrolled | _OverlappedBody | None, float]:
    """(several steps of a tile, seconds of the loop), if that takes less than `seconds`."""
    best = None
    for steps in (count for count in STEPS if count <= min(length, step.most)):
        unrolled = _unrolled(step, steps, machine, limits)
        if unrolled is None:
            break
        # The rest is priced as a part of a full round, and as no less than one.
        turn = unrolled.schedule.cost.seconds + _copying(unrolled.jaxpr, machine)
        total = turn * (length // steps + (1 if length % steps else 0))
        if total > seconds * limits.steps_gain:
            # One bad number of steps, such as one that does not divide the length, does not end the
            # search.
            if turn / steps > seconds / length:
                break
            continue
        best, seconds = unrolled, total
    return best, seconds


def _copying(body: jex.Jaxpr, machine: CostModel) -> float:
    """Seconds of copying carries after a turn: none if all are computed, so that they alternate (fuse/emit/control_flow.py)."""
    computed = {var for eqn in body.eqns for var in eqn.outvars}
    if all(not isinstance(var, jex.Literal) and var in computed for var in body.outvars):
        return 0.0
    return sum(
        2 * nbytes(var.aval) / machine.far_bandwidth(nbytes(var.aval)) for var in body.outvars
    )


@dataclass(frozen=True)
class _Unrolled:
    jaxpr: jex.Jaxpr
    outputs: list
    schedule: Schedule
    steps: int

    def inner(self) -> Inner:
        node = Node("group", list(self.jaxpr.eqns), self.outputs, self.schedule)
        why = Edge(
            self.jaxpr.eqns[-1],
            True,
            "steps in time share a kernel",
            after=self.schedule.cost.seconds,
        )
        return Inner(self.jaxpr, Partition([node], [why]), [node], self.steps)

    def shorter(
        self, step: _Step, steps: int, machine: CostModel, limits: TimeTilingLimits
    ) -> _Unrolled | None:
        return _unrolled(step, steps, machine, limits)


# (*consts, *carries, *xs) -> carries after some steps of a loop's body, and parts stored of each step
time_steps_p = jex.Primitive("time_steps")
time_steps_p.multiple_results = True


@time_steps_p.def_abstract_eval
def _time_steps_type(*_, body: jex.ClosedJaxpr, steps: int, stored: tuple[StoredRows, ...]):
    results = body.jaxpr.outvars
    carries = len(results) - len(stored)
    return [var.aval for var in results[:carries]] + [
        jax.core.ShapedArray((steps, *part.shape), var.aval.dtype)
        for part, var in zip(stored, results[carries:])
    ]


@dataclass(frozen=True)
class _OverlappedBody:
    """Several steps as one wavefront kernel, without blocks; `values` of each step follow behind it."""

    wave: Wavefront
    cost: Cost
    values: StepValues | None
    partition: Callable[[jex.ClosedJaxpr], Partition]

    @property
    def steps(self) -> int:
        return self.wave.steps

    def several(self, *args) -> list:
        """(*consts, *carries, *xs) -> (*carries, *values of the steps)."""
        wave, (first, carries) = self.wave, self.wave.counts
        results = time_steps_p.bind(*args, body=wave.body, steps=wave.steps, stored=wave.stored)
        if self.values is None:
            return results
        finish = jax.vmap(
            jex.jaxpr_as_fun(self.values.finish),
            (None,) * first + (0,) * (len(args) - first - carries + len(wave.stored)),
            axis_size=wave.steps,
        )
        values = finish(*args[:first], *args[first + carries :], *results[carries:])
        return [*results[:carries], *values]

    def inner(self) -> Inner:
        wave = self.wave
        shapes = [
            (wave.steps,) * (var in wave.elements) + var.aval.shape
            for var in wave.body.jaxpr.invars
        ]
        avals = [
            jax.ShapeDtypeStruct(shape, var.aval.dtype)
            for shape, var in zip(shapes, wave.body.jaxpr.invars)
        ]
        jaxpr = retrace(jax.make_jaxpr(self.several)(*avals), {}).jaxpr
        eqn = next(eqn for eqn in jaxpr.eqns if eqn.primitive is time_steps_p)
        behind = [each for each in jaxpr.eqns if each is not eqn]
        operand = dict(zip(wave.body.jaxpr.invars, jaxpr.invars))
        reads = [
            (operand[var], tuple(map(whole, operand[var].aval.shape))) for var in wave.operands
        ]
        carries = wave.counts[1]
        makes = [(var, wave.made_by_program(var)) for var in eqn.outvars[:carries]]
        makes += [(var, tuple(map(whole, var.aval.shape))) for var in eqn.outvars[carries:]]
        schedule = Schedule(
            (wave.programs,),
            (wave.height,),
            tuple(makes),
            BlockRequests({}, [], reads),
            self.cost,
            wave=wave,
        )
        node = Node("group", [eqn], list(eqn.outvars), schedule)
        why = Edge(
            eqn,
            True,
            f"{wave.steps} steps in time follow each other in one kernel",
            after=self.cost.seconds,
        )
        parts = Partition([node], [why])
        if behind:
            after = self.partition(
                jex.ClosedJaxpr(
                    jaxpr.replace(invars=[*jaxpr.invars, *eqn.outvars], eqns=behind), ()
                )
            )
            parts = Partition([node, *after.nodes], [why, *after.edges])
        return Inner(jaxpr, parts, order(parts.nodes, jaxpr.invars), wave.steps)

    def shorter(
        self, step: _Step, steps: int, machine: CostModel, limits: TimeTilingLimits
    ) -> _OverlappedBody | None:
        wave = replace(self.wave, steps=steps)
        cost = price(wave, machine)
        return replace(self, wave=wave, cost=cost) if cost is not None else None


@dataclass(frozen=True)
class _Step:
    """A loop's body: `counts` of consts and carries, dimensions in which each operand is `periodic`, the `most` steps."""

    body: jex.ClosedJaxpr
    counts: tuple[int, int]
    periodic: list[set[int]]
    most: int


def _step(body: jex.ClosedJaxpr, counts: tuple[int, int], limits: TimeTilingLimits) -> _Step:
    body = retrace(with_thin_slices(retrace(body, as_slices(limits)), limits), {})
    rolled = with_periodic_halos(body)
    periodic = periodic_dimensions(rolled.jaxpr, counts)
    if periodic is None or not any(periodic):
        return _Step(
            body,
            counts,
            [set() for _ in body.jaxpr.invars],
            limits.most_step_equations // max(len(body.jaxpr.eqns), 1),
        )
    extent = min(
        var.aval.shape[dim] for var, dims in zip(rolled.jaxpr.invars, periodic) for dim in dims
    )
    return _Step(
        rolled,
        counts,
        periodic,
        min(limits.most_step_equations // len(rolled.jaxpr.eqns), extent // reach(rolled.jaxpr)),
    )


def _unrolled(
    one: _Step, steps: int, machine: CostModel, limits: TimeTilingLimits
) -> _Unrolled | None:
    """`steps` steps as one group, which takes as many elements of xs at once; None where they cannot be."""
    body, (first, end) = one.body, (one.counts[0], sum(one.counts))
    step: Callable = jex.jaxpr_as_fun(body)

    def several(*args):
        arrays = [continued(arg, dims) for arg, dims in zip(args[:end], one.periodic)]
        consts, carries, xs = arrays[:first], arrays[first:], args[end:]
        for k in range(steps):
            elements = (lax.squeeze(lax.slice_in_dim(x, k, k + 1), (0,)) for x in xs)
            carries = step(*consts, *carries, *map(continued, elements, one.periodic[end:]))
        originals = {id(array): arg for array, arg in zip(arrays, args)}
        return [originals.get(id(carry), carry) for carry in carries]

    shapes = [(steps,) * (n >= end) + var.aval.shape for n, var in enumerate(body.jaxpr.invars)]
    avals = [
        jax.ShapeDtypeStruct(shape, var.aval.dtype) for shape, var in zip(shapes, body.jaxpr.invars)
    ]
    traced = retrace(jax.make_jaxpr(several)(*avals), {})
    jaxpr = traced.jaxpr
    computed = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    outputs = list(
        dict.fromkeys(
            var for var in jaxpr.outvars if not isinstance(var, jex.Literal) and var in computed
        )
    )
    if traced.consts or not outputs:
        return None
    try:
        schedule = search(
            jaxpr.eqns, outputs, machine, lambda cost: cost.recompute <= limits.most_recompute
        )
    except (Unfusable, NeedsWhole, UnsupportedOp, NotImplementedError):
        return None
    return _Unrolled(jaxpr, outputs, schedule, steps)
