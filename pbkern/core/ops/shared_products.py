"""Products that several sums read: each is rounded once, so that all of them see one number.

A sum may take a product unrounded, as a fused multiply-add does, only where it is the product's one
reader in the whole function: otherwise `x * y - max(x * y)` is never 0, and `max(x * y, 0) - x * y`
may be negative. Recomputing a product in several kernels does not change how often it is read.
"""

from __future__ import annotations

import collections

import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.walks import inner_of

from . import rounding

PRODUCTS = frozenset({"mul", "square", "integer_pow"})
SUMS = frozenset({"add", "add_any", "sub", "reduce_sum", "cumsum", "reduce_window_sum"})
# What reads elements as they are, or with the other sign: its readers are the product's.
VIEWS = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims slice transpose rev neg copy dynamic_slice".split()
)


def shared_products(jaxpr: jex.Jaxpr) -> frozenset[jex.Var]:
    """Products of floats with several readers, some of them sums; also those within loops and branches."""
    summed_products = {
        product for inner in inner_of(jaxpr) for product in shared_products(inner.jaxpr)
    }
    products = {
        out_var
        for equation in jaxpr.eqns
        if equation.primitive.name in PRODUCTS
        for out_var in equation.outvars
        if _is_float(out_var)
    }
    if not products:
        return frozenset(summed_products)
    reads: dict[jex.Var, int] = collections.Counter(
        result for result in jaxpr.outvars if isinstance(result, jex.Var)
    )
    added: set[jex.Var] = set()
    for eqn in reversed(jaxpr.eqns):
        through = eqn.primitive.name in VIEWS
        count = max(sum(reads[out_var] for out_var in eqn.outvars), 1) if through else 1
        for var in eqn.invars:
            if isinstance(var, jex.Var):
                reads[var] += count
                if eqn.primitive.name in SUMS or (through and not added.isdisjoint(eqn.outvars)):
                    added.add(var)
    return frozenset(
        summed_products
        | {product for product in products if reads[product] > 1 and product in added}
    )


def rounded(x):
    """The value as a number of its own dtype: no operation that reads it may use it unrounded."""
    if x.dtype.itemsize == 2:
        return rounding.rounded(x)
    info = np.finfo(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def _is_float(var: jex.Var) -> bool:
    return getattr(var.aval, "dtype", None) in (np.float32, np.float64)
