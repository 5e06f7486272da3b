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

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pbkern.core.affine import Affine
from pbkern.lower.grid.block_copies import BLOCK_SPACE
from pbkern.lower.nest.edit.grow import guarded, zero_filled
from pbkern.lower.nest.edit.pipeline import pipelined
from pbkern.lower.nest.edit.rename import renamed
from pbkern.lower.nest.ir import AsyncCopy, For, Let, Nest, Stmt, Wait
from pbkern.targets.simt.schedule.copies import copied_at_once

from .products import Context, ranges_of


@dataclass(frozen=True)
class PipelineSteps:
    """Begins copies of blocks ahead, `stages` - 1 steps, less those for which a stage is kept (ThreadOptions)."""

    def __call__(self, stmts: Sequence[Stmt], context: Context) -> list[Stmt]:
        fixed = block_copies(stmts)
        rest = [stmt for stmt in stmts if stmt not in fixed]
        ready = [_zero_filled(copy, context, frozenset()) for copy in fixed]
        late = [copy for copy in ready if _is_async(copy, context)]
        out: list[Stmt] = [copy for copy in ready if copy not in late]
        if late:
            out.append(AsyncCopy(tuple(late)))
        for stmt in rest:
            moving = block_copies(stmt.body) if isinstance(stmt, For) else []
            if not moving or not isinstance(stmt, For):
                out += [Wait(0), stmt] if late and isinstance(stmt, For) else [stmt]
                continue
            inner = {stmt.counter} | {x.name for x in stmt.body if isinstance(x, Let)}
            copies = [_zero_filled(copy, context, frozenset(inner)) for copy in moving]
            readers = [x for x in stmt.body if x not in moving]
            out += pipelined(
                replace(stmt, body=(*copies, *readers)),
                context.options.stages,
                copies,
                lambda copy: _is_async(copy, context),
                context,
                under_way=context.options.delay,
            )
        return out


def block_copies(stmts: Sequence[Stmt]) -> list[Nest]:
    """The statements that copy blocks of inputs."""
    nests = [stmt for stmt in stmts if isinstance(stmt, Nest)]
    return [nest for nest in nests if any(x.buf.space == BLOCK_SPACE for x in nest.stores)]


def _is_async(copy: Nest, context: Context) -> bool:
    return context.options.device.copies_tiles and copied_at_once(copy) > 0


def _zero_filled(copy: Nest, context: Context, moving: frozenset[str]) -> Nest:
    """The copy at all places of which it may be asked for when steps move these symbols anywhere; zero outside of the array."""
    single: dict[str, Affine] = {dim: Affine() for dim, size in copy.dims.items() if size == 1}
    dims = {dim: size for dim, size in copy.dims.items() if size > 1}
    (store,) = renamed(copy, single, dims, context.pool).stores
    known = {symbol: ends for symbol, ends in context.bounds.items() if symbol not in moving}
    value = zero_filled(guarded(store.value, context.pool), known | ranges_of(dims), context)
    return replace(copy, dims=dims, stores=(replace(store, value=value),))
