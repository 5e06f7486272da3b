"""Places of a nest's accesses: addresses of points, and masks of lanes and bounds."""

from __future__ import annotations

from dataclasses import field
from functools import cached_property

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir.element_types import mlir_type, storage_el
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest import effects
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.context import INT32_MAX
from pbkern.lower.nest.ir import Accumulator, Buf, Expr, Gather, Load, Nest
from pbkern.targets.cpu.schedule.nest_schedule import NestSchedule

Point = dict[str, int]


@dataclass
class Tail:
    """The last, partial vector: how many lanes are live, and where it starts behind the first vector of its step."""

    live: int
    start: int = 0

    def of(self, point: Point, vector: str | None) -> Tail | None:
        """Part of the tail that a point of the register tile has: all vectors of a step but the last are whole."""
        return self if point.get(vector or "", 0) >= self.start else None


@dataclass
class NestWalk:
    """State while one nest is emitted."""

    nest: Nest
    sched: NestSchedule
    top: Block
    written: set[Buf]
    memo: dict = field(default_factory=dict)
    # how far expressions are taken (targets/cpu/schedule/sliding_windows.py)
    reaches: dict[int, dict[str, int]] = field(default_factory=dict)
    # the current step's place along the vector dimension, where it is a constant
    first: int | None = None
    # strided loads of the current step that share vectors
    # (targets/cpu/schedule/interleaved_access.py)
    runs: dict[tuple, dict] = field(default_factory=dict)
    before: list[Ssa] = field(
        default_factory=list
    )  # of ordered reductions in runs: accumulators of the runs before
    transposed_rows: int = 0  # points of the transposed dimension in the current step
    # vectors of the current step whose elements are taken by turns, two and two
    # (targets/cpu/emit/reductions/halves.py)
    halves: int = 0

    @cached_property
    def moves(self) -> bool:
        """Whether some value is taken at a distance."""
        return self.nest.moves()

    @cached_property
    def rewrites(self) -> bool:
        """Whether the nest reads, anywhere, an array that it writes."""
        return any(load.buf.root in self.written for load in self.nest.loads())

    @cached_property
    def reads_other_points(self) -> bool:
        """Whether a point may read what another point of the nest stores."""
        return self.rewrites and effects.reads_other_points(self.nest)

    def reach(self, dim: str) -> int:
        """Distance from the nest's points at which values are taken, and computed in vain."""
        furthest = max((distances.get(dim, 0) for distances in self.reaches.values()), default=0)
        return (
            furthest + 2 * self.sched.lanes if furthest and dim == self.sched.vector else furthest
        )

    def live_lanes(self, load: Expr, point: Point) -> int:
        """Counts the elements from a load's place on that are there to be read, in a step at a constant place."""
        vector = self.sched.along
        assert self.first is not None
        end = self.nest.dims[vector] + self.reaches.get(id(load), {}).get(vector, 0)
        return end - self.first - point.get(vector, 0)

    def place(self, block: Block, expr: Expr) -> Block:
        """The shallowest block of this nest that knows the symbols of an expression.

        Reads of what the nest writes stay put.
        """
        if self._reads_written(expr):
            return block
        depth = self.top.depth
        for symbol in expr.symbols:
            depth = max(depth, block.lookup(symbol)[0].depth)
        return block.ancestor(depth)

    def _reads_written(self, expr: Expr) -> bool:
        key = ("reads", id(expr))
        if key not in self.memo:
            is_written = isinstance(expr, Load | Gather) and expr.buf.root in self.written
            self.memo[key] = (
                is_written
                or isinstance(expr, Accumulator)
                or any(self._reads_written(arg) for arg in expr.args)
            )
        return self.memo[key]

    @property
    def terms(self) -> int:
        """Numbers that a step adds, one after the other, to an accumulator."""
        return self.sched.lanes if self.sched.transpose in self.nest.rdims else 1


class Addressing:
    """Emits addresses and masks into blocks of `text`."""

    def __init__(self, text: Text):
        self.text = text

    def address(self, block: Block, buf: Buf, index, point: Point) -> tuple[Block, str]:
        flat = flat_index(buf, index)
        return self.text.affine(
            block, flat, sum(flat.coefficient(dim) * offset for dim, offset in point.items())
        )

    def tail_mask(self, tail: Tail, lanes: int) -> Ssa:
        return Ssa(
            self.text.const(f" [{tail.live}]", f"vector<{lanes}xi1>", "vector.constant_mask"),
            "i1",
            lanes,
        )

    def axis_is_safe(self, walk: NestWalk, affine: Affine, extent: int) -> bool:
        """Whether an index stays inside without looking at runtime values."""
        if not affine.symbols <= walk.nest.dims.keys():
            return False
        low, high = affine.bounds(lambda dim: walk.nest.dims[dim] + walk.reach(dim))
        return low >= 0 and high < extent

    def reached(
        self, walk: NestWalk, block: Block, position: Affine, extent: int, point: Point, lanes: int
    ) -> str | None:
        """Whether some lane's index is inside an axis, i1; None where each vector is known to end within one of the axis.

        A masked access whose lanes are all off still looks up its page, and takes hundreds of cycles where none is there.
        Measured on Zen 4, jnp.roll of two million elements: 25 ms with such loads, 0.4 without.
        """
        step = position.coefficient(walk.sched.along)
        span = (lanes - 1) * abs(step)
        if position.symbols <= walk.nest.dims.keys():
            low, high = position.bounds(lambda dim: walk.nest.dims[dim] + walk.reach(dim))
            if low > -lanes and high < extent + lanes:
                return None
        offset = sum(position.coefficient(dim) * shift for dim, shift in point.items())
        _, last = self.text.affine(block, position, offset + (span if step > 0 else 0))
        count = self.text.index(extent + span)
        return self.text.put(block, "arith.cmpi", (last, count), "index", " ult, %s, %s")

    def guard_masks(
        self, walk: NestWalk, block: Block, buf: Buf, index, point: Point, lanes: int
    ) -> tuple[list[Ssa], list[str]]:
        """(lane masks, scalar conditions) under which every index is inside its axis."""
        masks, conditions = [], []
        vector = walk.sched.vector if lanes else None
        for position, extent in zip(index, buf.shape):
            if self.axis_is_safe(walk, position, extent):
                continue
            if vector and position.coefficient(vector):
                masks.append(self.in_range(walk, block, (position, 0, extent), point, lanes))
            else:
                conditions.append(self.in_range(walk, block, (position, 0, extent), point, 0).name)
        return masks, conditions

    def in_range(self, walk: NestWalk, block: Block, info, point: Point, lanes: int) -> Ssa:
        """low <= index < high, per lane where the index moves along the vector dimension."""
        i, low, high = info
        b = self.text.builder(block, lanes)
        value = self.index(
            walk,
            block,
            i,
            point,
            lanes,
            "i64" if max(abs(low), abs(high)) > INT32_MAX else "i32",
        )
        parts = [] if low <= -INT32_MAX else [b.cmp("ge", value, b.c(low, value.el))]
        parts += [] if high >= INT32_MAX else [b.cmp("lt", value, b.c(high, value.el))]
        return b.and_(*parts) if len(parts) == 2 else parts[0]

    def index(
        self, walk: NestWalk, block: Block, affine: Affine, point: Point, lanes: int, el: str
    ) -> Ssa:
        """An index as an integer value; lanes follow the vector dimension."""
        vector = walk.sched.vector
        offset = sum(affine.coefficient(dim) * shift for dim, shift in point.items())
        _, name = self.text.affine(block, affine, offset)
        scalar = Ssa(self.text.put(block, "arith.index_cast", (name,), f"index to {el}"), el, 0)
        stride = affine.coefficient(vector) if vector else 0
        if not lanes or not stride:
            return scalar if not lanes else self.text.builder(block, lanes).broadcast(scalar)
        b = self.text.builder(block, lanes)
        half = 1 << (int(el[1:]) - 1)
        numbers = [(k * stride + half) % (2 * half) - half for k in range(lanes)]
        steps = self.text.const(f"dense<{numbers}>", f"vector<{lanes}x{el}>")
        return b.add(b.broadcast(scalar), Ssa(steps, el, lanes))


def memref(buf: Buf) -> str:
    """Type of the flat memref that holds a buffer."""
    root = buf.root
    return f"memref<{max(root.size, 1)}x{mlir_type(storage_el(root.dtype))}>"
