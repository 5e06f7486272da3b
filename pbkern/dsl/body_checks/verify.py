"""Kernel -> None, or a KernelError at the line where the kernel was defined, with values and a way out.

trace_kernel calls verify_blocks before it traces the body, and verify on the whole.
"""

from __future__ import annotations

import jax
import numpy as np
from jax import lax

from pbkern import _jax
from pbkern.core.errors import KernelError
from pbkern.core.jaxprs.walks import equations
from pbkern.dsl.kernel import Blocked, BlockMapping, Element, Kernel
from pbkern.dsl.primitives.ref_access import Range, ref_access

KINDS = "biufcV"  # V: the small float types of ml_dtypes


def verify(kernel: Kernel) -> None:
    """Raises KernelError unless the kernel is well-formed."""
    verify_blocks(kernel)
    _verify_body(kernel)


def verify_blocks(kernel: Kernel) -> None:
    """Raises KernelError unless all but the body is well-formed."""
    _verify_grid(kernel)
    for operand in kernel.inputs + kernel.outputs:
        _verify_mapping(kernel, operand)
    for n, scratch in enumerate(kernel.scratch):
        _verify_dtype(kernel, f"scratch {n}", scratch.dtype)
        if any(size < 1 for size in scratch.shape):
            raise KernelError(
                f"scratch {n} of kernel `{kernel.name}` has a size below 1",
                at=kernel.defined_at,
                why=f"shape {scratch.shape}",
            )
    _verify_aliases(kernel)
    _verify_params(kernel)
    if kernel.finish is not None:
        _verify_finish(kernel, kernel.finish)


def _verify_grid(kernel: Kernel) -> None:
    if any(size < 0 for size in kernel.grid):
        raise KernelError(
            f"grid of kernel `{kernel.name}` has a negative size",
            at=kernel.defined_at,
            why=f"grid={kernel.grid}",
        )
    if not 0 <= kernel.num_scalar_prefetch <= len(kernel.inputs):
        raise KernelError(
            f"kernel `{kernel.name}` prefetches more operands than it has",
            at=kernel.defined_at,
            why=f"num_scalar_prefetch={kernel.num_scalar_prefetch}, {len(kernel.inputs)} operands",
        )
    for dimension, operand in kernel.dynamic_grid:
        _verify_dynamic_size(kernel, dimension, operand)


def _verify_dynamic_size(kernel: Kernel, dimension: int, operand: int) -> None:
    values = f"dynamic_grid has {dimension}: {operand}; grid={kernel.grid}, {len(kernel.inputs)} operands"
    if not (0 <= dimension < len(kernel.grid) and 0 <= operand < len(kernel.inputs)):
        raise KernelError(
            f"dynamic_grid of kernel `{kernel.name}` names a dimension or an operand that it lacks",
            at=kernel.defined_at,
            why=values,
            hint="{grid dimension: number of the operand that is its size}, both from 0",
        )
    array = kernel.inputs[operand].array
    if array.dtype != np.int32 or array.shape not in ((), (1,)):
        raise KernelError(
            f"{kernel.inputs[operand].origin} of kernel `{kernel.name}` is the size of a grid dimension, and no int32",
            at=kernel.defined_at,
            why=f"{array}; {values}",
            hint="jnp.int32(size) in the call",
        )


def _verify_dtype(kernel: Kernel, what: str, dtype: np.dtype) -> None:
    if dtype.kind not in KINDS or dtype.itemsize == 0:
        raise KernelError(
            f"{what} of kernel `{kernel.name}` has a dtype that kernels do not take",
            at=kernel.defined_at,
            why=f"dtype {dtype}",
            hint="bool, integers, floats and complex numbers; jax.random.key_data for PRNG keys",
        )


def _verify_mapping(kernel: Kernel, mapping: BlockMapping) -> None:
    _verify_dtype(kernel, mapping.origin, mapping.array.dtype)
    if len(mapping.dims) != len(mapping.array.shape):
        raise KernelError(
            f"{mapping.origin} of kernel `{kernel.name}` has {len(mapping.dims)}-d blocks but is {len(mapping.array.shape)}-d",
            at=kernel.defined_at,
            why=f"array {mapping.array}, blocks {mapping.dims}",
        )
    _verify_index_map(kernel, mapping)
    for n, (dim, extent) in enumerate(zip(mapping.dims, mapping.array.shape)):
        _verify_block_size(kernel, mapping, n, dim, extent)
    if kernel.num_programs:
        for n in range(len(mapping.dims)):
            _verify_start(kernel, mapping, n)


def _verify_index_map(kernel: Kernel, mapping: BlockMapping) -> None:
    """Rank, arity and types of the traced index map."""
    jaxpr = mapping.index_map.jaxpr
    scalars = [var for var in jaxpr.invars if not _jax.is_ref(var.aval)]
    if len(scalars) != len(kernel.grid) or len(jaxpr.invars) - len(scalars) not in (
        0,
        kernel.num_scalar_prefetch,
    ):
        raise KernelError(
            f"index map of {mapping.origin} takes {len(scalars)} grid indices, the grid has {len(kernel.grid)} dimensions",
            at=kernel.defined_at,
            why=f"grid={kernel.grid}",
        )
    if len(jaxpr.outvars) != len(mapping.array.shape) or any(
        var.aval.dtype != np.int32 for var in jaxpr.outvars
    ):
        raise KernelError(
            f"index map of {mapping.origin} does not return one i32 per dimension",
            at=kernel.defined_at,
            why=f"array {mapping.array}, returns ({', '.join(var.aval.str_short() for var in jaxpr.outvars)})",
        )


def _verify_block_size(kernel: Kernel, mapping: BlockMapping, axis: int, dim, extent: int) -> None:
    values = f"array {mapping.array}, dimension {axis}: block {dim.size}, extent {extent}"
    if dim.size < 1 and not (extent == 0 and dim.size == 0):
        raise KernelError(
            f"{mapping.origin} of kernel `{kernel.name}` has a block size below 1",
            at=kernel.defined_at,
            why=values,
            hint="a positive size; None squeezes a dimension",
        )
    if isinstance(dim, Element) and min(dim.padding) < 0:
        raise KernelError(
            f"{mapping.origin} of kernel `{kernel.name}` has negative padding",
            at=kernel.defined_at,
            why=f"{values}, padding {dim.padding}",
        )
    reach = extent + (sum(dim.padding) if isinstance(dim, Element) else 0)
    if dim.size > reach and 0 not in kernel.grid:  # without programs there are no blocks
        hint = f"at most {extent} (ragged last blocks are fine, larger ones than the array are not)"
        if isinstance(dim, Element):
            hint = "widen Element(n, padding=(low, high)) by what lies outside the array"
        raise KernelError(
            f"{mapping.origin} of kernel `{kernel.name}` has blocks larger than the array",
            at=kernel.defined_at,
            why=values,
            hint=hint,
        )


def _verify_start(kernel: Kernel, mapping: BlockMapping, dim: int) -> None:
    """Blocks are inside the array and its padding, where the index map is affine."""
    start, block_dim, extent = mapping.starts[dim], mapping.dims[dim], mapping.array.shape[dim]
    if start is None:
        return
    if start.symbols & {axis for axis, _ in kernel.dynamic_grid}:
        return
    low, high = start.bounds(lambda axis: kernel.grid[axis])
    if isinstance(block_dim, Element):
        first, last = -block_dim.padding[0], extent + block_dim.padding[1] - block_dim.size
        need = (max(0, -low), max(0, high + block_dim.size - extent))
        hint = f"pbkern.Element({block_dim.size}, padding={need}), or another index map"
    else:
        first, last = 0, max(extent - 1, 0)
        of_blocks = (
            -(-extent // block_dim.size)
            if isinstance(block_dim, Blocked) and block_dim.size
            else extent
        )
        hint = f"dimension {dim} has {of_blocks} blocks of {block_dim.size}: make the grid or the index map fit"
    if low < first or high > last:
        raise KernelError(
            f"blocks of {mapping.origin} of kernel `{kernel.name}` lie outside the array",
            at=kernel.defined_at,
            why=(
                f"array {mapping.array}, dimension {dim}: starts {low} to {high} "
                f"with size {block_dim.size} over grid {kernel.grid}"
            ),
            hint=hint,
        )


def _verify_aliases(kernel: Kernel) -> None:
    for i, output in kernel.aliases:
        if not (0 <= i < len(kernel.inputs) and 0 <= output < len(kernel.outputs)):
            raise KernelError(
                f"kernel `{kernel.name}` aliases an operand or result that it lacks",
                at=kernel.defined_at,
                why=f"input_output_aliases={{{i}: {output}}}, {len(kernel.inputs)} operands, {len(kernel.outputs)} results",
                hint="{number of an operand: number of the result that shares its array}, both from 0",
            )
        if kernel.inputs[i].array != kernel.outputs[output].array:
            raise KernelError(
                f"input {i} and output {output} of kernel `{kernel.name}` are aliased but differ in type",
                at=kernel.defined_at,
                why=f"input {kernel.inputs[i].array}, output {kernel.outputs[output].array}",
                hint="an aliased result has its operand's shape and dtype",
            )
    for side in zip(*kernel.aliases):
        if len(set(side)) != len(side):
            raise KernelError(
                f"kernel `{kernel.name}` aliases one array twice",
                at=kernel.defined_at,
                why=f"aliases {kernel.aliases}",
                hint="one result per operand, and one operand per result",
            )


def _verify_params(kernel: Kernel) -> None:
    for target, params in kernel.compiler_params.items():
        semantics = getattr(params, "dimension_semantics", None)
        if semantics is not None and len(semantics) != len(kernel.grid):
            raise KernelError(
                f"dimension_semantics of kernel `{kernel.name}` for `{target}` does not fit the grid",
                at=kernel.defined_at,
                why=f"dimension_semantics={tuple(semantics)}, grid={kernel.grid}",
                hint="one entry per grid dimension",
            )
        allowed = getattr(params, "allow_input_fusion", None)
        counts = len(kernel.inputs), len(kernel.inputs) - kernel.num_scalar_prefetch
        if allowed is not None and len(allowed) not in counts:
            raise KernelError(
                f"allow_input_fusion of kernel `{kernel.name}` for `{target}` does not fit the operands",
                at=kernel.defined_at,
                why=f"allow_input_fusion={tuple(allowed)}, {counts[0]} operands",
                hint="one entry per operand; prefetched ones may be left out",
            )


def _verify_finish(kernel: Kernel, finish: Kernel) -> None:
    """Raises KernelError unless the last stage takes the programs' results."""
    arrays = tuple(output.array for output in kernel.outputs)
    if finish.in_types[: len(arrays)] != arrays:
        raise KernelError(
            f"the last stage of kernel `{kernel.name}` does not take what its programs make",
            at=kernel.defined_at,
            why=f"`{finish.name}` takes ({', '.join(map(str, finish.in_types))}), the programs make "
            f"({', '.join(map(str, arrays))})",
            hint="the programs' results are its first operands, all of them and in their order",
        )
    if finish.finish is not None:
        raise KernelError(
            f"the last stage of kernel `{kernel.name}` has a last stage",
            at=kernel.defined_at,
            why=f"`{finish.name}` is followed by `{finish.finish.name}`",
            hint="one stage that does the work of both",
        )
    if finish.name == kernel.name:
        raise KernelError(
            f"kernel `{kernel.name}` and its last stage have one name",
            at=kernel.defined_at,
            hint="name=... of either",
        )
    verify(finish)


def _verify_body(kernel: Kernel) -> None:
    jaxpr = kernel.body.jaxpr
    types = [
        (operand.ref_shape, operand.array.dtype) for operand in kernel.inputs + kernel.outputs
    ] + [(scratch.shape, scratch.dtype) for scratch in kernel.scratch]
    ref_types = [
        _jax.ref_type(var.aval) if _jax.is_ref(var.aval) else var.aval for var in jaxpr.invars
    ]
    if ref_types != types or jaxpr.outvars or kernel.body.consts:
        raise KernelError(
            f"body of kernel `{kernel.name}` does not fit its blocks",
            at=kernel.defined_at,
            why=f"takes {ref_types}, blocks {types}, {len(jaxpr.outvars)} results, {len(kernel.body.consts)} constants",
            hint="a body takes Refs (*inputs, *outputs, *scratch), returns nothing and has no array constants",
        )
    for eqn in equations(jaxpr):
        _verify_equation(kernel, eqn)


def _verify_equation(kernel: Kernel, eqn) -> None:
    at = _jax.user_line(eqn) or kernel.defined_at
    for var in eqn.outvars:
        if jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.extended):
            raise KernelError(
                f"kernel `{kernel.name}` computes with a dtype that kernels do not take",
                at=at,
                why=f"`{eqn.primitive.name}` gives {var.aval.str_short()}",
                hint="numbers and bools; jax.random works with the words of a key, jax.random.key_data(key)",
            )
    if eqn.primitive.name in ("program_id", "num_programs") and not 0 <= eqn.params["axis"] < len(
        kernel.grid
    ):
        raise KernelError(
            f"{eqn.primitive.name}({eqn.params['axis']}) in kernel `{kernel.name}`, "
            f"whose grid has {len(kernel.grid)} dimensions",
            at=at,
            why=f"grid={kernel.grid}",
        )
    if eqn.primitive.name in _jax.REF_PRIMITIVES:
        _verify_slices(kernel, eqn, at)
    if eqn.primitive is lax.reshape_p:  # JAX leaves this to XLA
        old, new = eqn.invars[0].aval, eqn.outvars[0].aval
        if old.size != new.size:
            raise KernelError(
                f"a reshape in kernel `{kernel.name}` changes the number of elements",
                at=at,
                why=f"{old.str_short()} has {old.size}, {new.str_short()} has {new.size}",
            )


def _verify_slices(kernel: Kernel, eqn, at) -> None:
    shape, _ = _jax.ref_type(eqn.invars[0].aval)
    for axis, (index, size) in enumerate(zip(ref_access(eqn).indices, shape)):
        if isinstance(index, Range) and index.size and (index.size - 1) * index.stride >= size:
            raise KernelError(
                f"a slice in kernel `{kernel.name}` is longer than its Ref",
                at=at,
                why=f"{index.size} elements"
                + (f", {index.stride} apart," if index.stride != 1 else "")
                + f" of {size} along axis {axis}",
                hint="a shorter slice, or a masked load",
            )
