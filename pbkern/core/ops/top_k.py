"""top_k as a sort by integers that fall as the elements rise: floats, as XLA orders them, from -NaN over -0 and 0 to NaN."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jax import lax
from jax import numpy as jnp

# Most first elements that are found one after the other, without sorting, in lines of at most
# LONGEST_FIRST_LINE elements. Measured on Zen 4: 2 of 64 take a twelfth of the time, 4 of 1000 half
# of it.
MOST_FIRST = 4
# Elements of the longest line for which MOST_FIRST holds. Measured on Zen 4: 4 of 32000 take 1.3
# times as long as sorting.
LONGEST_FIRST_LINE = 4096
# Most first elements that are found one after the other in lines of more than LONGEST_FIRST_LINE
# elements. Measured on Zen 4 as well.
MOST_FIRST_OF_LONG = 2


def first_of_sorted(operands, *, dimension: int, num_keys: int, first: int) -> list:
    """The first elements of lines along a dimension, after a stable sort."""
    return [
        lax.slice_in_dim(operand, 0, first, axis=dimension)
        for operand in lax.sort(operands, dimension=dimension, num_keys=num_keys)
    ]


def by_sorting(eqn, operands, sort: Callable[..., list] = first_of_sorted) -> list | None:
    """The first elements and their places after a stable sort; None where there is nothing to do or no order."""
    (x,), axis, k = operands, eqn.params["axis"], eqn.params["k"]
    if k == 0 or x.dtype.kind == "c":
        return None
    if (
        k <= (MOST_FIRST if x.shape[axis] <= LONGEST_FIRST_LINE else MOST_FIRST_OF_LONG)
        and x.dtype != bool
    ):
        keys, places = _few_first(_falling(x), k, axis, eqn.outvars[1].aval.dtype)
        return [_of_falling(keys, x.dtype), places]
    places = lax.broadcasted_iota(eqn.outvars[1].aval.dtype, x.shape, axis)
    keys, places = sort((_falling(x), places), dimension=axis, num_keys=1, first=k)
    return [_of_falling(keys, x.dtype), places]


def _few_first(keys, count: int, axis: int, of_places) -> tuple:
    """The least keys and their places, one after the other: the least of those behind the one before, and its first place."""
    extent, limit = keys.shape[axis], jnp.iinfo(keys.dtype).max
    index, least, places, behind = lax.broadcasted_iota(of_places, keys.shape, axis), [], [], None
    for _ in range(count):
        waiting = keys if behind is None else lax.select(behind, keys, lax.full_like(keys, limit))
        least.append(_line(lax.reduce_min(waiting, (axis,)), keys.shape, axis))
        here = lax.eq(keys, least[-1])
        here = here if behind is None else lax.bitwise_and(here, behind)
        position = lax.select(here, index, lax.full_like(index, extent))
        places.append(_line(lax.reduce_min(position, (axis,)), keys.shape, axis))
        later = lax.bitwise_and(lax.eq(keys, least[-1]), lax.gt(index, places[-1]))
        behind = lax.bitwise_or(lax.gt(keys, least[-1]), later)
    first = [
        lax.concatenate([lax.slice_in_dim(value, 0, 1, axis=axis) for value in values], axis)
        for values in (least, places)
    ]
    return first[0], first[1]


def _line(values, shape, axis: int):
    """One value per line, for all elements of it."""
    return lax.broadcast_in_dim(values, shape, [dim for dim in range(len(shape)) if dim != axis])


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
    bits, word = (
        _without_sign(lax.bitwise_not(keys)),
        dtype if np.dtype(dtype).itemsize > 1 else np.float32,
    )
    return lax.convert_element_type(lax.bitcast_convert_type(bits, word), dtype)


def _without_sign(bits):
    """Sign and magnitude to two's complement, and back."""
    sign = lax.shift_right_arithmetic(bits, lax.full_like(bits, 8 * bits.dtype.itemsize - 1))
    return lax.bitwise_xor(
        bits, lax.bitwise_and(sign, lax.full_like(bits, np.iinfo(bits.dtype).max))
    )
