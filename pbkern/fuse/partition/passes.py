"""PARTITION_PASSES: how equations become groups, phase by phase; each works on the Partitioner that the one before leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jax.extend import core as jex

from pbkern.core.passes import Pass, run_passes
from pbkern.fuse.cost.model import CostModel
from pbkern.fuse.graph import Partition

from .control_regions import take_several_steps
from .duplicate_producers import DuplicateMasks, share_duplicates
from .final_reductions import JoinLastStages
from .grow_groups import GrowGroups
from .join_softmax_chains import JoinSoftmaxChains
from .leave_layouts_to_xla import LeaveLayouts
from .loop_kernels.loops_in_kernels import LoopsInKernels
from .masked_blocks import TrimMaskedBlocks
from .merge_groups import MergeProducers, MergeSiblings
from .move_consumers import MoveConsumers
from .partitioner import Partitioner
from .rematerialise import Rematerialise


def _changing(change: Callable[[Partitioner], None]) -> Callable[..., Partitioner]:
    """A pass of a function that changes groups where they are."""

    def function(parts: Partitioner, options: object) -> Partitioner:
        change(parts)
        return parts

    return function


def _joins(options: object) -> bool:
    """Whether equations may share kernels."""
    return not getattr(options, "disable_affine_fusion", False)


def _joins_reductions(options: object) -> bool:
    """Whether reductions that depend on each other may share kernels."""
    return _joins(options) and not getattr(options, "disable_reduce_reduce_fusion", False)


PARTITION_PASSES = (
    Pass(
        "grow groups",
        GrowGroups(),
        "in reverse, equations join the groups of their consumers while the modelled time falls",
    ),
    Pass(
        "search blocks",
        _changing(Partitioner.search_blocks),
        "while groups grew, cheap equations kept the blocks so far",
        when=_joins,
    ),
    Pass(
        "duplicate masks",
        DuplicateMasks(),
        "a mask that is computed again costs less than one that is read",
        when=_joins,
    ),
    Pass(
        "share duplicates",
        _changing(share_duplicates),
        "what several groups compute is computed once where that is less work",
        when=_joins,
    ),
    Pass(
        "join softmax chains",
        JoinSoftmaxChains(),
        "attention needs no scores in memory",
        when=_joins,
    ),
    Pass(
        "merge producers",
        MergeProducers(),
        "whole groups join their consumers where storing the value between costs more",
        when=_joins,
    ),
    Pass(
        "rematerialise",
        Rematerialise(),
        "large values between kernels are computed again from small ones",
        when=_joins_reductions,
    ),
    Pass(
        "move consumers",
        MoveConsumers(),
        "readers of a large value go where it is made, and pass on a smaller one",
        when=_joins,
    ),
    Pass(
        "merge siblings",
        MergeSiblings(),
        "groups that read the same arrays read them once",
        when=_joins,
    ),
    Pass(
        "trim masked blocks",
        TrimMaskedBlocks(),
        "with fewer rows per program, less masked work is done",
        when=_joins,
    ),
    Pass(
        "join last stages",
        JoinLastStages(),
        "a small reduction of a kernel's results needs no kernel of its own",
        when=_joins_reductions,
    ),
    Pass(
        "search blocks of products",
        _changing(Partitioner.search_blocks_of_products),
        "from a second starting point, now that groups are final",
    ),
)

# What follows behind those: passes that know the target.
KERNEL_PASSES = (
    Pass(
        "put loops in kernels",
        LoopsInKernels(),
        "a step that computes little costs less than its launch, and carries stay in registers",
        when=lambda options, results: options.joins,
    ),
    Pass(
        "take several steps",
        take_several_steps,
        "steps of stencils share a tile in a cache; of loops that are no kernel",
        when=lambda options, results: options.joins,
    ),
)

# What follows on the partition of a whole function, after those of the bodies of its control flow.
WHOLE_PASSES = (
    Pass(
        "leave layouts",
        LeaveLayouts(),
        "XLA chooses layouts of arrays that it hands to LAPACK, and a call less is made",
        when=lambda options: not getattr(options, "strict_target", False),
    ),
)


def partition(
    closed: jex.ClosedJaxpr,
    machine: CostModel,
    supports: Callable,
    options: object,
    name: str = "",
    pairs: Mapping = MappingProxyType({}),
) -> Partition:
    """Groups the equations of a simplified jaxpr; `name`: the function's, in dumps.

    `pairs`: result -> the operand that it may overwrite.
    """
    parts = Partitioner(closed.jaxpr, machine, supports, options, partition, pairs)
    run_passes("partition", PARTITION_PASSES, parts, options, of=name)
    return Partition(parts.nodes, parts.edges)
