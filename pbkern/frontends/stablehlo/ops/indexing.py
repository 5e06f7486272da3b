"""Operations that read and write elements at computed places."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import stablehlo

from pbkern.frontends.stablehlo.comparators import combiners
from pbkern.frontends.stablehlo.table import check, rule


@rule("stablehlo.dynamic_slice")
def dynamic_slice(op, x, *starts):
    """Starts below 0 are 0, unlike Python's."""
    return lax.dynamic_slice(x, starts, op.integers("slice_sizes"), allow_negative_indices=False)


@rule("stablehlo.dynamic_update_slice")
def dynamic_update_slice(op, x, update, *starts):
    return lax.dynamic_update_slice(x, update, starts, allow_negative_indices=False)


def _indices_last(indices, dim: int):
    """Index vectors along the last dimension, as lax has them; one more dimension where they are single numbers."""
    return jnp.expand_dims(indices, dim) if dim == indices.ndim else jnp.moveaxis(indices, dim, -1)


@rule("stablehlo.gather")
def gather(op, x, indices):
    """Slices that would reach over an end are moved back."""
    gather_dimension_numbers = stablehlo.GatherDimensionNumbers(op.attribute("dimension_numbers"))
    numbers = lax.GatherDimensionNumbers(
        tuple(gather_dimension_numbers.offset_dims),
        tuple(gather_dimension_numbers.collapsed_slice_dims),
        tuple(gather_dimension_numbers.start_index_map),
        tuple(gather_dimension_numbers.operand_batching_dims),
        tuple(gather_dimension_numbers.start_indices_batching_dims),
    )
    return lax.gather(
        x,
        _indices_last(indices, gather_dimension_numbers.index_vector_dim),
        numbers,
        op.integers("slice_sizes"),
        indices_are_sorted=op.flag("indices_are_sorted"),
        mode="clip",
    )


SCATTERS = {
    "add": lax.scatter_add,
    "multiply": lax.scatter_mul,
    "minimum": lax.scatter_min,
    "maximum": lax.scatter_max,
    "second": lax.scatter,
    "subtract": lax.scatter_sub,
    "or": lax.scatter_max,
    "and": lax.scatter_min,
}
BOOLEAN = {"add": "or", "multiply": "and", "maximum": "or", "minimum": "and"}


@rule("stablehlo.scatter")
def scatter(op, *operands):
    """Updates that would reach over an end are left out."""
    num_operands = (len(operands) - 1) // 2
    scatter_dimension_numbers = stablehlo.ScatterDimensionNumbers(
        op.attribute("scatter_dimension_numbers")
    )
    numbers = lax.ScatterDimensionNumbers(
        tuple(scatter_dimension_numbers.update_window_dims),
        tuple(scatter_dimension_numbers.inserted_window_dims),
        tuple(scatter_dimension_numbers.scattered_dims_to_operand_dims),
        tuple(scatter_dimension_numbers.input_batching_dims),
        tuple(scatter_dimension_numbers.scatter_indices_batching_dims),
    )
    indices = _indices_last(operands[num_operands], scatter_dimension_numbers.index_vector_dim)
    results = []
    for operand, updates, name in zip(
        operands[:num_operands], operands[num_operands + 1 :], combiners(op.block(0))
    ):
        assert name is not None
        scatter_op = SCATTERS[BOOLEAN.get(name, name) if operand.dtype == bool else name]
        results.append(
            scatter_op(
                operand,
                indices,
                updates,
                numbers,
                indices_are_sorted=op.flag("indices_are_sorted"),
                unique_indices=op.flag("unique_indices"),
                mode="drop",
            )
        )
    return results


@check("stablehlo.scatter")
def _scatter_combines(op):
    names = combiners(op.regions[0].blocks[0])
    if len(names) != (len(op.operands) - 1) // 2 or any(name not in SCATTERS for name in names):
        return "elements are combined by more than one operation"
    types = [str(operand.type) for operand in op.operands]
    if any(
        name in ("or", "and") and "xi1>" not in type_ and "<i1>" not in type_
        for name, type_ in zip(names, types)
    ):
        return "bits of integers are combined"
    return None


@rule("stablehlo.torch_index_select")
def torch_index_select(op, x, indices):
    """Rows along `dim` for each element of the first `batch_dims` dimensions."""
    dim, batch = op.integer("dim"), op.integer("batch_dims")
    if not batch:
        return jnp.take(x, indices, axis=dim, mode="clip")
    shape = (
        indices.shape[:batch]
        + (1,) * (dim - batch)
        + indices.shape[batch:]
        + (1,) * (x.ndim - dim - 1)
    )
    return jnp.take_along_axis(x, indices.reshape(shape), axis=dim, mode="clip")


@rule("stablehlo.real_dynamic_slice")
def real_dynamic_slice(op, x, starts, limits, strides):
    """Takes a slice of known size."""
    places = tuple(starts[k] + jnp.arange(size) * strides[k] for k, size in enumerate(op.shape))
    return x[jnp.ix_(*places)] if places else x
