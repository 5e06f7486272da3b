"""Kernel -> results that values at run time may leave unwritten: these start as zeros (build_programs.py).

    @pbkern.when(x[0] > 0)
    def _(): o[...] = x[...]

    pbkern.store(o, ..., x[...], mask=x[...] > 0)
    o[rows[0]] = x[...]
    pbkern.atomic_add(o, x[...], 1)

Otherwise a caller would read whatever was in memory. Stores that depend on nothing but the
program's place in the grid and on loop counters are the author's to get right: no fill is paid for
there. What no program can write is an error (body_checks/unwritten_results.py).
"""

from __future__ import annotations

import math

import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jaxprs.walks import inner_jaxprs
from pbkern.dsl.primitives.ref_access import (
    MOST_MARKED,
    GatheredIndex,
    Point,
    RefAccess,
    constant_positions,
    is_ref_access,
    ref_access,
)

from .kernel import BlockMapping, Kernel


def unsure_results(kernel: Kernel) -> tuple[int, ...]:
    """Numbers of results that start as zeros, because values decide whether all of them are written.

    These are results of grids whose size an operand gives, of index maps that read operands, and
    those that are stored to under conditions or masks of values, or at indices that are values.
    Results that share memory with an operand keep what that has. Kernels of the fuser write all of
    their results.
    """
    if not kernel.defined_at:
        return ()
    aliased = {number for _, number in kernel.aliases}
    return tuple(
        n
        for n, output in enumerate(kernel.outputs)
        if n not in aliased
        and (
            kernel.dynamic_grid
            or _moves_with_values(kernel, output)
            or _depends_on_values(kernel, n, output.ref_shape)
        )
    )


def _moves_with_values(kernel: Kernel, mapping: BlockMapping) -> bool:
    """Whether prefetched operands decide which blocks the programs write."""
    jaxpr = mapping.index_map.jaxpr
    read = {var for eqn in jaxpr.eqns for var in eqn.invars if not isinstance(var, jex.Literal)}
    return any(var in read or var in jaxpr.outvars for var in jaxpr.invars[len(kernel.grid) :])


def _depends_on_values(kernel: Kernel, number: int, shape: tuple[int, ...]) -> bool:
    """Whether loaded values decide what the body stores to a result, and other stores leave a part of its block."""
    ref = kernel.body.jaxpr.invars[len(kernel.inputs) + number]
    # Of a large block one mark stands for all elements.
    marked = np.zeros(shape if math.prod(shape) <= MOST_MARKED else (), bool)
    body = _Body(ref, set(), marked)
    body.run(kernel.body.jaxpr)
    return body.stores_by_value and not body.marked.all()


class _Body:
    """Stores of a body's equations to one Ref.

    Attributes:
      ref: the Ref's variable in the jaxpr that runs.
      values: variables that depend on what was loaded.
      marked: bools of the Ref's shape: elements that are stored to whatever the values are. Under
        conditions of the place in the grid, and at indices that follow from it or from a counter,
        a store gets the benefit of the doubt.
      stores_by_value: whether there is a store that depends on values.
    """

    def __init__(self, ref: jex.Var, values: set[jex.Var], marked: np.ndarray) -> None:
        self.ref, self.values, self.marked, self.stores_by_value = ref, values, marked, False

    def run(self, jaxpr: jex.Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            if is_ref_access(eqn):
                self._access(ref_access(eqn))
            elif self.ref in eqn.invars and any(inner_jaxprs(eqn)):
                self._call(eqn)
            if any(map(self._is_value, eqn.invars)):
                self.values.update(eqn.outvars)

    def _is_value(self, atom) -> bool:
        return not isinstance(atom, jex.Literal) and (
            atom in self.values or _jax.is_ref(getattr(atom, "aval", None))
        )

    def _access(self, access: RefAccess) -> None:
        if access.ref is not self.ref or access.kind == "load":
            return
        starts = [
            index.at if isinstance(index, Point | GatheredIndex) else index.start
            for index in access.indices
        ]
        if any(self._is_value(atom) for atom in (access.mask, *starts) if atom is not None):
            self.stores_by_value = True
            return
        where = [constant_positions(index) for index in access.indices]
        if self.marked.size:  # of an array without elements, constant indices are outside
            self.marked[... if None in where or not self.marked.ndim else tuple(where)] = True

    def _call(self, eqn) -> None:
        """Joins the stores of an equation's branches, loop or function."""
        name, operands = eqn.primitive.name, list(eqn.invars)
        inner = [closed.jaxpr for closed in inner_jaxprs(eqn)]
        if name == "cond":
            ends = [self._inside(branch, operands[1:]).marked for branch in inner]
            some, every = np.logical_or.reduce(ends), np.logical_and.reduce(ends)
            by_value = self._is_value(operands[0])
            self.stores_by_value |= by_value and bool((some != every).any())
            self.marked |= every if by_value else some
        elif name == "while":  # its condition decides whether there is a turn
            body, first = eqn.params["body_jaxpr"].jaxpr, eqn.params["cond_nconsts"]
            stored = self._inside(body, operands[first:]).marked
            self.stores_by_value |= bool((stored != self.marked).any())
        elif name == "scan":
            params, (body,) = _jax.params_of(eqn), inner
            first, carried = params["num_consts"], params["num_carry"]
            self.marked |= self._inside(body, operands, first, carried).marked
        elif all(len(jaxpr.invars) == len(operands) for jaxpr in inner):
            for jaxpr in inner:
                self.marked |= self._inside(jaxpr, operands).marked
        else:
            self.marked[...] = True  # its operands are arranged in a way that is not known here

    def _inside(self, jaxpr: jex.Jaxpr, operands: list, first: int = 0, carried: int = 0) -> _Body:
        """Runs a jaxpr on these operands, among which the Ref is; a loop carries `carried` of them, from the first on."""
        ref = jaxpr.invars[operands.index(self.ref)]
        values = {var for operand, var in zip(operands, jaxpr.invars) if self._is_value(operand)}
        while True:
            inner = _Body(ref, set(values), self.marked.copy())
            inner.run(jaxpr)
            turns = zip(jaxpr.outvars[:carried], jaxpr.invars[first:])
            grown = {var for result, var in turns if inner._is_value(result)} - values
            if not grown:
                self.stores_by_value |= inner.stores_by_value
                return inner
            values |= grown
