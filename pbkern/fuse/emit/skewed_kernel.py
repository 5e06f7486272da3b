"""Wave -> dsl.Kernel: each program moves a wavefront over its rows, with all steps in one scratch buffer per carry.

Rows count from the first that a program reads; a step's rows count from the first row that they
need. Row d of a step needs rows d, d + 1, ... d + lag of the step before, and replaces row d:
elements are stored over what only earlier rows needed. The scratch holds the rows between the first
step and the last, and as many more; then the wavefront moves back to its start.

The first and the last rows may be made apart, by bodies of their own. The first rows wait for their
last one, so that everything they need is there; the scratch has places in front of its start for
those that wait. The last rows are made with the first of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jax_types import array_aval
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.kernel import ArrayType, Kernel
from pbkern.dsl.primitives.grid import ds, program_id, when
from pbkern.dsl.trace import trace_kernel
from pbkern.fuse.access.blocks import BodyContext, run_steps
from pbkern.fuse.access.rules import Access, Span
from pbkern.fuse.tiling.time_skewing import Reads, StoredRows, Wavefront

from .group_kernel import array_type

I32 = np.int32
# Memory lines by which rows are lengthened at most.
MOST_LONGER = 64


def emit_wavefront(name: str, wave: Wavefront, compiler_params: dict) -> Kernel:
    """The kernel that computes the carries after `wave.steps` steps from `wave.operands`; xs have `wave.steps` elements."""
    return trace_kernel(
        _SkewedBody(wave).body,
        in_types=[_operand_type(wave, operand) for operand in wave.operands],
        out_types=[array_type(carry.aval) for carry in wave.carries]
        + [
            ArrayType((wave.steps, *part.shape), np.dtype(var.aval.dtype))
            for part, var in zip(wave.stored, wave.body.jaxpr.outvars[len(wave.carries) :])
        ],
        grid=(wave.programs,),
        scratch_shapes=[_Ring.of(wave, carry).type for carry in wave.carries],
        compiler_params=compiler_params,
        name=name,
        x64=True,
        source="",
    )


def _operand_type(wave: Wavefront, var) -> ArrayType:
    lead = (wave.steps,) if var in wave.elements else ()
    return ArrayType((*lead, *var.aval.shape), np.dtype(var.aval.dtype))


@dataclass(frozen=True)
class _Ring:
    """The wavefront's rows of one carry.

    `first`: the index of its first element, except along the front.
    """

    v: jex.Var
    axis: int
    first: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, wave: Wavefront, var) -> _Ring:
        axis, lanes = (
            wave.axis(var),
            wave.machine.sizes.line_bytes // np.dtype(var.aval.dtype).itemsize,
        )
        first, shape = [], []
        for dim, (extent, (low, high)) in enumerate(zip(var.aval.shape, wave.margins(var))):
            last = dim == len(var.aval.shape) - 1
            low = -(-low // lanes) * lanes if last else low
            size = -(-(low + extent + high) // lanes) * lanes if last else low + extent + high
            first.append(low)
            shape.append(_rows(wave) if dim == axis else size)
        stride = (
            math.prod(shape[axis + 1 : -1]) * np.dtype(var.aval.dtype).itemsize
        )  # of rows, per element of the last axis
        wider = range(shape[-1], shape[-1] + MOST_LONGER * lanes, lanes)
        shape[-1] = next(
            (length for length in wider if not wave.machine.rows_alias(length * stride)), shape[-1]
        )
        return cls(var, axis, tuple(first), tuple(shape))

    @property
    def type(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, array_aval(self.v).dtype)

    def at(self, slot, hull: Access) -> tuple:
        """Index of a block whose first row is in `slot`."""
        return tuple(
            ds(slot, span.size) if dim == self.axis else ds(margin + span.start.const, span.size)
            for dim, (margin, span) in enumerate(zip(self.first, hull))
        )

    def line(self, slot, count: int, dim: int, start: int, size: int) -> tuple:
        """Index of a part of rows along `dim`, with the margins of the others."""
        part = {self.axis: ds(slot, count), dim: ds(start, size)}
        return tuple(part.get(position, slice(None)) for position in range(len(self.shape)))

    def rows(self, slot, count: int) -> tuple:
        """Index of whole rows, without margins."""
        return tuple(
            ds(slot, count) if dim == self.axis else ds(margin, size)
            for dim, (margin, size) in enumerate(zip(self.first, array_aval(self.v).shape))
        )


@dataclass(frozen=True)
class _RowsOfValue:
    """Computed rows, of which a part is stored."""

    value: jax.Array
    part: StoredRows

    @property
    def count(self) -> int:
        return self.value.shape[self.part.axis]

    def take(self, number, size: int):
        hull, axis = self.part.hull, self.part.axis
        starts = [int(number) if k == axis else s.start.const for k, s in enumerate(hull)]
        sizes = [size if k == axis else s.size for k, s in enumerate(hull)]
        return lax.slice(self.value, starts, [a + b for a, b in zip(starts, sizes)])


@dataclass(frozen=True)
class _RowsOfRing:
    """Rows of a carry, from `slot` on, of which a part is stored."""

    scratch: Any
    ring: _Ring
    slot: jax.Array
    count: int
    part: StoredRows

    def take(self, number, size: int):
        hull = tuple(
            Span(span.start, size) if dim == self.ring.axis else span
            for dim, span in enumerate(self.part.hull)
        )
        return self.scratch[self.ring.at(self.slot + number, hull)]


def _panel(wave: Wavefront) -> int:
    """Turns, of a few rows each, after which the wavefront moves back to the scratch buffer's start."""
    turns = _turns(wave)
    panel = -(-wave.lag * wave.steps // wave.reads.rows)
    return turns if turns <= 2 * panel else panel


def _turns(wave: Wavefront) -> int:
    """Turns until the last step has made all rows of a program."""
    return -(-(wave.height + wave.lag * wave.steps) // wave.reads.rows)


def _waiting(wave: Wavefront) -> int:
    """Rows that wait for a later one: the scratch buffer's start has places for them."""
    return wave.upper.rows - 1 if wave.upper else 0


def _rows(wave: Wavefront) -> int:
    return _waiting(wave) + wave.lag * wave.steps + _panel(wave) * wave.reads.rows


class _SkewedBody:
    """The body of the kernel, as methods that trace its parts."""

    def __init__(self, wave: Wavefront):
        self.wave = wave
        self.rings = [_Ring.of(wave, carry) for carry in wave.carries]
        self.low, _ = wave.reach

    def body(self, *refs) -> None:
        wave, at = self.wave, len(self.wave.operands)
        carries, results = len(wave.carries), len(wave.carries) + len(wave.stored)
        self.given = dict(zip(wave.operands, refs))
        self.results, self.scratch = refs[at : at + carries], refs[at + results :]
        self.parts = refs[at + carries : at + results]
        self.base = program_id(0) * I32(wave.height)
        panels = -(-_turns(wave) // _panel(wave))

        def panel(panel_index, _):
            _loop(
                _panel(wave),
                lambda in_panel: self.turn(panel_index * I32(_panel(wave)) + in_panel, in_panel),
            )
            if panels > 1:
                self.go_back()
            return _

        lax.fori_loop(I32(0), I32(panels), panel, None)

    # ---------------------------------------------------------------- a turn

    def turn(self, turns, in_panel) -> None:
        """Rows enter, each step makes some, rows leave.

        `turns`: turns so far, `in_panel`: since it moved back.
        """
        wave, rows = self.wave, self.wave.reads.rows
        behind = wave.lag * wave.steps
        entering = turns * I32(rows)
        slot = in_panel * I32(rows) + I32(behind + _waiting(wave))
        first = self.base + I32(wave.steps * self.low)

        @when(entering < wave.height + behind)
        def _():
            self.enter(first + entering, slot)

        def step(k):
            back = (k + I32(1)) * I32(wave.lag)
            distance = entering - back
            row = first + distance - (k + I32(1)) * I32(self.low)
            needed = (distance > -rows) & (distance < I32(wave.height + behind) - back)
            if not wave.wraps:
                needed &= (row > -rows) & (row < wave.extent)

            @when(needed)
            def _():
                self.make(k, row, slot - back)

        _loop(wave.steps, step)
        done = entering - I32(behind)

        @when(done > -rows)
        def _():
            self.leave(done, slot - I32(behind))

    def go_back(self) -> None:
        """Moves the rows that are still needed to the scratch buffer's start."""
        wave = self.wave
        far, waiting = _panel(wave) * wave.reads.rows, _waiting(wave)
        for ring, scratch in zip(self.rings, self.scratch):

            def move(to, count: int, ring=ring, scratch=scratch):
                old, new = (
                    _along(len(ring.shape), ring.axis, ds(start, count))
                    for start in (to + I32(far), to)
                )
                scratch[new] = scratch[old]

            # First those in front, which the last step's waiting rows are made from: the others go over their old places.
            if waiting:
                move(I32(0), waiting)
            _loop(
                wave.steps,
                lambda chunk, move=move: move(chunk * I32(wave.lag) + I32(waiting), wave.lag),
            )

    # ---------------------------------------------------------------- rows in and out

    def enter(self, row, slot) -> None:
        """Reads rows of the carries; with periodic borders, rows beyond the edges from the other side."""
        wave = self.wave

        def read(var, ring, scratch, row, slot, count) -> None:
            scratch[ring.rows(slot, count)] = self.given[var][
                _along(var.aval.ndim, wave.axis(var), ds(row, count))
            ]
            self.wrap(ring, scratch, slot, count)

        for carry, ring, scratch in zip(wave.carries, self.rings, self.scratch):
            if carry in self.given:
                self.by_rows(
                    row,
                    slot,
                    wave.rows_of(carry),
                    lambda *at, v=carry, r=ring, s=scratch: read(v, r, s, *at),
                )

    def leave(self, dim, slot) -> None:
        """Writes rows of the last step."""
        wave = self.wave
        row, last = self.base + dim, self.base + I32(wave.height)

        def write(result, ring, scratch, row, slot, count) -> None:
            result[_along(len(ring.shape), ring.axis, ds(row, count))] = scratch[
                ring.rows(slot, count)
            ]

        # Rows that wait leave with the one that they wait for.
        upper = wave.upper.rows if wave.upper else 0
        begin = jnp.maximum(self.base, I32(upper)) if upper else self.base
        for ring, scratch, result in zip(self.rings, self.scratch, self.results):
            end = jnp.minimum(last, I32(wave.rows_of(ring.v)))
            leaving = functools.partial(write, result, ring, scratch)
            self.by_rows(row, slot, end, leaving, begin, wraps=False)
            if upper:
                ahead = I32(upper - 1) - row

                @when((ahead >= 0) & (ahead < wave.reads.rows) & (self.base < upper))
                def _(leaving=leaving, ahead=ahead):
                    leaving(I32(0), slot + ahead - I32(upper - 1), upper)

    def by_rows(self, row, slot, end, use: Callable, begin=0, wraps: bool = True) -> None:
        """`use(row, slot, count)` for all rows at once if they are in [begin, end), else for each row that is."""
        rows, inside = (
            self.wave.reads.rows,
            (row >= begin) & (row + I32(self.wave.reads.rows) <= end),
        )

        @when(inside)
        def _():
            use(row, slot, rows)

        @when(~inside)
        def _():
            def one(number) -> None:
                if wraps and self.wave.wraps:
                    use(self.wrapped(row + number), slot + number, 1)
                else:
                    when((row + number >= begin) & (row + number < end))(
                        lambda: use(row + number, slot + number, 1)
                    )

            _loop(rows, one)

    def wrapped(self, row):
        """A row beyond the edges as that on the other side."""
        wave = self.wave
        beyond = -(wave.steps + 1) * self.low + wave.reads.rows
        return lax.rem(row + I32(-(-beyond // wave.extent) * wave.extent), I32(wave.extent))

    def wrap(self, ring: _Ring, scratch, slot, count: int) -> None:
        """Continues rows beyond their ends where borders are periodic."""
        dims = self.wave.periodic[self.wave.body.jaxpr.invars.index(ring.v)] - {ring.axis}
        for dim in sorted(dims):
            low, high = self.wave.margins(ring.v)[dim]
            extent, first = array_aval(ring.v).shape[dim], ring.first[dim]
            for size, to, origin in (
                (low, first - low, first + extent - low),
                (high, first + extent, first),
            ):
                if size:
                    scratch[ring.line(slot, count, dim, to, size)] = scratch[
                        ring.line(slot, count, dim, origin, size)
                    ]

    # ---------------------------------------------------------------- a step

    def make(self, k, row, slot) -> None:
        """Some rows of step k + 1: at once if everything that they need is in bounds, else one by one."""
        rows, (low, high) = self.wave.reads.rows, self.inside(self.wave.reads)
        if self.wave.wraps and not self.has_rows_of_others():
            self.store(self.wave.reads, k, row, row, slot, clipped=False)
            return
        inside = (row >= low) & (row <= high) if low <= high else np.False_

        @when(inside)
        def _():
            # Constant bounds let tests of rows fold away.
            at = lax.clamp(I32(0), row - I32(low), I32(high - low)) + I32(low)
            self.store(self.wave.reads, k, row, at, slot, clipped=False)

        @when(~inside)
        def _():
            def one(number) -> None:
                if self.wave.wraps:
                    here = row + number
                    self.store(
                        self.wave.alone, k, here, self.wrapped(here), slot + number, clipped=True
                    )
                    return
                first, end = self.wave.between
                when((row + number >= first) & (row + number < end))(
                    lambda: self.store(
                        self.wave.alone, k, row + number, row + number, slot + number, clipped=True
                    )
                )

            # Rows are stored over older ones, in order.
            self.make_upper(k, row, slot)
            _loop(rows, one)
            self.make_lower(k, row, slot)

    def make_upper(self, k, row, slot) -> None:
        """The first rows, if their last one is among those from `row` on."""
        upper = self.wave.upper
        if upper is not None:
            ahead = I32(upper.rows - 1) - row

            @when((ahead >= 0) & (ahead < self.wave.reads.rows))
            def _():
                at = slot + ahead - I32(upper.rows - 1)
                self.store(upper, k, I32(0), I32(0), at, clipped=False)

    def make_lower(self, k, row, slot) -> None:
        """The last rows, if their first one is among those from `row` on."""
        lower = self.wave.lower
        if lower is not None:
            start = I32(self.wave.between[1])
            ahead = start - row

            @when((ahead >= 0) & (ahead < self.wave.reads.rows))
            def _():
                self.store(lower, k, start, start, slot + ahead, clipped=False)

    def inside(self, reads: Reads) -> tuple[int, int]:
        """(first, last) row for which no operand is read beyond its edges."""
        first, end = self.wave.between
        low, high = first, min(end, self.wave.least_extent) - reads.rows
        for var in self.wave.body.jaxpr.invars:
            for hull in reads.hulls(var):
                for span, size in zip(hull, var.aval.shape):
                    if not span.is_const:
                        low, high = (
                            max(low, -span.start.const),
                            min(high, size - span.start.const - span.size),
                        )
        return low, high

    def has_rows_of_others(self) -> bool:
        return any(
            not span.is_const
            for var in (*self.wave.consts, *self.wave.elements)
            for hull in self.wave.reads.hulls(var)
            for span in hull
        )

    def store(self, reads: Reads, k, place, row, slot, clipped: bool) -> None:
        """Stores rows of a step, from `row` on, into `slot`.

        `place`: the row's number along the front, beyond the extent where borders are periodic.
        """
        wave = self.wave
        blocks = {
            (operand, hull): self.block(operand, hull, k, row, slot, clipped)
            for operand in wave.operands
            for hull in reads.hulls(operand)
        }
        get = run_steps(reads.requests, blocks, BodyContext({0: row}))
        results = wave.body.jaxpr.outvars
        # A result that ends before these rows has none of them: its value is None.
        values = [get(var, access) for var, access in zip(results, reads.results)]
        carries = results[: len(self.rings)]
        stored = list(zip(wave.stored, self.parts, results[len(carries) :], values[len(carries) :]))
        for part, ref, var, value in stored:
            if var not in carries and value is not None:
                self.store_part(part, ref, k, place, _RowsOfValue(value, part))
        counts = [
            0 if value is None else value.shape[ring.axis]
            for ring, value in zip(self.rings, values)
        ]
        for ring, scratch, value, count in zip(self.rings, self.scratch, values, counts):
            if count:
                scratch[ring.rows(slot, count)] = value
        for part, ref, var, value in stored:
            if var in carries and value is not None:
                # Read again: a value that two places store would not be computed over the old rows.
                at = carries.index(var)
                rows = _RowsOfRing(self.scratch[at], self.rings[at], slot, counts[at], part)
                self.store_part(part, ref, k, place, rows)
        for ring, scratch, count in zip(self.rings, self.scratch, counts):
            if count:
                self.wrap(ring, scratch, slot, count)

    def store_part(self, part: StoredRows, ref, k, row, rows: _RowsOfValue | _RowsOfRing) -> None:
        """Stores the rows of a value, from `row` on, that belong to the part and to this program."""
        span, count = part.hull[part.axis], rows.count
        first, last = span.start.const, span.start.const + span.size
        begin = jnp.maximum(self.base, I32(first))
        end = jnp.minimum(self.base + I32(self.wave.height), I32(last))
        inside = (row >= begin) & (row + I32(count) <= end)

        def store(number, size: int) -> None:
            at = ds(row + number - I32(first), size)
            ref[(k, *_along(len(part.hull), part.axis, at))] = rows.take(number, size)

        def one(number) -> None:
            when((row + number >= begin) & (row + number < end))(lambda: store(number, 1))

        # Rows at a fixed place are known to be in the part, or not.
        numbers = [
            number
            for number in range(count)
            if not isinstance(row, np.integer) or first <= int(row) + number < last
        ]
        at_once = span.size >= count > 1 and len(numbers) == count
        if at_once:
            when(inside)(lambda: store(I32(0), count))
        edge = (row + I32(count) > begin) & (row < end)

        @when(edge & ~inside if at_once else edge)
        def _():
            for number in numbers:
                one(I32(number))

    def block(self, var, hull: Access, k, row, slot, clipped: bool):
        """The block of an operand that rows of step k + 1, from `row` on, need."""
        if var in self.wave.carries:
            ring, scratch = next(
                (candidate, buf)
                for candidate, buf in zip(self.rings, self.scratch)
                if candidate.v is var
            )
            span = hull[ring.axis]
            # Rows at a fixed place are counted from the first that is made.
            ahead = span.start.const - (int(row) if span.is_const else 0)
            return scratch[ring.at(slot + I32(ahead - self.low), hull)]
        ref = self.given[var]
        index: list = [ds(span.start.const, span.size) for span in hull]
        lead = [k] if var in self.wave.elements else []
        axis = next((dim for dim, span in enumerate(hull) if not span.is_const), None)
        if axis is None:
            return ref[(*lead, *index)]
        if not clipped:
            index[axis] = ds(row + I32(hull[axis].start.const), hull[axis].size)
            return ref[(*lead, *index)]
        nearest = [
            self.nearest(row + I32(hull[axis].start.const + far), var.aval.shape[axis])
            for far in range(hull[axis].size)
        ]
        lines = [ref[(*lead, *index[:axis], ds(at, 1), *index[axis + 1 :])] for at in nearest]
        return lax.concatenate(lines, axis) if len(lines) > 1 else lines[0]

    def nearest(self, row, extent: int):
        """A row of another operand. Where tests of rows mask it, any row will do."""
        return self.wrapped(row) if self.wave.wraps else jnp.clip(row, I32(0), I32(extent - 1))


def _along(rank: int, axis: int, rows) -> tuple:
    """Index of whole rows."""
    return tuple(rows if dim == axis else slice(None) for dim in range(rank))


def _loop(turns: int, body: Callable) -> None:
    """body(i32 number of a turn), for its effects."""
    if turns:
        lax.fori_loop(I32(0), I32(turns), lambda turn, _: body(turn), None)
