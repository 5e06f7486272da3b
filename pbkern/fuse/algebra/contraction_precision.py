"""mm_conv_precision_mode: the dtype in which contractions multiply and add, as casts around them.

Float modes apply to float contractions, integer modes to integer ones. The result keeps its dtype.
None keeps the precision that operands and results dictate.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern._jax import bind_again
from pbkern.core.errors import OptionError
from pbkern.fuse.simplify.driver import retrace

# mode -> (kind of operands it applies to, dtype of multiplication, dtype of addition)
MODES = {
    "fp16": (jnp.floating, jnp.float16, jnp.float16),
    "fp32": (jnp.floating, jnp.float32, jnp.float32),
    "mixed_fp16_fp32": (jnp.floating, jnp.float16, jnp.float32),
    "int32": (jnp.integer, jnp.int32, jnp.int32),
    "mixed_int8_int32": (jnp.integer, jnp.int8, jnp.int32),
}


def set_precision(closed: jex.ClosedJaxpr, mode: str | None) -> jex.ClosedJaxpr:
    """The jaxpr with its contractions in the given mode. Raises OptionError for an unknown one."""
    if mode is None:
        return closed
    if mode not in MODES:
        raise OptionError(
            f"mm_conv_precision_mode {mode!r} is unknown", hint=f"one of {', '.join(MODES)}"
        )
    kind, multiply, add = MODES[mode]

    def rewrite(eqn, operands):
        if not all(jnp.issubdtype(operand.dtype, kind) for operand in operands):
            return None
        narrow = [lax.convert_element_type(operand, multiply) for operand in operands]
        params = {**eqn.params, "preferred_element_type": np.dtype(add)}
        (result,) = bind_again(eqn, narrow, params)
        return [_rounded(lax.convert_element_type(result, eqn.outvars[0].aval.dtype), add)]

    return retrace(closed, dict.fromkeys(("dot_general", "conv_general_dilated"), rewrite))


def _rounded(result, dtype):
    """The result with the exponent and precision of sums of `dtype`: kernels keep more of a value that they convert at once."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return result
    # Values of 16 bits are carried in float32: also those whose type is that of the sums.
    is_carried_wider = jnp.finfo(dtype).bits < 32
    if jnp.finfo(dtype).nmant >= jnp.finfo(result.dtype).nmant and not is_carried_wider:
        return result
    return lax.reduce_precision(result, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
