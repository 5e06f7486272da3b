"""mm_conv_precision_mode: the dtype in which contractions multiply and add, as casts around them.

Float modes apply to float contractions, integer modes to integer ones. The result keeps its dtype.
None keeps the precision that operands and results dictate. A mode that is a target's default leaves contractions alone
that say how exact they are.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern._jax import bind_again
from pbkern.core.errors import OptionError
from pbkern.core.jaxprs.evaluation import Notes
from pbkern.fuse.cost.kinds import CONTRACTIONS
from pbkern.fuse.simplify.driver import retrace

# mode -> (kind of operands it applies to, dtype of multiplication, dtype of addition)
MODES = {
    "fp16": (jnp.floating, jnp.float16, jnp.float16),
    "fp32": (jnp.floating, jnp.float32, jnp.float32),
    "mixed_fp16_fp32": (jnp.floating, jnp.float16, jnp.float32),
    "int32": (jnp.integer, jnp.int32, jnp.int32),
    "mixed_int8_int32": (jnp.integer, jnp.int8, jnp.int32),
}
# Floats of 16 bits.
SHORT = frozenset(("float16", "bfloat16"))
# Views of one operand through which conversions are seen.
FOLLOWED_VIEWS = ("broadcast_in_dim", "reshape", "rev", "slice", "squeeze", "transpose")
# The default of targets whose matrix instructions multiply float16.
MATRIX_MODE = "mixed_fp16_fp32"


def set_precision(
    closed: jex.ClosedJaxpr, mode: str | None, is_default: bool = False
) -> jex.ClosedJaxpr:
    """The jaxpr with its contractions in the given mode. Raises OptionError for an unknown one.

    `is_default`: nobody has asked for the mode, so that it applies to operands of float32 alone, and only where the
    contraction's own `precision` does not ask for more. Operands that were all widened from one type of 16 bits are multiplied
    in that type, which loses nothing. Where one operand is or was bfloat16, so are all: float16 lacks the range of its numbers.
    """
    if mode is None:
        return closed
    if mode not in MODES:
        raise OptionError(
            f"mm_conv_precision_mode {mode!r} is unknown", hint=f"one of {', '.join(MODES)}"
        )
    kind, multiply, add = MODES[mode]
    notes = Notes()

    def convert(eqn, operands):
        """A float of 16 bits, as float32, is noted with what it was."""
        (x,) = operands
        is_wider = x.dtype.name in SHORT and eqn.params["new_dtype"] == jnp.float32
        return notes.bound("widened", eqn, operands, x) if is_wider else None

    def view(eqn, operands):
        """A view of what was widened is the same view of what it was."""
        before = notes.find("widened", operands[0])
        if before is None or len(operands) > 1:
            return None
        return notes.bound("widened", eqn, operands, *bind_again(eqn, before))

    def rewrite(eqn, operands):
        if not all(jnp.issubdtype(operand.dtype, kind) for operand in operands):
            return None
        if is_default and not _is_open(eqn):
            return None
        dtype = multiply
        if is_default:
            operands = [(notes.find("widened", x) or (x,))[0] for x in operands]
            dtype = _multiplied({x.dtype.name for x in operands}, multiply)
        narrow = [lax.convert_element_type(operand, dtype) for operand in operands]
        params = {**eqn.params, "preferred_element_type": np.dtype(add)}
        (result,) = bind_again(eqn, narrow, params)
        return [_rounded(lax.convert_element_type(result, eqn.outvars[0].aval.dtype), add)]

    rewrites: dict = dict.fromkeys(CONTRACTIONS, rewrite)
    if is_default:
        rewrites |= {"convert_element_type": convert, **dict.fromkeys(FOLLOWED_VIEWS, view)}
    return retrace(closed, rewrites)


def _multiplied(types: set[str], multiply: Any) -> Any:
    """The type of a product of floats, which are no wider than float32, in a default mode."""
    return jnp.bfloat16 if "bfloat16" in types else multiply


def _is_open(eqn: jex.JaxprEqn) -> bool:
    """Whether a contraction of float32 leaves open how exact its products are."""
    asked = eqn.params["precision"]
    says = {*asked} if isinstance(asked, tuple) else {asked}
    widest = max(jnp.finfo(dtype).bits for dtype in _operand_types(eqn))
    return widest == 32 and not says - {
        None,
        lax.Precision.DEFAULT,
        lax.DotAlgorithmPreset.DEFAULT,
    }


def multiplies_halves(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation is a contraction as MATRIX_MODE leaves it."""
    return eqn.primitive.name in CONTRACTIONS and all(
        dtype == jnp.float16 for dtype in _operand_types(eqn)
    )


def _operand_types(eqn: Any) -> list[np.dtype]:
    return [operand.aval.dtype for operand in eqn.invars]


def _rounded(result, dtype):
    """The result with the exponent and precision of sums of `dtype`: kernels keep more of a value that they convert at once."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return result
    # Values of 16 bits are carried in float32: also those whose type is that of the sums.
    is_carried_wider = jnp.finfo(dtype).bits < 32
    if jnp.finfo(dtype).nmant >= jnp.finfo(result.dtype).nmant and not is_carried_wider:
        return result
    return lax.reduce_precision(result, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
