"""Pallas's BlockSpec and GridSpec -> ours: a kernel may be given either."""

from __future__ import annotations

from typing import Any

import jax

from pbkern import _jax
from pbkern.core.errors import KernelError

from .body_rewrites.bounded_slices import BoundedSlice
from .kernel import Blocked, BlockDim, Element, Squeezed
from .specs import BlockSpec, GridSpec


def own_grid_spec(spec: Any, at: str | None) -> GridSpec:
    """The grid, block specs and scratch that a kernel was given, all of pbkern's classes.

    Raises KernelError for named grids, which kernels lack.
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
