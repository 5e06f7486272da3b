"""Operands of a pallas_call that XLA would copy only to transpose them: the kernel reads them where they are.

    q = jnp.swapaxes(x, 1, 2)                    # [batch, heads, length, width] of [batch, length, heads, width]
    pl.pallas_call(..., in_specs=[pl.BlockSpec((None, None, 128, width), lambda b, h, i: (b, h, i, 0))])(q)

The block of q is one of x as well: (1, 128, 1, width) at (b, i, h, 0), without the squeezed
dimensions the same Ref. This holds where the dimensions that a block keeps are in the order of the
Ref, as those of blocks of one head do.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from typing import Any

from pbkern.dsl.kernel import ArrayType, Blocked, BlockMapping, Kernel, Squeezed

# Shorter runs of a block, in bytes, are copied: its rows then share cache lines with other blocks'.
SHORTEST_RUN_BYTES = 64


@dataclasses.dataclass(frozen=True)
class InterleavedView:
    """An array as a view of another: (size, stride in elements) of each dimension in `source`."""

    source: Any
    dims: tuple[tuple[int, int], ...]

    def order(self) -> tuple[int, ...]:
        """Dimensions as they are in the source, those of the largest strides first."""
        return tuple(
            sorted(
                range(len(self.dims)), key=lambda dim: (-self.dims[dim][1], self.dims[dim][0] != 1)
            )
        )


def in_place(
    kernel: Kernel, operands: tuple[int, ...], nodes: tuple
) -> tuple[Kernel, dict[int, InterleavedView]]:
    """The kernel that reads transposed operands where they are, and those by their number among `nodes`.

    Args:
      kernel: the kernel that the call is of.
      operands: number of each kernel operand among `nodes`.
      nodes: the MLIR values of the call's operands.
    """
    inputs, views = list(kernel.inputs), {}
    aliased = {i for i, _ in kernel.aliases}
    for i in range(kernel.num_scalar_prefetch, len(inputs)):
        view = strided(nodes[operands[i]])
        order = view.order()
        if (
            i not in aliased
            and view.source is not nodes[operands[i]]
            and _reads_alike(inputs[i], view, order)
        ):
            inputs[i], views[operands[i]] = _permuted(inputs[i], order), view
    return dataclasses.replace(kernel, inputs=tuple(inputs)), views


def strided(node) -> InterleavedView:
    """Finds the value of which an MLIR value is a view, through transpositions and reshapes that move nothing."""
    whole = InterleavedView(node, tuple(zip(node.type.shape, _row_major(node.type.shape))))
    name = getattr(node.owner, "name", None)  # blocks, which own arguments, have none
    if name not in ("stablehlo.transpose", "stablehlo.reshape"):
        return whole
    inner = strided(node.owner.operands[0])
    if name == "stablehlo.transpose":
        return InterleavedView(
            inner.source, tuple(inner.dims[axis] for axis in node.owner.attributes["permutation"])
        )
    dims = _reshaped(inner.dims, tuple(node.type.shape))
    return whole if dims is None else InterleavedView(inner.source, dims)


def _row_major(shape) -> list[int]:
    return (
        list(itertools.accumulate(list(shape)[:0:-1], operator.mul, initial=1))[::-1]
        if shape
        else []
    )


def _reshaped(
    dims: tuple[tuple[int, int], ...], shape: tuple[int, ...]
) -> tuple[tuple[int, int], ...] | None:
    """Strides of the same elements under another shape; None where they are not so."""
    if 0 in shape:
        return None
    merged: list[list[int]] = []  # runs of dimensions that are one, as [size, stride of the last]
    for size, stride in (dim for dim in dims if dim[0] != 1):
        if merged and merged[-1][1] == size * stride:
            merged[-1] = [merged[-1][0] * size, stride]
        else:
            merged.append([size, stride])
    groups: list[tuple[int, int]] = []
    for size in shape:
        if size == 1:
            groups.append((1, 1))
            continue
        if not merged or merged[0][0] % size:
            return None
        rest = merged[0][0] // size
        groups.append((size, rest * merged[0][1]))
        merged[0][0] = rest
        if rest == 1:
            merged.pop(0)
    return tuple(groups)


def _reads_alike(mapping: BlockMapping, view: InterleavedView, order: tuple[int, ...]) -> bool:
    """Whether a block is the same Ref in the source, made of runs that are long enough."""
    axes = [axis for axis in order if not isinstance(mapping.dims[axis], Squeezed)]
    plain = all(isinstance(block_dim, (Blocked, Squeezed)) for block_dim in mapping.dims)
    if (
        not plain
        or order == tuple(range(len(order)))
        or axes != sorted(axes)
        or math.prod(mapping.array.shape) == 0
    ):
        return False
    dense = [view.dims[axis] for axis in order if view.dims[axis][0] != 1]
    if [stride for _, stride in dense] != _row_major([size for size, _ in dense]):
        return False
    run = 1
    for dim in reversed(order):
        run *= mapping.dims[dim].size
        if mapping.dims[dim].size != mapping.array.shape[dim]:
            break
    return run * mapping.array.dtype.itemsize >= SHORTEST_RUN_BYTES


def _permuted(mapping: BlockMapping, order: tuple[int, ...]) -> BlockMapping:
    """The mapping with its array's dimensions in another order."""
    jaxpr = mapping.index_map.jaxpr
    index_map = mapping.index_map.replace(
        jaxpr=jaxpr.replace(outvars=[jaxpr.outvars[dim] for dim in order])
    )
    array = ArrayType(tuple(mapping.array.shape[dim] for dim in order), mapping.array.dtype)
    return dataclasses.replace(
        mapping, array=array, dims=tuple(mapping.dims[dim] for dim in order), index_map=index_map
    )
