"""Views of one array: the primitives that move or repeat elements and compute none, and what each makes of a NumPy array.

The numbers behind views of a small constant are known without running them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# Views that keep elements in their order: they give an array another shape, or repeat it.
SHAPE_VIEWS = ("broadcast_in_dim", "reshape", "squeeze")
# Elements of an array whose numbers are looked at while a function is compiled.
MOST_ELEMENTS = 1024


def _broadcast_in_dim(params: dict, x: np.ndarray) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for dim, size in zip(params["broadcast_dimensions"], x.shape):
        shape[dim] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _reshape(params: dict, x: np.ndarray) -> np.ndarray:
    order = params["dimensions"]
    return (x if order is None else x.transpose(order)).reshape(params["new_sizes"])


def _slice(params: dict, x: np.ndarray) -> np.ndarray:
    strides = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def iota_numbers(params: dict) -> np.ndarray:
    """The numbers of an iota of these parameters: a view of one line."""
    line = [1] * len(params["shape"])
    line[params["dimension"]] = -1
    counted = np.arange(params["shape"][params["dimension"]]).astype(params["dtype"])
    return np.broadcast_to(counted.reshape(line), params["shape"])


# Primitive -> (its parameters, operand) -> result.
VIEWS: dict[str, Callable[[dict, np.ndarray], np.ndarray]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "rev": lambda params, x: np.flip(x, tuple(params["dimensions"])),
    "slice": _slice,
    "copy": lambda params, x: x,
}
