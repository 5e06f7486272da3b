"""top_k as a sort by integers that fall as the elements rise: floats, as XLA orders them, from -NaN over -0 and 0 to NaN."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jax import lax
from jax import numpy as jnp


def first_of_sorted(operands, *, dimension: int, num_keys: int, first: int) -> list:
    """The first elements of lines along a dimension, after a stable sort."""
    return [lax.slice_in_dim(v, 0, first, axis=dimension) for v in lax.sort(operands, dimension=dimension, num_keys=num_keys)]


def by_sorting(eqn, operands, sort: Callable[..., list] = first_of_sorted) -> list | None:
    """The first elements and their places after a stable sort; None where there is nothing to do or no order."""
    (x,), axis, k = operands, eqn.params["axis"], eqn.params["k"]
    if k == 0 or x.dtype.kind == "c":
        return None
    places = lax.broadcasted_iota(eqn.outvars[1].aval.dtype, x.shape, axis)
    keys, places = sort((_falling(x), places), dimension=axis, num_keys=1, first=k)
    return [_of_falling(keys, x.dtype), places]


def _falling(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.bitwise_not(x)
    x = x if x.dtype.itemsize > 1 else lax.convert_element_type(x, np.float32)
    bits = lax.bitcast_convert_type(x, np.dtype(f"int{8 * x.dtype.itemsize}"))
    return lax.bitwise_not(_without_sign(bits))


def _of_falling(keys, dtype):
    """The inverse of `_falling`."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return lax.bitwise_not(keys)
    bits, kept = _without_sign(lax.bitwise_not(keys)), dtype if np.dtype(dtype).itemsize > 1 else np.float32
    return lax.convert_element_type(lax.bitcast_convert_type(bits, kept), dtype)


def _without_sign(bits):
    """Sign and magnitude to two's complement, and back."""
    sign = lax.shift_right_arithmetic(bits, lax.full_like(bits, 8 * bits.dtype.itemsize - 1))
    return lax.bitwise_xor(bits, lax.bitwise_and(sign, lax.full_like(bits, np.iinfo(bits.dtype).max)))
