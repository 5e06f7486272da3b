"""FuseOptions: what passes over functions know of the options and of the target."""

from __future__ import annotations

from dataclasses import dataclass

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
      unrolls: loops may be written out.
      precision: mm_conv_precision_mode, or the default of targets with matrix instructions; is_default_precision:
        whether it is that.
      rounds: each operation on 16-bit floats rounds its result.
    """

    machine: CostModel
    platform: str
    unsafe: bool = True
    fast: bool = True
    unrolls: bool = True
    precision: str | None = None
    is_default_precision: bool = False
    rounds: bool = False

    @classmethod
    def of(cls, options: object, machine: CostModel) -> FuseOptions:
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
            unrolls=not getattr(options, "disable_affine_fusion", False),
            precision=MATRIX_MODE if asked is None and is_matrix_mode else asked,
            is_default_precision=asked is None and is_matrix_mode,
            rounds=getattr(options, "emulate_precision_casts", False),
        )
