"""Group with a Schedule -> dsl.Kernel: block mappings from accesses, body by re-tracing at block shape.

A span whose start is a multiple of its size becomes a Blocked dimension, any other an Element one
with the padding that its bounds over the grid need. Choosing blocks is fuse/tiling/block_search.py;
the body is fuse/access/blocks.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from pbkern.core.affine import Affine
from pbkern.core.jax_types import array_aval
from pbkern.dsl.kernel import ArrayType, BlockDim, Blocked, BlockMapping, Element, Kernel, Scratch
from pbkern.fuse.access.blocks import BlockRequests, Hulls, bounds
from pbkern.fuse.access.rules import Access, Span, whole

from .body_memo import body_once


def array_type(aval) -> ArrayType:
    return ArrayType(tuple(aval.shape), np.dtype(aval.dtype))


def _block_dim(span: Span, extent: int, grid: Sequence[int]) -> tuple[BlockDim, Affine]:
    """(block dimension, index affine in grid axes) of one span."""
    size, start = span.size, span.start
    if size and start.const % size == 0 and all(coeff % size == 0 for _, coeff in start.terms):
        lo, hi = bounds(span, grid)
        # A block wholly outside the array is a halo as well, and only Element may be outside.
        if lo >= 0 and hi - size < max(extent, 1) and size <= extent:
            return Blocked(size), Affine(
                tuple((axis, coeff // size) for axis, coeff in start.terms), start.const // size
            )
    lo, hi = bounds(span, grid)
    return Element(size, (max(0, -lo), max(0, hi - extent))), start


@functools.lru_cache(maxsize=4096)
def _index_map(indices: tuple[Affine, ...], rank: int) -> jex.ClosedJaxpr:
    """Closed jaxpr from `rank` i32 grid indices to the given affine expressions."""

    def index(*grid):
        results = []
        for affine in indices:
            total = None
            for axis, coeff in affine.terms:
                term = grid[axis] if coeff == 1 else grid[axis] * np.int32(coeff)
                total = term if total is None else total + term
            if total is None:
                total = np.int32(affine.const)
            elif affine.const:
                total = total + np.int32(affine.const)
            results.append(total)
        return tuple(results)

    return jax.make_jaxpr(index)(*[jax.ShapeDtypeStruct((), jnp.int32)] * rank)


def block_mapping(
    origin: str, array: ArrayType, access: Access, grid: Sequence[int]
) -> BlockMapping:
    pairs = [_block_dim(span, size, grid) for span, size in zip(access, array.shape)]
    return BlockMapping(
        origin,
        array,
        tuple(dim for dim, _ in pairs),
        _index_map(tuple(i for _, i in pairs), len(grid)),
    )


def emit_kernel(
    name: str,
    grid: tuple[int, ...],
    requests: BlockRequests,
    outputs: Sequence[tuple[jex.Var, Access]],
    compiler_params: dict | None = None,
    aliases: tuple[tuple[int, int], ...] = (),
    *,
    body: jex.ClosedJaxpr | None = None,
    scratch: tuple[Scratch, ...] = (),
) -> Kernel:
    """The kernel that computes `outputs`.

    Operands are `requests.inputs` in order; `aliases` pairs some with outputs.

    `body`: over Refs of operands, outputs and `scratch`; None: the equations block by block.
    """
    return Kernel(
        name=name,
        grid=grid,
        inputs=tuple(
            block_mapping(f"input {n}", array_type(array_aval(var)), access, grid)
            for n, (var, access) in enumerate(requests.inputs)
        ),
        outputs=tuple(
            block_mapping(f"output {n}", array_type(array_aval(var)), access, grid)
            for n, (var, access) in enumerate(outputs)
        ),
        scratch=scratch,
        body=body_once(requests, outputs) if body is None else body,
        compiler_params=compiler_params or {},
        aliases=aliases,
    )


def emit_finish(
    name: str,
    requests: BlockRequests,
    outputs: Sequence[tuple[jex.Var, Access]],
    results: Sequence,
    shared: Sequence,
    params: dict,
) -> Kernel:
    """The last stage that computes `outputs`, in the form of Kernel.finish.

    Args:
      name: the last stage's.
      requests: what it computes, as blocks.
      outputs: its results, as accesses.
      results: the programs' results, its first operands.
      shared: those of `results` that the kernel returns after `outputs`.
      params: its compiler_params.
    """
    access = {var: tuple(map(whole, var.aval.shape)) for var in results}
    hulls = requests.hulls | {
        var: Hulls.of([block]) for var, block in access.items() if var in requests.hulls
    }
    further = [(var, block) for var, block in requests.inputs if var not in access]
    asked = dataclasses.replace(requests, hulls=hulls, inputs=[*access.items(), *further])
    aliases = tuple((results.index(var), len(outputs) + n) for n, var in enumerate(shared))
    return emit_kernel(
        name, (), asked, [*outputs, *((var, access[var]) for var in shared)], params, aliases
    )
