"""BoundedSlice: blocks whose place and size an index map gives, resolved while a kernel is traced.

In a traced Kernel such a dimension is an Element of the largest size. The size of a program's slice
is computed at the top of the body, and masks what the body stores and what `in_bounds` says; so
lowering and interpreting know nothing of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import KernelError
from pbkern.core.jaxprs.retracing import retrace_into
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.kernel import Element
from pbkern.dsl.primitives import grid
from pbkern.dsl.primitives.atomics import positions
from pbkern.dsl.primitives.ref_access import GatheredIndex, bind_access, compose
from pbkern.dsl.primitives.ref_access import add_index as add
from pbkern.dsl.primitives.ref_access import mul_index as mul

Limits = dict[
    int, dict[int, jax.Array]
]  # id of a Ref -> its dimension -> i32 size of this program's slice


@dataclass(frozen=True, slots=True)
class BoundedSlice:
    """At most `size` elements; the index map returns `pbkern.ds(start, size)` for the dimension; both may be traced.

    What a read returns beyond the slice is unspecified; stores there are dropped. `in_bounds` tells
    which positions it has. The slice may reach beyond the array's end. Slices of size 0 are empty.

    Examples:
      >>> starts = pbkern.BlockSpec((pbkern.BoundedSlice(4),), lambda i: (pbkern.ds(3 * i, 3),))
      >>> @pbkern.kernel(
      ...     grid=(2,), in_specs=[starts], out_specs=pbkern.BlockSpec((1,), lambda i: (i,)),
      ...     out_shape=jax.ShapeDtypeStruct((2,), "float32"),
      ... )
      ... def sums(x, o):
      ...     o[0] = jnp.where(pbkern.in_bounds(x, 0), x[...], 0).sum()
      >>> sums(jnp.arange(6.0)).tolist()
      [3.0, 12.0]
    """

    size: int


def element_of(dim: BoundedSlice) -> Element:
    """The dimension that stands for it in a traced kernel: it may start anywhere up to the array's end."""
    return Element(int(dim.size), (0, int(dim.size)))


def is_bounded(block_shape) -> bool:
    return any(isinstance(size, BoundedSlice) for size in block_shape or ())


def split_index_map(
    function: Callable | None, block_shape: Sequence, origin: str, at: str | None
) -> tuple[Callable, Callable]:
    """(index map of starts, map of the same arguments to {dimension of the Ref: size}) of an index map with slices."""
    if function is None:
        hint = "one that returns pbkern.ds(start, size) for that dimension"
        raise KernelError(
            f"{origin} has a BoundedSlice but no index map",
            at=at,
            why=f"block_shape {block_shape}",
            hint=hint,
        )
    axes = _ref_axes(block_shape)

    def indices(*args) -> tuple:
        index = function(*args)
        index = tuple(map(_slice, index)) if isinstance(index, (tuple, list)) else (_slice(index),)
        for n, (i, size) in enumerate(zip(index, block_shape)):
            if isinstance(size, BoundedSlice) != _jax.is_slice(i):
                raise KernelError(
                    f"index map of {origin} does not fit dimension {n}",
                    at=at,
                    why=f"block dimension {size}, index {i}",
                    hint="pbkern.ds(start, size) for a BoundedSlice, an integer for any other",
                )
        return index

    @functools.wraps(function)
    def starts(*args) -> tuple:
        return tuple(index.start if _jax.is_slice(index) else index for index in indices(*args))

    def sizes(*args) -> dict:
        return {
            axes[n]: jnp.asarray(index.size, np.int32)
            for n, index in enumerate(indices(*args))
            if _jax.is_slice(index)
        }

    return starts, sizes


def _slice(i):
    """A Python slice as JAX's."""
    return _jax.Slice(i.start or 0, i.stop - (i.start or 0)) if isinstance(i, slice) else i


def _ref_axes(block_shape: Sequence) -> list[int]:
    """Dimension of the Ref per array dimension; squeezed ones count for nothing."""
    has_axis = [size is not None and type(size).__name__ != "Squeezed" for size in block_shape]
    return [sum(has_axis[:n]) for n in range(len(has_axis))]


def bound(closed: jex.ClosedJaxpr, limits_of: Callable[[Sequence], Limits]) -> jex.ClosedJaxpr:
    """A body whose accesses respect limits, which `limits_of(refs)` computes at its top."""

    def run(*refs):
        limits = limits_of(refs)
        retrace_into(
            closed.jaxpr,
            closed.consts,
            refs,
            lambda eqn, *operands: _rewrite(limits, eqn, operands),
        )

    with jax.enable_x64(True):  # every type is explicit by now
        return jax.make_jaxpr(run)(*[_jax.fresh_aval(var.aval) for var in closed.jaxpr.invars])


def _rewrite(limits: Limits, eqn, operands: Sequence) -> list | None:
    sizes = limits.get(id(operands[0])) if operands else None
    if sizes is None:
        return None
    name, ref = eqn.primitive.name, operands[0]
    if name == "in_bounds":
        axis = eqn.params["axis"]
        inside = grid.in_bounds_p.bind(ref, axis=axis)
        if axis in sizes:
            inside = inside & (lax.iota(np.int32, ref_shape(ref)[axis]) < sizes[axis])
        return [inside]
    if name not in ("swap", "addupdate", "masked_store"):
        return None
    number = _jax.REF_OPERANDS[name]
    indexers = _jax.unflatten_indexers(eqn.params["tree"], operands[number:])
    return _store(eqn, ref, operands[1:number], compose(ref_shape(ref), indexers, add, mul), sizes)


def ref_shape(ref) -> tuple[int, ...]:
    return _jax.ref_type(jax.typeof(ref))[0]


def _store(eqn, ref, operands: Sequence, indices: tuple, sizes: dict) -> list:
    """swap, addupdate or masked_store as a masked store; a swap's old elements are read before."""
    name, shape, value = eqn.primitive.name, ref_shape(ref), operands[0]
    mask = inside_slice(indices, sizes, np.shape(value))
    if name == "masked_store":
        mask = mask & operands[1]
    old: Any = None
    if name == "addupdate" and any(isinstance(index, GatheredIndex) for index in indices):
        value = lax.select(mask, value, jnp.zeros_like(value))  # an element may be named twice
        return bind_access(eqn.primitive, shape, [ref, value], indices)
    if name == "addupdate" or (name == "swap" and not _jax.is_dropped(eqn.outvars[0])):
        (old,) = bind_access(_jax.REF_PRIMITIVES["get"], shape, [ref], indices)
    if name == "addupdate":
        value = lax.add(old, value)
    bind_access(grid.masked_store_p, shape, [ref, value, mask], indices)
    return [value if old is None else old] if name == "swap" else []


def inside_slice(indices: tuple, sizes: dict, shape: tuple[int, ...]):
    """bool[shape]: which elements of an access are inside the slice."""
    tests = []
    for axis, at in enumerate(positions(indices, shape)):
        if axis in sizes:
            tests.append(lax.lt(at, jnp.broadcast_to(sizes[axis], shape)))
    return functools.reduce(lax.bitwise_and, tests)
