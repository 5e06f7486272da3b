"""Every nest gets its schedule: those that packing has decided stay, the others are chosen by register_tiles.py.

nest [d0<100, d1<64]  ...   ->   nest [d0<100, d1<64] schedule(lanes=8, vector='d1', unroll=4, order=('d0',))  ...
"""

from __future__ import annotations

from collections.abc import Sequence

from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.ir import Nest, Stmt, with_bodies

from .nest_schedule import scheduled
from .register_tiles import schedule_of


def decide_schedules(stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
    """The statements with a schedule for each nest."""
    options = context.options
    result: list[Stmt] = []
    for stmt in stmts:
        stmt = with_bodies(stmt, lambda inner: decide_schedules(inner, context))
        if isinstance(stmt, Nest):
            schedule = schedule_of(stmt, options.vectors, options.contract)
            stmt = scheduled(stmt, schedule=schedule)
        result.append(stmt)
    return result
