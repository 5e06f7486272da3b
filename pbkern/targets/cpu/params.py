"""CompilerParams: what a kernel's author tells the CPU target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pbkern.targets.params import CheckedParams, DimensionSemantics, is_count

VECTOR_WIDTHS = (128, 256, 512)


@dataclass(frozen=True)
class CompilerParams(CheckedParams):
    """Choices for one kernel on the CPU; `kernel(..., compiler_params=pbkern.cpu.CompilerParams(...))`.

    Attributes:
      approx_math: allow cheaper, less exact implementations of functions such as exp. Default
        False.
      dimension_semantics: one entry per grid dimension. "parallel": programs may run in any order,
        on several threads. "arbitrary" and "sequential": programs run in order on one thread (the
        CPU does not distinguish the two). None, the default: a dimension is parallel where its
        programs provably write disjoint blocks and keep nothing in scratch.
      num_threads: most threads that run programs of this kernel. None: every core the process may
        use.
      vector_width: bits of the vectors in generated code: 128, 256 or 512. None: the machine's
        widest.
      max_concurrent_steps: sequential grid steps whose blocks are on their way at the same time.
        The CPU has no asynchronous copies; it prefetches the blocks of the next
        max_concurrent_steps - 1 steps. Default 1: none.
      allow_input_fusion: per operand, whether a producer outside may be computed in this kernel in
        place of being read, where a function of pbkern.jit calls it. A permission, not an order:
        what is read by many programs is computed once, outside, if that costs less. None, the
        default: permitted for all. Operands that are prefetched may be left out.

    Examples:
      >>> params = pbkern.cpu.CompilerParams(dimension_semantics=("parallel",), num_threads=2)
      >>> @pbkern.kernel(
      ...     grid=(4,), out_specs=pbkern.BlockSpec((2,), lambda i: (i,)), compiler_params=params,
      ...     out_shape=jax.ShapeDtypeStruct((8,), "float32"),
      ... )
      ... def ones(o):
      ...     o[...] = jnp.ones(2)
      >>> float(ones().sum())
      8.0
    """

    approx_math: bool = False
    dimension_semantics: tuple[DimensionSemantics, ...] | None = None
    num_threads: int | None = None
    vector_width: int | None = None
    max_concurrent_steps: int = 1
    allow_input_fusion: tuple[bool, ...] | None = None

    target_name: ClassVar[str] = "cpu"

    def __post_init__(self) -> None:
        threads = self.num_threads
        self._check_flags("approx_math")
        self._check(
            "num_threads", threads is None or is_count(threads), "an integer of at least 1, or None"
        )
        self._check(
            "vector_width", self.vector_width in (None, *VECTOR_WIDTHS), "128, 256, 512 or None"
        )
        self._check(
            "max_concurrent_steps", is_count(self.max_concurrent_steps), "an integer of at least 1"
        )
        self._check_semantics()
        self._check_sequence(
            "allow_input_fusion", lambda flag: isinstance(flag, bool), "a sequence of True or False"
        )


CompilerParams.__module__ = "pbkern.cpu"  # where people import it from, and so how kernels print it
