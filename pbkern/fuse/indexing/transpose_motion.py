"""ClosedJaxpr -> the same with transposes moved past convolutions and operations around them, so that they cancel.

Images are often transposed to the layout that a convolution is written for, and back. Each
intermediate value would then be stored in another order than it is loaded. A convolution takes any
layout by its dimension numbers: transposes of its input become transposes of its result, pass
elementwise operations, pads and slices, and meet their inverses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.fuse.simplify.driver import retrace

Order = tuple[int, ...]


def move_transposes(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites jaxprs that hold both transposes and convolutions."""
    names = {eqn.primitive.name for eqn in closed.jaxpr.eqns}
    if not {"transpose", "conv_general_dilated"} <= names:
        return closed
    moved = _Transposes()
    rewrites = dict.fromkeys(ELEMENTWISE, moved.elementwise)
    rewrites |= {
        name: getattr(moved, name)
        for name in ("transpose", "pad", "slice", "squeeze", "broadcast_in_dim")
    }
    rewrites["conv_general_dilated"] = moved.convolution
    return retrace(retrace(closed, rewrites), {})


class _Transposes:
    """Remembers which value is a transpose of which other: value = transpose(base, order)."""

    def __init__(self) -> None:
        self.notes = Notes()

    def find(self, x) -> tuple[object, Order] | None:
        return self.notes.find("transposed", x)

    def transposed(self, base, order: Sequence[int]) -> list:
        order = tuple(int(dim) for dim in order)
        if order == tuple(range(len(order))):
            return [base]
        value = lax.transpose_p.bind(base, permutation=order)
        return self.notes.note("transposed", value, base, order)

    def transpose(self, eqn, operands):
        base, order = self.find(operands[0]) or (operands[0], range(operands[0].ndim))
        return self.transposed(base, [order[axis] for axis in eqn.params["permutation"]])

    def elementwise(self, eqn, operands):
        """Before -> after: f(transpose(x), transpose(y), 2) -> transpose(f(x, y, 2))."""
        arrays = [operand for operand in operands if getattr(operand, "ndim", 0)]
        transposes = [self.find(array) for array in arrays]
        if (
            eqn.primitive.multiple_results
            or not transposes
            or None in transposes
            or len({view[1] for view in transposes}) > 1
        ):
            return None
        if eqn.outvars[0].aval.ndim != len(
            transposes[0][1]
        ):  # a bitcast to elements of another width
            return None
        bases = [
            self.find(operand)[0] if getattr(operand, "ndim", 0) else operand
            for operand in operands
        ]
        return self.transposed(eqn.primitive.bind(*bases, **eqn.params), transposes[0][1])

    def pad(self, eqn, operands):
        def change(order: Order) -> dict:
            return {"padding_config": _permuted(eqn.params["padding_config"], order)}

        return self._same_rank(eqn, operands, change)

    def slice(self, eqn, operands):
        def change(order: Order) -> dict:
            return {key: param and _permuted(param, order) for key, param in eqn.params.items()}

        return self._same_rank(eqn, operands, change)

    def _same_rank(self, eqn, operands, change: Callable[[Order], dict]):
        transpose = self.find(operands[0])
        if transpose is None:
            return None
        base, order = transpose
        return self.transposed(eqn.primitive.bind(base, *operands[1:], **change(order)), order)

    def squeeze(self, eqn, operands):
        transpose = self.find(operands[0])
        if transpose is None:
            return None
        base, order = transpose
        gone = {order[dim % len(order)] for dim in eqn.params["dimensions"]}
        rank = {
            axis: n for n, axis in enumerate(axis for axis in range(len(order)) if axis not in gone)
        }
        return self.transposed(
            lax.squeeze(base, sorted(gone)), [rank[dim] for dim in order if dim not in gone]
        )

    def broadcast_in_dim(self, eqn, operands):
        """New dimensions of size 1 go last."""
        transpose, params = self.find(operands[0]), eqn.params
        mapped = params["broadcast_dimensions"]
        new = [axis for axis in range(len(params["shape"])) if axis not in mapped]
        if transpose is None or len(operands) > 1 or any(params["shape"][dim] != 1 for dim in new):
            return None
        if any(params["shape"][dim] != size for dim, size in zip(mapped, operands[0].shape)):
            return None
        base, order = transpose
        place = dict(zip(mapped, order)) | {axis: base.ndim + n for n, axis in enumerate(new)}
        grown = lax.expand_dims(base, range(base.ndim, base.ndim + len(new)))
        return self.transposed(grown, [place[axis] for axis in range(len(params["shape"]))])

    def convolution(self, eqn, operands):
        """The result gets the input's layout, with output channels in place of input channels."""
        transpose = self.find(operands[0])
        if transpose is None:
            return None
        base, order = transpose
        numbers = eqn.params["dimension_numbers"]
        layout = tuple(order[dim] for dim in numbers.lhs_spec)
        transposed = lax.ConvDimensionNumbers(layout, numbers.rhs_spec, layout)
        result = eqn.primitive.bind(
            base, operands[1], **{**eqn.params, "dimension_numbers": transposed}
        )
        place = dict(zip(numbers.out_spec, layout))
        return self.transposed(result, [place[axis] for axis in range(len(place))])


def _permuted(entries: Sequence, order: Order) -> tuple:
    """Entries per dimension of a transposed value -> per dimension of its base."""
    out: list = [None] * len(order)
    for dim, entry in zip(order, entries):
        out[dim] = entry
    return tuple(out)
