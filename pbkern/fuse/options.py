"""FuseOptions: the user's options and the target's properties that passes over functions read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

from pbkern.core.lazy_dataclass import dataclass
from pbkern.fuse.algebra.contraction_precision import MATRIX_MODE
from pbkern.fuse.cost.model import CostModel


@dataclass(frozen=True)
class FuseOptions:
    """Facts that passes over the jaxpr may know.

    Attributes:
      machine: sizes and prices of the target.
      platform: its name, by which functions choose between implementations.
      unsafe: rewrites may change rounding and drop NaNs as compile_options say; fast: sums may be
        reassociated.
      joins: equations may share kernels, and loops be written out.
      precision: mm_conv_precision_mode, or the default of targets with matrix instructions; is_default_precision:
        whether it is that.
      rounds: each operation on 16-bit floats rounds its result.
      supports: equation -> None if the target's bodies can contain it, else the reason.
      donated: per operand of the function, whether kernels may write results into it; (): none.
      edges: what passes decided about pairs of equations, for reports.
    """

    machine: CostModel
    platform: str
    unsafe: bool = True
    fast: bool = True
    joins: bool = True
    precision: str | None = None
    is_default_precision: bool = False
    rounds: bool = False
    supports: Callable[[Any], str | None] = lambda eqn: None
    donated: tuple[bool, ...] = ()
    edges: list = field(default_factory=list, compare=False)

    @classmethod
    def of(
        cls,
        options: object,
        machine: CostModel,
        supports: Callable[[Any], str | None] = lambda eqn: None,
        donated: Sequence[bool] = (),
    ) -> FuseOptions:
        """From any object; see `plan`."""
        asked = getattr(options, "mm_conv_precision_mode", None)
        has_matrices = "float16" in machine.sizes.matrix_types
        is_matrix_mode = has_matrices and not getattr(
            options, "polyblocks_gpu_no_tensor_core", False
        )
        return cls(
            machine,
            machine.name,
            unsafe=not getattr(options, "disable_unsafe_math_canonicalizations", False),
            fast=not getattr(options, "mlir_disable_fast_math", False),
            joins=not getattr(options, "disable_affine_fusion", False),
            precision=MATRIX_MODE if asked is None and is_matrix_mode else asked,
            is_default_precision=asked is None and is_matrix_mode,
            rounds=getattr(options, "emulate_precision_casts", False),
            supports=supports,
            donated=tuple(donated),
        )
