"""Maps each dimension of a value to the dimension of the array it comes from, through views."""

from __future__ import annotations

from pbkern.core.ops.views import SHAPE_VIEWS

# Per dimension of a value: the array's dimension; None: the value repeats along it, or has one
# element.
Places = tuple
# Equations that move dimensions.
MOVING = (*SHAPE_VIEWS, "transpose")


def moved(eqn, places: Places) -> Places | None:
    """The dimension map of a view, given its operand's.

    None for a reshape that joins or splits dimensions.
    """
    params, shape, to = eqn.params, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    match eqn.primitive.name:
        case "transpose":
            return tuple(places[axis] for axis in params["permutation"])
        case "squeeze":
            return tuple(
                place for axis, place in enumerate(places) if axis not in params["dimensions"]
            )
        case "broadcast_in_dim":
            place_of = {
                dim: place
                for dim, place, size in zip(params["broadcast_dimensions"], places, shape)
                if size == to[dim]
            }
            return tuple(place_of.get(axis) for axis in range(len(to)))
    if [size for size in shape if size > 1] != [extent for extent in to if extent > 1] or params[
        "dimensions"
    ] is not None:
        return None
    rest = iter(place for place, size in zip(places, shape) if size > 1)
    return tuple(next(rest) if extent > 1 else None for extent in to)
