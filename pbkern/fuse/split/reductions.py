"""Split reductions: reductions of little parallelism -> partial results of chunks, then the rest.

A reduction with few outputs, or whose reduced block outgrows the cache, cannot be tiled by its
output alone.

    reduce(x, axes)      ->  reduce(partial_reduce(x, axis, block), 0)
    sum((x - c)(y - d))  ->  sum over chunks of sum((x - l)(y - m)) + (l - c) sum(y - m) + (m - d) sum(x - l) + n (l - c)(m - d)
    sum(exp(x - c))      ->  sum over chunks of sum(exp(x - l)) exp(l - c)
    argmax(x)            ->  the index that the first of the greatest chunks has

The first stage is parallel over chunks of `block` elements along one axis and takes the producers
of x with it; the second is small. For products, l and m are means of the beginnings of chunks of n
elements. c and d follow from sums of x and y, as the means in variances and covariances do. The
first stage needs neither, so that one pass reads x and y; the second merges as Welford does. The
identity holds for any l, m, c and d, and errs no more than the usual two passes (Chan, Golub,
LeVeque 1983). For exponentials, l are the maxima of chunks, and c follows from the maximum of x
(Milakov, Gimelshein 2018). Sums are reassociated.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.lazy_dataclass import dataclass
from pbkern.fuse.access.windows_contractions import (
    REDUCERS,
    chunk_dimensions,
    greatest,
    least,
    partial_reduce_p,
    reducer_params,
)
from pbkern.fuse.cost.model import CostModel
from pbkern.fuse.simplify.driver import Rewrite

from .chunks import in_chunks, near_divisor
from .limits import SplitLimits

# Reduction of x -> kind of its result in the notes; that kind -> kind of x less it.
STATISTICS = {"reduce_sum": "statistic", "reduce_max": "greatest"}
DIFFERENCES = {"statistic": "deviation", "greatest": "excess"}
# The functions of x less a statistic that are summed.
SUMMED = ("mul", "square", "integer_pow", "exp")
ARGS = {"argmax": (lax.reduce_max_p, least), "argmin": (lax.reduce_min_p, greatest)}


class Deviation(NamedTuple):
    """x - c, where c has the dimensions `dims` of x."""

    x: jax.Array
    c: jax.Array
    dims: tuple[int, ...]

    def varies_along(self, axes) -> bool:
        return any(dim in axes for dim, size in zip(self.dims, np.shape(self.c)) if size > 1)

    def level_less_c(self, runs: Chunks, axes, level):
        """One number per chunk of x, laid out by `runs`, less c."""
        result_dims = runs.result_dims(axes, self.x.ndim)
        places = [
            result_dims.index(dim) for dim, size in zip(self.dims, np.shape(self.c)) if size > 1
        ]
        units = [j for j, size in enumerate(np.shape(self.c)) if size == 1]
        return level - lax.broadcast_in_dim(lax.squeeze(self.c, units), level.shape, places)


@dataclass(frozen=True)
class Chunks:
    """Cut of an operand along `axis` into chunks of `block` elements.

    Each index of the `outer` reduced dimensions before the axis has chunks of its own.
    """

    axis: int
    outer: int
    block: int

    def within(self, axes) -> tuple[int, ...]:
        """Axes that are reduced within a chunk."""
        return tuple(dim for dim in sorted(axes) if not self.axis - self.outer <= dim < self.axis)

    def result_dims(self, axes, rank: int) -> list[int]:
        """Dimensions of x that partial results have; along `axis` they have one element per chunk."""
        return [dim for dim in range(rank) if dim == self.axis or dim not in self.within(axes)]

    def counted(self, axes) -> tuple[int, ...]:
        """Dimensions of partial results that count chunks."""
        return tuple(chunk_dimensions(self.axis, self.within(axes), self.outer))

    def divide(self, shape) -> bool:
        return shape[self.axis] % self.block == 0

    def _inner(self, axes) -> list[int]:
        """Axes of the cut operand that are reduced within a chunk."""
        return [dim + (dim >= self.axis) for dim in self.within(axes)]

    def cut(self, x, axes, level):
        """x in chunks, less the `level` of each."""
        x, inner = in_chunks(x, self.axis, self.block, np.zeros((), x.dtype)), self._inner(axes)
        return x - lax.broadcast_in_dim(
            level, x.shape, [dim for dim in range(x.ndim) if dim not in inner]
        )

    def sums(self, x, axes):
        """Partial results: sums of each chunk of a cut operand."""
        reduced = (self.axis, *self._inner(axes))  # a chunk is one element along `axis` now
        return partial_reduce_p.bind(
            x,
            reducer="reduce_sum",
            axis=self.axis,
            block=1,
            axes=reduced,
            outer=self.outer,
            part=None,
        )

    def beginning(self, shape, axes, limits: SplitLimits) -> tuple[tuple[int, int], int]:
        """((dimension, elements along it) of the first part of each chunk, along its longest dimension; elements in all)."""
        sizes = {dim: self.block if dim == self.axis else shape[dim] for dim in self.within(axes)}
        longest = max(sizes, key=sizes.__getitem__)
        part = max(
            -(-sizes[longest] // limits.beginnings), min(sizes[longest], limits.shortest_beginning)
        )
        return (longest, part), math.prod(sizes.values()) // sizes[longest] * part


class ReductionStages:
    """Rewrites of one jaxpr. Remembers, by value, the array whose sums it follows from."""

    def __init__(self, jaxpr: jex.Jaxpr, machine: CostModel, limits: SplitLimits) -> None:
        self.machine, self.limits = machine, limits
        self.notes = Notes()
        self.reduced_twice = _reduced_twice(jaxpr)

    def rewrites(self) -> dict[str, Rewrite]:
        """Primitive name -> Rewrite."""
        noted = dict.fromkeys(
            "mul div reshape squeeze broadcast_in_dim convert_element_type".split(), self.statistic
        )
        noted |= {"sub": self.deviation, "square": self.squared, "integer_pow": self.squared}
        noted |= {"select_n": self.greatest, "max": self.greatest, "exp": self.exponential}
        return noted | dict.fromkeys(REDUCERS, self.split) | dict.fromkeys(ARGS, self.split_arg)

    def runs_of(self, eqn) -> Chunks | None:
        """Chooses the cut of a reduction's operand; None if it needs no second stage, and for other equations."""
        name = eqn.primitive.name
        if name not in REDUCERS and name not in ARGS:
            return None
        shape, axes = eqn.invars[0].aval.shape, sorted(eqn.params["axes"])
        itemsize = np.dtype(eqn.invars[0].aval.dtype).itemsize
        if math.prod(shape) * itemsize < self.machine.sizes.stage_bytes or not axes:
            return None
        result_shape = [size for axis, size in enumerate(shape) if axis not in axes]
        reduced = math.prod(shape[axis] for axis in axes)
        # Fewest neighbouring results of one program, and how much of the operand it may read for
        # them.
        part = (
            min(shape[-1], self.machine.sizes.far_row_bytes // itemsize)
            if len(shape) - 1 not in axes
            else 1
        )
        near = math.prod(shape) * itemsize <= self.machine.shared_bytes // 2
        width = min(part, self.machine.lanes(itemsize)) if near else part
        again = not isinstance(eqn.invars[0], jex.Literal) and eqn.invars[0] in self.reduced_twice
        room = self.machine.near_bytes // 2
        room = (
            room
            if near or again
            else max(room, self.machine.shared_bytes // (4 * self.machine.cores))
        )
        if (
            math.prod(result_shape) // width
            >= self.machine.sizes.busy_programs * self.machine.cores
            and reduced * width * itemsize <= room
        ) and (
            near or not _has_short_rows(shape, axes, self.machine.sizes.short_row_bytes // itemsize)
        ):
            return None
        results = max(math.prod(result_shape) // part, 1)
        ways = (self._runs_from(low, shape, axes, part, results) for low in axes)
        return next((runs for runs in ways if runs is not None), None)

    def _runs_from(self, low: int, shape, axes, part: int, results: int) -> Chunks | None:
        """Chunks from dimension `low` on, with `part` columns per program; None if there would be too few.

        `results`: programs that there are without chunks.
        """
        sizes, high = self.machine.sizes, low
        programs = max(-(-4 * self.machine.cores // results), sizes.fewest_chunks)

        def line() -> int:
            inside = math.prod(shape[axis] for axis in axes if not low <= axis <= high)
            return inside * part

        while high + 1 in axes and (
            math.prod(shape[low : high + 1]) < programs or line() > self.limits.run_elements
        ):
            high += 1
        size, inner = math.prod(shape[low : high + 1]), shape[high]
        if size < programs:
            return None
        block = max(1, min(self.limits.run_elements // line(), -(-size // programs)))
        if low == high:
            few = (
                self.limits.fewest_elements
                if results > 1
                else self.limits.fewest_elements // sizes.fewest_chunks
            )
            block = near_divisor(size, max(block, sizes.shortest_chunk, few // line()))
            return Chunks(low, 0, block) if block < size else None
        block = next(divisor for divisor in range(min(block, inner), 0, -1) if inner % divisor == 0)
        fewest = min(self.limits.fewest_elements, self.limits.run_elements // 4)
        return Chunks(high, high - low, block) if block * line() >= fewest else None

    # ---- sums, products, extrema

    def split(self, eqn, operands):
        runs, (x,) = self.runs_of(eqn), operands
        if eqn.primitive.name == "reduce_sum" and runs is not None:
            total = self._sum_of_products(eqn, x, runs)
            total = self._sum_of_exponentials(eqn, x, runs) if total is None else total
            if total is not None:
                return [total]
        if runs is None:
            return [self._columns_first(eqn, x)] if self.is_narrow(eqn) else None
        name = eqn.primitive.name
        partial = self._partial(name, x, eqn.params["axes"], runs)
        result = eqn.primitive.bind(
            partial, **reducer_params(name, runs.counted(eqn.params["axes"]))
        )
        if name in STATISTICS and x.dtype in (np.float32, np.float64):
            self.notes.note(STATISTICS[name], result, x)
        return [result]

    def is_narrow(self, eqn) -> bool:
        """Whether a reduction has many groups of few neighbouring elements, as in a group norm with channels last."""
        if (
            eqn.primitive.name not in REDUCERS or eqn.invars[0].aval.dtype.itemsize < 4
        ):  # sums of columns would be rounded
            return False
        shape, axes = eqn.invars[0].aval.shape, eqn.params["axes"]
        last, lanes = len(shape) - 1, self.machine.lanes(eqn.invars[0].aval.dtype.itemsize)
        outer = math.prod(shape[axis] for axis in axes if axis != last)
        return (
            last in axes
            and last - 1 not in axes
            and 1 < shape[last] <= 2 * lanes
            and outer >= lanes
        )

    def _columns_first(self, eqn, x):
        """reduce(x, (1, 3)) -> reduce(reduce(x, 1), 2): whole vectors over the rows, then the few elements."""
        name, axes = eqn.primitive.name, [axis for axis in eqn.params["axes"] if axis != x.ndim - 1]
        columns = eqn.primitive.bind(x, **reducer_params(name, tuple(axes)))
        return eqn.primitive.bind(columns, **reducer_params(name, (columns.ndim - 1,)))

    def _partial(self, name: str, x, axes, runs: Chunks, part: tuple[int, int] | None = None):
        """Partial results. `part`: (dimension, how many of its first elements of each chunk)."""
        return partial_reduce_p.bind(
            x,
            reducer=name,
            axis=runs.axis,
            block=runs.block,
            axes=runs.within(axes),
            outer=runs.outer,
            part=part,
        )

    # ---- products of deviations

    def statistic(self, eqn, operands):
        """Notes scaled, reshaped and repeated sums of x, or its maximum, and products of deviations."""
        if eqn.primitive.name == "mul" and all(
            self.notes.find("deviation", operand) for operand in operands
        ):
            return self.notes.bound("product", eqn, operands, *operands)
        kind = (
            "greatest"
            if any(self.notes.find("greatest", operand) for operand in operands)
            else "statistic"
        )
        notes = [self.notes.find(kind, operand) for operand in operands]
        if not any(notes) or any(
            note is None and np.ndim(operand) for note, operand in zip(notes, operands)
        ):
            return None
        (of,) = next(note for note in notes if note)
        (value,) = self.notes.bound(kind, eqn, operands, of)
        if eqn.primitive.name == "broadcast_in_dim":
            self.notes.note("repeated", value, operands[0], eqn.params["broadcast_dimensions"])
        return [value]

    def greatest(self, eqn, operands):
        """Notes selects and maxima of the maximum of x and something else, such as where it is not finite."""
        greatest = next(
            (note for operand in operands if (note := self.notes.find("greatest", operand))), None
        )
        return greatest and self.notes.bound("greatest", eqn, operands, *greatest)

    def deviation(self, eqn, operands):
        x, centre = operands
        kind = "greatest" if self.notes.find("greatest", centre) else "statistic"
        note = self.notes.find(kind, centre)
        if (
            note is None
            or note[0] is not x
            or np.ndim(centre) not in (0, x.ndim)
            or eqn.outvars[0].aval.shape != x.shape
        ):
            return None
        array, dims = self.notes.find("repeated", centre) or (centre, range(np.ndim(centre)))
        part = Deviation(x, array, tuple(dims))
        return self.notes.bound(DIFFERENCES[kind], eqn, operands, part)

    def squared(self, eqn, operands):
        if self.notes.find("deviation", operands[0]) is None or eqn.params.get("y", 2) != 2:
            return None
        return self.notes.bound("product", eqn, operands, *operands * 2)

    def _sum_of_products(self, eqn, x, runs: Chunks):
        """The sum in two stages; the first reads no c. None if that does not apply."""
        factors, axes = self.notes.find("product", x), eqn.params["axes"]
        if factors is None:
            return None
        parts: list[Deviation] = [
            part for factor in factors for part in self.notes.find("deviation", factor) or ()
        ]
        if any(part.x.shape != x.shape for part in parts):  # a factor repeats
            return None
        if not runs.divide(x.shape) or any(part.varies_along(axes) for part in parts):
            return None
        count = runs.block * math.prod(
            x.shape[dim] for dim in runs.within(axes) if dim != runs.axis
        )
        around, apart = zip(*(self._around_runs(part, axes, runs) for part in parts))

        def of_runs(y):
            return runs.sums(y, axes)

        # With rounded means, sums of x - l and y - m are not quite zero.
        left = apart[0] * of_runs(around[1]) + apart[1] * of_runs(around[0])
        within = _sum(of_runs(around[0] * around[1]), runs.counted(axes)) + _sum(
            left, runs.counted(axes)
        )
        return within + np.asarray(count, x.dtype) * _sum(apart[0] * apart[1], runs.counted(axes))

    def _around_runs(self, part: Deviation, axes, runs: Chunks) -> tuple:
        """(x in chunks, less the level of each; levels less c)."""
        beginning, count = runs.beginning(part.x.shape, axes, self.limits)
        total = self._partial("reduce_sum", part.x, axes, runs, beginning)
        # Rounded once: as an operand of a fused multiply-add it would be another number in each
        # stage.
        info = jax.numpy.finfo(part.x.dtype)
        level = lax.reduce_precision(
            total * np.asarray(1 / count, part.x.dtype), info.nexp, info.nmant
        )
        return runs.cut(part.x, axes, level), part.level_less_c(runs, axes, level)

    # ---- exponentials

    def exponential(self, eqn, operands):
        excess = self.notes.find("excess", operands[0])
        return excess and self.notes.bound("exponential", eqn, operands, *excess)

    def _sum_of_exponentials(self, eqn, x, runs: Chunks):
        """The sum in two stages; the first reads no c. None if that does not apply."""
        exponential, axes = self.notes.find("exponential", x), eqn.params["axes"]
        if exponential is None or exponential[0].varies_along(axes) or not runs.divide(x.shape):
            return None
        (part,) = exponential
        level = self._partial("reduce_max", part.x, axes, runs)
        # A chunk whose maximum is infinite is not shifted: its sum is 0, inf or NaN, and so is
        # exp(l - c).
        finite = lax.select(lax.is_finite(level), level, lax.full_like(level, 0))
        within = runs.sums(lax.exp(runs.cut(part.x, axes, finite)), axes)
        return _sum(within * lax.exp(part.level_less_c(runs, axes, level)), runs.counted(axes))

    # ---- places of extrema

    def split_arg(self, eqn, operands):
        runs, (x,) = self.runs_of(eqn), operands
        (axis,), dtype = eqn.params["axes"], eqn.params["index_dtype"]
        if runs is None or x.shape[axis] > np.iinfo(dtype).max:
            return None
        reducer, worst = ARGS[eqn.primitive.name]
        cut = in_chunks(x, axis, runs.block, worst(x.dtype))
        best = reducer.bind(cut, axes=(axis + 1,))
        place = eqn.primitive.bind(cut, axes=(axis + 1,), index_dtype=dtype)
        first = eqn.primitive.bind(best, axes=(axis,), index_dtype=dtype)
        run = lax.broadcasted_iota(dtype, place.shape, axis)
        chosen = lax.eq(
            run,
            lax.broadcast_in_dim(first, run.shape, [dim for dim in range(run.ndim) if dim != axis]),
        )
        at = place + run * np.asarray(runs.block, dtype)
        return [_sum(lax.select(chosen, at, lax.full_like(at, 0)), (axis,))]


def _sum(x: jax.Array, axes) -> jax.Array:
    return lax.reduce_sum_p.bind(x, **reducer_params("reduce_sum", tuple(axes)))


def _has_short_rows(shape, axes, longest: int) -> bool:
    """Whether each result reduces several rows, each of at most `longest` elements along the last dimensions."""
    result_axes = [axis for axis in range(len(shape)) if axis not in axes and shape[axis] > 1]
    if not result_axes or not any(axis < result_axes[-1] and shape[axis] > 1 for axis in axes):
        return False
    return 1 < math.prod(shape[result_axes[-1] + 1 :]) <= longest


def _reduced_twice(jaxpr: jex.Jaxpr) -> set:
    """Arrays x that only sums of f(x - c) use, and the f(x - c): chunks save a second pass over x."""
    # Value -> whether only sums, and the functions summed, use it.
    summed = dict.fromkeys(
        (atom for atom in jaxpr.outvars if not isinstance(atom, jex.Literal)), False
    )
    statistics: set = set()
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        is_term = name == "reduce_sum" or (name in SUMMED and summed.get(eqn.outvars[0], False))
        for var in eqn.invars:
            if not isinstance(var, jex.Literal):
                summed[var] = summed.get(var, True) and is_term
                statistics |= {var} if name in STATISTICS else set()
    twice: set = set()
    for eqn in jaxpr.eqns:
        x = eqn.invars[0] if eqn.invars else None
        if x is None or isinstance(x, jex.Literal):
            continue
        if eqn.primitive.name == "sub" and x in statistics:
            twice |= {x, eqn.outvars[0]} if summed.get(eqn.outvars[0], False) else set()
        elif eqn.primitive.name in SUMMED and x in twice and summed.get(x, False):
            twice.add(eqn.outvars[0])
    return twice
