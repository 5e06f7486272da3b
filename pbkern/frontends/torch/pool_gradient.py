"""Max pooling whose gradient looks at the input, not at indices: the forward graph then has no indices to make and keep."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

SIGNATURE = "(Tensor grad, Tensor input, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode) -> Tensor"


@functools.cache
def decompositions() -> dict[Any, Callable]:
    """aten::max_pool*d_with_indices_backward -> the same without its last argument, as an operator of our own."""
    library = torch.library.Library("pbkern", "FRAGMENT")
    _kept.append(library)
    return {_backward(rank): _define(library, rank) for rank in (2, 3)}


_kept: list[Any] = []  # a library's operators go with it


def _backward(rank: int) -> Any:
    return getattr(torch.ops.aten, f"max_pool{rank}d_with_indices_backward").default


def _define(library: Any, rank: int) -> Callable:
    name = f"max_pool{rank}d_backward"
    library.define(name + SIGNATURE)
    forward = getattr(torch.ops.aten, f"max_pool{rank}d_with_indices")

    def in_torch(tensor: torch.Tensor, x: torch.Tensor, *config: Any) -> torch.Tensor:
        return _backward(rank)(tensor, x, *config, forward(x, *config)[1])

    library.impl(name, in_torch, "CPU")
    torch.library.register_fake(
        f"pbkern::{name}", lambda g, x, *config: torch.empty_like(x), lib=library
    )
    operator = getattr(torch.ops.pbkern, name).default

    def decomposition(tensor: torch.Tensor, x: torch.Tensor, *config: Any) -> torch.Tensor:
        *window, _ = config
        return operator(tensor, x, *window)

    return decomposition
