"""CompilerParams: what a kernel's author tells the AMD GPU target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pbkern.targets.simt.params import ThreadParams


@dataclass(frozen=True)
class CompilerParams(ThreadParams):
    """Choices for one kernel on an AMD GPU; `kernel(..., compiler_params=pbkern.amdgpu.CompilerParams(...))`.

    Attributes:
      approx_math: allow cheaper, less exact implementations of functions such as exp. Default
        False.
      dimension_semantics: one entry per grid dimension. "parallel": programs run in any order, each
        on a workgroup. "arbitrary" and "sequential": programs run in order, in a loop inside a
        workgroup. None, the default: a dimension is parallel where its programs provably write
        disjoint blocks and keep nothing in scratch.
      unsafe_no_auto_barriers: place no barrier between statements of the body whose threads meet in memory; those between
        copies of blocks and their readers stay. Default False.
      max_concurrent_steps: steps along grid dimensions that run in order which are active at the same time: one computes,
        blocks of inputs of the others are in LDS already, or on their way there through registers, for the device copies
        nothing by itself. Default 1: blocks are read in place.
      delay_release: steps for which the memory of a step's blocks is kept behind it. Default 0; less than
        max_concurrent_steps.
      num_warps: wavefronts in a workgroup, of 64 threads on CDNA and 32 on RDNA; a power of two,
        1,024 threads at most. None, the default: 128 threads.

    Examples:
      >>> params = pbkern.amdgpu.CompilerParams(dimension_semantics=("parallel",), num_warps=4)
      >>> @pbkern.kernel(
      ...     grid=(4,), out_specs=pbkern.BlockSpec((2,), lambda i: (i,)), compiler_params=params,
      ...     out_shape=jax.ShapeDtypeStruct((8,), "float32"), in_types=[],
      ... )
      ... def ones(o):
      ...     o[...] = jnp.ones(2)
      >>> ones.trace().compiler_params["amdgpu"].num_warps
      4
    """

    target_name: ClassVar[str] = "amdgpu"


# where people import it from, and so how kernels print it
CompilerParams.__module__ = "pbkern.amdgpu"
