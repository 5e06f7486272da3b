"""Sorts, and the greatest elements."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern.frontends.stablehlo.comparators import Key, sort_order
from pbkern.frontends.stablehlo.operation import HloOperation
from pbkern.frontends.stablehlo.table import check, rule

from .elementwise import in_total_order


@rule("stablehlo.sort")
def sort(op: HloOperation, *xs):
    """Sorts by the order that the comparator means."""
    keys = sort_order(op.block(0))
    assert keys is not None
    dim = op.integer("dimension") % xs[0].ndim
    plain = not any(key.descending or key.total for key in keys)
    if plain:
        return lax.sort(list(xs), dimension=dim, is_stable=op.flag("is_stable"), num_keys=len(keys))
    if len(xs) == 1:
        return _from_key(
            lax.sort(_as_key(xs[0], keys[0]), dimension=dim, is_stable=False), keys[0], xs[0].dtype
        )
    by = [_as_key(x, key) for x, key in zip(xs, keys)]
    return lax.sort([*by, *xs], dimension=dim, is_stable=op.flag("is_stable"), num_keys=len(by))[
        len(by) :
    ]


def _as_key(x, key: Key):
    """Numbers that lax.sort brings into the order of the key."""
    x = in_total_order(x) if key.total else x
    if not key.descending:
        return x
    return lax.neg(x) if jnp.issubdtype(x.dtype, jnp.inexact) else lax.bitwise_not(x)


def _from_key(x, key: Key, dtype: np.dtype):
    """The numbers that _as_key was given."""
    if key.descending:
        x = lax.neg(x) if jnp.issubdtype(x.dtype, jnp.inexact) else lax.bitwise_not(x)
    if not key.total:
        return x
    bits = lax.select(x < 0, x ^ np.iinfo(x.dtype).max, x)  # the map is its own inverse
    return lax.bitcast_convert_type(bits, dtype)


@check("stablehlo.sort")
def _order_is_known(op):
    known = sort_order(op.regions[0].blocks[0]) is not None
    return (
        None
        if known
        else "its comparator is no order by up to three of the arrays, ascending or descending"
    )


@rule("chlo.top_k", "mhlo.topk")
def top_k(op: HloOperation, x):
    """Takes the largest of the last dimension."""
    return lax.top_k(x, op.integer("k"))


@check("mhlo.topk")
def _takes_the_greatest(op):
    largest = op.attributes.get("largest", None)
    return None if largest is None or str(largest) == "true" else "it takes the least"
