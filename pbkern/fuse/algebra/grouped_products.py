"""ragged_dot -> a kernel that multiplies each row by the matrix of its group.

    for each tile of rows, for each group that has rows in it:   y[tile] += where(row in group, x[tile], 0) @ w[group]
    for each group, for each tile of rows that it has rows in:   y[group] += where(row in group, x[tile], 0).T @ z[tile]

The second form has the groups along the summed dimension; it is the gradient of `w` in the first. XLA multiplies all
rows by all matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import primitive_names
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.dsl.primitives.grid import program_id
from pbkern.dsl.specs import BlockSpec
from pbkern.dsl.trace import kernel
from pbkern.fuse.simplify.driver import retrace

RAGGED = "ragged_dot_general"
# Names of the two kernels.
ROWS_BY_GROUP = "rows_by_group"
SUMS_BY_GROUP = "sums_by_group"


@dataclass(frozen=True)
class GroupProducts:
    """Rewrites products of rows in groups, without batch dimensions."""

    rows: int = threshold(
        32, "rows of a tile: a group's first and last tile are multiplied in full"
    )
    columns: int = threshold(128, "columns of a tile")

    def __call__(self, closed: jex.ClosedJaxpr, options: object) -> jex.ClosedJaxpr:
        if RAGGED not in primitive_names(closed):
            return closed
        return retrace(closed, {RAGGED: self.product})

    def product(self, eqn, operands: Sequence) -> list | None:
        x, w, sizes = operands
        params, result = params_of(eqn), array_aval(eqn.outvars[0])
        dims = params["ragged_dot_dimension_numbers"]
        ((summed, (along, *more)), batch) = dims.dot_dimension_numbers
        ragged = dims.lhs_ragged_dimensions
        plain = batch == ((), ()) and not more and params["group_offset"] is None
        if not plain or x.ndim != 2 or sizes.ndim != 1 or 0 in (*x.shape, *w.shape, *sizes.shape):
            return None
        ends = lax.cumsum(lax.convert_element_type(sizes, np.int32))
        starts = ends - lax.convert_element_type(sizes, np.int32)
        if tuple(ragged) == tuple(summed):
            x, w = (v if dim == 0 else v.T for v, dim in ((x, summed[0]), (w, along)))
            return [self._of_groups(starts, ends, x, w, result)]
        x = x if tuple(ragged) == (0,) else x.T
        if tuple(dims.rhs_group_dimensions) != (0,):
            return None
        return [self._of_rows(starts, ends, x, w, along, result)]

    def _of_rows(self, starts, ends, x, w, along: int, result) -> jax.Array:
        """y[i] = x[i] @ w[group of i]."""
        (m, k), (groups, *_), n = x.shape, w.shape, result.shape[1]
        rows, columns, dtype = min(self.rows, m), min(self.columns, n), _sum_type(result.dtype)
        whole, matrices = BlockSpec(), (groups, k, columns) if along == 1 else (groups, columns, k)

        def body(starts, ends, x, w, y):
            first = program_id(0) * rows
            y[...] = jax.numpy.zeros((rows, columns), dtype)

            def group(g, carry):
                def add():
                    part = _within(x[...], first, starts[g], ends[g])
                    y[...] += lax.dot_general(
                        part, w[g], (((1,), (along - 1,)), ((), ())), preferred_element_type=dtype
                    )

                lax.cond((starts[g] < first + rows) & (ends[g] > first), add, lambda: None)
                return carry

            lax.fori_loop(0, groups, group, 0)

        place = (lambda i, j: (0, 0, j)) if along == 1 else (lambda i, j: (0, j, 0))
        function = kernel(
            body,
            grid=(math.ceil(m / rows), math.ceil(n / columns)),
            in_specs=[
                whole,
                whole,
                BlockSpec((rows, k), lambda i, j: (i, 0)),
                BlockSpec(matrices, place),
            ],
            out_specs=[BlockSpec((rows, columns), lambda i, j: (i, j))],
            out_shape=[jax.ShapeDtypeStruct((m, n), dtype)],
            name=ROWS_BY_GROUP,
        )
        return lax.convert_element_type(function(starts, ends, x, w)[0], result.dtype)

    def _of_groups(self, starts, ends, x, z, result) -> jax.Array:
        """y[g] = sum over the rows i of the group of x[i] z[i]."""
        (m, k), (_, n), (groups, *_) = x.shape, z.shape, result.shape
        rows, dtype = min(self.rows, m), _sum_type(result.dtype)
        tile = min(self.columns, k), min(self.columns, n)

        def body(starts, ends, x, z, y):
            start, end = (bounds[program_id(0)] for bounds in (starts, ends))
            y[...] = jax.numpy.zeros((1, *tile), dtype)

            def some(number, carry):
                first = jax.numpy.minimum(
                    number * rows, m - rows
                )  # the last tile ends with the array

                def add():
                    part, other = (
                        lax.dynamic_slice_in_dim(ref[...], first, rows) for ref in (x, z)
                    )
                    part = _within(part, first, jax.numpy.maximum(start, number * rows), end)
                    sums = lax.dot_general(
                        part, other, (((0,), (0,)), ((), ())), preferred_element_type=dtype
                    )
                    y[...] += sums[None]

                lax.cond((start < first + rows) & (end > first), add, lambda: None)
                return carry

            lax.fori_loop(0, math.ceil(m / rows), some, 0)

        function = kernel(
            body,
            grid=(groups, math.ceil(k / tile[0]), math.ceil(n / tile[1])),
            in_specs=[
                BlockSpec(),
                BlockSpec(),
                BlockSpec((m, tile[0]), lambda g, i, j: (0, i)),
                BlockSpec((m, tile[1]), lambda g, i, j: (0, j)),
            ],
            out_specs=[BlockSpec((1, *tile), lambda g, i, j: (g, i, j))],
            out_shape=[jax.ShapeDtypeStruct((groups, k, n), dtype)],
            name=SUMS_BY_GROUP,
        )
        return lax.convert_element_type(function(starts, ends, x, z)[0], result.dtype)


def _within(x, first, start, end):
    """Rows of a tile that begins at row `first`, zeros in place of those outside of a group."""
    row = lax.broadcasted_iota(np.int32, x.shape, 0) + first
    return jax.numpy.where((row >= start) & (row < end), x, np.zeros((), x.dtype))


def _sum_type(dtype) -> np.dtype:
    """The type in which products of a type are added up."""
    return (
        np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else np.dtype(dtype)
    )
