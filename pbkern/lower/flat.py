"""Places of accesses in buffers seen as flat arrays."""

from __future__ import annotations

from ..affine import Affine
from .nest import Buf


def flat_index(buf: Buf, index) -> Affine:
    """The element's place in the buffer."""
    terms: dict = {}
    const = 0
    for i, stride in zip(index, buf.strides):
        const += i.const * stride
        for s, c in i.terms:
            terms[s] = terms.get(s, 0) + c * stride
    return Affine.make(terms, const)


def flat_coefficient(buf: Buf, index, dim: str) -> int:
    """Elements between neighbours along `dim`, as far as the axes are affine."""
    total = 0
    for i, s in zip(index, buf.strides):
        if i is not None:
            total += i.coefficient(dim) * s
    return total
