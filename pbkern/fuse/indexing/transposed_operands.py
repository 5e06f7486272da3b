"""ClosedJaxpr -> the same with transposes of a contraction's operands in its dimension numbers.

    dot(transpose(a), b)  ->  dot_general(a, b) that reduces a's other dimension

The contraction's equation then gives the order in which its operands are stored, by which the contraction is priced and
packed. The transpose stays for its other readers. Products with a vector pack nothing: they stay as they are.
"""

from __future__ import annotations

import math

from jax.extend import core as jex

from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import primitive_names
from pbkern.fuse.simplify.driver import retrace


def fold_transposes(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites jaxprs that hold transposes and contractions."""
    if not primitive_names(closed) >= {"transpose", "dot_general"}:
        return closed
    seen = _Transposed()
    return retrace(closed, {"transpose": seen.transpose, "dot_general": seen.dot_general})


class _Transposed:
    """Remembers, by value, its operand and permutation where it is a transpose."""

    def __init__(self) -> None:
        self.notes = Notes()

    def transpose(self, eqn, operands):
        return self.notes.bound("transposed", eqn, operands, operands[0], eqn.params["permutation"])

    def dot_general(self, eqn, operands):
        contracted, batch = eqn.params["dimension_numbers"]
        if not all(
            _rows(operand.shape, summed, batched) > 1
            for operand, summed, batched in zip(operands, contracted, batch)
        ):
            return None
        operands, contracted = list(operands), list(contracted)
        for side in (0, 1):
            transposed = self.notes.find("transposed", operands[side])
            if transposed is not None and _keeps_results(
                transposed[1], contracted[side], batch[side]
            ):
                operands[side], contracted[side] = (
                    transposed[0],
                    tuple(transposed[1][dim] for dim in contracted[side]),
                )
        if contracted == list(eqn.params["dimension_numbers"][0]):
            return None
        return [
            eqn.primitive.bind(
                *operands, **eqn.params | {"dimension_numbers": (tuple(contracted), batch)}
            )
        ]


def _rows(shape: tuple[int, ...], contracted: tuple[int, ...], batch: tuple[int, ...]) -> int:
    """Elements along an operand's free dimensions."""
    return math.prod(
        size for axis, size in enumerate(shape) if axis not in contracted and axis not in batch
    )


def _keeps_results(
    order: tuple[int, ...], contracted: tuple[int, ...], batch: tuple[int, ...]
) -> bool:
    """Whether the result keeps its dimensions: batch dimensions stay where they are, free ones in their order."""
    free = [
        order[axis] for axis in range(len(order)) if axis not in contracted and axis not in batch
    ]
    return all(order[dim] == dim for dim in batch) and free == sorted(free)
