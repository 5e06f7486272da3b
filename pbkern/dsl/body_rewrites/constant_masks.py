"""Masks whose every element is known while a body is traced, such as `arange(64) < 64`: accesses and selects without them.

An access whose place is a value keeps its mask: a slice that reaches over the end of its Ref is
moved back where there is none.

Kernels that pad blocks to powers of two carry such masks for sizes that need no padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jaxprs.retracing import retrace
from pbkern.core.ops.views import SHAPE_VIEWS
from pbkern.dsl.interpret import numpy_result
from pbkern.dsl.primitives.ref_access import add_index, bind_access, compose, mul_index, stays

# Larger values are not worth the time; they are computed where they are used.
LARGEST_CONSTANT = 1 << 20
# Operations that masks are made of, beside iota.
EVALUATED = (
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "and",
    "or",
    "not",
    "add",
    "sub",
    "mul",
    *SHAPE_VIEWS,
)


def fold_constant_masks(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The body with masked accesses under masks that always hold as plain ones, and selects by known conditions decided."""
    with jax.enable_x64(True):  # every type is explicit by now
        return retrace(closed, _KnownConstants().rewrite)


class _KnownConstants:
    """Values of tracers that are constants."""

    def __init__(self) -> None:
        self.values: dict[
            int, tuple
        ] = {}  # id -> (tracer, so that the id stays its own; NumPy value)

    def value(self, x) -> np.ndarray | None:
        if isinstance(x, jax.core.Tracer):
            return self.values.get(id(x), (None, None))[1]
        return np.asarray(x)

    def uniform(self, x) -> bool | None:
        """The value of a bool whose elements are all known and the same."""
        value = self.value(x)
        if value is None or value.dtype != bool or not value.size:
            return None
        return True if value.all() else None if value.any() else False

    def rewrite(self, eqn, *operands) -> list | None:
        name = eqn.primitive.name
        if name == "masked_load" and self.uniform(operands[1]) is True:
            return self.plain(eqn, "get", operands[:1], operands[3:])
        if name == "masked_store" and self.uniform(operands[2]) is True:
            return None if self.plain(eqn, "swap", operands[:2], operands[3:]) is None else []
        if name == "select_n" and len(operands) == 3 and self.uniform(operands[0]) is not None:
            case = operands[2 if self.uniform(operands[0]) else 1]
            return [case if isinstance(case, jax.core.Tracer) else jnp.asarray(case)]
        if name == "iota" or name in EVALUATED:
            return self.evaluate(eqn, operands)
        return None

    def plain(self, eqn, name: str, operands: Sequence, leaves: Sequence) -> list | None:
        shape, _ = _jax.ref_type(jax.typeof(operands[0]))
        indices = compose(
            shape, _jax.unflatten_indexers(eqn.params["tree"], leaves), add_index, mul_index
        )
        if not all(map(stays, indices, shape)):
            return None
        return bind_access(_jax.REF_PRIMITIVES[name], shape, operands, indices)

    def evaluate(self, eqn, operands: Sequence) -> list | None:
        aval = eqn.outvars[0].aval
        values = [self.value(operand) for operand in operands]
        if (
            any(operand is None or operand.dtype.kind not in "biu" for operand in values)
            or int(np.prod(aval.shape)) > LARGEST_CONSTANT
        ):
            return None
        if eqn.primitive.name == "iota":
            array: np.ndarray | None = np.asarray(np.broadcast_to(_iota(eqn.params), aval.shape))
        else:
            array = numpy_result(eqn, values)
        if array is None:
            return None
        result = eqn.primitive.bind(*operands, **eqn.params)
        self.values[id(result)] = result, array.astype(aval.dtype)
        return [result]


def _iota(params) -> np.ndarray:
    shape, dim = params["shape"], params["dimension"]
    return np.arange(shape[dim]).reshape([-1 if k == dim else 1 for k in range(len(shape))])
