"""Arithmetic behind reshapes of a kernel's operands and results moves to the kernel's own shapes.

    kernel(reshape(x * s)) -> kernel(reshape(x) * s),    reshape(kernel(x)) + r -> reshape(kernel(x) + reshape(r))

A block of rows of [batch * length, width] is no block of [batch, length, width] where it is a part of one batch. Reshapes of
arrays cost nothing, so that the arithmetic can be fused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern._jax import fresh_aval
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import atoms
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.ops.reshape import segments
from pbkern.dsl.call import kernel_p
from pbkern.fuse.simplify.driver import drop_dead, keep_types


def in_shapes_of_kernels(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites a function that calls kernels; equations inside of control flow stay."""
    run = _Reshaped(closed)
    avals = [fresh_aval(var.aval) for var in closed.jaxpr.invars]
    return drop_dead(jax.make_jaxpr(run.run)(*avals))


class _Reshaped:
    """One run. `plain`: result -> its value in the shape of a kernel's result, of which it is a reshape."""

    def __init__(self, closed: jex.ClosedJaxpr):
        self.closed = closed
        jaxpr = closed.jaxpr
        self.makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.uses: dict = {}
        for var in (*(atom for eqn in jaxpr.eqns for atom in atoms(eqn)), *jaxpr.outvars):
            if isinstance(var, jex.Var):
                self.uses[var] = self.uses.get(var, 0) + 1
        self.operands = {
            atom for eqn in jaxpr.eqns if eqn.primitive is kernel_p for atom in atoms(eqn)
        }
        self.env: dict = {}
        self.plain: dict = {}

    def run(self, *args) -> list:
        jaxpr = self.closed.jaxpr
        self.env = dict(zip(jaxpr.constvars, self.closed.consts)) | dict(zip(jaxpr.invars, args))
        for eqn in jaxpr.eqns:
            with _jax.source_context(eqn):
                self.env.update(zip(eqn.outvars, self.results(eqn)))
        return keep_types([self.value(atom) for atom in jaxpr.outvars], jaxpr.outvars)

    def value(self, atom):
        return atom.val if isinstance(atom, jex.Literal) else self.env[atom]

    def results(self, eqn) -> Sequence:
        name, result = eqn.primitive.name, eqn.outvars[0]
        if name == "reshape" and len(atoms(eqn)) == 1 and eqn.params["dimensions"] is None:
            (operand,) = atoms(eqn)
            maker = self.makers.get(operand)
            if maker is not None and maker.primitive is kernel_p:
                self.plain[result] = self.value(operand)
            elif result in self.operands:
                return [self.in_shape(operand, array_aval(result).shape)]
        if name in ELEMENTWISE:
            shape = next(
                (self.plain[atom].shape for atom in atoms(eqn) if atom in self.plain), None
            )
            computed = None if shape is None else self.computed(eqn, shape)
            if computed is not None:
                self.plain[result] = computed
                return [lax.reshape(computed, array_aval(result).shape)]
        return _jax.bind_again(eqn, [self.value(atom) for atom in eqn.invars])

    def computed(self, eqn, shape: tuple[int, ...]) -> jax.Array | None:
        """An elementwise equation in another shape; None where an operand repeats along dimensions that are joined or split."""
        extents = array_aval(eqn.outvars[0]).shape
        operands = []
        for atom in eqn.invars:
            held = array_aval(atom).shape
            if isinstance(atom, jex.Var) and atom in self.plain:
                operands.append(self.plain[atom])
            elif not held:
                operands.append(self.value(atom))
            elif held == extents:
                operands.append(self.in_shape(atom, shape))
            elif (narrow := _narrow(held, extents, shape)) is not None:
                operands.append(lax.reshape(self.value(atom), narrow))
            else:
                return None
        return _jax.bind_again(eqn, operands)[0]

    def in_shape(self, var, shape: tuple[int, ...]) -> jax.Array:
        """A value in another shape.

        It is computed in that shape where it has one reader or repeats another value, and reshaped elsewhere.
        """
        maker = self.makers.get(var)
        if var in self.plain and self.plain[var].shape == shape:
            return self.plain[var]
        if maker is not None and (
            self.uses[var] == 1 or maker.primitive.name == "broadcast_in_dim"
        ):
            with _jax.source_context(maker):
                again = self.again(maker, shape)
            if again is not None:
                return again
        return lax.reshape(self.value(var), shape)

    def again(self, maker, shape: tuple[int, ...]) -> jax.Array | None:
        if maker.primitive.name in ELEMENTWISE:
            return self.computed(maker, shape)
        if maker.primitive.name != "broadcast_in_dim" or len(maker.invars) != 1:
            return None
        (operand,), extents = maker.invars, array_aval(maker.outvars[0]).shape
        dims = dict(zip(maker.params["broadcast_dimensions"], array_aval(operand).shape))
        full = tuple(dims.get(axis, 1) for axis in range(len(extents)))
        narrow = _narrow(full, extents, shape)
        if narrow is None:
            return None
        operand = lax.reshape(self.value(operand), narrow)
        return lax.broadcast_in_dim(operand, shape, range(len(shape)))


def _narrow(
    held: tuple[int, ...], extents: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Shape of an operand that repeats along its dimensions of size 1, where the result gets another shape.

    None where it would repeat along a part of a dimension.
    """
    if len(held) != len(extents):
        return None
    narrow = [1] * len(shape)
    for before, after in segments(extents, shape):
        sizes = [held[axis] for axis in before]
        if sizes == [extents[axis] for axis in before]:
            for axis in after:
                narrow[axis] = shape[axis]
        elif math.prod(sizes) != 1:
            return None
    return tuple(narrow)
