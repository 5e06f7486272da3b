"""THREAD_PASSES: the passes of GPUs over nests, after SHARED_PASSES: what is read more than once is read from shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from pbkern.core.passes import Pass
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.collapse_dims import collapse
from pbkern.lower.nest.ir import Nest, Stmt, with_nests
from pbkern.lower.passes.unswitching import Unswitch
from pbkern.targets.simt.options import ThreadOptions

from .contract import ContractTiles
from .regions import is_tiled
from .staging import StageInSharedMemory
from .strips import CutIntoStrips

Context = NestContext[ThreadOptions]


def _join(stmts: Sequence[Stmt], context: Context) -> list[Stmt]:
    def joined(nest: Nest) -> list[Stmt]:
        return [nest if is_tiled(nest) else collapse(nest, context.pool, context.aliases)]

    return with_nests(stmts, joined)


THREAD_PASSES = (
    Pass(
        "unswitch",
        Unswitch(),
        "of arrays between which a scalar selects, one is read",
    ),
    Pass(
        "contract",
        ContractTiles(),
        "products by matrix instructions, before their operands are staged in another way",
    ),
    Pass(
        "cut into strips",
        CutIntoStrips(),
        "what nests read again fits shared memory a few rows at a time",
    ),
    Pass(
        "stage in shared memory",
        StageInSharedMemory(),
        "what is read again, or across rows, is loaded once, along rows",
    ),
    Pass(
        "join dimensions", _join, "rows that follow one another in memory are one, of whole vectors"
    ),
)
