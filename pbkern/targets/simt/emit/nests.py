"""One nest as code for the threads of a block: loops over the points of each team, reductions, stores."""

from __future__ import annotations

import re
from collections.abc import Callable

from pbkern.core.affine import Affine
from pbkern.lower.mlir.operation import walk
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest import reductions
from pbkern.lower.nest.ir import Nest
from pbkern.lower.nest.reductions import is_rounded_sum
from pbkern.targets.simt.schedule.registers import in_slots
from pbkern.targets.simt.schedule.sectors import WholeSectors
from pbkern.targets.simt.schedule.threads import ThreadMapping
from pbkern.targets.simt.schedule.tiles import Tile, terms_beside, tiled

from .expressions import Expressions, SimtWalk
from .reductions import Team

# Additions to one accumulator in a row: what rounding loses grows with them. Source: Higham 2002,
# Accuracy and Stability of Numerical Algorithms, section 4.2.
LONGEST_DEVICE_CHAIN = 256
LINE = re.compile(r"(.+?):(\d+)(?::(\d+))?(?: \(.*\))?$")
THREAD = "%tid"


class SimtNestEmitter(Expressions):
    """Emits nests. `team` combines accumulators of threads."""

    team: Team

    def emit(self, block: Block, nest: Nest, mapping: ThreadMapping) -> None:
        """Appends the nest to `block`."""
        if any(size == 0 for _, size in mapping.free):
            return
        top = Block(block)
        nest = in_slots(
            tiled(nest, mapping.tiles, self.context), mapping, self.placement.slots, self.context
        )
        walk = SimtWalk(nest, top, frozenset(store.buf.root for store in nest.stores))
        for tile in mapping.tiles:
            if tile.beside:
                walk.beside, walk.along = tile.count, tile.dim
        if mapping.beside:
            walk.terms, walk.term_stores = terms_beside(nest, *mapping.beside, self.context)
        if mapping.alone:
            first = self.text.put(
                top, "arith.cmpi", (THREAD, self.text.index(0)), "index", " eq, %s, %s"
            )
            self.text.when(
                top, first, lambda inner: self._in_order(walk, inner, list(mapping.free))
            )
        elif mapping.everyone and mapping.team == 1:
            self._in_order(walk, top, list(mapping.free))
        else:
            self._by_threads(walk, top, mapping)
        locate(top, nest.at)
        block.take(top)

    def _in_order(self, walk: SimtWalk, block: Block, dims: list[tuple[str, int]]) -> None:
        """All points, one after the other."""
        if not dims:
            self._point(walk, block, None, None)
            return
        (dim, size), *rest = dims

        def fill(inner: Block, _) -> list:
            self._in_order(walk, inner, rest)
            return []

        self.text.loop(block, dim, 0, size, 1, fill)

    # ---------------------------------------------------------------- points of teams

    def _by_threads(self, walk: SimtWalk, block: Block, mapping: ThreadMapping) -> None:
        """The points of each team: number `team + k * teams` in step k."""
        text, points, teams = self.text, mapping.points, mapping.teams
        number = self._team_number(block, mapping)

        def step(inner: Block, _) -> list:
            at = (
                Affine.symbol("%step", teams)
                if number == 0
                else Affine.symbol("%step", teams) + Affine.symbol("%team")
            )
            inner.values["%team"] = number
            _, place = text.affine(inner, at)
            live = None
            if points % teams:
                live = text.put(
                    inner, "arith.cmpi", (place, text.index(points)), "index", " ult, %s, %s"
                )
            if (
                live is not None and 1 < mapping.team < self.team.device.warp
            ):  # others of the warp exchange with this thread
                place = text.put(inner, "arith.minui", (place, text.index(points - 1)), "index")
                self._at(walk, inner, mapping, place, live)
            elif live is not None:
                text.when(inner, live, lambda body: self._at(walk, body, mapping, place, None))
            else:
                self._at(walk, inner, mapping, place, None)
            return []

        if mapping.in_registers:
            text.unrolled(block, "%step", 0, mapping.steps, 1, step, [])
        else:
            text.loop(block, "%step", 0, mapping.steps, 1, step)

    def _team_number(self, block: Block, mapping: ThreadMapping) -> str | int:
        if mapping.teams == 1:
            return 0
        if mapping.team == 1:
            return THREAD
        return self.text.put(block, "arith.divui", (THREAD, self.text.index(mapping.team)), "index")

    def _at(
        self, walk: SimtWalk, block: Block, mapping: ThreadMapping, number: str, live: str | None
    ) -> None:
        inner = Block(block)
        self.split(inner, list(mapping.places), number)
        for tile in mapping.tiles:
            self._keep_inside(inner, tile)
        sectors = mapping.sectors if mapping.team == 1 else None
        is_point = self._from_sector(inner, sectors) if sectors else None
        if sectors is None or is_point is None:
            self._point(walk, inner, mapping, live)
        else:
            dim = sectors.dim

            def inside(body: Block) -> None:
                # Loads of the place belong where there is one: others may lie outside of an array.
                body.values[dim] = inner.values[dim]
                self._point(walk, body, mapping, live)

            self.text.when(inner, is_point, inside)
        block.take(inner)

    def _from_sector(self, block: Block, sectors: WholeSectors) -> str | None:
        """Replaces a place counted from a sector's start by one counted from the row's.

        Whether there is a point, where there may be none.
        """
        text, dim, places = self.text, sectors.dim, sectors.places
        _, first = text.affine(block, sectors.first)
        skipped = text.put(block, "arith.andi", (first, text.index(sectors.elements - 1)), "index")
        place = text.named(block.values[dim])
        at = text.put(block, "arith.subi", (place, skipped), "index")
        if places & (places - 1) == 0:
            at = text.put(block, "arith.andi", (at, text.index(places - 1)), "index")
        else:
            is_end = text.put(block, "arith.cmpi", (at, text.index(0)), "index", " slt, %s, %s")
            end = text.put(block, "arith.addi", (at, text.index(places)), "index")
            at = text.put(block, "arith.select", (is_end, end, at), "index")
        block.values[dim] = at
        if places == sectors.size:
            return None
        return text.put(
            block, "arith.cmpi", (at, text.index(sectors.size)), "index", " ult, %s, %s"
        )

    def _keep_inside(self, block: Block, tile: Tile) -> None:
        """Values of the places of points that may lie outside."""
        for number in filter(tile.may_lie_outside, range(tile.count)):
            at = self.text.affine(block, tile.place(number))[1]
            block.values[tile.clamped(number)] = self.text.put(
                block, "arith.minui", (at, self.text.index(tile.size - 1)), "index"
            )

    def split(self, block: Block, dims: list[tuple[str, int]], number: str) -> None:
        """Values of dimensions, slowest first, at the point of this number."""
        longer = [axis for axis, n in dims if n > 1]
        for dim, extent in reversed(dims):
            if extent == 1:
                block.values[dim] = 0
            elif dim == longer[0]:
                block.values[dim] = number
            else:
                size = self.text.index(extent)
                block.values[dim] = self.text.put(block, "arith.remui", (number, size), "index")
                number = self.text.put(block, "arith.divui", (number, size), "index")

    # ---------------------------------------------------------------- one point

    def _point(
        self, walk: SimtWalk, block: Block, mapping: ThreadMapping | None, live: str | None
    ) -> None:
        """Reduces, then stores.

        `live`: whether the point is this team's own, if others may have it as well.
        """
        nest, team = walk.nest, 1 if mapping is None else mapping.team
        if nest.rdims or nest.reductions:
            b = self.builder(block)
            start = [
                acc for reduction in nest.reductions for acc in reductions.identity(b, reduction)
            ]
            if mapping is not None and team > 1:
                walk.along, walk.beside = mapping.beside or ("", 1)
                partials = self._terms_of_team(walk, block, mapping, start, live)
                walk.along, walk.beside = "", 1
                accs = self.team.joined(block, nest.reductions, partials, team)
            else:
                accs = self._terms(walk, block, list(nest.rdims), start)
            self._bind(walk, accs)
        else:
            self._writes(walk, block, inner=True, also=live)
        first = live
        if mapping is not None and team > 1 and not mapping.everyone:
            first = self._is_first(block, mapping, live)
        self._writes(walk, block, inner=False, also=first)
        walk.accs = {}

    def _is_first(self, block: Block, mapping: ThreadMapping, live: str | None) -> str:
        """Whether the thread is its team's first, which stores for all."""
        lane = self._lane(block, mapping)
        test = self.text.put(
            block, "arith.cmpi", (lane, self.text.index(0)), "index", " eq, %s, %s"
        )
        return test if live is None else self.text.put(block, "arith.andi", (test, live), "i1")

    def _lane(self, block: Block, mapping: ThreadMapping) -> str:
        if mapping.teams == 1:
            return THREAD
        return self.text.put(block, "arith.remui", (THREAD, self.text.index(mapping.team)), "index")

    def _bind(self, walk: SimtWalk, accs: list[Ssa]) -> None:
        """Accumulator number -> value; of searches: the index."""
        at, walk.accs = 0, {}
        for n, reduction in enumerate(walk.nest.reductions):
            at += reductions.width(reduction)
            walk.accs[n] = accs[at - 1]

    def _writes(
        self, walk: SimtWalk, block: Block, *, inner: bool, also: str | None = None
    ) -> None:
        stores = walk.term_stores if inner and walk.terms else walk.nest.stores
        mine = [store for store in stores if store.inner == inner]
        each = len(mine) // walk.beside
        if walk.beside > 1 and mine and also is None and all(x.mask is None for x in mine):
            for n in range(each):
                group = mine[n::each]
                if self.placement.is_private(group[0].buf):
                    for x in group:
                        self.write(walk, block, x)
                else:
                    self.write_beside(walk, block, group)
            return
        for x in mine:
            self.write(walk, block, x, also)

    def _term(
        self, walk: SimtWalk, block: Block, accs: list[Ssa], also: str | None = None
    ) -> list[Ssa]:
        """One point of the reduced dimensions; the next accumulators."""
        b, out = self.builder(block), accs
        for group in walk.terms or [walk.nest.reductions]:
            accs, out, at = out, [], 0
            for reduction in group:
                width = reductions.width(reduction)
                out += reductions.add(
                    b,
                    reduction,
                    accs[at : at + width],
                    [self.value(walk, block, arg) for arg in reduction.args],
                )
                at += width
        if any(store.inner for store in walk.nest.stores):
            if walk.nest.ordered:
                self._bind(walk, out)
            self._writes(walk, block, inner=True, also=also)
            walk.accs = {}
        return out

    def _terms(self, walk: SimtWalk, block: Block, dims: list[str], accs: list[Ssa]) -> list[Ssa]:
        """All points of the reduced dimensions, by one thread."""
        if not dims:
            return self._term(walk, block, accs)
        dim, *rest = dims
        return self._chain(
            walk,
            block,
            dim,
            walk.nest.dims[dim],
            accs,
            lambda inner, carried: self._terms(walk, inner, rest, carried),
            last=not rest,
        )

    def _chain(
        self,
        walk: SimtWalk,
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
        longest = LONGEST_DEVICE_CHAIN // max(len(walk.terms), 1)
        rounded = [
            is_rounded_sum(reduction)
            for reduction in walk.nest.reductions
            for _ in range(reductions.width(reduction))
        ]
        if (
            not last
            or not any(rounded)
            or walk.nest.ordered
            or trips <= 2 * longest
            or not self.text.contract
        ):
            return self.text.loop(block, symbol, 0, trips, 1, fill, accs)
        runs, rest = divmod(trips, longest)
        zeros = [
            identity
            for reduction in walk.nest.reductions
            for identity in reductions.identity(self.builder(block), reduction)
        ]

        def joined(inner: Block, before: list[Ssa], run: list[Ssa]) -> list[Ssa]:
            one = self.builder(inner)
            return [one.add(x, y) if is_sum else y for x, y, is_sum in zip(before, run, rounded)]

        def restarted(carried: list[Ssa]) -> list[Ssa]:
            return [z if is_sum else x for x, z, is_sum in zip(carried, zeros, rounded)]

        def run(outer: Block, carried: list[Ssa], first: Affine, count: int) -> list[Ssa]:
            def trip(inner: Block, values: list[Ssa]) -> list[Ssa]:
                inner.values[symbol] = self.text.affine(inner, first + Affine.symbol(f"{symbol}'"))[
                    1
                ]
                return fill(inner, values)

            return joined(
                outer,
                carried,
                self.text.loop(outer, f"{symbol}'", 0, count, 1, trip, restarted(carried)),
            )

        whole = Affine.symbol(f"{symbol}''", longest)
        accs = self.text.loop(
            block,
            f"{symbol}''",
            0,
            runs,
            1,
            lambda inner, carried: run(inner, carried, whole, longest),
            accs,
        )
        return run(block, accs, Affine((), runs * longest), rest) if rest else accs

    def _terms_of_team(
        self,
        walk: SimtWalk,
        block: Block,
        mapping: ThreadMapping,
        accs: list[Ssa],
        live: str | None,
    ) -> list[Ssa]:
        """The points of the reduced dimensions, mapped to a team's threads."""
        text, team = self.text, mapping.team
        lane = block.values["%lane"] = self._lane(block, mapping)
        full, rest = divmod(mapping.terms, team)

        def step(body: Block, carried: list[Ssa]) -> list[Ssa]:
            inner = Block(body)
            _, number = text.affine(body, Affine.symbol("%lane") + Affine.symbol("%term", team))
            self.split(inner, list(mapping.reduced), number)
            if mapping.sectors:
                self._from_sector(inner, mapping.sectors)
            out = self._term(walk, inner, carried, live)
            body.take(inner)
            return out

        accs = self._chain(walk, block, "%term", full, accs, step, last=True) if full else accs
        if not rest:
            return accs
        one, other = Block(block), Block(block)
        test = text.put(block, "arith.cmpi", (lane, text.index(rest)), "index", " ult, %s, %s")
        one.values["%term"] = full
        new = step(one, accs)
        types = ", ".join(acc.type for acc in accs)
        if not accs:
            block.add("scf.if", (test,), regions=(one,))
            return accs
        one.add("scf.yield", tuple(value.name for value in new), types)
        other.add("scf.yield", tuple(acc.name for acc in accs), types)
        name = text.name()
        block.add(
            "scf.if",
            (test,),
            "",
            f" %s -> ({types})",
            regions=(one, other),
            result=name,
            count=len(accs),
        )
        return [acc._replace(name=f"{name}#{k}") for k, acc in enumerate(accs)]


def locate(block: Block, at: str | None) -> None:
    """Gives operations the user's line."""
    match = LINE.match(at) if at else None
    if match is None:
        return
    where = f' loc("{match[1]}":{match[2]}:{match[3] or 1})'
    for op in walk(block.operations):
        if not op.regions and not op.location:
            op.location = where
