"""Every nest gets its schedule: those that packing has decided stay, the others are chosen by register_tiles.

nest [d0<100, d1<64]  ...   ->   nest [d0<100, d1<64] schedule(lanes=8, vector='d1', unroll=4, order=('d0',))  ...
"""

from __future__ import annotations

from collections.abc import Sequence

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.ir import Nest, Stmt, with_nests

from .nest_schedule import schedule_so_far, scheduled
from .prefetch import prefetch_rows
from .register_tiles.choice import choose


@dataclass(frozen=True)
class DecideSchedules:
    """Leaves a schedule with each nest, and how far ahead its schedule has rows prefetched."""

    rows_ahead: int = threshold(
        8, "rows between a load and what it asks for. 4 to 16 measure the same"
    )

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        options = context.options

        def decided(nest: Nest) -> list[Stmt]:
            if schedule_so_far(nest) is not None:
                return [nest]
            schedule = choose(nest, options.vectors, options.contract)
            followed = options.followed_row_bytes
            fetching = prefetch_rows(nest, schedule, self.rows_ahead, followed)
            return [scheduled(fetching, schedule=schedule)]

        return with_nests(stmts, decided)
