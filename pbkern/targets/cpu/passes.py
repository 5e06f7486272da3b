"""CPU_PASSES: the CPU's own passes over nests, after SHARED_PASSES: they use caches and vectors better."""

from __future__ import annotations

from operator import attrgetter

from pbkern.core.passes import Pass
from pbkern.lower.nest.context import NestContext
from pbkern.lower.passes.in_place_stores import store_in_place
from pbkern.lower.passes.mask_versioning import VersionMasks
from pbkern.lower.passes.stage_inlining import InlineStages
from pbkern.lower.passes.strips.masked_strips import SkipMaskedStrips
from pbkern.lower.passes.strips.running_maximum import RunningMaximum
from pbkern.lower.passes.unswitching import Unswitch
from pbkern.lower.passes.window_gathers import LoopOverWindowStarts
from pbkern.targets.cpu.locality.cache_blocking import BlockForCaches
from pbkern.targets.cpu.locality.carried_values import overwrite_carries
from pbkern.targets.cpu.locality.loop_results import store_loop_results
from pbkern.targets.cpu.locality.window_sums import FactorWindowSums
from pbkern.targets.cpu.math.extremes import maxima_as_minima
from pbkern.targets.cpu.math.narrow_extremes import extremes_as_integers
from pbkern.targets.cpu.packing.narrow_operands import SinkWideningCasts
from pbkern.targets.cpu.packing.pack import Pack
from pbkern.targets.cpu.packing.row_padding import PadScratchRows
from pbkern.targets.cpu.schedule.decide_schedules import DecideSchedules
from pbkern.targets.cpu.schedule.instructions import INSTRUCTIONS

_reassociates = attrgetter("options.contract")
_has_asymmetric_minima = attrgetter("options.asymmetric_minima")


def _has_word_products(context: NestContext) -> bool:
    """Whether some instruction of the machine adds up products of narrow integers."""
    rows = INSTRUCTIONS.values()
    return any(row.accumulator.kind == "i" and row.is_available(context.options) for row in rows)


CPU_PASSES = (
    Pass(
        "store loop results",
        store_loop_results,
        "values of each step of a scan go to the result's memory at once",
    ),
    Pass(
        "sink widening casts",
        SinkWideningCasts(),
        "dot-product instructions take narrow integers",
        when=_has_word_products,
    ),
    Pass(
        "skip masked strips",
        SkipMaskedStrips(),
        "strips of keys that a mask hides are not computed",
        when=_reassociates,
    ),
    Pass(
        "factor window sums",
        FactorWindowSums(),
        "sums over windows are added along one dimension after the other",
        when=_reassociates,
    ),
    Pass(
        "inline stages",
        InlineStages(),
        "stencils over stencils keep rows in registers",
        when=_reassociates,
    ),
    Pass(
        "overwrite carries",
        overwrite_carries,
        "registers hold what steps of a loop carry on; before nests over whole rows are flat",
    ),
    Pass(
        "block for caches",
        BlockForCaches(),
        "chains of nests take turns on what the nearest cache holds",
        when=_reassociates,
    ),
    Pass(
        "running maximum",
        RunningMaximum(),
        "long rows of a softmax are read once",
        when=_reassociates,
    ),
    Pass(
        "pad scratch rows",
        PadScratchRows(),
        "rows that follow one another fall into different cache sets",
    ),
    Pass(
        "loop over window starts",
        LoopOverWindowStarts(),
        "gathers of windows become loads of whole vectors",
    ),
    Pass(
        "version masks",
        VersionMasks(),
        "most programs need no mask; before unswitching, which counts copies",
    ),
    Pass(
        "unswitch",
        Unswitch(),
        "selects by scalars, and those by rows, become branches outside loops",
    ),
    Pass(
        "store in place",
        store_in_place,
        "copies back are not needed where stores stay behind loads",
    ),
    Pass(
        "pack",
        Pack(),
        "operands of contractions are stored as the register tile reads them",
    ),
    Pass(
        "extremes as integers",
        extremes_as_integers,
        "16-bit floats are compared as they are; before their maxima become minima",
    ),
    Pass(
        "maxima as minima",
        maxima_as_minima,
        "a minimum that keeps NaN and signs of zeros takes fewer instructions; after passes that look for maxima",
        when=_has_asymmetric_minima,
    ),
    Pass(
        "decide schedules",
        DecideSchedules(),
        "vectors and register tiles are values that code generation reads; last, because edits lose them",
        required=True,
    ),
)
