"""Exponentials over their sum -> the same with softmax's derivative, in a function that JAX differentiates.

    y = exp(x - m) / sum(exp(x - m))        dy = y * (dx - sum(y * dx))        m does not vary along the sum

The derivative of each operation reads exponentials and sums and, where m is a maximum, adds a cotangent
of m that is zero but for rounding. This one reads y alone.
"""

from __future__ import annotations

import functools

import jax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jaxprs.retracing import retrace


def with_softmax_rules(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The function in canonical form, with a rule for each such quotient."""
    return retrace(closed, _Softmaxes())


class _Softmaxes:
    """A rewrite rule that remembers which equations have made values."""

    def __init__(self) -> None:
        self.makers: dict[int, tuple] = {}

    def __call__(self, eqn, *operands) -> list | None:
        name = eqn.primitive.name
        if name not in ("exp", "sub", "reduce_sum", "broadcast_in_dim", "reshape", "div"):
            return None
        (value,) = _jax.bind_again(eqn, operands)
        softmax = self.softmax(*operands) if name == "div" else None
        result = value if softmax is None else _known_softmax(softmax[1], softmax[0], value)
        self.makers[id(result)] = name, operands, eqn.params, result  # which stays alive
        return [result]

    def maker(self, value) -> tuple:
        """(name, operands, parameters) of the equation that made a value, if it is one of those."""
        return self.makers.get(id(value), ("", (), {}))[:3]

    def softmax(self, exponentials, divisor) -> tuple | None:
        """(argument, axes) of the softmax that a quotient is."""
        name, operands, _ = self.maker(exponentials)
        terms, axes = self.total(divisor)
        if name != "exp" or terms is not exponentials:
            return None
        (argument,) = operands
        name, operands, _ = self.maker(argument)
        is_shifted = name == "sub" and operands[0].shape == argument.shape
        if is_shifted and not any(self.varies(operands[1], axis) for axis in axes):
            argument = operands[0]
        return argument, axes

    def total(self, value) -> tuple:
        """(terms, axes) of a sum that a value repeats along these axes; None of others."""
        name, operands, params = self.maker(value)
        inner, terms, of_sum = self.maker(operands[0]) if operands else ("", (), {})
        if inner == "broadcast_in_dim" or inner == "reshape":
            is_wider = name == "broadcast_in_dim" and operands[0].ndim == value.ndim
            return self.total(operands[0]) if is_wider else (None, ())
        if inner != "reduce_sum":
            return None, ()
        axes = of_sum["axes"]
        rest = [axis for axis in range(terms[0].ndim) if axis not in axes]
        if name == "reshape":
            sizes = [1 if n in axes else size for n, size in enumerate(terms[0].shape)]
            return (terms[0], axes) if list(value.shape) == sizes else (None, ())
        is_aligned = value.ndim == terms[0].ndim and list(params["broadcast_dimensions"]) == rest
        return (terms[0], axes) if is_aligned else (None, ())

    def varies(self, value, axis: int) -> bool:
        """Whether a value may differ along an axis of the shape that it is broadcast to."""
        if not getattr(value, "ndim", 0) or value.shape[axis] == 1:
            return False
        name, operands, params = self.maker(value)
        if name != "broadcast_in_dim":
            return True
        dims = list(params["broadcast_dimensions"])
        return axis in dims and self.varies(operands[0], dims.index(axis))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _known_softmax(axes: tuple[int, ...], argument, softmax):
    """`softmax`, which is that of the argument."""
    return softmax


@_known_softmax.defjvp
def _(axes, primals, tangents):
    softmax, moved = _known_softmax(axes, *primals), tangents[0]
    return softmax, softmax * (moved - (softmax * moved).sum(axes, keepdims=True))
