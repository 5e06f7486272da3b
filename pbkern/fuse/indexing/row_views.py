"""Rows of stacked arrays are views: no kernel knows which row it reads.

    w: f32[8,64,64]    slice[start=(3,0,0), limit=(4,64,64)] w    ->    row_view[start=12288] w

Layers whose parameters are stacked in one array then run the same kernels, each compiled once, on operands that begin at
other elements. A row is contiguous: one element along leading dimensions, everything along the others. Arrays whose rows are
taken are operands that a function, or the body of a loop, reads in no other way: a stencil, which reads neighbours of its
elements as well, keeps its slices.
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.interpreters import mlir

from pbkern._jax import params_of
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import atoms, primitive_names
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.cost.kinds import nbytes

row_view_p = jex.Primitive("row_view")


@row_view_p.def_abstract_eval
def _row_type(x, *, start: int, shape: tuple[int, ...]):
    return jax.core.ShapedArray(shape, x.dtype)


@row_view_p.def_impl
def _row(x, *, start: int, shape: tuple[int, ...]):
    return lax.reshape(
        lax.slice(lax.reshape(x, (x.size,)), (start,), (start + math.prod(shape),)), shape
    )


mlir.register_lowering(row_view_p, mlir.lower_fun(_row, multiple_results=False))


def view_of_row(eqn: jex.JaxprEqn, row: jex.Var) -> jex.JaxprEqn:
    """The view that takes the place of a slice, and of a squeeze behind it, whose result is `row`."""
    start = np.ravel_multi_index(eqn.params["start_indices"], array_aval(eqn.invars[0]).shape)
    params = {"start": int(start), "shape": array_aval(row).shape}
    return eqn.replace(primitive=row_view_p, outvars=[row], params=params)


@dataclass(frozen=True)
class ViewRows:
    """The pass: slices that are rows of an operand become views of it."""

    least_bytes: int = threshold(
        64,
        "smaller rows are elements of a table, which a kernel reads by their index. A line of the cache",
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: object) -> jex.ClosedJaxpr:
        if "slice" not in primitive_names(closed):
            return closed
        jaxpr = self.viewed(closed.jaxpr, {*closed.jaxpr.invars, *closed.jaxpr.constvars})
        return jex.ClosedJaxpr(jaxpr, closed.consts)

    def viewed(self, jaxpr: jex.Jaxpr, operands: set) -> jex.Jaxpr:
        """The jaxpr with views of those of its operands that nothing writes to."""
        readers: dict = {}
        for eqn in jaxpr.eqns:
            for atom in atoms(eqn):
                readers.setdefault(atom, []).append(eqn)
        results = {var for var in jaxpr.outvars if not isinstance(var, jex.Literal)}
        stacked = {var for var in operands - results if all(map(self.is_row, readers.get(var, ())))}
        eqns: list = []
        absorbed: set[int] = set()  # squeezes whose result is the view
        for eqn in jaxpr.eqns:
            if id(eqn) in absorbed:
                continue
            if eqn.primitive.name != "slice" or eqn.invars[0] not in stacked:
                eqns.append(self.with_inner(eqn))
                continue
            (row,) = eqn.outvars
            users = readers.get(row, [])
            if len(users) == 1 and users[0].primitive.name == "squeeze" and row not in results:
                absorbed.add(id(users[0]))
                (row,) = users[0].outvars
            eqns.append(view_of_row(eqn, row))
        return jaxpr.replace(eqns=eqns)

    def is_row(self, eqn: jex.JaxprEqn) -> bool:
        """Whether an equation takes a row of its operand."""
        if eqn.primitive.name != "slice" or any(step != 1 for step in eqn.params["strides"] or ()):
            return False
        whole, row = array_aval(eqn.invars[0]).shape, array_aval(eqn.outvars[0])
        leading = next((dim for dim, size in enumerate(row.shape) if size != 1), len(row.shape))
        return (
            row.shape != whole
            and row.shape[leading:] == whole[leading:]
            and nbytes(row) >= self.least_bytes
        )

    def with_inner(self, eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        """An equation whose own jaxprs have views."""
        params = self.inner_params(eqn)
        return eqn.replace(params=eqn.params | params) if params else eqn

    def inner_params(self, eqn: jex.JaxprEqn) -> dict:
        """The jaxprs of control flow, rewritten. Carries are not viewed: a turn of a loop may write to their memory."""
        params = params_of(eqn)
        match eqn.primitive.name:
            case "scan":
                carries = range(params["num_consts"], params["num_consts"] + params["num_carry"])
                return {"jaxpr": self.body(params["jaxpr"], carries)}
            case "while":
                bodies = {"body": params["body_jaxpr"], "cond": params["cond_jaxpr"]}
                return {
                    f"{name}_jaxpr": self.body(
                        body, range(params[f"{name}_nconsts"], len(body.jaxpr.invars))
                    )
                    for name, body in bodies.items()
                }
            case "cond":
                return {
                    "branches": tuple(
                        self.body(branch, range(len(branch.jaxpr.invars)))
                        for branch in params["branches"]
                    )
                }
        return {}

    def body(self, closed: jex.ClosedJaxpr, written: range) -> jex.ClosedJaxpr:
        invars = closed.jaxpr.invars
        operands = {var for n, var in enumerate(invars) if n not in written}
        return jex.ClosedJaxpr(self.viewed(closed.jaxpr, operands), closed.consts)
