"""Orders in which tensors lie in memory.

Torch keeps track of strides, arrays here lie one element after the other. A tensor whose dimensions
merely lie in another order, such as a transposed one or one in channels_last, is an array with its
dimensions in that order, and a transpose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Order = tuple[int, ...]


def order_of(t: torch.Tensor) -> Order | None:
    """Dimensions from the outermost in memory to the innermost: `t.permute(order)` is contiguous.

    None for a tensor that is contiguous already, and for one that skips or repeats elements.
    """
    if t.is_contiguous():
        return None
    strides = t.stride()
    order = tuple(sorted(range(t.ndim), key=lambda d: (-strides[d], d)))
    return order if t.permute(order).is_contiguous() else None


def inverse(order: Sequence[int]) -> Order:
    """The permutation that undoes one."""
    found = [0] * len(order)
    for k, d in enumerate(order):
        found[d] = k
    return tuple(found)
