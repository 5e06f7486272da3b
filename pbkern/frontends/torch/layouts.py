"""Orders in which tensors lie in memory.

Torch keeps track of strides, arrays here lie one element after the other. A tensor whose dimensions
merely lie in another order, such as a transposed one or one in channels_last, is an array with its
dimensions in that order, and a transpose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Order = tuple[int, ...]


def order_of(tensor: torch.Tensor) -> Order | None:
    """Dimensions from the outermost in memory to the innermost: `t.permute(order)` is contiguous.

    None for a tensor that is contiguous already, and for one that skips or repeats elements.
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))
    return order if tensor.permute(order).is_contiguous() else None


def inverse(order: Sequence[int]) -> Order:
    """The permutation that undoes one."""
    order_back = [0] * len(order)
    for k, axis in enumerate(order):
        order_back[axis] = k
    return tuple(order_back)
