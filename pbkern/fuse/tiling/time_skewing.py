"""Time skewing: steps of a stencil as a wavefront, one pass over memory.

Each step follows the previous one by a few rows.

    rows of step 1      . . . . . . #              while rows enter the cache, each step computes its next few rows:
    rows of step 2      . . . . #                  the rows of the step before are there already. As every step stores over
    rows of step 3      . . #                      what later rows no longer need, all steps share the same rows of cache

A wavefront takes whole rows, so that only programs that share a border of rows repeat work, and as
many steps as the cache holds rows for. fuse/emit/skewed_kernel.py emits it;
fuse/time_tiling/overlapped.py chooses between it and overlapped tiles.

Borders may be set from rows at fixed places: u.at[0].set(u[1]). Then the first and the last few rows
are blocks of their own, whose equations are asked for at those rows; the rows between need one case
of each select between borders and the rest (decided_cases.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any, cast

from jax.extend import core as jex

from pbkern.core.affine import Affine
from pbkern.core.errors import UnsupportedOp
from pbkern.core.jax_types import array_aval
from pbkern.core.lazy_dataclass import dataclass
from pbkern.fuse.access.blocks import BlockRequests, Step, Unfusable, request, step_of
from pbkern.fuse.access.rules import Access, NeedsWhole, Span, whole
from pbkern.fuse.cost.kinds import itemsize, nbytes
from pbkern.fuse.cost.model import Cost, CostModel
from pbkern.fuse.cost.roofline import overlapped

from .decided_cases import DecidedCases

# Rows that a step computes at a time: a register tile takes four; more rows repeat less of what a
# step stores in between.
ROWS = (4, 8, 16)
# The part of near memory that the wavefront may fill: rows on their way from and to memory pass
# through as well.
NEAR_SHARE = 0.95
# A wavefront may take as little as this part of the steps that fit, if then no shorter one must
# follow the last.
EVEN_SHARE = 0.5
# Most rows, relative to its own, that a program's first step computes beyond them, as its
# neighbours do.
REPEATED_ROWS = 0.5
# Rows are whole in the last dimension, so wavefronts move along an earlier one.
ALONG = (2, 3)  # counted from the end
ROW = Affine.symbol(0)
# Most rows at either end of an array that a step makes apart.
MOST_BORDER_ROWS = 4


@dataclass(frozen=True)
class Reads:
    """The blocks of operands that some rows of a step's results need.

    `rows` of them; the first is symbol 0, or `start`. Results that have no such row have no access.
    """

    rows: int
    requests: BlockRequests
    results: tuple[Access | None, ...]
    start: int | None = None

    @classmethod
    def of(
        cls,
        body: jex.Jaxpr,
        axes: Sequence[int],
        rows: int,
        step_for: Callable[[Any, Access], Step] = step_of,
    ) -> Reads:
        """`axes`: each result's dimension of rows. Raises NeedsWhole, UnsupportedOp, Unfusable.

        `step_for`: the step that computes a block, such as that of one case (decided_cases.py).
        """
        # Results of a wavefront's step are variables (_all_have_rows).
        variables = cast(list[jex.Var], body.outvars)
        span = Span(ROW, rows)
        results = [_with_rows(var, axis, span) for var, axis in zip(variables, axes)]
        outputs = list(zip(variables, results))
        return cls(rows, request(body.eqns, outputs, step_for), tuple(results))

    @classmethod
    def at(cls, body: jex.Jaxpr, axes: Sequence[int], start: int, end: int) -> Reads:
        """Rows from `start` to `end`, of results that have them. Raises as `of` does."""
        variables = cast(list[jex.Var], body.outvars)
        results: list[Access | None] = []
        for var, axis in zip(variables, axes):
            size = min(end, array_aval(var).shape[axis]) - start
            span = Span(Affine((), start), size)
            results.append(_with_rows(var, axis, span) if size > 0 else None)
        outputs = [(var, access) for var, access in zip(variables, results) if access is not None]
        step = DecidedCases(body.eqns).step
        return cls(end - start, request(body.eqns, outputs, step), tuple(results), start)

    def hulls(self, var) -> list[Access]:
        return list(self.requests.hulls.get(var, ()))


def _with_rows(var, axis: int, rows: Span) -> Access:
    return tuple(
        rows if dim == axis else whole(size) for dim, size in enumerate(array_aval(var).shape)
    )


@dataclass(frozen=True)
class StoredRows:
    """The part of a value that a wavefront stores of each step: `axis` is its dimension of rows, the hull is constant."""

    axis: int
    hull: Access

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(span.size for span in self.hull)


@dataclass(frozen=True)
class Wavefront:
    """A wavefront of `steps` steps.

    Attributes:
      body: one step, (*consts, *carries, *elements of xs) -> (*carries, *stored values); `counts` of
        consts and carries.
      periodic: per operand of the body, the dimensions along which elements beyond an edge come
        from the other side.
      along: the dimension of all carries along which the wavefront moves, counted from the end.
        Carries may differ in length (on staggered grids they do); nothing reads what a step
        computes beyond a carry's end.
      height: rows that one program makes. reads: blocks that a few rows of a step read. alone:
        blocks that one row reads. upper, lower: blocks that the first and the last rows read, if
        they are made apart. The first rows are made when their last one is due, and the last rows
        when their first one is.
      machine: for which its rows are placed.
      stored: what is stored of each step's values behind the carries.
    """

    body: jex.ClosedJaxpr
    counts: tuple[int, int]
    periodic: tuple[frozenset, ...]
    along: int
    steps: int
    height: int
    reads: Reads
    alone: Reads
    machine: CostModel = field(repr=False, compare=False)
    stored: tuple[StoredRows, ...] = ()
    upper: Reads | None = None
    lower: Reads | None = None

    @property
    def consts(self) -> list:
        return self.body.jaxpr.invars[: self.counts[0]]

    @property
    def carries(self) -> list:
        return self.body.jaxpr.invars[self.counts[0] : sum(self.counts)]

    @property
    def elements(self) -> list:
        return self.body.jaxpr.invars[sum(self.counts) :]

    @cached_property
    def operands(self) -> list:
        """Operands of the body that it reads."""
        return [var for var in self.body.jaxpr.invars if self.hulls(var)]

    def hulls(self, var) -> list[Access]:
        """Blocks of an operand that any rows read."""
        parts = (self.reads, self.alone, self.upper, self.lower)
        return [hull for part in parts if part is not None for hull in part.hulls(var)]

    @cached_property
    def between(self) -> tuple[int, int]:
        """(first, one past last) row of those that are not made apart."""
        upper = self.upper.rows if self.upper else 0
        return upper, self.extent if self.lower is None else cast(int, self.lower.start)

    def axis(self, var) -> int:
        return len(var.aval.shape) - self.along

    def rows_of(self, var) -> int:
        return var.aval.shape[self.axis(var)]

    @cached_property
    def extent(self) -> int:
        """Rows of the longest carry."""
        return max(map(self.rows_of, self.carries))

    @cached_property
    def least_extent(self) -> int:
        """Rows of the shortest carry."""
        return min(map(self.rows_of, self.carries))

    @cached_property
    def wraps(self) -> bool:
        """Whether the rows before the first one are the last ones."""
        return self.axis(self.carries[0]) in self.periodic[self.counts[0]]

    @cached_property
    def reach(self) -> tuple[int, int]:
        """(low <= 0, high >= 0): a row of a step needs rows from low to high around it of the step before (the halo)."""
        spans = self._spans(self.reads)
        low = min([0, *(span.start.const for span in spans)])
        high = max([0, *(span.start.const + span.size - self.reads.rows for span in spans)])
        first, end = self.between
        if self.upper is not None:
            high = max([high, *(s.start.const + s.size - first for s in self._spans(self.upper))])
        if self.lower is not None:
            low = min([low, *(span.start.const - end for span in self._spans(self.lower))])
            high = max(high, self.lower.rows - 1)
        return low, high

    def _spans(self, reads: Reads) -> list[Span]:
        """The rows of carries that are read."""
        return [hull[self.axis(carry)] for carry in self.carries for hull in reads.hulls(carry)]

    @property
    def lag(self) -> int:
        """Rows by which a step follows the one before."""
        return self.reach[1] - self.reach[0]

    @property
    def programs(self) -> int:
        return -(-self.extent // self.height)

    def made_by_program(self, var) -> Access:
        """The part of a new carry that one program makes."""
        axis = self.axis(var)
        return tuple(
            Span(Affine.symbol(0, self.height), self.height) if dim == axis else whole(size)
            for dim, size in enumerate(var.aval.shape)
        )

    def margins(self, var) -> list[tuple[int, int]]:
        """Per dimension of a carry, elements before and behind it that a step reads; none along the front."""
        margins = [(0, 0)] * len(var.aval.shape)
        for hull in self.hulls(var):
            for dim, (span, size) in enumerate(zip(hull, var.aval.shape)):
                if dim != self.axis(var):
                    low, high = margins[dim]
                    margins[dim] = (
                        max(low, -span.start.const),
                        max(high, span.start.const + span.size - size),
                    )
        return margins


def wavefronts(
    body: jex.ClosedJaxpr,
    counts: tuple[int, int],
    periodic: Sequence[set],
    length: int,
    machine: CostModel,
    along: int,
    stored: tuple[StoredRows, ...] = (),
) -> Iterator[tuple[Wavefront, Cost]]:
    """Wavefronts of at most `length` steps in one dimension, each with its price."""
    if not _all_have_rows(body.jaxpr, counts, periodic, along):
        return
    borders = tuple(map(frozenset, periodic))
    making = _Fronts(body, counts, borders, along, machine, stored)
    for rows in (count for count in ROWS if count <= making.shortest):
        wave = making.front(rows)
        # Rows that do not depend on others, however many are made at a time, need no wavefront: they are tiles without halos.
        if wave is not None and not wave.lag:
            return
        if wave is not None and _wraps_once(wave):
            yield from _sized(wave, length, machine)


class _Fronts:
    """Wavefronts of one step over a body, without a height; arguments as of `wavefronts`."""

    def __init__(
        self,
        body: jex.ClosedJaxpr,
        counts: tuple[int, int],
        periodic: tuple[frozenset, ...],
        along: int,
        machine: CostModel,
        stored: tuple[StoredRows, ...],
    ) -> None:
        self.body, self.counts, self.periodic, self.along = body, counts, periodic, along
        self.machine, self.stored = machine, stored
        carries = body.jaxpr.invars[counts[0] : sum(counts)]
        extents = [array_aval(var).shape[-along] for var in carries]
        self.shortest, self.longest = min(extents), max(extents)
        self.axes = [*(array_aval(var).ndim - along for var in carries), *(p.axis for p in stored)]
        self.apart: tuple[int, int] | None = None  # rows made apart, once it is decided

    def front(self, rows: int) -> Wavefront | None:
        """The wavefront of the least lag that makes `rows` rows at a time."""
        plain = self.with_rows_apart(rows, 0, 0)
        if self.apart is None:
            self.apart = self.rows_apart(plain, rows)
        return plain if self.apart == (0, 0) else self.with_rows_apart(rows, *self.apart)

    def rows_apart(self, plain: Wavefront | None, rows: int) -> tuple[int, int]:
        """Numbers of rows at both ends that are best made apart from the others."""
        most = MOST_BORDER_ROWS
        is_best = plain is not None and (plain.wraps or not plain.lag)
        if is_best or self.shortest < 2 * most + rows:
            return 0, 0
        widest = self.between(rows, most, most)
        if widest is None or (plain is not None and plain.lag <= widest.lag):
            return 0, 0
        # Which rows the ends must hold for the others to be alike does not depend on the other end.
        counts = range(most + 1)
        above = next(n for n in counts if _as_short(self.between(rows, n, most), widest))
        below = next(n for n in counts if _as_short(self.between(rows, most, n), widest))
        pairs = [(upper, lower) for upper in counts[above:] for lower in counts[below:]]
        fronts = {pair: self.with_ends(widest, *pair) for pair in pairs}
        lags = {pair: front.lag for pair, front in fronts.items() if front is not None}
        if plain is not None:
            lags[0, 0] = plain.lag
        return min(lags, key=lambda pair: (lags[pair], sum(pair)), default=(0, 0))

    def with_rows_apart(self, rows: int, above: int, below: int) -> Wavefront | None:
        wave = self.between(rows, above, below)
        return None if wave is None else self.with_ends(wave, above, below)

    def between(self, rows: int, above: int, below: int) -> Wavefront | None:
        """The wavefront over all rows but the first `above` and the last `below`, if there is one."""
        jaxpr, last = self.body.jaxpr, self.shortest - below if below else self.longest
        if above > last - rows:
            return None
        try:
            if above or below:
                reads, alone = (
                    Reads.of(
                        jaxpr,
                        self.axes,
                        count,
                        DecidedCases(jaxpr.eqns, (above, last - count)).step,
                    )
                    for count in (rows, 1)
                )
            else:
                reads, alone = (Reads.of(jaxpr, self.axes, count) for count in (rows, 1))
        except (NeedsWhole, Unfusable, UnsupportedOp, NotImplementedError):
            return None
        wave = Wavefront(
            self.body,
            self.counts,
            self.periodic,
            self.along,
            1,
            rows,
            reads,
            alone,
            self.machine,
            self.stored,
        )
        return wave if all(_is_wavefront(wave, part) for part in (reads, alone)) else None

    def with_ends(self, wave: Wavefront, above: int, below: int) -> Wavefront | None:
        """The wavefront with the first `above` and the last `below` rows made apart."""
        jaxpr, last = self.body.jaxpr, self.shortest - below
        try:
            upper = Reads.at(jaxpr, self.axes, 0, above) if above else None
            lower = Reads.at(jaxpr, self.axes, last, self.longest) if below else None
        except (NeedsWhole, Unfusable, UnsupportedOp, NotImplementedError):
            return None
        ends = [part for part in (upper, lower) if part is not None]
        whole_wave = replace(wave, upper=upper, lower=lower)
        return whole_wave if all(_is_in_bounds(wave, part) for part in ends) else None


def _as_short(wave: Wavefront | None, other: Wavefront) -> bool:
    return wave is not None and wave.lag <= other.lag


def _all_have_rows(
    body: jex.Jaxpr, counts: tuple[int, int], periodic: Sequence[set], along: int
) -> bool:
    """Whether all carries have rows along the front, and either all or none of them wrap around."""
    carries = [array_aval(var) for var in body.invars[counts[0] : sum(counts)]]
    if (
        not carries
        or any(isinstance(var, jex.Literal) for var in body.outvars)
        or any(carry.ndim < along for carry in carries)
    ):
        return False
    extents = {carry.shape[-along] for carry in carries}
    wrap = {carry.ndim - along in dims for carry, dims in zip(carries, periodic[counts[0] :])}
    return (
        len(wrap) == 1
        and (len(extents) == 1 or wrap == {False})
        and min(carry.size for carry in carries) > 0
    )


def _is_wavefront(wave: Wavefront, reads: Reads) -> bool:
    """Whether carries are read by rows, and other operands by rows or at one place."""
    for k, var in enumerate(wave.body.jaxpr.invars):
        carried = wave.counts[0] <= k < sum(wave.counts)
        for hull in reads.hulls(var):
            moving = [axis for axis, span in enumerate(hull) if not span.is_const]
            if any(hull[dim].start.terms != ROW.terms for dim in moving) or len(moving) > 1:
                return False
            if carried and moving != [wave.axis(var)]:
                return False
            if not carried and any(
                not 0 <= span.start.const <= span.start.const + span.size <= size
                for axis, (span, size) in enumerate(zip(hull, var.aval.shape))
                if axis not in moving
            ):
                return False
    return True


def _is_in_bounds(wave: Wavefront, reads: Reads) -> bool:
    """Tells whether rows at one end read operands within their bounds; carries may be continued along their rows."""
    return all(
        span.start.const >= 0 and span.start.const + span.size <= size
        for var in wave.body.jaxpr.invars
        for hull in reads.hulls(var)
        for dim, (span, size) in enumerate(zip(hull, array_aval(var).shape))
        if var not in wave.carries or dim == wave.axis(var)
    )


def _ends_have_one_program(wave: Wavefront) -> bool:
    """Tells whether rows that are made apart are computed by the first and by the last program alone."""
    low, high = wave.reach
    first, end = wave.between
    apart = wave.upper is not None or wave.lower is not None
    return (
        not apart
        or wave.programs == 1
        or (
            wave.height + wave.steps * low >= first
            and (wave.programs - 1) * wave.height + wave.steps * high <= end
        )
    )


def _wraps_once(wave: Wavefront) -> bool:
    """Tells whether reads beyond an edge are at most one extent away, with periodic borders."""
    dims = zip(wave.carries, wave.periodic[wave.counts[0] :])
    return all(
        max(wave.margins(var)[dim]) <= var.aval.shape[dim]
        for var, periodic in dims
        for dim in periodic
    )


def _sized(wave: Wavefront, length: int, machine: CostModel) -> Iterator[tuple[Wavefront, Cost]]:
    """Varies a wavefront: rows for one core or for each, and as many steps as the cache holds and neighbours may repeat."""
    row_bytes = sum(_row_bytes(wave, carry) for carry in wave.carries)
    room = int(NEAR_SHARE * machine.near_bytes / max(row_bytes, 1)) - wave.reads.rows
    for programs in dict.fromkeys((1, machine.cores)):
        height = -(-wave.extent // programs // wave.reads.rows) * wave.reads.rows
        shared = REPEATED_ROWS * height if programs > 1 else wave.extent if wave.wraps else math.inf
        most = min(length, *(limit // wave.lag for limit in (room, shared)))
        if most >= 2 and -(-wave.least_extent // height) == -(-wave.extent // height):
            sized = replace(wave, steps=_even(int(most), length), height=height)
            cost = price(sized, machine)
            if cost is not None and _ends_have_one_program(sized):
                yield sized, cost


def _even(most: int, length: int) -> int:
    """A number of steps that divides the loop's, if not much less than fit; else one that cuts the loop evenly."""
    divisor = next(n for n in range(most, 0, -1) if length % n == 0)
    return divisor if divisor >= EVEN_SHARE * most else -(-length // -(-length // most))


def _row_bytes(wave: Wavefront, var) -> int:
    sizes = [size + low + high for size, (low, high) in zip(var.aval.shape, wave.margins(var))]
    return math.prod(size for axis, size in enumerate(sizes) if axis != wave.axis(var)) * itemsize(
        var
    )


def price(wave: Wavefront, machine: CostModel) -> Cost | None:
    """One front over the whole array: rows of each step, repeated ones too, against carries from memory and back.

    None if a step repeats what is too expensive.
    """
    programs = wave.programs
    one = machine.kernel_cost(
        wave.reads.requests, _results(wave), (-(-wave.extent // wave.reads.rows),)
    )
    if one is None:
        return None
    shared = programs if wave.wraps else programs - 1
    repeated = 1 + shared * wave.lag * wave.steps / 2 / wave.extent
    idle = machine.cores / min(programs, machine.cores)
    arithmetic, trips = (
        one.compute,
        2 * sum(nbytes(carry.aval) for carry in wave.carries) / machine.near_bandwidth,
    )
    compute = overlapped(arithmetic, trips) * idle * wave.steps * repeated
    stored = wave.steps * sum(
        math.prod(part.shape) * itemsize(var)
        for part, var in zip(wave.stored, wave.body.jaxpr.outvars[len(wave.carries) :])
    )
    moved = stored + sum(nbytes(var.aval) for var in (*wave.operands, *wave.carries))
    memory = 2 * stored / machine.far_bandwidth(stored) + sum(
        3 * nbytes(carry.aval) / machine.far_bandwidth(nbytes(carry.aval)) for carry in wave.carries
    )
    seconds = overlapped(compute, memory) + machine.launch_seconds
    front = int(
        sum(_row_bytes(wave, carry) for carry in wave.carries)
        * (wave.lag * wave.steps + wave.reads.rows)
    )
    return Cost(
        seconds,
        compute,
        memory,
        moved,
        one.flops * wave.steps * repeated,
        one.recompute * repeated,
        front,
        front,
        programs,
        max(one.limit, moved / machine.memory_bandwidth),
    )


def _results(wave: Wavefront) -> list[tuple[jex.Var, Access]]:
    # A step's rows at no fixed place are in all of its results.
    return list(zip(wave.body.jaxpr.outvars, cast(tuple[Access, ...], wave.reads.results)))
