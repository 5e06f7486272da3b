"""Maps each dimension of a value to the dimension of the array it comes from, through views."""

from __future__ import annotations

# Per dimension of a value: the array's dimension; None: the value repeats along it, or has one
# element.
Places = tuple
# Equations that move dimensions.
MOVING = ("transpose", "broadcast_in_dim", "squeeze", "reshape")


def moved(eqn, places: Places) -> Places | None:
    """The dimension map of a view, given its operand's.

    None for a reshape that joins or splits dimensions.
    """
    p, shape, to = eqn.params, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    match eqn.primitive.name:
        case "transpose":
            return tuple(places[d] for d in p["permutation"])
        case "squeeze":
            return tuple(q for d, q in enumerate(places) if d not in p["dimensions"])
        case "broadcast_in_dim":
            kept = {d: q for d, q, n in zip(p["broadcast_dimensions"], places, shape) if n == to[d]}
            return tuple(kept.get(d) for d in range(len(to)))
    if [n for n in shape if n > 1] != [n for n in to if n > 1] or p["dimensions"] is not None:
        return None
    rest = iter(q for q, n in zip(places, shape) if n > 1)
    return tuple(next(rest) if n > 1 else None for n in to)
