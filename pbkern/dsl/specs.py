"""A user's words about blocks (BlockSpec, GridSpec, scratch) -> BlockMapping and Scratch.

Index maps are traced here, to closed jaxprs from i32 grid indices to i32 block indices. What is
checked here is what tracing needs; verify.py checks the canonical result.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import KernelError
from pbkern.core.jaxprs.evaluation import in_demand_order
from pbkern.core.jaxprs.retracing import retrace
from pbkern.dsl.body_rewrites.bounded_slices import BoundedSlice
from pbkern.dsl.primitives import ref_access

from .kernel import ArrayType, BlockDim, Blocked, BlockMapping, Element, Scratch, Squeezed


@dataclass(frozen=True)
class BlockSpec:
    """Which block of an array each program sees.

    Args:
      block_shape: one entry per array dimension: an int (or Blocked(n)): the index map counts in
        blocks of n; None (or Squeezed()): one element, and the Ref lacks the dimension; Element(n,
        padding=(low, high)): n elements, and the index map counts in elements; BoundedSlice(n): at
        most n elements, and the index map returns pbkern.ds(start, size), in elements. None for the
        whole array.
      index_map: grid indices -> one index per array dimension; None: all zeros.
      memory_space: "any", or a space that the target names.

    Examples:
      >>> rows = pbkern.BlockSpec((16, 128), lambda i: (i, 0))  # program 3 sees rows 48 to 63
      >>> @pbkern.kernel(
      ...     grid=(4,), in_specs=[rows], out_specs=rows,
      ...     out_shape=jax.ShapeDtypeStruct((64, 128), "float32"),
      ... )
      ... def doubled(x, o):
      ...     o[...] = 2 * x[...]
      >>> float(doubled(jnp.ones((64, 128))).sum())
      16384.0
    """

    block_shape: Sequence[int | BlockDim | None] | None = None
    index_map: Callable | None = None
    memory_space: str = "any"

    def __init__(self, block_shape=None, index_map=None, *, memory_space: str = "any"):
        object.__setattr__(self, "block_shape", None if block_shape is None else tuple(block_shape))
        object.__setattr__(self, "index_map", index_map)
        object.__setattr__(self, "memory_space", memory_space or "any")


@dataclass(frozen=True)
class GridSpec:
    """Grid, block specs and scratch of a kernel in one object.

    The first `num_scalar_prefetch` operands are whole arrays, which index maps receive too (as
    Refs, after the grid indices) and which `in_specs` leaves out.

    Examples:
      >>> pick = pbkern.BlockSpec((1, 4), lambda i, rows: (rows[i], 0))
      >>> put = pbkern.BlockSpec((1, 4), lambda i, rows: (i, 0))
      >>> spec = pbkern.GridSpec(grid=(2,), in_specs=[pick], out_specs=put, num_scalar_prefetch=1)
      >>> @pbkern.kernel(grid_spec=spec, out_shape=jax.ShapeDtypeStruct((2, 4), "float32"))
      ... def picked(rows, x, o):
      ...     o[...] = x[...]
      >>> x = jnp.arange(12.0).reshape(3, 4)
      >>> np.asarray(picked(jnp.array([2, 0]), x))[:, 0].tolist()
      [8.0, 0.0]
    """

    grid: int | Sequence[int] = ()
    in_specs: Sequence[BlockSpec] | None = None
    out_specs: Any = None
    scratch_shapes: Sequence = ()
    num_scalar_prefetch: int = 0


def array_type(x, what: str, at: str | None = None) -> ArrayType:
    """ArrayType of anything with shape and dtype."""
    if isinstance(x, ArrayType):
        return x
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise KernelError(
            f"{what} has no shape and dtype",
            at=at,
            why=f"{x!r}",
            hint="jax.ShapeDtypeStruct((8, 128), jnp.float32)",
        )
    try:
        type_ = ArrayType(tuple(int(size) for size in x.shape), np.dtype(x.dtype))
        if not type_.dtype.isnative:
            raise KernelError(
                f"{what} has the bytes of its elements in another order than this machine",
                at=at,
                why=f"dtype {x.dtype.str}",
                hint="x.astype(x.dtype.newbyteorder('='))",
            )
        return type_
    except TypeError:
        raise KernelError(
            f"{what} has a dtype that kernels do not take",
            at=at,
            why=f"shape {tuple(x.shape)}, dtype {x.dtype}",
            hint="bool, integers, floats and complex numbers; jax.random.key_data for PRNG keys",
        ) from None


def scratch(x, number: int, at: str | None = None) -> Scratch:
    """Scratch from pbkern.Scratch, a ShapeDtypeStruct or (shape, dtype)."""
    if isinstance(x, tuple) and len(x) == 2:
        x = Scratch(*x)
    buf_type = array_type(x, f"scratch {number}", at)
    return Scratch(
        buf_type.shape,
        buf_type.dtype,
        getattr(x, "memory_space", None) or "any",
        getattr(x, "scoped", False),
    )


def block_mapping(
    spec: BlockSpec | None,
    array: ArrayType,
    origin: str,
    grid: Sequence[int | None],
    prefetch: Sequence[ArrayType] = (),
    at: str | None = None,
) -> BlockMapping:
    """Resolves `spec` for one array.

    Args:
      spec: what the kernel's author gave; None: the whole array.
      array: its type.
      origin: what the array is, in messages.
      grid: size of each grid dimension; None: known only when the kernel runs.
      prefetch: the whole arrays that index maps may read.
      at: the place in the author's file that messages name.
    """
    spec = BlockSpec() if spec is None else spec
    if not isinstance(spec, BlockSpec):
        raise KernelError(
            f"{origin} has no BlockSpec",
            at=at,
            why=f"{spec!r}",
            hint="pbkern.BlockSpec((8, 128), ...)",
        )
    if spec.block_shape is not None and len(spec.block_shape) != len(array.shape):
        raise KernelError(
            f"{origin} has {len(spec.block_shape)}-d blocks but is {len(array.shape)}-d",
            at=at,
            why=f"array {array}, block_shape {_show(spec.block_shape)}",
            hint=f"one entry per dimension, e.g. {_example(spec.block_shape, array.shape)}; None squeezes one",
        )
    shape = array.shape if spec.block_shape is None else spec.block_shape
    dims = tuple(_block_dim(size, origin, array, at) for size in shape)
    index_map = _trace_index_map(spec.index_map, origin, array, grid, prefetch, at)
    return BlockMapping(origin, array, dims, index_map, spec.memory_space)


def _block_dim(dim, origin: str, array: ArrayType, at: str | None) -> BlockDim:
    if dim is None:
        return Squeezed()
    if isinstance(dim, (int, np.integer)) and not isinstance(dim, bool):
        return Blocked(int(dim))
    if isinstance(dim, Element):
        low, high = map(int, dim.padding)
        return Element(int(dim.size), (low, high))
    if isinstance(dim, (Blocked, Squeezed)):
        return dim
    raise KernelError(
        f"{origin} has a block dimension that is none",
        at=at,
        why=f"array {array}, entry {dim!r}",
        hint="an int, None, pbkern.Blocked(n), pbkern.Squeezed(), pbkern.Element(n) or pbkern.BoundedSlice(n)",
    )


def _example(block_shape: Sequence, shape: tuple[int, ...]) -> str:
    """A block shape of the right rank, near the one that was given."""
    if len(block_shape) < len(shape):
        return _show((*(1,) * (len(shape) - len(block_shape)), *block_shape))
    return _show(block_shape[len(block_shape) - len(shape) :])


def _show(block_shape: Sequence) -> str:
    inner = ", ".join("None" if isinstance(size, Squeezed) else str(size) for size in block_shape)
    return f"({inner},)" if len(block_shape) == 1 else f"({inner})"


def _trace_index_map(index_map, origin, array, grid, prefetch, at):
    """Closed jaxpr (i32 grid indices, prefetch Refs) -> i32 per dimension, with and without jax_enable_x64."""
    at = definition_line(index_map) or at
    if index_map is None:
        index_map = lambda *_: (0,) * len(array.shape)
    _check_arity(index_map, origin, len(grid), len(prefetch), at)
    avals = [jax.core.ShapedArray((), np.dtype("int32"))] * len(grid)
    avals += [_jax.ref_aval(operand_type.shape, operand_type.dtype) for operand_type in prefetch]

    def indices(*args):
        result = index_map(*args)
        result = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        if len(result) != len(array.shape):
            raise KernelError(
                f"index map of {origin} returns {len(result)} indices for {len(array.shape)} dimensions",
                at=at,
                why=f"array {array}, returned {_show_indices(result)}",
                hint="one block index per array dimension; squeezed ones too",
            )
        return tuple(_index(i, n, origin, array, at) for n, i in enumerate(result))

    with jax.enable_x64(False):
        closed = canonical_index_map(jax.make_jaxpr(indices)(*avals), grid)
    if closed.consts:
        raise KernelError(
            f"index map of {origin} uses an array constant",
            at=at,
            why=f"constant of shape {closed.consts[0].shape}",
            hint="pass the table as an operand: num_scalar_prefetch=1, and index it as lambda i, table: (table[i],)",
        )
    return closed


def canonical_index_map(closed: jex.ClosedJaxpr, grid: Sequence[int | None]) -> jex.ClosedJaxpr:
    """An index map's jaxpr in the form that BlockMapping.index_map has: flat, in the order in which it prints.

    Raises KernelError, at the user's line, for program_id, and num_programs of a dimension whose
    size is not known yet.
    """

    def rewrite(eqn, *operands) -> list | None:
        if eqn.primitive.name not in ("program_id", "num_programs"):
            return ref_access.rewrite(eqn, *operands)
        axis = eqn.params["axis"]
        if eqn.primitive.name == "num_programs" and axis < len(grid) and grid[axis] is not None:
            return [np.int32(grid[axis])]
        raise KernelError(
            f"{eqn.primitive.name}({axis}) in an index map",
            at=_jax.user_line(eqn),
            why=f"grid ({', '.join('dynamic' if size is None else str(size) for size in grid)})",
            hint="grid indices are the map's arguments; num_programs gives sizes that are constants",
        )

    return in_demand_order(retrace(closed, rewrite)) if closed.jaxpr.eqns else closed


def _check_arity(f, origin: str, grid_rank: int, num_prefetch: int, at: str | None) -> None:
    try:
        inspect.signature(f).bind(*[None] * (grid_rank + num_prefetch))
    except TypeError as e:
        expected = f"{grid_rank} grid indices" + (
            f" and {num_prefetch} prefetched Refs" if num_prefetch else ""
        )
        raise KernelError(
            f"index map of {origin} does not take {expected}",
            at=at,
            why=f"{e}; signature {inspect.signature(f)}",
            hint=f"lambda {', '.join('ijklmnop'[n : n + 1] or f'i{n}' for n in range(grid_rank))}: ...",
        ) from None


def _index(i, axis: int, origin: str, array: ArrayType, at: str | None):
    if isinstance(i, (int, np.integer)) and not isinstance(i, (bool, np.bool_)):
        return np.int32(i)
    dtype = getattr(i, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or jnp.shape(i) != ():
        raise KernelError(
            f"index map of {origin} returns a non-integer for dimension {axis}",
            at=at,
            why=f"array {array}, index {_show_indices((i,))}",
            hint="only a dimension that is pbkern.BoundedSlice(n) takes a slice"
            if _jax.is_slice(i)
            else "integer arithmetic on grid indices: // for /",
        )
    return jnp.asarray(i, np.int32)


def _show_indices(indices: tuple) -> str:
    shown = [
        index.aval.str_short() if isinstance(index, jax.core.Tracer) else repr(index)
        for index in indices
    ]
    return f"({', '.join(shown)})"


def definition_line(function) -> str | None:
    """`file:line:column (function)` where a Python function is defined."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None:
        return None
    column = next(
        (
            position[2]
            for position in code.co_positions()
            if position[0] == code.co_firstlineno and position[2] is not None
        ),
        0,
    )
    return f"{code.co_filename}:{code.co_firstlineno}:{column} ({code.co_name})"


# --- Pallas's specs
# ---------------------------------------------------------------------------------------------------


def own_grid_spec(spec: Any, at: str | None) -> GridSpec:
    """The grid, block specs and scratch that a kernel was given, all of pbkern's classes.

    Memory spaces and pipeline modes of Pallas's specs name memories of other devices; they change
    no result, and the target chooses here. Raises KernelError for named grids, which kernels lack.
    """
    pallas = _jax.loaded_pallas()
    if pallas is not None and isinstance(spec, pallas.GridSpec):
        if spec.grid_names is not None:
            raise KernelError(
                "a grid with names",
                at=at,
                why=f"grid names {spec.grid_names}",
                hint="grid=(4, 8); pbkern.program_id takes the number of a dimension",
            )
        given = None if spec.in_specs is pallas.no_block_spec else spec.in_specs
        results = None if spec.out_specs is pallas.no_block_spec else spec.out_specs
        prefetch = getattr(spec, "num_scalar_prefetch", 0)
        spec = GridSpec(spec.grid, given, results, spec.scratch_shapes, prefetch)
    if pallas is None or not isinstance(spec, GridSpec):
        return spec
    return GridSpec(
        spec.grid,
        _own_tree(spec.in_specs, pallas),
        _own_tree(spec.out_specs, pallas),
        spec.scratch_shapes,
        spec.num_scalar_prefetch,
    )


def _own_tree(specs: Any, pallas) -> Any:
    is_leaf = lambda spec: spec is None or isinstance(spec, BlockSpec | pallas.BlockSpec)
    return jax.tree.map(lambda spec: _own(spec, pallas), specs, is_leaf=is_leaf)


def _own(spec: Any, pallas) -> Any:
    if spec is pallas.no_block_spec:
        return BlockSpec()
    if not isinstance(spec, pallas.BlockSpec):
        return spec
    shape = spec.block_shape
    return BlockSpec(
        None if shape is None else [_own_dim(size, pallas) for size in shape],
        None if spec.index_map is None else spec.index_map.index_map,
    )


def _own_dim(size: Any, pallas) -> int | BlockDim | BoundedSlice | None:
    match size:
        case pallas.Blocked(block_size):
            return Blocked(block_size)
        case pallas.Element(block_size, padding):
            return Element(block_size, padding)
        case pallas.BoundedSlice(block_size):
            return BoundedSlice(block_size)
        case pallas.Squeezed():
            return Squeezed()
    return size
