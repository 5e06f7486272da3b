"""The pass that packs: short rows tiled, operands of contractions copied, rows prefetched."""

from __future__ import annotations

from collections.abc import Sequence

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest import effects
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.collapse_dims import collapse
from pbkern.lower.nest.ir import Buf, Nest, Stmt, with_bodies, with_nests
from pbkern.targets.cpu.schedule.nest_schedule import schedule_so_far

from .limits import PackLimits
from .operand_copies import OperandCopies
from .products import pack
from .row_tiling import tile_rows


@dataclass(frozen=True)
class Pack(PackLimits):
    """Joins dimensions and packs; what several contractions of a list stage alike is staged once."""

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        return self._packed(stmts, context, effects.written(stmts))

    def _packed(self, stmts: Sequence[Stmt], context: NestContext, written: set[Buf]) -> list[Stmt]:
        out: list[Stmt] = []
        staged = OperandCopies(written)
        for stmt in stmts:
            stmt = with_bodies(stmt, lambda inner: self._packed(inner, context, written))
            if not isinstance(stmt, Nest):
                out.append(stmt)
                continue
            whole = collapse(stmt, context.pool, context.aliases)
            for nest in tile_rows(whole, context, self):
                joined = collapse(nest, context.pool, context.aliases)
                out += self._joined_copies(pack(joined, context, self, staged), context)
        return out

    def _joined_copies(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        """Joins dimensions of nests that packing left without a schedule, also inside its loops."""

        def joined(nest: Nest) -> list[Stmt]:
            if schedule_so_far(nest) is not None:
                return [nest]
            return [collapse(nest, context.pool, context.aliases)]

        return with_nests(stmts, joined)
