"""Views of arrays, evaluated by NumPy: the numbers behind some views of a small constant are known without running it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# Elements of an array whose numbers are looked at while a function is compiled.
MOST_ELEMENTS = 1024


def _broadcast(x: np.ndarray, params: dict) -> np.ndarray:
    shape, places = params["shape"], params["broadcast_dimensions"]
    unit = [1] * len(shape)
    for size, place in zip(x.shape, places):
        unit[place] = size
    return np.broadcast_to(x.reshape(unit), shape)


def _reshape(x: np.ndarray, params: dict) -> np.ndarray:
    order = params["dimensions"]
    return (x if order is None else x.transpose(order)).reshape(params["new_sizes"])


def _slice(x: np.ndarray, params: dict) -> np.ndarray:
    steps = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]


# Primitive -> the result's numbers, from the operand's and the parameters.
VIEWS: dict[str, Callable[[np.ndarray, dict], np.ndarray]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": lambda x, params: x.squeeze(params["dimensions"]),
    "expand_dims": lambda x, params: np.expand_dims(x, params["dimensions"]),
    "transpose": lambda x, params: x.transpose(params["permutation"]),
    "rev": lambda x, params: np.flip(x, params["dimensions"]),
    "slice": _slice,
    "copy": lambda x, params: x,
}
