"""CompilerParams: what a kernel's author tells the NVIDIA GPU target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pbkern.targets.params import is_count
from pbkern.targets.simt.params import ThreadParams

LOWERINGS = ("Lane", "Warpgroup")


@dataclass(frozen=True)
class CompilerParams(ThreadParams):
    """Choices for one kernel on an NVIDIA GPU; `kernel(..., compiler_params=pbkern.nvgpu.CompilerParams(...))`.

    Attributes:
      approx_math: allow cheaper, less exact implementations of functions: exp, exp2 and tanh of float32 are
        the instructions ex2.approx and tanh.approx. Default False.
      dimension_semantics: one entry per grid dimension. "parallel": programs run in any order, each
        on a thread block. "arbitrary" and "sequential": programs run in order, in a loop inside a
        block. None, the default: a dimension is parallel where its programs provably write disjoint
        blocks and keep nothing in scratch.
      max_concurrent_steps: steps along grid dimensions that run in order which are active at the same time: one computes,
        blocks of inputs of the others are on their way to shared memory, by cp.async where rows allow it, else through
        registers. Blocks that no step moves are copied once. Default 1: blocks are read in place; only operands of products
        are copied ahead, by as many steps as the target chooses.
      delay_release: steps for which the memory of a step's blocks is kept behind it, so that as many less are on their way;
        with 1 or more, a product by groups of warps is left under way when the next step begins. Default 0; less than
        max_concurrent_steps.
      unsafe_no_auto_barriers: place no barrier between statements of the body whose threads meet in memory; those between
        copies of blocks and their readers stay. Default False.
      profile_space: events that each block records: how long it ran, then its steps along
        sequential dimensions, as many as fit. Default 0: none. Recording lets the threads of a
        block wait for each other at both ends of a step.
      profile_dir: folder for the recorded events, a Chrome trace (chrome://tracing, Perfetto) per
        launch. Default "".
      lowering_semantics: "Lane", the default: code for threads, and for warps or groups of four warps where these multiply
        matrices. "Warpgroup": groups compute all products of matrices; ScheduleError where the device has no instruction for
        that, a block no whole groups, or a product another shape or type. A string, or Pallas's plgpu.LoweringSemantics.
      num_warps: warps of 32 threads in a block, a power of two up to 32. None, the default: 4, or more for large
        products and for scatters.

    Examples:
      >>> params = pbkern.nvgpu.CompilerParams(dimension_semantics=("parallel",), num_warps=8)
      >>> @pbkern.kernel(
      ...     grid=(4,), out_specs=pbkern.BlockSpec((2,), lambda i: (i,)), compiler_params=params,
      ...     out_shape=jax.ShapeDtypeStruct((8,), "float32"), in_types=[],
      ... )
      ... def ones(o):
      ...     o[...] = jnp.ones(2)
      >>> ones.trace().compiler_params["nvgpu"].num_warps
      8
    """

    profile_space: int = 0
    profile_dir: str = ""
    lowering_semantics: str = "Lane"

    target_name: ClassVar[str] = "nvgpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("profile_space", is_count(self.profile_space, 0), "an integer of at least 0")
        named = isinstance(self.profile_dir, str) and (
            bool(self.profile_dir) or not self.profile_space
        )
        self._check(
            "profile_dir",
            named,
            "the name of a folder, in which profile_space events of each block are written",
        )
        self._check_choice("lowering_semantics", LOWERINGS)


# where people import it from, and so how kernels print it
CompilerParams.__module__ = "pbkern.nvgpu"
