"""A loop whose steps copy blocks of inputs -> one whose copies run as many steps ahead as the kernel's author asks for.

    for %g0 < 64:                                          for %s < 2:
      nest [d0<8, d1<64]                                     async:
        %t1[d0, d1] = %a0[d0, 64*%g0 + d1]?                    %t1[%s, d0, d1] = ...
      nest [i<8, k<64*]                          ->        for %g0 < 64:
        acc0 sum= %t1[i, k]                                  wait 1
        ...                                                  async:
                                                               %t1[%g0 + 2, d0, d1] = ...
                                                             nest [i<8, k<64*]
                                                               acc0 sum= %t1[%g0, i, k]
                                                               ...
                                                           wait 0

What lies outside of an array is zero in the copies. Threads copy what the device does not: they load to registers before a
step, and store behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.grid.block_copies import BLOCK_SPACE
from pbkern.lower.nest.async_copies import is_mask, masked_load
from pbkern.lower.nest.edit.grow import guarded, zero_filled
from pbkern.lower.nest.edit.inline import stored_at
from pbkern.lower.nest.edit.peel import peeled
from pbkern.lower.nest.edit.pipeline import pipelined
from pbkern.lower.nest.edit.rename import renamed
from pbkern.lower.nest.ir import (
    AsyncCopy,
    Buf,
    Expr,
    For,
    Let,
    Load,
    Nest,
    Stmt,
    Wait,
    every,
    with_nests,
)
from pbkern.targets.simt.schedule.copies import copied_at_once

from .block_tiles import with_tiles
from .products import Context, in_chunks, ranges_of


@dataclass(frozen=True)
class PipelineSteps:
    """Begins copies of blocks ahead, `stages` - 1 steps, less those for which a stage is kept (ThreadOptions)."""

    def __call__(self, stmts: Sequence[Stmt], context: Context) -> list[Stmt]:
        blocks = {copy.stores[0].buf: copy for copy in block_copies(list(every(stmts)))}
        if not blocks:
            return list(stmts)
        stmts = with_nests(stmts, lambda nest: [_without_masks(nest, blocks, context)])
        stmts = with_tiles(stmts, blocks.keys(), context)
        fixed = block_copies(stmts)
        out: list[Stmt] = []
        late: list[Nest] = []
        for copy in fixed:
            ready = _zero_filled(copy, context, frozenset())
            (late if _is_async(ready, context) else out).append(ready)
        out += [AsyncCopy(tuple(late))] if late else []
        for stmt in stmts:
            for part in peeled(stmt, context) if isinstance(stmt, For) else [stmt]:
                if part not in fixed:
                    out += self._pipelined(part, bool(late), context)
        return out

    def _pipelined(self, stmt: Stmt, has_begun: bool, context: Context) -> list[Stmt]:
        """A statement; `has_begun`: copies of blocks that do not move are under way."""
        if not isinstance(stmt, For):
            return [stmt]
        moving = block_copies(stmt.body)
        before: list[Stmt] = [Wait(0)] if has_begun else []
        if not moving:
            return [*before, stmt]
        inner = frozenset((stmt.counter, *(x.name for x in stmt.body if isinstance(x, Let))))
        copies = [_zero_filled(copy, context, inner) for copy in moving]
        readers = [x for x in stmt.body if x not in moving]
        if any(_is_async(copy, context) for copy in copies):
            before = []  # the first step waits for all groups before its own
        return before + pipelined(
            replace(stmt, body=(*copies, *readers)),
            context.options.stages,
            copies,
            lambda copy: _is_async(copy, context),
            context,
            under_way=context.options.delay,
        )


def block_copies(stmts: Sequence[Stmt]) -> list[Nest]:
    """The statements that copy blocks of inputs."""
    nests = [stmt for stmt in stmts if isinstance(stmt, Nest)]
    return [nest for nest in nests if any(x.buf.space == BLOCK_SPACE for x in nest.stores)]


def _is_async(copy: Nest, context: Context) -> bool:
    return copy.by is None and context.options.device.copies_tiles and copied_at_once(copy) > 0


def _without_masks(nest: Nest, blocks: Mapping[Buf, Nest], context: Context) -> Nest:
    """The nest without tests that tell elements of a block outside of its array, which are zero, from others."""

    def plain(node: Expr) -> Expr | None:
        masked = masked_load(node)
        if masked is None or not is_mask(node) or masked[0].buf not in blocks:
            return None
        load, (test, *_) = masked
        (store,) = blocks[load.buf].stores
        assert isinstance(store.value, Load), "a block is copied"
        there = stored_at(store, load.index, context.pool)
        assert isinstance(there, Load)
        ends = zip(there.index, there.buf.shape)
        is_known = any(test is context.pool.in_range(place, 0, size) for place, size in ends)
        return node.args[-1] if is_known else None

    return nest.mapped(context.pool.rewriter(plain))


def _zero_filled(copy: Nest, context: Context, moving: frozenset[str]) -> Nest:
    """The copy at all places of which it may be asked for when steps move these symbols anywhere.

    It is zero outside of the array, and in a tile behind the block.
    """
    long = [dim for dim, size in copy.dims.items() if size > 1] or list(copy.dims)[-1:]
    single: dict[str, Affine] = {dim: Affine() for dim in copy.dims if dim not in long}
    (store,) = renamed(copy, single, copy.dims, context.pool).stores
    dims = {dim: size for place, size in zip(store.index, store.buf.shape) for dim in place.symbols}
    known = {symbol: ends for symbol, ends in context.bounds.items() if symbol not in moving}
    value = zero_filled(guarded(store.value, context.pool), known | ranges_of(dims), context)
    for dim, size in dims.items():
        if size > copy.dims[dim]:
            test = context.pool.in_range(Affine.symbol(dim), 0, copy.dims[dim])
            value = context.select(test, value, context.const(0, value.dtype))
    ready = replace(copy, dims=dims, stores=(replace(store, value=value),))
    return ready if store.buf.layout is None else in_chunks(ready, value, context)
