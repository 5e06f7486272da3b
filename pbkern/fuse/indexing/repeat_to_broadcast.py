"""ClosedJaxpr -> the same with broadcasts moved before reshapes: jnp.repeat along two dimensions is one broadcast.

    reshape(broadcast(reshape(broadcast(x, (n, 2, m)), (2n, m)), (2n, m, 2)), (2n, 2m))
    ->  reshape(broadcast(broadcast(x, (n, 2, m)), (n, 2, m, 2)), (2n, 2m))

A value that is repeated and then reshaped has no affine index, and is stored, unless the reshape
comes last. Applies to results only: small values that are repeated for arithmetic, such as means of
groups, are better stored while they are small.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.calls import has_calls
from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import inner_jaxprs, neighbours
from pbkern.core.ops.reshape import segments
from pbkern.fuse.simplify.driver import retrace


def repeats_to_broadcasts(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites jaxprs that hold broadcasts and reshapes. The same values."""
    pairs = neighbours(closed)
    moves = ("reshape", "broadcast_in_dim") in pairs and not pairs.isdisjoint(
        (("reshape", "reshape"), ("broadcast_in_dim", "reshape"))
    )
    if not moves and not has_calls(closed):
        return closed
    seen = _Repeats(set(only_moved(closed.jaxpr, ("broadcast_in_dim", "reshape"))))
    return retrace(closed, {"broadcast_in_dim": seen.broadcast_in_dim, "reshape": seen.reshape})


def only_moved(jaxpr: jex.Jaxpr, movers: Container[str]) -> Iterator:
    """Values that only equations of these primitives read, on the way to results."""
    read: set = set()
    for eqn in reversed(jaxpr.eqns):
        is_moved = read.isdisjoint(eqn.outvars)
        if is_moved:
            yield from eqn.outvars
        if not is_moved or eqn.primitive.name not in movers:
            read.update(var for var in eqn.invars if not isinstance(var, jex.Literal))
        for inner in inner_jaxprs(eqn):
            yield from only_moved(inner.jaxpr, movers)


class _Repeats:
    """Remembers, by value: repetitions of other values, and reshapes that join dimensions of such a repetition."""

    def __init__(self, only_moved: set) -> None:
        self.notes, self.only_moved = Notes(), only_moved

    def reshape(self, eqn, operands):
        repeats, joined = (self.notes.find(kind, operands[0]) for kind in ("repeats", "joined"))
        if (
            len(operands) > 1
            or eqn.params["dimensions"] is not None
            or (repeats is None and joined is None)
        ):
            return None
        (x,) = joined or operands
        return self._joined(x, eqn.outvars[0].aval.shape)

    def _joined(self, x, shape) -> list:
        """A reshape of x, a value that repeats."""
        value = lax.reshape(x, shape)
        return [value] if _groups(x.shape, shape) is None else self.notes.note("joined", value, x)

    def broadcast_in_dim(self, eqn, operands: Sequence) -> list | None:
        (x, *sizes), shape, dims = operands, eqn.params["shape"], eqn.params["broadcast_dimensions"]
        joined = self.notes.find("joined", x)
        if joined is None or sizes or eqn.outvars[0] not in self.only_moved:
            repeats = not sizes and eqn.outvars[0].aval.size > x.size > 1
            return (
                self.notes.note("repeats", eqn.primitive.bind(*operands, **eqn.params))
                if repeats
                else None
            )
        (source,) = joined
        groups = _groups(source.shape, x.shape) or {}
        finer: list[int] = []
        places: list[int] = []
        for axis, size in enumerate(shape):
            group = groups.get(dims.index(axis), ()) if axis in dims else ()
            places += range(len(finer), len(finer) + len(group))
            finer += [source.shape[dim] for dim in group] or [size]
        flat = lax.squeeze(source, [k for k, n in enumerate(source.shape) if n == 1])
        return self._joined(lax.broadcast_in_dim(flat, finer, places), shape)


def _groups(old, new) -> dict[int, list[int]] | None:
    """Dimension of a reshape's result -> those of the operand that it joins, units left out; None if it splits some."""
    if 0 in old:
        return None
    runs = segments(old, new)
    return (
        {new_dims[0]: old_dims for old_dims, new_dims in runs}
        if all(len(new_dims) == 1 for _, new_dims in runs)
        else None
    )
