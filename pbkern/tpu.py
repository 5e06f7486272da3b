"""Public names for TPUs: `CompilerParams` for kernels that `to_pallas(target="tpu")` hands to JAX's compiler."""

from pbkern.targets.tpu.params import CompilerParams

__all__ = ["CompilerParams"]
