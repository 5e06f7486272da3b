"""CPU_PASSES: the CPU's own passes over nests, after SHARED_PASSES: they use caches and vectors better."""

from __future__ import annotations

from collections.abc import Sequence

from pbkern.core.passes import Pass
from pbkern.lower.nest import effects
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.collapse_dims import collapse
from pbkern.lower.nest.ir import Buf, Nest, Stmt, with_bodies
from pbkern.targets.cpu.locality.cache_blocking import block_for_caches
from pbkern.targets.cpu.locality.in_place_stores import store_in_place
from pbkern.targets.cpu.locality.mask_versioning import VersionMasks
from pbkern.targets.cpu.locality.masked_strips import skip_dead_tiles
from pbkern.targets.cpu.locality.prefetch import prefetch_rows
from pbkern.targets.cpu.locality.running_maximum import RunningMaximum
from pbkern.targets.cpu.locality.stage_inlining import InlineStages
from pbkern.targets.cpu.locality.unswitching import Unswitch
from pbkern.targets.cpu.locality.window_gathers import scalarise_window_gathers
from pbkern.targets.cpu.lower_options import LowerOptions
from pbkern.targets.cpu.packing.narrow_operands import sink_widening_casts
from pbkern.targets.cpu.packing.operand_copies import OperandCopies
from pbkern.targets.cpu.packing.panels import pack
from pbkern.targets.cpu.packing.row_padding import PadScratchRows
from pbkern.targets.cpu.packing.row_tiling import tile_rows
from pbkern.targets.cpu.schedule.nest_schedule import NestSchedule, schedule_decided_for
from pbkern.targets.cpu.schedule.register_tiles import choose

Context = NestContext[LowerOptions]


def _sink_widening_casts(stmts: Sequence[Stmt], context: Context) -> list[Stmt]:
    return sink_widening_casts(stmts, context, set(context.kept))


def _skip_dead_tiles(stmts: Sequence[Stmt], context: Context) -> list[Stmt]:
    return skip_dead_tiles(stmts, context, context.options.vector_bits, set(context.kept))


def _block_for_caches(stmts: Sequence[Stmt], context: Context) -> list[Stmt]:
    options = context.options
    return block_for_caches(
        stmts,
        context,
        context.aliases,
        options.vector_bits,
        options.l1_bytes // 2,
        set(context.kept),
    )


def _scalarise_window_gathers(stmts: Sequence[Stmt], context: Context) -> list[Stmt]:
    return scalarise_window_gathers(stmts, context, context.options.vector_bits, context.bounds)


def _store_in_place(stmts: Sequence[Stmt], context: Context) -> list[Stmt]:
    def scheduled(nest: Nest) -> tuple[Nest, NestSchedule]:
        nest = collapse(nest, context.pool, context.aliases)
        return nest, choose(nest, context.options.vector_bits, reassociate=context.options.contract)

    return store_in_place(stmts, context.pool, {buf.root for buf in context.kept}, scheduled)


def _pack(stmts: Sequence[Stmt], context: Context) -> list[Stmt]:
    return _packed(stmts, context, effects.written(stmts))


def _packed(stmts: Sequence[Stmt], context: Context, written: set[Buf]) -> list[Stmt]:
    """Joins dimensions and packs; what several contractions of a list stage alike is staged once."""
    out: list[Stmt] = []
    staged, options = OperandCopies(written), context.options
    for stmt in stmts:
        stmt = with_bodies(stmt, lambda inner: _packed(inner, context, written))
        if not isinstance(stmt, Nest):
            out.append(stmt)
            continue
        for nest in tile_rows(
            collapse(stmt, context.pool, context.aliases), context, options.vector_bits
        ):
            joined = collapse(nest, context.pool, context.aliases)
            out += _joined_copies(pack(joined, context, options, staged), context)
    return out


def _joined_copies(stmts: Sequence[Stmt], context: Context) -> list[Stmt]:
    """Joins dimensions of nests that packing left without a schedule, also inside its loops."""
    out: list[Stmt] = []
    for stmt in stmts:
        stmt = with_bodies(stmt, lambda inner: _joined_copies(inner, context))
        if isinstance(stmt, Nest) and schedule_decided_for(stmt) is None:
            stmt = collapse(stmt, context.pool, context.aliases)
            stmt = prefetch_rows(stmt, context.options.vector_bits)
        out.append(stmt)
    return out


def _reassociates(context: Context) -> bool:
    return context.options.contract


CPU_PASSES = (
    Pass(
        "sink widening casts",
        _sink_widening_casts,
        "dot-product instructions take narrow integers",
        when=lambda context: context.options.vnni,
    ),
    Pass(
        "skip masked strips",
        _skip_dead_tiles,
        "strips of keys that a mask hides are not computed",
        when=_reassociates,
    ),
    InlineStages(),
    Pass(
        "block for caches",
        _block_for_caches,
        "chains of nests take turns on what the nearest cache holds",
        when=_reassociates,
    ),
    RunningMaximum(),
    PadScratchRows(),
    Pass(
        "loop over window starts",
        _scalarise_window_gathers,
        "gathers of windows become loads of whole vectors",
    ),
    VersionMasks(),
    Unswitch(),
    Pass(
        "store in place",
        _store_in_place,
        "copies back are not needed where stores stay behind loads",
    ),
    Pass(
        "pack",
        _pack,
        "operands of contractions are stored as the register tile reads them; last, because it schedules",
    ),
)
