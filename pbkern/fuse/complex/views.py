"""Complex arrays in memory: views as real arrays, re and im interleaved along a last dimension of 2, and back.

    complex_as_reals: complex64[...] -> float32[..., 2]        reals_as_complex: float32[..., 2] -> complex64[...]

Both rename bytes. In a HostProgram they are two types of one buffer. XLA computes those that are
left to it: empty arrays.
"""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.interpreters import mlir

from pbkern.core.ops.complex.interleaved import part_type

VIEWS_OF_COMPLEX = ("complex_as_reals", "reals_as_complex")

as_reals_p = jex.Primitive("complex_as_reals")
as_complex_p = jex.Primitive("reals_as_complex")


@as_reals_p.def_abstract_eval
def _reals_type(z):
    return jax.core.ShapedArray((*z.shape, 2), part_type(z.dtype))


@as_complex_p.def_abstract_eval
def _complex_type(x):
    return jax.core.ShapedArray(x.shape[:-1], np.result_type(x.dtype, np.complex64))


@as_reals_p.def_impl
def _reals(z):
    return lax.concatenate(
        [lax.expand_dims(part(z), [z.ndim]) for part in (lax.real, lax.imag)], z.ndim
    )


@as_complex_p.def_impl
def _complex(x):
    return lax.complex(*(lax.index_in_dim(x, n, x.ndim - 1, keepdims=False) for n in range(2)))


for _primitive, _impl in ((as_reals_p, _reals), (as_complex_p, _complex)):
    mlir.register_lowering(_primitive, mlir.lower_fun(_impl, multiple_results=False))
