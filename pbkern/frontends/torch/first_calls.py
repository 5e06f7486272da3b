"""First calls: TorchDynamo compiles once per thread that asks while it compiles, and counts each against its limit.

A thread that calls with arguments of a kind that nobody has called with waits for those that do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch


class FirstCalls:
    """Calls of one function: the first of a kind one by one, all others as they come."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._known: set[Any] = set()

    def __call__(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        if torch.compiler.is_dynamo_compiling() or threading.active_count() == 1:
            return function(*args, **kwargs)
        torch.get_num_threads()  # sets it in a thread that is new to Torch; what is compiled depends on it
        kind = torch.is_grad_enabled(), _kind(args), _kind(kwargs)
        if kind in self._known:
            return function(*args, **kwargs)
        with self._lock:
            results = function(*args, **kwargs)
            self._known.add(kind)
        return results


def _kind(value: Any) -> Any:
    """The facts of an argument that TorchDynamo compiles for; of a number its type, since it becomes an operand."""
    match value:
        case torch.Tensor():
            stride = value.stride() if value.layout is torch.strided else None
            place = value.layout, stride, value.device
            return type(value), value.dtype, tuple(value.shape), place, value.requires_grad
        case list() | tuple():
            return type(value), tuple(map(_kind, value))
        case Mapping():
            return type(value), tuple((key, _kind(item)) for key, item in value.items())
        case bool() | str():
            return value
    return type(value)
