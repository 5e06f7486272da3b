"""THREAD_PASSES: the passes of GPUs over nests, after SHARED_PASSES: what is read more than once is read from shared memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter

from pbkern.core.passes import Pass
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.collapse_dims import collapse
from pbkern.lower.nest.ir import Nest, Stmt, with_nests
from pbkern.lower.passes.mask_versioning import VersionMasks
from pbkern.lower.passes.stage_inlining import InlineStages
from pbkern.lower.passes.strips.hidden_steps import SkipHiddenSteps
from pbkern.lower.passes.strips.masked_strips import SkipMaskedStrips
from pbkern.lower.passes.strips.running_maximum import RunningMaximum
from pbkern.lower.passes.unswitching import Unswitch
from pbkern.targets.simt.options import ThreadOptions

from .contract import ContractTiles
from .costly_values import StoreCostlyValues
from .pipeline_steps import PipelineSteps
from .regions import is_tiled
from .staging import StageInSharedMemory
from .strips import CutIntoStrips

Context = NestContext[ThreadOptions]


def _join(stmts: Sequence[Stmt], context: Context) -> list[Stmt]:
    def joined(nest: Nest) -> list[Stmt]:
        is_whole = is_tiled(nest) or any(load.buf.circular for load in nest.loads())
        return [nest if is_whole else collapse(nest, context.pool, context.aliases)]

    return with_nests(stmts, joined)


_reassociates = attrgetter("options.contract")

THREAD_PASSES = (
    Pass(
        "pipeline steps",
        PipelineSteps(),
        "blocks of the next steps are on their way, before other passes ask where operands come from",
    ),
    Pass(
        "skip masked strips",
        SkipMaskedStrips(),
        "strips of keys that a mask hides are not computed",
        when=_reassociates,
    ),
    Pass(
        "skip hidden steps",
        SkipHiddenSteps(),
        "chunks of keys that a mask hides are not computed, and their tiles not copied",
        when=_reassociates,
    ),
    Pass(
        "inline stages",
        InlineStages(),
        "what is summed over a few elements needs no memory between",
        when=_reassociates,
    ),
    Pass(
        "contract",
        ContractTiles(),
        "products by matrix instructions, before their operands are staged in another way",
    ),
    Pass(
        "unswitch",
        Unswitch(fewest_row_points=sys.maxsize),  # threads take rows at once
        "of arrays between which a scalar selects, one is read",
    ),
    Pass(
        "cut into strips",
        CutIntoStrips(),
        "what nests read again fits shared memory a few rows at a time",
    ),
    Pass(
        "running maximum",
        RunningMaximum(fewest_strips=4, first_part=8),
        "rows of a softmax that shared memory does not hold are read once",
        when=_reassociates,
    ),
    Pass(
        "stage in shared memory",
        StageInSharedMemory(),
        "what is read again, or across rows, is loaded once, along rows",
    ),
    Pass(
        "store costly values",
        StoreCostlyValues(),
        "what is computed of a staged element is not computed again",
    ),
    Pass(
        "version masks",
        VersionMasks(),
        "most programs need no mask; behind staging, for which readers stand side by side",
    ),
    Pass(
        "join dimensions", _join, "rows that follow one another in memory are one, of whole vectors"
    ),
)
