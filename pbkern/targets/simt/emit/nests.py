"""One nest as code for the threads of a block: loops over the points of each team, reductions, stores."""

from __future__ import annotations

import re
from collections.abc import Callable

from pbkern.core.affine import Affine
from pbkern.lower.mlir.ops import Value as Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.ir import Nest

from ..schedule.registers import in_slots
from ..schedule.threads import Deal
from ..schedule.tiles import Tile, terms_beside, tiled
from . import reductions
from .expressions import Expressions, Walk
from .reductions import Team

# Additions to one accumulator in a row: what rounding loses grows with them. Source: Higham 2002,
# Accuracy and Stability of Numerical Algorithms, section 4.2.
LONGEST_CHAIN = 256
LINE = re.compile(r"(.+?):(\d+)(?::(\d+))?(?: \(.*\))?$")
THREAD = "%tid"


class NestEmitter(Expressions):
    """Emits nests. `team` combines accumulators of threads."""

    team: Team

    def emit(self, block: Block, nest: Nest, deal: Deal) -> None:
        """Appends the nest to `block`."""
        if any(n == 0 for _, n in deal.free):
            return
        top = Block(block)
        nest = in_slots(
            tiled(nest, deal.tiles, self.context), deal, self.placement.slots, self.context
        )
        w = Walk(nest, top, frozenset(x.buf.root for x in nest.writes))
        for t in deal.tiles:
            if t.beside:
                w.beside, w.along = t.count, t.dim
        if deal.beside:
            w.terms = terms_beside(nest, *deal.beside, self.context)
        if deal.alone:
            first = self.text.put(top, f"arith.cmpi eq, {THREAD}, {self.text.index(0)} : index")
            self.text.when(top, first, lambda b: self._in_order(w, b, list(deal.free)))
        elif deal.everyone and deal.team == 1:
            self._in_order(w, top, list(deal.free))
        else:
            self._dealt(w, top, deal)
        _locate(top, nest.at)
        block.take(top)

    def _in_order(self, w: Walk, block: Block, dims: list[tuple[str, int]]) -> None:
        """All points, one after the other."""
        if not dims:
            self._point(w, block, None, None)
            return
        (d, n), *rest = dims

        def fill(inner: Block, _) -> list:
            self._in_order(w, inner, rest)
            return []

        self.text.loop(block, d, 0, n, 1, fill)

    # ---------------------------------------------------------------- points of teams

    def _dealt(self, w: Walk, block: Block, deal: Deal) -> None:
        """The points of each team: number `team + k * teams` in step k."""
        t, points, teams = self.text, deal.points, deal.teams
        number = self._team_number(block, deal)

        def step(inner: Block, _) -> list:
            at = (
                Affine.symbol("%step", teams)
                if number == 0
                else Affine.symbol("%step", teams) + Affine.symbol("%team")
            )
            inner.values["%team"] = number
            _, place = t.affine(inner, at)
            live = None
            if points % teams:
                live = t.put(inner, f"arith.cmpi ult, {place}, {t.index(points)} : index")
            if (
                live is not None and 1 < deal.team < self.team.device.warp
            ):  # others of the warp exchange with this thread
                place = t.put(inner, f"arith.minui {place}, {t.index(points - 1)} : index")
                self._at(w, inner, deal, place, live)
            elif live is not None:
                t.when(inner, live, lambda b: self._at(w, b, deal, place, None))
            else:
                self._at(w, inner, deal, place, None)
            return []

        if deal.kept:
            t.unrolled(block, "%step", 0, deal.steps, 1, step, [])
        else:
            t.loop(block, "%step", 0, deal.steps, 1, step)

    def _team_number(self, block: Block, deal: Deal) -> str | int:
        if deal.teams == 1:
            return 0
        if deal.team == 1:
            return THREAD
        return self.text.put(block, f"arith.divui {THREAD}, {self.text.index(deal.team)} : index")

    def _at(self, w: Walk, block: Block, deal: Deal, number: str, live: str | None) -> None:
        inner = Block(block)
        self._split(inner, list(deal.free), number)
        for t in deal.tiles:
            self._keep_inside(inner, t)
        self._point(w, inner, deal, live)
        block.take(inner)

    def _keep_inside(self, block: Block, t: Tile) -> None:
        """Values of the places of points that may lie outside."""
        for u in filter(t.may_lie_outside, range(t.count)):
            at = self.text.affine(block, t.place(u))[1]
            block.values[t.kept(u)] = self.text.put(
                block, f"arith.minui {at}, {self.text.index(t.size - 1)} : index"
            )

    def _split(self, block: Block, dims: list[tuple[str, int]], number: str) -> None:
        """Values of dimensions, slowest first, at the point of this number."""
        longer = [d for d, n in dims if n > 1]
        for d, n in reversed(dims):
            if n == 1:
                block.values[d] = 0
            elif d == longer[0]:
                block.values[d] = number
            else:
                size = self.text.index(n)
                block.values[d] = self.text.put(block, f"arith.remui {number}, {size} : index")
                number = self.text.put(block, f"arith.divui {number}, {size} : index")

    # ---------------------------------------------------------------- one point

    def _point(self, w: Walk, block: Block, deal: Deal | None, live: str | None) -> None:
        """Reduces, then stores.

        `live`: whether the point is this team's own, if others may have it as well.
        """
        nest, team = w.nest, 1 if deal is None else deal.team
        if nest.rdims or nest.reductions:
            b = self.builder(block)
            start = [a for r in nest.reductions for a in reductions.identity(b, r)]
            if deal is not None and team > 1:
                w.along, w.beside = deal.beside or ("", 1)
                found = self._terms_of_team(w, block, deal, start, live)
                w.along, w.beside = "", 1
                accs = self.team.joined(block, nest.reductions, found, team)
            else:
                accs = self._terms(w, block, list(nest.rdims), start)
            self._bind(w, accs)
        else:
            self._writes(w, block, inner=True, also=live)
        first = live
        if deal is not None and team > 1 and not deal.everyone:
            first = self._is_first(block, deal, live)
        self._writes(w, block, inner=False, also=first)
        w.accs = {}

    def _is_first(self, block: Block, deal: Deal, live: str | None) -> str:
        """Whether the thread is its team's first, which stores for all."""
        lane = self._lane(block, deal)
        test = self.text.put(block, f"arith.cmpi eq, {lane}, {self.text.index(0)} : index")
        return test if live is None else self.text.put(block, f"arith.andi {test}, {live} : i1")

    def _lane(self, block: Block, deal: Deal) -> str:
        if deal.teams == 1:
            return THREAD
        return self.text.put(block, f"arith.remui {THREAD}, {self.text.index(deal.team)} : index")

    def _bind(self, w: Walk, accs: list[Ssa]) -> None:
        """Accumulator number -> value; of searches: the index."""
        at, w.accs = 0, {}
        for n, r in enumerate(w.nest.reductions):
            at += reductions.width(r)
            w.accs[n] = accs[at - 1]

    def _writes(self, w: Walk, block: Block, *, inner: bool, also: str | None = None) -> None:
        mine = [x for x in w.nest.writes if x.inner == inner]
        each = len(w.nest.writes) // w.beside
        if w.beside > 1 and mine and also is None and all(x.mask is None for x in mine):
            for n in range(each):
                group = w.nest.writes[n::each]
                if self.placement.is_private(group[0].buf):
                    for x in group:
                        self.write(w, block, x)
                else:
                    self.write_beside(w, block, group)
            return
        for x in mine:
            self.write(w, block, x, also)

    def _term(self, w: Walk, block: Block, accs: list[Ssa], also: str | None = None) -> list[Ssa]:
        """One point of the reduced dimensions; the next accumulators."""
        b, out = self.builder(block), accs
        for group in w.terms or [w.nest.reductions]:
            accs, out, at = out, [], 0
            for r in group:
                n = reductions.width(r)
                out += reductions.add(
                    b, r, accs[at : at + n], [self.value(w, block, e) for e in r.args]
                )
                at += n
        if any(x.inner for x in w.nest.writes):
            if w.nest.ordered:
                self._bind(w, out)
            self._writes(w, block, inner=True, also=also)
            w.accs = {}
        return out

    def _terms(self, w: Walk, block: Block, dims: list[str], accs: list[Ssa]) -> list[Ssa]:
        """All points of the reduced dimensions, by one thread."""
        if not dims:
            return self._term(w, block, accs)
        d, *rest = dims
        return self._chain(
            w,
            block,
            d,
            w.nest.dims[d],
            accs,
            lambda b, a: self._terms(w, b, rest, a),
            last=not rest,
        )

    def _chain(
        self,
        w: Walk,
        block: Block,
        symbol: str,
        trips: int,
        accs: list[Ssa],
        fill: Callable[[Block, list[Ssa]], list[Ssa]],
        last: bool,
    ) -> list[Ssa]:
        """A loop.

        Long sums of floats start anew with every run of trips; what these have summed is added to
        the whole.
        """
        longest = LONGEST_CHAIN // max(len(w.terms), 1)
        rounded = [
            reductions.is_rounded(r) for r in w.nest.reductions for _ in range(reductions.width(r))
        ]
        if (
            not last
            or not any(rounded)
            or w.nest.ordered
            or trips <= 2 * longest
            or not self.text.contract
        ):
            return self.text.loop(block, symbol, 0, trips, 1, fill, accs)
        runs, rest = divmod(trips, longest)
        zeros = [a for r in w.nest.reductions for a in reductions.identity(self.builder(block), r)]

        def joined(b: Block, before: list[Ssa], run: list[Ssa]) -> list[Ssa]:
            one = self.builder(b)
            return [one.add(x, y) if is_sum else y for x, y, is_sum in zip(before, run, rounded)]

        def restarted(a: list[Ssa]) -> list[Ssa]:
            return [z if is_sum else x for x, z, is_sum in zip(a, zeros, rounded)]

        def run(outer: Block, a: list[Ssa], first: Affine, count: int) -> list[Ssa]:
            def trip(b: Block, c: list[Ssa]) -> list[Ssa]:
                b.values[symbol] = self.text.affine(b, first + Affine.symbol(f"{symbol}'"))[1]
                return fill(b, c)

            return joined(
                outer, a, self.text.loop(outer, f"{symbol}'", 0, count, 1, trip, restarted(a))
            )

        whole = Affine.symbol(f"{symbol}''", longest)
        accs = self.text.loop(
            block, f"{symbol}''", 0, runs, 1, lambda b, a: run(b, a, whole, longest), accs
        )
        return run(block, accs, Affine((), runs * longest), rest) if rest else accs

    def _terms_of_team(
        self, w: Walk, block: Block, deal: Deal, accs: list[Ssa], live: str | None
    ) -> list[Ssa]:
        """The points of the reduced dimensions, dealt out to a team's threads."""
        t, team = self.text, deal.team
        block.values["%lane"] = self._lane(block, deal)
        full, rest = divmod(deal.terms, team)

        def step(b: Block, a: list[Ssa]) -> list[Ssa]:
            inner = Block(b)
            _, number = t.affine(b, Affine.symbol("%lane") + Affine.symbol("%term", team))
            self._split(inner, list(deal.reduced), number)
            out = self._term(w, inner, a, live)
            b.take(inner)
            return out

        accs = self._chain(w, block, "%term", full, accs, step, last=True) if full else accs
        if not rest:
            return accs
        one, other = Block(block), Block(block)
        test = t.put(block, f"arith.cmpi ult, {block.values['%lane']}, {t.index(rest)} : index")
        one.values["%term"] = full
        new = step(one, accs)
        types = ", ".join(a.type for a in accs)
        if not accs:
            block.add(f"scf.if {test}", one)
            return accs
        one.add(f"scf.yield {', '.join(a.name for a in new)} : {types}")
        other.add(f"scf.yield {', '.join(a.name for a in accs)} : {types}")
        name = t.name()
        block.add(f"{name}:{len(accs)} = scf.if {test} -> ({types})", one, other)
        return [a._replace(name=f"{name}#{k}") for k, a in enumerate(accs)]


def _locate(block: Block, at: str | None) -> None:
    """Gives operations the user's line."""
    found = LINE.match(at) if at else None
    if found is None:
        return
    where = f' loc("{found[1]}":{found[2]}:{found[3] or 1})'
    block.operations = [
        op.mapped(lambda o: o.text if o.regions or " loc(" in o.text else o.text + where)
        for op in block.operations
    ]
