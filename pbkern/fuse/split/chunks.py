"""Cuts a dimension into chunks of equal length, for work in two stages."""

from __future__ import annotations

from jax import lax


def near_divisor(n: int, block: int) -> int:
    """A divisor of n near `block` (within a factor of two), so that no chunk is ragged; else `block`."""
    divisors = (
        [
            divisor
            for divisor in range(max(1, block // 2), min(n, 2 * block) + 1)
            if n % divisor == 0
        ]
        if block < 1 << 20
        else []
    )
    return min(divisors, key=lambda divisor: abs(divisor - block), default=block)


def in_chunks(x, axis: int, block: int, fill):
    """[..., n, ...] -> [..., ceil(n / block), block, ...]; the last chunk ends in `fill`."""
    runs = -(-x.shape[axis] // block)
    missing = runs * block - x.shape[axis]
    if missing:
        x = lax.pad(x, fill, [(0, missing if dim == axis else 0, 0) for dim in range(x.ndim)])
    return lax.reshape(x, (*x.shape[:axis], runs, block, *x.shape[axis + 1 :]))
