"""ClosedJaxpr -> the same with delayed normalisation: divisions of softmax move behind the products that follow.

    dot(p / l, v)  ->  dot(p, v) / l        where l does not vary along the contracted dimensions

One division per result instead of one per probability, and p needs no second pass once l is known. Only for p = exp(x -
max(x)): p is at most 1, so the product overflows only where the sum of |v| nearly does.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import primitive_names
from pbkern.fuse.access.dimension_map import moved
from pbkern.fuse.simplify.driver import retrace


def delay_normalisation(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites jaxprs that hold exponentials, divisions and products. Changes rounding."""
    if not primitive_names(closed) >= {"exp", "div", "dot_general", "reduce_max"}:
        return closed
    seen = _Quotients()
    names = (
        "reduce_max broadcast_in_dim sub exp div convert_element_type squeeze transpose dot_general"
    )
    return retrace(closed, {name: getattr(seen, name) for name in names.split()})


class _Quotients:
    """Remembers, by value: maxima with their operands, exponentials that are at most 1, quotients of these."""

    def __init__(self) -> None:
        self.notes = Notes()

    def reduce_max(self, eqn, operands):
        """Notes the operand of a maximum, and its dimension per dimension of the result; None where the maximum repeats."""
        axes = tuple(axis for axis in range(operands[0].ndim) if axis not in eqn.params["axes"])
        return self.notes.bound("max", eqn, operands, operands[0], axes)

    def broadcast_in_dim(self, eqn, operands):
        maximum = self.notes.find("max", operands[0])
        if maximum is None or len(operands) > 1:
            return None
        return self.notes.bound("max", eqn, operands, maximum[0], moved(eqn, maximum[1]))

    def sub(self, eqn, operands):
        x, y = operands
        maximum = self.notes.find("max", y)
        if maximum is None or jnp.ndim(x) != jnp.ndim(y):
            return None
        base, order = self.notes.find("transposed", x) or (x, range(x.ndim))
        beside = all(
            dim is None or dim == axis or base.shape[dim] == 1
            for dim, axis in zip(maximum[1], order)
        )
        return (
            self.notes.bound("negative", eqn, operands) if maximum[0] is base and beside else None
        )

    def exp(self, eqn, operands):
        return (
            self.notes.bound("at most 1", eqn, operands)
            if self.notes.find("negative", operands[0]) is not None
            else None
        )

    def div(self, eqn, operands):
        x, y = operands
        bounded = self.notes.find("at most 1", x) is not None and jnp.ndim(x) == jnp.ndim(y)
        return self.notes.bound("quotient", eqn, operands, x, y) if bounded else None

    def convert_element_type(self, eqn, operands):
        """A quotient rounded to fewer bits: the numerator is rounded instead, to the same relative error."""
        quotient = self.notes.find("quotient", operands[0])
        if quotient is None or not jnp.issubdtype(eqn.params["new_dtype"], jnp.floating):
            return None
        rounded = lax.convert_element_type(quotient[0], eqn.params["new_dtype"])
        return self.notes.bound("quotient", eqn, operands, rounded, quotient[1])

    def transpose(self, eqn, operands):
        if (maximum := self.notes.find("max", operands[0])) is not None:
            return self.notes.bound("max", eqn, operands, maximum[0], moved(eqn, maximum[1]))
        order = eqn.params["permutation"]
        return self._parts_moved(eqn, operands) or self.notes.bound(
            "transposed", eqn, operands, operands[0], order
        )

    def squeeze(self, eqn, operands):
        if (maximum := self.notes.find("max", operands[0])) is not None:
            return self.notes.bound("max", eqn, operands, maximum[0], moved(eqn, maximum[1]))
        return self._parts_moved(eqn, operands)

    def _parts_moved(self, eqn, operands):
        """A view of a quotient (dimensions moved, or dropped if of size 1): the quotient of the same views of its parts."""
        quotient = self.notes.find("quotient", operands[0])
        return quotient and self.notes.bound(
            "quotient", eqn, operands, *(eqn.primitive.bind(x, **eqn.params) for x in quotient)
        )

    def dot_general(self, eqn, operands):
        for side in (0, 1):
            quotient = self.notes.find("quotient", operands[side])
            if (
                quotient is not None
                and (divided := _divided(eqn, operands, side, *quotient)) is not None
            ):
                return [divided]
        return None


def _divided(eqn, operands, side: int, numerator, denominator):
    """The product with the numerator, then divided; None if the denominator varies along a contracted dimension."""
    contracted, batch = (pair[side] for pair in eqn.params["dimension_numbers"])
    rank = operands[side].ndim
    if any(denominator.shape[dim] != 1 for dim in contracted) or not jnp.issubdtype(
        eqn.outvars[0].aval.dtype, jnp.floating
    ):
        return None
    given = [numerator if k == side else operand for k, operand in enumerate(operands)]
    product = eqn.primitive.bind(*given, **eqn.params)
    free = [axis for axis in range(rank) if axis not in contracted and axis not in batch]
    free_of_other = product.ndim - len(batch) - len(free)
    row = lax.squeeze(denominator, tuple(contracted))
    remaining = [axis for axis in range(rank) if axis not in contracted]
    row = lax.transpose(row, [remaining.index(dim) for dim in (*batch, *free)])
    first = len(batch) + (free_of_other if side == 1 else 0)
    places = (*range(len(batch)), *range(first, first + len(free)))
    row = lax.convert_element_type(row, product.dtype)
    return lax.div(product, lax.broadcast_in_dim(row, product.shape, places))
