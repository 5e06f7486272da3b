"""Every nest gets its schedule: those that packing has decided stay, the others are chosen by register_tiles.

nest [d0<100, d1<64]  ...   ->   nest [d0<100, d1<64] schedule(lanes=8, vector='d1', unroll=4, order=('d0',))  ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.ir import For, Nest, Stmt, bodies, with_nests

from .nest_schedule import schedule_so_far, scheduled
from .prefetch import prefetch_rows
from .register_tiles.choice import choose
from .register_tiles.elementwise import branches_at_sines


@dataclass(frozen=True)
class DecideSchedules:
    """Leaves a schedule with each nest, and how far ahead its schedule has rows prefetched.

    A nest of few points whose sines branch has one vector in a step, where the tile has several for the constants that a vector
    reads: its first call takes less time by more than all later ones lose.
    """

    rows_ahead: int = threshold(
        8, "rows between a load and what it asks for. 4 to 16 measure the same"
    )
    few_points: int = threshold(
        16_384,
        "points of a nest in all its programs from which sines have several vectors in a step. With 16 registers of Zen 3, "
        "4,096 points of ten operations take 41 us with one and 42 with four, Box-Muller 21 and 20, a tangent 18 and 18; the "
        "first call of the ten 0.11 and 0.16 s",
    )

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        options = context.options

        def decided(nest: Nest) -> list[Stmt]:
            if schedule_so_far(nest) is not None:
                return [nest]
            schedule = choose(nest, options.vectors, options.contract)
            points = context.programs * math.prod(nest.dims.values())
            if points < self.few_points and not nest.reductions and branches_at_sines(nest):
                schedule = replace(schedule, unroll=1)
            followed = options.followed_row_bytes
            cached = options.stream_traffic
            fetching = prefetch_rows(nest, schedule, self.rows_ahead, followed, cached, counters)
            return [scheduled(fetching, schedule=schedule)]

        counters = _counters(stmts)
        return with_nests(stmts, decided)


def _counters(stmts: Sequence[Stmt]) -> list[str]:
    """Counters of all loops, inner ones first."""
    counters: list[str] = []
    for stmt in stmts:
        for body in bodies(stmt):
            counters += _counters(body)
        if isinstance(stmt, For):
            counters.append(stmt.counter)
    return counters
