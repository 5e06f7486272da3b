"""Values per step of a stencil's loop: those that a wavefront stores for each step, and those that it derives from them.

    u = step(u)                          u = step(u)
    ys[k] = sqrt(sum(u * u))     ->      stored[k] = sums of the rows of u * u
                                         ys = sqrt(sums of stored), behind the wavefront

A wavefront has a few rows of each step at a time. It stores parts of carries, sums of rows, or
whole results that have a carry's rows. The rest of a value is computed for all its steps at once.
"""

from __future__ import annotations

import jax
from jax.extend import core as jex

from pbkern.core.errors import UnsupportedOp
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import leading_to
from pbkern.core.lazy_dataclass import dataclass
from pbkern.fuse.access.blocks import BodyContext, Unfusable, request, run_steps
from pbkern.fuse.access.rules import NeedsWhole, whole
from pbkern.fuse.access.windows_contractions import REDUCERS, reducer_params
from pbkern.fuse.simplify.driver import drop_dead, retrace
from pbkern.fuse.tiling.time_skewing import StoredRows


@dataclass(frozen=True)
class StepValues:
    """A loop's body in two parts.

    Attributes:
      body: one step, (*consts, *carries, *elements of xs) -> (*carries, *stored values).
      stored: what is stored of the latter.
      finish: (*consts, *elements of xs, *stored parts) -> the values of a step.
    """

    body: jex.ClosedJaxpr
    stored: tuple[StoredRows, ...]
    finish: jex.ClosedJaxpr


@dataclass(frozen=True)
class _Rows:
    """Rows of arrays: `extent` of them, in dimension `along`, counted from the end."""

    extent: int
    along: int

    def axis(self, x) -> int:
        return len(x.shape if isinstance(x, jax.Array) else x.aval.shape) - self.along

    def has_rows(self, x) -> bool:
        shape = x.shape if isinstance(x, jax.Array) else x.aval.shape
        return len(shape) >= self.along and shape[-self.along] == self.extent

    def reduces_each(self, eqn) -> bool:
        """Whether each row gives one row of the result."""
        return (
            eqn.primitive.name in REDUCERS
            and self.has_rows(eqn.invars[0])
            and self.axis(eqn.invars[0]) not in eqn.params["axes"]
        )

    def last(self, eqn, operands):
        """reduce(x, axes) -> reduce(reduce(x, the other axes), rows)."""
        (x,), axes = operands, eqn.params["axes"]
        if not self.has_rows(x) or self.axis(x) not in axes or len(axes) == 1:
            return None
        name, row_axis = eqn.primitive.name, self.axis(x)
        inner = tuple(axis for axis in axes if axis != row_axis)
        each = eqn.primitive.bind(x, **reducer_params(name, inner))
        left = row_axis - sum(axis < row_axis for axis in inner)
        return [eqn.primitive.bind(each, **reducer_params(name, (left,)))]


def step_values(body: jex.ClosedJaxpr, counts: tuple[int, int], along: int) -> StepValues | None:
    """Divides a body whose carries have their rows in dimension `along`, counted from the end."""
    first, end = counts[0], sum(counts)
    if any(array_aval(var).ndim < along for var in body.jaxpr.invars[first:end]):
        return None
    extent = array_aval(body.jaxpr.invars[first]).shape[-along]
    rows = _Rows(extent, along)
    by_rows = retrace(body, dict.fromkeys(REDUCERS, rows.last))
    jaxpr = by_rows.jaxpr
    carries, results = jaxpr.outvars[: counts[1]], jaxpr.outvars[counts[1] :]
    if any(isinstance(var, jex.Literal) for var in jaxpr.outvars):
        return None
    needed = {id(eqn) for eqn in leading_to(jaxpr.eqns, carries)}
    axes = {
        eqn.outvars[0]: rows.axis(eqn.invars[0])
        - sum(axis < rows.axis(eqn.invars[0]) for axis in eqn.params["axes"])
        for eqn in leading_to(jaxpr.eqns, results)
        if id(eqn) not in needed and rows.reduces_each(eqn)
    }
    of_rows = (*carries, *jaxpr.invars[first:end], *filter(rows.has_rows, results))
    axes |= {var: rows.axis(var) for var in of_rows if var not in axes}
    behind = leading_to(jaxpr.eqns, results, axes)
    try:
        requests = request(behind, [(var, tuple(map(whole, var.aval.shape))) for var in results])
    except (NeedsWhole, Unfusable, UnsupportedOp, NotImplementedError):
        return None
    parts = [(var, hull) for var in axes for hull in requests.hulls.get(var, ())]
    constants = [*jaxpr.invars[:first], *jaxpr.invars[end:]]
    divided = jaxpr.replace(outvars=[*carries, *(var for var, _ in parts)])

    def finish(*args):
        blocks = dict(zip(parts, args[len(constants) :]))
        for var, arg in zip(constants, args):
            for hull in requests.hulls.get(var, ()):
                starts = [span.start.const for span in hull]
                ends = [start + span.size for start, span in zip(starts, hull)]
                blocks[var, hull] = jax.lax.slice(arg, starts, ends)
        get = run_steps(requests, blocks, BodyContext())
        return [get(var, tuple(map(whole, var.aval.shape))) for var in results]

    types = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in constants] + [
        jax.ShapeDtypeStruct([span.size for span in hull], var.aval.dtype) for var, hull in parts
    ]
    return StepValues(
        drop_dead(jex.ClosedJaxpr(divided, by_rows.consts)),
        tuple(StoredRows(axes[var], hull) for var, hull in parts),
        jax.make_jaxpr(finish)(*types),
    )
