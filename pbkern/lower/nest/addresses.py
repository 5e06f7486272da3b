"""Places of accesses in buffers seen as flat arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pbkern.core.affine import Affine

from .ir import Buf, Const, Expr, Gather, IndexValue, Load, Nest

Index = Sequence[Affine | None]


def flat_index(buf: Buf, index) -> Affine:
    """The element's place in the buffer."""
    terms: dict = {}
    const = 0
    for position, stride in zip(index, buf.strides):
        const += position.const * stride
        for symbol, coefficient in position.terms:
            terms[symbol] = terms.get(symbol, 0) + coefficient * stride
    return Affine.make(terms, const)


def flat_coefficient(buf: Buf, index, dim: str) -> int:
    """Elements between neighbours along `dim`, as far as the axes are affine."""
    total = 0
    for position, stride in zip(index, buf.strides):
        if position is not None:
            total += position.coefficient(dim) * stride
    return total


def apart(
    index: Index, dims: Mapping[str, int], other: Index, other_dims: Mapping[str, int]
) -> bool:
    """Whether two accesses of one buffer never meet, at whatever points of their dimensions each.

    Along some axis, their ranges are then apart. `index` per axis is an Affine, or None where it is
    not known.
    """
    for position, rival in zip(index, other):
        if position is not None and rival is not None:
            (base, low, high), (base2, low2, high2) = (
                _range(position, dims),
                _range(rival, other_dims),
            )
            if base == base2 and (high < low2 or high2 < low):
                return True
    return False


def _range(affine: Affine, dims: Mapping[str, int]) -> tuple[Affine, int, int]:
    """Splits an index into what does not depend on the dimensions, and the (smallest, largest) rest."""
    inner = Affine(
        tuple((symbol, coefficient) for symbol, coefficient in affine.terms if symbol in dims),
        affine.const,
    )
    return affine - inner, *inner.bounds(lambda symbol: dims[symbol])


def as_affine(expr: Expr) -> Affine[str] | None:
    """The affine place that an expression is: an index, or a constant integer."""
    if isinstance(expr, IndexValue):
        return expr.affine
    return Affine((), int(expr.value)) if isinstance(expr, Const) else None


def is_written(expr: Load | Gather, nest: Nest) -> bool:
    """Whether a load or gather may read what some point of the nest writes."""
    buf, index = expr.access
    known = isinstance(expr, Load) and not expr.guard
    mine = [store for store in nest.stores if store.buf.root is buf.root]
    return any(
        not known or store.buf is not buf or not apart(index, nest.dims, store.index, nest.dims)
        for store in mine
    )
