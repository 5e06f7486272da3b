"""Gather equations, read once for fusion and for lowering: dimensions of the result, and the values of rows outside."""

from __future__ import annotations

import numpy as np


def fills(eqn) -> bool:
    """Whether windows that leave the operand give the fill value; otherwise they are moved inside."""
    return "FILL" in str(eqn.params["mode"]).upper()


def fill_value(eqn):
    """Value of a window outside.

    JAX's default: NaN, the lowest value of signed, the largest of unsigned integers.
    """
    given, dtype = eqn.params["fill_value"], np.dtype(eqn.outvars[0].aval.dtype)
    if given is not None:
        return np.asarray(given, dtype)[()]
    if dtype.kind == "b":
        return np.True_
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return dtype.type(info.min if dtype.kind == "i" else info.max)
    return np.asarray(float("nan"), dtype)[()]


def batch_dims(eqn) -> list[int]:
    """Dimensions of the result that the index vectors go along."""
    dn = eqn.params["dimension_numbers"]
    return [axis for axis in range(len(eqn.outvars[0].aval.shape)) if axis not in dn.offset_dims]


def result_dims(eqn) -> dict[int, int]:
    """Dimension of the operand -> dimension of the result, where the operand is not looked up at single places."""
    dn, rank, batch = (
        eqn.params["dimension_numbers"],
        len(eqn.invars[0].aval.shape),
        batch_dims(eqn),
    )
    window = [
        k
        for k in range(rank)
        if k not in dn.collapsed_slice_dims and k not in dn.operand_batching_dims
    ]
    batched = {
        dim: batch[axis]
        for dim, axis in zip(dn.operand_batching_dims, dn.start_indices_batching_dims)
    }
    return dict(zip(window, dn.offset_dims)) | batched
