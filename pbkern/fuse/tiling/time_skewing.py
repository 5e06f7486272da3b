"""Time skewing: steps of a stencil as a wavefront, one pass over memory.

Each step follows the previous one by a few rows.

    rows of step 1      . . . . . . #              while rows enter the cache, each step computes its next few rows:
    rows of step 2      . . . . #                  the rows of the step before are there already. As every step stores over
    rows of step 3      . . #                      what later rows no longer need, all steps share the same rows of cache

A wavefront takes whole rows, so that only programs that share a border of rows repeat work, and as
many steps as the cache holds rows for. fuse/emit/skewed_kernel.py emits it;
fuse/time_tiling/overlapped.py chooses between it and overlapped tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import cast

from jax.extend import core as jex

from pbkern.core.affine import Affine
from pbkern.core.errors import UnsupportedOp
from pbkern.core.jax_types import array_aval
from pbkern.core.lazy_dataclass import dataclass
from pbkern.fuse.access.blocks import BlockRequests, Unfusable, request
from pbkern.fuse.access.rules import Access, NeedsWhole, Span, whole
from pbkern.fuse.cost.kinds import itemsize, nbytes
from pbkern.fuse.cost.model import Cost, CostModel
from pbkern.fuse.cost.roofline import overlapped

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


@dataclass(frozen=True)
class Reads:
    """The blocks of operands that `rows` rows of a step's results need; the first row is symbol 0."""

    rows: int
    requests: BlockRequests
    results: tuple[Access, ...]

    @classmethod
    def of(cls, body: jex.Jaxpr, axes: Sequence[int], rows: int) -> Reads:
        """`axes`: each result's dimension of rows. Raises NeedsWhole, UnsupportedOp, Unfusable."""
        # Results of a wavefront's step are variables (_all_have_rows).
        variables = cast(list[jex.Var], body.outvars)
        results = tuple(_rows_of(var, axis, rows) for var, axis in zip(variables, axes))
        return cls(rows, request(body.eqns, list(zip(variables, results))), results)

    def hulls(self, var) -> list[Access]:
        return list(self.requests.hulls.get(var, ()))


def _rows_of(var, axis: int, rows: int) -> Access:
    return tuple(
        Span(ROW, rows) if dim == axis else whole(size) for dim, size in enumerate(var.aval.shape)
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
        blocks that one row reads.
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
        return [var for var in self.body.jaxpr.invars if self.reads.hulls(var)]

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
        """Are the rows before the first one the last ones?"""
        return self.axis(self.carries[0]) in self.periodic[self.counts[0]]

    @cached_property
    def reach(self) -> tuple[int, int]:
        """(low <= 0, high >= 0): a row of a step needs rows from low to high around it of the step before (the halo)."""
        spans = [
            hull[self.axis(carry)] for carry in self.carries for hull in self.reads.hulls(carry)
        ]
        low = min([0, *(span.start.const for span in spans)])
        return low, max([0, *(span.start.const + span.size - self.reads.rows for span in spans)])

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
        for hull in self.reads.hulls(var):
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
    carries = body.jaxpr.invars[counts[0] : sum(counts)]
    shortest = min(var.aval.shape[-along] for var in carries)
    axes = [*(var.aval.ndim - along for var in carries), *(part.axis for part in stored)]
    borders = tuple(map(frozenset, periodic))
    for rows in (count for count in ROWS if count <= shortest):
        try:
            reads, alone = (Reads.of(body.jaxpr, axes, count) for count in (rows, 1))
        except (NeedsWhole, Unfusable, UnsupportedOp, NotImplementedError):
            break
        wave = Wavefront(body, counts, borders, along, 1, rows, reads, alone, machine, stored)
        # Rows that do not depend on others need no wavefront: they are tiles without halos.
        if (
            wave.lag
            and all(_is_wavefront(wave, row_reads) for row_reads in (reads, alone))
            and _wraps_once(wave)
        ):
            yield from _sized(wave, length, machine)


def _all_have_rows(
    body: jex.Jaxpr, counts: tuple[int, int], periodic: Sequence[set], along: int
) -> bool:
    """Do all carries have rows along the front, and all wrap around, or none?"""
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
    """Are carries read by rows, and other operands by rows or at one place?"""
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
            if cost is not None:
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
    return list(zip(wave.body.jaxpr.outvars, wave.reads.results))
