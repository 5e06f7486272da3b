"""Blocks of inputs -> copies in scratch, which a loop over the grid dimensions that run in order makes step by step.

    of %a0: float32[8,4096] the block [0 .. + 8, 64*%g0 .. + 64]       for %g0 < 64:
    nest [i<8, k<64*]                                                    nest [d0<8, d1<64]
      acc0 sum= %a0[i, 64*%g0 + k]                            ->           %t1[d0, d1] = %a0[d0, 64*%g0 + d1]?
      %t0[i] = %t0[i] + acc0  (after)                                    nest [i<8, k<64*]
                                                                           acc0 sum= %t1[i, k]
                                                                           %t0[i] = %t0[i] + acc0  (after)

Blocks that the loop does not move are copied once, before it. A target may then begin copies some steps ahead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pbkern.core.affine import Affine
from pbkern.dsl.kernel import BlockMapping, Kernel
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.join_loops import counters
from pbkern.lower.nest.ir import INT32, Buf, For, Let, Nest, Stmt, Store

# Memory of blocks: that of all who compute a program together.
BLOCK_SPACE = "shared"
# Counter of the steps along several grid dimensions.
STEP_COUNTER = "%steps"


def copied_inputs(kernel: Kernel) -> list[int]:
    """Inputs whose blocks can be copied: programs see a block of them, and none of them stores there."""
    updated = {operand for operand, _ in kernel.aliases}
    return [
        operand
        for operand, mapping in enumerate(kernel.inputs)
        if operand >= kernel.num_scalar_prefetch
        and operand not in updated
        and math.prod(dim.size for dim in mapping.dims) * mapping.array.dtype.itemsize
        and math.prod(mapping.array.shape)
    ]


def block_copy(
    buf: Buf, starts: Sequence[Affine], mapping: BlockMapping, context: NestContext
) -> Nest:
    """The nest that copies the block of an array to scratch; what lies outside of the array is unspecified."""
    scratch = context.new_buffer([dim.size for dim in mapping.dims], mapping.array.dtype)
    dims = {context.names("d"): dim.size for dim in mapping.dims}
    places = tuple(start + Affine.symbol(dim) for start, dim in zip(starts, dims))
    store = Store(
        replace(scratch, space=BLOCK_SPACE),
        tuple(map(Affine.symbol, dims)),
        context.pool.load(buf.dtype, buf, places, True),
    )
    return Nest(dims, stores=(store,))


def step_loop(
    sizes: Mapping[str, int],
    copies: Sequence[Nest],
    prologue: Sequence[Stmt],
    body: Sequence[Stmt],
    context: NestContext,
) -> list[Stmt]:
    """The statements of all steps: copies of blocks that do not move, and one loop with the others before its body.

    sizes: programs along the grid dimensions that run in order, by symbol, the slowest first. prologue: what computes the
    starts of blocks.
    """
    counter, *outer = sizes
    trips = math.prod(sizes.values())
    lets: list[Let] = []
    if outer:
        counter = STEP_COUNTER
        context.bounds[counter] = (0, trips - 1)
        lets, places = counters(counter, sizes, context)
        lets += [Let(name, context.pool.index(INT32, place)) for name, place in places.items()]
    moving = {counter, *sizes, *(let.name for let in prologue if isinstance(let, Let))}
    moved = [copy for copy in copies if copy.stores[0].value.symbols & moving]
    fixed = [copy for copy in copies if copy not in moved]
    return [*fixed, For(counter, trips, (*lets, *prologue, *moved, *body))]
