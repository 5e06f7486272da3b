"""FuseOptions: what passes over functions know of the options and of the target."""

from __future__ import annotations

from dataclasses import dataclass

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
      precision: mm_conv_precision_mode.
      rounds: each operation on 16-bit floats rounds its result.
    """

    machine: CostModel
    platform: str
    unsafe: bool = True
    fast: bool = True
    unrolls: bool = True
    precision: str | None = None
    rounds: bool = False

    @classmethod
    def of(cls, options: object, machine: CostModel) -> FuseOptions:
        """From any object; see `plan`."""
        return cls(
            machine,
            machine.name,
            unsafe=not getattr(options, "disable_unsafe_math_canonicalizations", False),
            fast=not getattr(options, "mlir_disable_fast_math", False),
            unrolls=not getattr(options, "disable_affine_fusion", False),
            precision=getattr(options, "mm_conv_precision_mode", None),
            rounds=getattr(options, "emulate_precision_casts", False),
        )
