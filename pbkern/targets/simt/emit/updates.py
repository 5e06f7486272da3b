"""Loops of updates as code for the threads of a block: loads of several steps, then their atomic operations."""

from __future__ import annotations

from functools import partial

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block
from pbkern.targets.simt.schedule.updates import STEPS_UNDER_WAY, Updates

from .expressions import SimtWalk
from .nests import THREAD, SimtNestEmitter, locate


@dataclass(frozen=True)
class PointUpdate:
    """One point of one step, as SSA names: what is combined with which element, if a test holds."""

    value: str
    type: str
    element: str
    test: str | None


class TeamStep:
    """One step of a team. block: its code. number: which one. tests: whether the team takes it, as SSA names."""

    def __init__(self, parent: Block, number: Affine):
        self.block, self.number = Block(parent), number
        self.tests: list[str] = []


@dataclass
class UpdateEmitter:
    """Emits one loop.

    nests: emits expressions. threads: of the block.
    """

    nests: SimtNestEmitter
    updates: Updates
    threads: int

    def __post_init__(self) -> None:
        self.text = self.nests.text

    def emit(self, block: Block) -> None:
        """Appends the loop: team t of T takes steps t, t + T, ... of each round."""
        updates, top = self.updates, Block(block)
        teams = self.threads // updates.team
        team, lane = self._divided(top, THREAD, updates.team)
        at_a_time = min(STEPS_UNDER_WAY, -(-updates.steps // teams))
        is_whole = updates.steps % (teams * at_a_time) == 0

        def fill(inner: Block, _: object) -> list:
            inner.values["%team"] = team
            first = Affine.symbol("%round", teams * at_a_time) + Affine.symbol("%team")
            steps = [TeamStep(inner, first + number * teams) for number in range(at_a_time)]
            for step in steps:
                self._scalars(step, is_whole)
            places = range(0, updates.points, updates.team)
            points = [(Block(step.block), step, place) for step in steps for place in places]
            under_way = [self._point(*point, lane) for point in points]
            # Places of points are computed among their step's scalars.
            for body in (*(step.block for step in steps), *(body for body, _, _ in points)):
                inner.take(body)
            for update in under_way:
                tests = [update.test] if update.test else []
                self.text.when_all(inner, tests, partial(self._apply, update))
            return []

        self.text.loop(top, "%round", 0, -(-updates.steps // (teams * at_a_time)), 1, fill)
        locate(top, updates.nest.at)
        block.take(top)

    def _scalars(self, step: TeamStep, is_whole: bool) -> None:
        """Computes a step's scalars, and whether the team takes the step."""
        updates, body = self.updates, step.block
        at = self.text.affine(body, step.number)[1]
        number, step.tests = self._inside(body, at, updates.steps, is_whole)
        self.nests.split(body, list(updates.loops), number)
        for scalar in updates.scalars:
            value = self.nests.scalar(body, scalar.value)
            is_unsigned = scalar.value.dtype.kind in "ub"
            body.values[scalar.name] = self.nests.to_index(body, value, is_unsigned)
        if updates.test:
            is_true = self.text.named(body.values[updates.test]), self.text.index(0)
            step.tests.append(self.text.put(body, "arith.cmpi", is_true, "index", " ne, %s, %s"))

    def _point(self, body: Block, step: TeamStep, first: int, lane: str | int) -> PointUpdate:
        """A thread's point of a step, all but the operation itself."""
        updates, store = self.updates, self.updates.store
        body.values["%lane"] = lane
        at = self.text.affine(body, Affine.symbol("%lane") + first)[1]
        is_whole = first + updates.team <= updates.points
        number, inside = self._inside(body, at, updates.points, is_whole)
        self.nests.split(body, list(updates.dims), number)
        walk = SimtWalk(updates.nest, body, frozenset((store.buf.root,)))
        guards = self.nests.guards(walk, body, store.buf, store.index) if store.guard else []
        element = self.nests.element(body, store.buf, store.index)
        put, test = partial(self.text.put, body), None
        for each in (*step.tests, *inside, *guards):
            test = each if test is None else put("arith.andi", (test, each), "i1")
        value = self._value(body, test)
        return PointUpdate(value.name, value.type, element, test)

    def _value(self, block: Block, test: str | None) -> Ssa:
        """The value to combine with an element; nothing is loaded for it where a test fails."""
        updates, inner = self.updates, Block(block)
        walk = SimtWalk(updates.nest, inner, frozenset((updates.store.buf.root,)))
        value = self.nests.value(walk, inner, updates.value)
        stored = self.nests.builder(inner).to_storage(value, updates.store.buf.dtype)
        if test is None:
            block.take(inner)
            return stored
        nothing = self.nests.builder(block).c(0, stored.el)
        name = self.text.either(block, test, inner, stored, Block(block), nothing)
        return stored._replace(name=name)

    def _inside(self, block: Block, at: str, size: int, is_whole: bool) -> tuple[str, list[str]]:
        """(a number that is kept below a size, tests whether it was below)."""
        if is_whole:
            return at, []
        test = self.text.put(
            block, "arith.cmpi", (at, self.text.index(size)), "index", " ult, %s, %s"
        )
        nearest = self.text.put(block, "arith.minui", (at, self.text.index(size - 1)), "index")
        return nearest, [test]

    def _divided(self, block: Block, number: str, size: int) -> tuple[str | int, str | int]:
        """Quotient and remainder of a thread's number."""
        if size == 1:
            return number, 0
        if size == self.threads:
            return 0, number
        parts = (
            self.text.put(block, f"arith.{op}", (number, self.text.index(size)), "index")
            for op in ("divui", "remui")
        )
        quotient, remainder = parts
        return quotient, remainder

    def _apply(self, update: PointUpdate, block: Block) -> None:
        buf = self.updates.store.buf
        kind = self.nests.placement.memref(buf)
        self.text.put(
            block,
            "memref.atomic_rmw",
            (update.value, buf.root.name, update.element),
            f"({update.type}, {kind}) -> {update.type}",
            f" {self.updates.kind} %s, %s[%s]",
        )
