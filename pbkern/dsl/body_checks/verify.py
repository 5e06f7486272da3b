"""Kernel -> None, or a KernelError at the line where the kernel was defined, with values and a way out.

trace_kernel calls verify_blocks before it traces the body, and verify on the whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import KernelError
from pbkern.core.jaxprs import inner_jaxprs
from pbkern.dsl.kernel import Blocked, BlockMapping, Element, Kernel
from pbkern.dsl.primitives.ref_access import Range, ref_access

KINDS = "biufcV"  # V: the small float types of ml_dtypes


def verify(k: Kernel) -> None:
    """Raises KernelError unless the kernel is well-formed."""
    verify_blocks(k)
    _verify_body(k)


def verify_blocks(k: Kernel) -> None:
    """Raises KernelError unless all but the body is well-formed."""
    _verify_grid(k)
    for m in k.inputs + k.outputs:
        _verify_mapping(k, m)
    for n, s in enumerate(k.scratch):
        _verify_dtype(k, f"scratch {n}", s.dtype)
        if any(d < 1 for d in s.shape):
            raise KernelError(
                f"scratch {n} of kernel `{k.name}` is empty",
                at=k.defined_at,
                why=f"shape {s.shape}",
            )
    _verify_aliases(k)
    _verify_semantics(k)
    if k.finish is not None:
        _verify_finish(k, k.finish)


def _verify_grid(k: Kernel) -> None:
    if any(n < 0 for n in k.grid):
        raise KernelError(
            f"grid of kernel `{k.name}` has a negative size", at=k.defined_at, why=f"grid={k.grid}"
        )
    if not 0 <= k.num_scalar_prefetch <= len(k.inputs):
        raise KernelError(
            f"kernel `{k.name}` prefetches more operands than it has",
            at=k.defined_at,
            why=f"num_scalar_prefetch={k.num_scalar_prefetch}, {len(k.inputs)} operands",
        )
    for dimension, operand in k.dynamic_grid:
        _verify_dynamic_size(k, dimension, operand)


def _verify_dynamic_size(k: Kernel, dimension: int, operand: int) -> None:
    values = f"dynamic_grid has {dimension}: {operand}; grid={k.grid}, {len(k.inputs)} operands"
    if not (0 <= dimension < len(k.grid) and 0 <= operand < len(k.inputs)):
        raise KernelError(
            f"dynamic_grid of kernel `{k.name}` names a dimension or an operand that it lacks",
            at=k.defined_at,
            why=values,
            hint="{grid dimension: number of the operand that is its size}, both from 0",
        )
    array = k.inputs[operand].array
    if array.dtype != np.int32 or array.shape not in ((), (1,)):
        raise KernelError(
            f"{k.inputs[operand].origin} of kernel `{k.name}` is the size of a grid dimension, and no int32",
            at=k.defined_at,
            why=f"{array}; {values}",
            hint="jnp.int32(size) in the call",
        )


def _verify_dtype(k: Kernel, what: str, dtype: np.dtype) -> None:
    if dtype.kind not in KINDS or dtype.itemsize == 0:
        raise KernelError(
            f"{what} of kernel `{k.name}` has a dtype that kernels do not take",
            at=k.defined_at,
            why=f"dtype {dtype}",
            hint="bool, integers, floats and complex numbers; jax.random.key_data for PRNG keys",
        )


def _verify_mapping(k: Kernel, m: BlockMapping) -> None:
    _verify_dtype(k, m.origin, m.array.dtype)
    if len(m.dims) != len(m.array.shape):
        raise KernelError(
            f"{m.origin} of kernel `{k.name}` has {len(m.dims)}-d blocks but is {len(m.array.shape)}-d",
            at=k.defined_at,
            why=f"array {m.array}, blocks {m.dims}",
        )
    _verify_index_map(k, m)
    for n, (d, extent) in enumerate(zip(m.dims, m.array.shape)):
        _verify_block_size(k, m, n, d, extent)
    if k.num_programs:
        for n in range(len(m.dims)):
            _verify_start(k, m, n)


def _verify_index_map(k: Kernel, m: BlockMapping) -> None:
    """Rank, arity and types of the traced index map."""
    jaxpr = m.index_map.jaxpr
    scalars = [v for v in jaxpr.invars if not _jax.is_ref(v.aval)]
    if len(scalars) != len(k.grid) or len(jaxpr.invars) - len(scalars) not in (
        0,
        k.num_scalar_prefetch,
    ):
        raise KernelError(
            f"index map of {m.origin} takes {len(scalars)} grid indices, the grid has {len(k.grid)} dimensions",
            at=k.defined_at,
            why=f"grid={k.grid}",
        )
    if len(jaxpr.outvars) != len(m.array.shape) or any(
        v.aval.dtype != np.int32 for v in jaxpr.outvars
    ):
        raise KernelError(
            f"index map of {m.origin} does not return one i32 per dimension",
            at=k.defined_at,
            why=f"array {m.array}, returns ({', '.join(v.aval.str_short() for v in jaxpr.outvars)})",
        )


def _verify_block_size(k: Kernel, m: BlockMapping, n: int, d, extent: int) -> None:
    values = f"array {m.array}, dimension {n}: block {d.size}, extent {extent}"
    if d.size < 1 and not (extent == 0 and d.size == 0):
        raise KernelError(
            f"{m.origin} of kernel `{k.name}` has a block size below 1",
            at=k.defined_at,
            why=values,
            hint="a positive size; None squeezes a dimension",
        )
    if isinstance(d, Element) and min(d.padding) < 0:
        raise KernelError(
            f"{m.origin} of kernel `{k.name}` has negative padding",
            at=k.defined_at,
            why=f"{values}, padding {d.padding}",
        )
    reach = extent + (sum(d.padding) if isinstance(d, Element) else 0)
    if d.size > reach and 0 not in k.grid:  # without programs there are no blocks
        hint = f"at most {extent} (ragged last blocks are fine, larger ones than the array are not)"
        if isinstance(d, Element):
            hint = "widen Element(n, padding=(low, high)) by what lies outside the array"
        raise KernelError(
            f"{m.origin} of kernel `{k.name}` has blocks larger than the array",
            at=k.defined_at,
            why=values,
            hint=hint,
        )


def _verify_start(k: Kernel, m: BlockMapping, n: int) -> None:
    """Blocks are inside the array and its padding, where the index map is affine."""
    start, d, extent = m.starts[n], m.dims[n], m.array.shape[n]
    if start is None:
        return
    if start.symbols & {axis for axis, _ in k.dynamic_grid}:
        return
    low, high = start.bounds(lambda axis: k.grid[axis])
    if isinstance(d, Element):
        first, last = -d.padding[0], extent + d.padding[1] - d.size
        need = (max(0, -low), max(0, high + d.size - extent))
        hint = f"pbkern.Element({d.size}, padding={need}), or another index map"
    else:
        first, last = 0, max(extent - 1, 0)
        of_blocks = -(-extent // d.size) if isinstance(d, Blocked) and d.size else extent
        hint = (
            f"dimension {n} has {of_blocks} blocks of {d.size}: make the grid or the index map fit"
        )
    if low < first or high > last:
        raise KernelError(
            f"blocks of {m.origin} of kernel `{k.name}` lie outside the array",
            at=k.defined_at,
            why=f"array {m.array}, dimension {n}: starts {low} to {high} with size {d.size} over grid {k.grid}",
            hint=hint,
        )


def _verify_aliases(k: Kernel) -> None:
    for i, o in k.aliases:
        if not (0 <= i < len(k.inputs) and 0 <= o < len(k.outputs)):
            raise KernelError(
                f"kernel `{k.name}` aliases an operand or result that it lacks",
                at=k.defined_at,
                why=f"input_output_aliases={{{i}: {o}}}, {len(k.inputs)} operands, {len(k.outputs)} results",
            )
        if k.inputs[i].array != k.outputs[o].array:
            raise KernelError(
                f"input {i} and output {o} of kernel `{k.name}` are aliased but differ in type",
                at=k.defined_at,
                why=f"input {k.inputs[i].array}, output {k.outputs[o].array}",
                hint="an aliased result has its operand's shape and dtype",
            )
    for side in zip(*k.aliases):
        if len(set(side)) != len(side):
            raise KernelError(
                f"kernel `{k.name}` aliases one array twice",
                at=k.defined_at,
                why=f"aliases {k.aliases}",
            )


def _verify_semantics(k: Kernel) -> None:
    for target, params in k.compiler_params.items():
        semantics = getattr(params, "dimension_semantics", None)
        if semantics is not None and len(semantics) != len(k.grid):
            raise KernelError(
                f"dimension_semantics of kernel `{k.name}` for `{target}` does not fit the grid",
                at=k.defined_at,
                why=f"dimension_semantics={tuple(semantics)}, grid={k.grid}",
                hint="one entry per grid dimension",
            )


def _verify_finish(k: Kernel, finish: Kernel) -> None:
    """The last stage takes what the programs make."""
    made = tuple(m.array for m in k.outputs)
    if finish.in_types[: len(made)] != made:
        raise KernelError(
            f"the last stage of kernel `{k.name}` does not take what its programs make",
            at=k.defined_at,
            why=f"`{finish.name}` takes ({', '.join(map(str, finish.in_types))}), the programs make "
            f"({', '.join(map(str, made))})",
            hint="the programs' results are its first operands, all of them and in their order",
        )
    if finish.finish is not None:
        raise KernelError(
            f"the last stage of kernel `{k.name}` has a last stage",
            at=k.defined_at,
            why=f"`{finish.name}` is followed by `{finish.finish.name}`",
            hint="one stage that does the work of both",
        )
    if finish.name == k.name:
        raise KernelError(
            f"kernel `{k.name}` and its last stage have one name",
            at=k.defined_at,
            hint="name=... of either",
        )
    verify(finish)


def _verify_body(k: Kernel) -> None:
    jaxpr = k.body.jaxpr
    types = [(m.ref_shape, m.array.dtype) for m in k.inputs + k.outputs] + [
        (s.shape, s.dtype) for s in k.scratch
    ]
    found = [_jax.ref_type(v.aval) if _jax.is_ref(v.aval) else v.aval for v in jaxpr.invars]
    if found != types or jaxpr.outvars or k.body.consts:
        raise KernelError(
            f"body of kernel `{k.name}` does not fit its blocks",
            at=k.defined_at,
            why=f"takes {found}, blocks {types}, {len(jaxpr.outvars)} results, {len(k.body.consts)} constants",
            hint="a body takes Refs (*inputs, *outputs, *scratch), returns nothing and has no array constants",
        )
    for eqn in _equations(jaxpr):
        _verify_equation(k, eqn)


def _verify_equation(k: Kernel, eqn) -> None:
    at = _jax.user_line(eqn) or k.defined_at
    for v in eqn.outvars:
        if jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended):
            raise KernelError(
                f"kernel `{k.name}` computes with a dtype that kernels do not take",
                at=at,
                why=f"`{eqn.primitive.name}` gives {v.aval.str_short()}",
                hint="numbers and bools; jax.random works with the words of a key, jax.random.key_data(key)",
            )
    if eqn.primitive.name in ("program_id", "num_programs") and not 0 <= eqn.params["axis"] < len(
        k.grid
    ):
        raise KernelError(
            f"{eqn.primitive.name}({eqn.params['axis']}) in kernel `{k.name}`, whose grid has {len(k.grid)} dimensions",
            at=at,
            why=f"grid={k.grid}",
        )
    if eqn.primitive.name in _jax.REF_PRIMITIVES:
        _verify_slices(k, eqn, at)
    if eqn.primitive is lax.reshape_p:  # JAX leaves this to XLA
        old, new = eqn.invars[0].aval, eqn.outvars[0].aval
        if old.size != new.size:
            raise KernelError(
                f"a reshape in kernel `{k.name}` changes the number of elements",
                at=at,
                why=f"{old.str_short()} has {old.size}, {new.str_short()} has {new.size}",
            )


def _verify_slices(k: Kernel, eqn, at) -> None:
    shape, _ = _jax.ref_type(eqn.invars[0].aval)
    for axis, (i, n) in enumerate(zip(ref_access(eqn).indices, shape)):
        if isinstance(i, Range) and i.size and (i.size - 1) * i.stride >= n:
            raise KernelError(
                f"a slice in kernel `{k.name}` is longer than its Ref",
                at=at,
                why=f"{i.size} elements"
                + (f", {i.stride} apart," if i.stride != 1 else "")
                + f" of {n} along axis {axis}",
                hint="a shorter slice, or a masked load",
            )


def _equations(jaxpr: jex.Jaxpr) -> Iterator:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from _equations(inner.jaxpr)
