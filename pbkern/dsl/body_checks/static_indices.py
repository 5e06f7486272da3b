"""A body as traced -> KernelError for constant indices that are outside of their Refs.

Only what the user wrote is looked at: in a canonical body, an index of a branch that is never taken
may have become a constant. Slices end where the Ref does, as NumPy's; masked accesses may reach
further.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import KernelError
from pbkern.core.jaxprs.walks import inner_jaxprs


def check_indices(closed: jex.ClosedJaxpr, kernel: str, defined_at: str) -> None:
    """Raises KernelError for an index outside its Ref, or one that is no integer."""
    known = dict(zip(closed.jaxpr.constvars, closed.consts))
    for eqn in _taken(closed.jaxpr):
        if eqn.primitive.name in _jax.REF_PRIMITIVES:
            for indices, shape in _jax.shaped_indexers(eqn):
                for axis, (index, extent) in enumerate(zip(indices, shape)):
                    _check(eqn, _value(index, known), axis, extent, kernel, defined_at)


def _taken(jaxpr: jex.Jaxpr) -> Iterator:
    """Equations at any depth, without the branches of conditions that are constants."""
    for eqn in jaxpr.eqns:
        yield eqn
        inner = list(inner_jaxprs(eqn))
        if eqn.primitive.name == "cond" and isinstance(eqn.invars[0], jex.Literal):
            inner = [inner[min(max(int(eqn.invars[0].val), 0), len(inner) - 1)]]
        for j in inner:
            yield from _taken(j.jaxpr)


def _value(index, known: dict):
    """A constant index as an array; None for slices and computed ones."""
    if _jax.is_slice(index):
        return None
    if isinstance(index, jex.Literal):
        return np.asarray(index.val)
    if isinstance(index, jex.Var):
        return np.asarray(known[index]) if index in known else None
    return np.asarray(index)


def _check(eqn, index, axis: int, extent: int, kernel: str, defined_at: str) -> None:
    if index is None or not index.size:
        return
    index = index.reshape(-1)
    at = _jax.user_line(eqn) or defined_at
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise KernelError(
            f"an index of a Ref in kernel `{kernel}` is no integer",
            at=at,
            why=f"{index[0]} along axis {axis}",
            hint="integers, slices, pbkern.ds(start, size) or integer arrays",
        )
    outside = (
        index[(index < -extent) | (index >= extent)] if extent else index[:0]
    )  # of nothing, no program has a part
    if outside.size:
        raise KernelError(
            f"an index of a Ref in kernel `{kernel}` lies outside it",
            at=at,
            why=f"index {outside[0]} along axis {axis}, which has {extent} elements",
            hint=f"{-extent} to {extent - 1}: a Ref has the size of a block, not of the array",
        )
