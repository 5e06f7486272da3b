"""Functions of arrays that are spread over devices -> the same of arrays on one device."""

from __future__ import annotations

from collections.abc import Iterable

from jax.extend import core as jex

from pbkern._jax import bind_again, is_laid_over_devices

from .retracing import retrace
from .walks import equations, types_at_any_depth

# Equations that say where their operands are, and compute nothing.
PLACING = ("reshard", "sharding_constraint", "mesh_cast")


def without_shardings(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A function whose types and equations say nothing of meshes.

    JAX refuses equations on types of another mesh than that of its context, and types that later
    passes give to values have none. What a mesh's axes are inside shard_map stays: collective
    operations name these.
    """
    return retrace(closed, _rewrite) if _has_shardings(closed.jaxpr) else closed


def _has_shardings(jaxpr: jex.Jaxpr) -> bool:
    eqns = list(equations(jaxpr))
    types = types_at_any_depth(jaxpr)
    return any(is_laid_over_devices(getattr(aval, "sharding", None)) for aval in types) or any(
        eqn.primitive.name in PLACING or any(_shardings(eqn.params)) for eqn in eqns
    )


def _shardings(params: dict) -> Iterable[str]:
    """Names of the parameters that are shardings over a mesh."""
    return [
        name
        for name, param in params.items()
        if name.endswith("sharding") and is_laid_over_devices(param)
    ]


def _rewrite(eqn, *operands) -> list | None:
    if eqn.primitive.name in PLACING:
        return list(operands)
    placed = _shardings(eqn.params)
    return bind_again(eqn, operands, eqn.params | dict.fromkeys(placed)) if placed else None
