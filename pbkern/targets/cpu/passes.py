"""The CPU's passes over nests, in order: what all targets share first, then caches and vectors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pbkern.lower.kernel_nests import KernelNests, Section
from pbkern.lower.nest import scratch
from pbkern.lower.nest.collapse_dims import Aliases, collapse
from pbkern.lower.nest.index_tests import Bounds, decide_tests
from pbkern.lower.nest.ir import Buf, Nest, Stmt, with_bodies
from pbkern.lower.passes.merge_nests import merge_all, without_unread
from pbkern.lower.passes.reassociate_integers import add_shared_first
from pbkern.lower.passes.unroll_small_dims import take_apart
from pbkern.lower.passes.wide_multiply import use_wide_products
from pbkern.targets.cpu.locality.cache_blocking import keep_near
from pbkern.targets.cpu.locality.in_place_stores import store_in_place
from pbkern.targets.cpu.locality.mask_versioning import choose_unmasked
from pbkern.targets.cpu.locality.masked_strips import skip_masked
from pbkern.targets.cpu.locality.prefetch import fetch_rows
from pbkern.targets.cpu.locality.running_maximum import level_exponentials
from pbkern.targets.cpu.locality.stage_inlining import inline_stages
from pbkern.targets.cpu.locality.unswitching import unswitch
from pbkern.targets.cpu.locality.window_gathers import loop_over_starts
from pbkern.targets.cpu.packing.narrow_operands import read_narrow
from pbkern.targets.cpu.packing.operand_copies import Staged
from pbkern.targets.cpu.packing.panels import pack
from pbkern.targets.cpu.packing.row_padding import pad_rows
from pbkern.targets.cpu.packing.row_tiling import tile_rows
from pbkern.targets.cpu.schedule.register_tiles import NestSchedule, choose


def optimise(nests: KernelNests) -> KernelNests:
    """All passes on each list of statements of a kernel."""

    def optimised(s: Section) -> Section:
        return replace(s, statements=tuple(_optimise(list(s.statements), s.context, s.context.options, s.context.bounds,
                                                     s.context.kept)))

    return nests.mapped(optimised)


def _optimise(stmts: list[Stmt], builder, options, bounds: Bounds, kept: Iterable[Buf] = ()) -> list[Stmt]:
    """Merges, decides index tests, joins dimensions and packs, on every statement list, inner ones first."""
    stmts = without_unread(merge_all(take_apart(stmts, builder), builder), {b.root for b in kept})
    stmts = decide_tests(stmts, builder.pool, bounds, options.cut_bytes)
    stmts = add_shared_first(use_wide_products(stmts, builder), builder)
    if options.vnni:
        stmts = read_narrow(stmts, builder, set(kept))
    aliases = builder.aliases
    if options.contract:  # sums are added up strip by strip
        stmts = skip_masked(stmts, builder, options.vector_bits, set(kept))
        stmts = inline_stages(stmts, builder, aliases, options.vector_bits, {b.root for b in kept})
        stmts = keep_near(stmts, builder, aliases, options.vector_bits, options.l1_bytes // 2, set(kept))
        stmts = level_exponentials(stmts, builder, options.vector_bits, options.l1_bytes // 4, set(kept))
    stmts = pad_rows(stmts, builder.pool, options.vector_bits, set(kept))
    stmts = loop_over_starts(stmts, builder, options.vector_bits, bounds)
    stmts = unswitch(choose_unmasked(stmts, builder, options, bounds), builder, options)

    def scheduled(nest: Nest) -> tuple[Nest, NestSchedule]:
        nest = collapse(nest, builder.pool, aliases)
        return nest, choose(nest, options.vector_bits, reassociate=options.contract)

    stmts = store_in_place(stmts, builder.pool, {b.root for b in kept}, scheduled)
    return _shape_all(stmts, builder, options, aliases, scratch.written(stmts))


def _shape_all(stmts: list[Stmt], builder, options, aliases: Aliases, written: set[Buf]) -> list[Stmt]:
    """Joins dimensions and packs; what several contractions of a list stage alike is staged once."""
    out: list[Stmt] = []
    staged = Staged(written)
    for s in stmts:
        s = with_bodies(s, lambda inner: _shape_all(inner, builder, options, aliases, written))
        if not isinstance(s, Nest):
            out.append(s)
            continue
        for nest in tile_rows(collapse(s, builder.pool, aliases), builder, options.vector_bits):
            joined = collapse(nest, builder.pool, aliases)
            out += _joined_copies(pack(joined, builder, options, staged), builder, options, aliases)
    return out


def _joined_copies(stmts: list[Stmt], builder, options, aliases: Aliases) -> list[Stmt]:
    """Joins dimensions of nests that packing left without a schedule, also inside its loops."""
    out: list[Stmt] = []
    for s in stmts:
        s = with_bodies(s, lambda inner: _joined_copies(inner, builder, options, aliases))
        if isinstance(s, Nest) and s.schedule is None:
            s = collapse(s, builder.pool, aliases)
            fetch_rows(s, options.vector_bits)
        out.append(s)
    return out
