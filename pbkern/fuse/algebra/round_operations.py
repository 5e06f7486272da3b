"""emulate_precision_casts: every operation on float16 and bfloat16 rounds its result, as it does where it runs by itself.

    exp(x * y)  ->  exp(f16(f32(x * y)))

Kernels keep float32 precision and range between operations: a product beyond 65504 that is divided
again is finite there, and infinite operation by operation. What only moves or chooses elements has
nothing to round.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from pbkern._jax import bind_again
from pbkern.core.jaxprs.calls import called_jaxpr
from pbkern.core.jaxprs.walks import equations
from pbkern.core.ops.rounding import rounded
from pbkern.fuse.cost.kinds import DATA_MOVEMENT
from pbkern.fuse.simplify.driver import CONTROL, retrace

# Results are operands' elements, or are rounded already.
EXACT = {
    *DATA_MOVEMENT,
    *CONTROL,
    *(
        "abs argmax argmin bitcast_convert_type clamp convert_element_type cummax cummin dynamic_slice "
        "dynamic_update_slice gather imag max min neg real "
        "reduce_max reduce_min reduce_precision reduce_window_max reduce_window_min "
        "scatter select_and_gather_add select_n sign sort split"
    ).split(),
}


def round_operations(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    names = {
        eqn.primitive.name
        for eqn in equations(closed.jaxpr)
        if called_jaxpr(eqn) is None and any(map(_is_short, eqn.outvars))
    }
    return retrace(closed, dict.fromkeys(names - EXACT, _with_rounding))


def _is_short(var) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return (
        isinstance(dtype, np.dtype) and dtype.itemsize == 2 and jnp.issubdtype(dtype, jnp.floating)
    )


def _with_rounding(eqn, operands):
    results = bind_again(eqn, operands)
    return [
        rounded(result) if _is_short(var) else result for result, var in zip(results, eqn.outvars)
    ]
