"""SHARED_PASSES: what every target runs first on the statements of a kernel, in this order.

Each takes statements and a NestContext, and gives statements, of the prologue and of each case by itself. A target goes on from
here with passes of its own (targets/cpu/passes.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from pbkern.core.passes import Pass
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.ir import Stmt

from .decide_index_tests import DecideIndexTests
from .merge_nests import MergeNests, without_unread
from .reassociate_integers import reassociate_shared_sums
from .unroll_small_dims import UnrollSmallDimensions
from .wide_multiply import WideProducts
from .window_stores import WalkWindows


def _drop_unread(stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
    return without_unread(stmts, {buf.root for buf in context.persistent})


SHARED_PASSES = (
    Pass(
        "unroll small dimensions",
        UnrollSmallDimensions(),
        "small sums become expressions, which merge with what reads them",
    ),
    Pass("merge nests", MergeNests(), "what is read where it was written needs no memory between"),
    Pass("drop unread stores", _drop_unread, "merging has left scratch that nothing reads"),
    Pass(
        "walk windows",
        WalkWindows(),
        "updates of slices walk the slice, not the array",
    ),
    Pass(
        "decide index tests",
        DecideIndexTests(),
        "nests are cut where tests change, so that most points need no mask",
    ),
    Pass(
        "wide products",
        WideProducts(),
        "products of halves, as random numbers have them, are one operation",
    ),
    Pass(
        "reassociate integers",
        reassociate_shared_sums,
        "sums of what all points share are made once",
    ),
)
