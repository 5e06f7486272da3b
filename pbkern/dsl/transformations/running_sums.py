"""Sums beside running sums -> parts of those, in functions without effects.

    cumsum(x + pad(first))  ->  cumsum(x) + first          of a row where the sum begins
    sum(x)                  ->  the last row of cumsum(x)

Derivatives of kernels that hand on a running sum from program to program have both: the cotangent
of what was handed on is added to one row, and what goes on is the sum of all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import literal_value


def with_shared_sums(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The function with its sums along an axis taken from running sums of the same."""
    running = {
        (eqn.invars[0], eqn.params["axis"]): eqn
        for eqn in closed.jaxpr.eqns
        if eqn.primitive.name == "cumsum"
    }
    if not running:
        return closed
    return jax.make_jaxpr(lambda *args: _Sums(closed, running).run(args))(*closed.in_avals)


class _Sums:
    """Values of a function's variables, while it is traced again."""

    def __init__(self, closed: jex.ClosedJaxpr, running: dict) -> None:
        self.jaxpr, self.running = closed.jaxpr, running
        self.makers = {var: eqn for eqn in closed.jaxpr.eqns for var in eqn.outvars}
        self.sums: dict[int, tuple] = {}
        self.values: dict = dict(zip(closed.jaxpr.constvars, closed.consts))

    def run(self, args) -> list:
        self.values |= dict(zip(self.jaxpr.invars, args))
        for eqn in self.jaxpr.eqns:
            self.values.update(zip(eqn.outvars, self.results(eqn)))
        return list(map(self.read, self.jaxpr.outvars))

    def read(self, atom):
        return literal_value(atom) if isinstance(atom, jex.Literal) else self.values[atom]

    def results(self, eqn) -> list:
        if eqn.primitive.name == "cumsum":
            total, firsts = self.running_sum(eqn)
            wide = (lax.broadcast_in_dim(row, total.shape, range(total.ndim)) for row in firsts)
            return [functools.reduce(lax.add, wide, total)]
        axes: tuple[int, ...] = eqn.params["axes"] if eqn.primitive.name == "reduce_sum" else ()
        whole = self.running.get((eqn.invars[0], axes[0])) if len(axes) == 1 else None
        if whole is None:
            return _jax.bind_again(eqn, list(map(self.read, eqn.invars)))
        total, firsts = self.running_sum(whole)
        end = 0 if whole.params["reverse"] else -1
        rows = [lax.index_in_dim(total, end, axes[0]), *firsts]
        return [lax.squeeze(functools.reduce(lax.add, rows), axes)]

    def running_sum(self, eqn) -> tuple:
        """(the running sum of other terms, rows of those that are zero but where it begins), made where first read."""
        (of,) = eqn.invars
        if id(eqn) not in self.sums:
            terms = list(self.terms(of))
            rows = [self.first_row(term, **eqn.params) for term in terms]
            rest = [self.read(term) for term, row in zip(terms, rows) if row is None]
            firsts = [row for row in rows if row is not None]
            if not firsts or not rest:
                firsts, rest = [], [self.read(of)]
            total = lax.cumsum(functools.reduce(lax.add, rest), **eqn.params)
            self.sums[id(eqn)] = total, firsts
        return self.sums[id(eqn)]

    def terms(self, atom) -> Iterator:
        """The terms of a sum."""
        eqn = None if isinstance(atom, jex.Literal) else self.makers.get(atom)
        if eqn is None or eqn.primitive.name not in ("add", "add_any"):
            yield atom
            return
        for operand in eqn.invars:
            yield from self.terms(operand)

    def first_row(self, atom, axis: int, reverse: bool):
        """The row at which a running sum begins, of a term that is zero everywhere else; None of any other."""
        eqn = None if isinstance(atom, jex.Literal) else self.makers.get(atom)
        if eqn is None or eqn.primitive.name != "pad":
            return None
        row, zero = eqn.invars
        shape = array_aval(eqn.outvars[0]).shape
        around = [(0, 0, 0)] * len(shape)
        around[axis] = (shape[axis] - 1, 0, 0) if reverse else (0, shape[axis] - 1, 0)
        is_zero = isinstance(zero, jex.Literal) and not np.any(literal_value(zero))
        is_first = array_aval(row).shape[axis] == 1 and list(eqn.params["padding_config"]) == around
        return self.read(row) if is_zero and is_first else None
