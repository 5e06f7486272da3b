"""Atomic updates: element = f(element, value), while programs of a parallel dimension may update the same element.

A program's accesses are loads and stores in a traced Kernel. What makes the updates atomic is
order: a dimension of the grid whose programs are not proved to write disjoint blocks runs in order
in a kernel that has atomics, whatever dimension_semantics say (`in_order`). Updates of one access
through array indices run one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import KernelError
from pbkern.core.jaxprs.retracing import retrace
from pbkern.core.jaxprs.walks import inner_jaxprs, variables_read
from pbkern.dsl.kernel import Kernel

from . import grid
from .ref_access import (
    GatheredIndex,
    Index,
    Point,
    Range,
    add_index,
    bind_access,
    compose,
    mul_index,
    ref_access,
    value_axes,
)

COMBINE: dict[str, Callable] = {
    "xchg": lambda old, new: new,
    "add": lax.add,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "cas": lambda old, compare, new: lax.select(lax.eq(old, compare), new, old),
}

update_p = jex.Primitive(
    "atomic_update"
)  # ref, *values, mask if `masked`, *index operands -> elements before


def _update(kind: str, ref, idx, values: Sequence, mask) -> jax.Array:
    base, leaves, tree = _jax.flatten_subscript(ref, idx, mask is not None)
    out = _jax.indexed_type(jax.typeof(base), tree, leaves)
    if kind in ("and", "or", "xor") and out.dtype.kind not in "iub":
        raise KernelError(
            f"atomic_{kind} takes integers and bools", why=f"the Ref has dtype {out.dtype}"
        )
    values = [jnp.broadcast_to(jnp.asarray(value, out.dtype), out.shape) for value in values]
    masks = [] if mask is None else [grid.as_mask(mask, out.shape)]
    return update_p.bind(
        base, *values, *masks, *leaves, kind=kind, values=len(values), masked=bool(masks), tree=tree
    )


def atomic_add(ref, idx, value, *, mask=None) -> jax.Array:
    """ref[idx] += value; returns what was there.

    An element that array indices name twice is added to twice.

    Args:
      ref: a Ref of a result or of scratch.
      idx: as in ref[idx]. Negative elements of array indices are outside; they may be masked off.
      value: broadcast to ref[idx] and cast to the Ref's dtype.
      mask: bool, broadcast to ref[idx]: which elements are updated; of others 0 is returned.

    Raises KernelError for a mask that is not bool, and for dtypes that the operation does not take.

    Examples:
      >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((3,), "int32"))
      ... def updated(places, values, o):
      ...     o[...] = jnp.full(3, 0, "int32")
      ...     pbkern.atomic_add(o, places[...], values[...])
      >>> updated(jnp.array([0, 2, 2]), jnp.array([1, 5, 7], "int32")).tolist()
      [1, 0, 12]
    """
    return _update("add", ref, idx, [value], mask)


def atomic_max(ref, idx, value, *, mask=None) -> jax.Array:
    """ref[idx] = max(ref[idx], value); otherwise as atomic_add.

    Examples:
      >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((3,), "int32"))
      ... def updated(places, values, o):
      ...     o[...] = jnp.full(3, 3, "int32")
      ...     pbkern.atomic_max(o, places[...], values[...])
      >>> updated(jnp.array([0, 2, 2]), jnp.array([1, 5, 7], "int32")).tolist()
      [3, 3, 7]
    """
    return _update("max", ref, idx, [value], mask)


def atomic_min(ref, idx, value, *, mask=None) -> jax.Array:
    """ref[idx] = min(ref[idx], value); otherwise as atomic_add.

    Examples:
      >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((3,), "int32"))
      ... def updated(places, values, o):
      ...     o[...] = jnp.full(3, 3, "int32")
      ...     pbkern.atomic_min(o, places[...], values[...])
      >>> updated(jnp.array([0, 2, 2]), jnp.array([1, 5, 2], "int32")).tolist()
      [1, 3, 2]
    """
    return _update("min", ref, idx, [value], mask)


def atomic_and(ref, idx, value, *, mask=None) -> jax.Array:
    """ref[idx] &= value, for integers and bools; otherwise as atomic_add.

    Examples:
      >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((3,), "int32"))
      ... def updated(places, values, o):
      ...     o[...] = jnp.full(3, 7, "int32")
      ...     pbkern.atomic_and(o, places[...], values[...])
      >>> updated(jnp.array([0, 2, 2]), jnp.array([1, 6, 3], "int32")).tolist()
      [1, 7, 2]
    """
    return _update("and", ref, idx, [value], mask)


def atomic_or(ref, idx, value, *, mask=None) -> jax.Array:
    """ref[idx] |= value, for integers and bools; otherwise as atomic_add.

    Examples:
      >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((3,), "int32"))
      ... def updated(places, values, o):
      ...     o[...] = jnp.full(3, 0, "int32")
      ...     pbkern.atomic_or(o, places[...], values[...])
      >>> updated(jnp.array([0, 2, 2]), jnp.array([1, 4, 2], "int32")).tolist()
      [1, 0, 6]
    """
    return _update("or", ref, idx, [value], mask)


def atomic_xor(ref, idx, value, *, mask=None) -> jax.Array:
    """ref[idx] ^= value, for integers and bools; otherwise as atomic_add.

    Examples:
      >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((3,), "int32"))
      ... def updated(places, values, o):
      ...     o[...] = jnp.full(3, 1, "int32")
      ...     pbkern.atomic_xor(o, places[...], values[...])
      >>> updated(jnp.array([0, 2, 2]), jnp.array([1, 4, 2], "int32")).tolist()
      [0, 1, 7]
    """
    return _update("xor", ref, idx, [value], mask)


def atomic_xchg(ref, idx, value, *, mask=None) -> jax.Array:
    """ref[idx] = value; returns what was there. Otherwise as atomic_add.

    Of several values for one element the last one stays.

    Examples:
      >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((3,), "int32"))
      ... def updated(places, values, o):
      ...     o[...] = jnp.full(3, 0, "int32")
      ...     pbkern.atomic_xchg(o, places[...], values[...])
      >>> updated(jnp.array([0, 2, 2]), jnp.array([1, 4, 2], "int32")).tolist()
      [1, 0, 2]
    """
    return _update("xchg", ref, idx, [value], mask)


def atomic_cas(ref, idx, compare, value, *, mask=None) -> jax.Array:
    """ref[idx] = value where it equals `compare`; returns what was there. Otherwise as atomic_add.

    `compare` is broadcast and cast as `value` is.

    Examples:
      >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((3,), "int32"))
      ... def updated(places, values, o):
      ...     o[...] = jnp.full(3, 0, "int32")
      ...     pbkern.atomic_cas(o, places[...], 0, values[...])
      >>> updated(jnp.array([0, 2, 2]), jnp.array([1, 4, 2], "int32")).tolist()
      [1, 0, 4]
    """
    return _update("cas", ref, idx, [compare, value], mask)


@update_p.def_effectful_abstract_eval
def _update_type(ref, *operands, kind, values, masked, tree):
    out = _jax.indexed_type(ref, tree, operands[values + masked :])
    return out, {_jax.READ(0), _jax.WRITE(0)}


# --- as loads and stores
# -------------------------------------------------------------------------------------------


def expand(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The body with every atomic update as loads and stores."""
    if not is_used(closed.jaxpr):
        return closed
    with jax.enable_x64(True):  # every type is explicit by now
        return retrace(closed, functools.partial(_rewrite, _read(closed.jaxpr)))


def _read(jaxpr: jex.Jaxpr) -> frozenset[jex.Var]:
    """Variables that something reads, at any depth."""
    inner = (_read(inner.jaxpr) for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn))
    return variables_read(jaxpr).union(*inner)


def is_used(jaxpr: jex.Jaxpr) -> bool:
    return any(
        eqn.primitive is update_p or any(is_used(j.jaxpr) for j in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def _rewrite(used: frozenset[jex.Var], eqn, *operands) -> list | None:
    if eqn.primitive is not update_p:
        return None
    params, ref = eqn.params, operands[0]
    values, rest = operands[1 : 1 + params["values"]], operands[1 + params["values"] :]
    shape, _ = _jax.ref_type(jax.typeof(ref))
    indexers = _jax.unflatten_indexers(params["tree"], rest[params["masked"] :])
    indices = compose(shape, indexers, add_index, mul_index)
    mask = rest[0] if params["masked"] else None
    has_arrays = any(isinstance(index, GatheredIndex) for index in indices)
    if params["kind"] == "add" and has_arrays and eqn.outvars[0] not in used:
        _add(ref, indices, values[0], mask)
        return [None]
    return [update(ref, indices, COMBINE[params["kind"]], values, mask)]


def _add(ref, indices: tuple[Index, ...], value, mask) -> None:
    """Adds at arrays of indices; where it is masked off, zeros somewhere."""
    if mask is not None:
        value = lax.select(mask, value, jnp.zeros_like(value))
        places = positions(indices, np.shape(value))
        indices = tuple(GatheredIndex(lax.select(mask, at, jnp.zeros_like(at))) for at in places)
    bind_access(_jax.REF_PRIMITIVES["addupdate"], ref.shape, [ref, value], indices)


def one_by_one(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The body with every addition at arrays of indices as a loop over its elements."""

    def rewrite(eqn, *operands) -> list | None:
        access = ref_access(eqn) if eqn.primitive.name == "addupdate" else None
        if access is None or not any(isinstance(i, GatheredIndex) for i in access.indices):
            return None
        ref, value, *leaves = operands
        indexers = _jax.unflatten_indexers(eqn.params["tree"], leaves)
        indices = compose(ref.shape, indexers, add_index, mul_index)
        update_each(ref, indices, lax.add, [value], None)
        return []

    with jax.enable_x64(True):  # every type is explicit by now
        return retrace(closed, rewrite)


def update(ref, indices: tuple[Index, ...], combine: Callable, values: Sequence, mask) -> Any:
    """elements = combine(elements, *values) at these indices; returns what was there (0 where masked off)."""
    if any(isinstance(index, GatheredIndex) for index in indices):
        return update_each(ref, indices, combine, values, mask)
    shape, dtype = _jax.ref_type(jax.typeof(ref))
    if mask is None:
        (old,) = bind_access(_jax.REF_PRIMITIVES["get"], shape, [ref], indices)
        bind_access(_jax.REF_PRIMITIVES["swap"], shape, [ref, combine(old, *values)], indices)
        return old
    zeros = jnp.zeros(np.shape(mask), dtype)
    (old,) = bind_access(grid.masked_load_p, shape, [ref, mask, zeros], indices)
    bind_access(grid.masked_store_p, shape, [ref, combine(old, *values), mask], indices)
    return old


def update_each(ref, indices: tuple[Index, ...], combine: Callable, values: Sequence, mask) -> Any:
    """`update` for one element after the other, in row-major order of the values."""
    shape = np.shape(values[0])
    flat = [lax.reshape(position, (math.prod(shape),)) for position in positions(indices, shape)]
    columns = [lax.reshape(value, (math.prod(shape),)) for value in values]
    masks = None if mask is None else lax.reshape(mask, (math.prod(shape),))

    def step(_, x):
        at, new, taking_part = x
        return None, update(ref, tuple(map(Point, at)), combine, new, taking_part)

    _, old = lax.scan(step, None, (tuple(flat), tuple(columns), masks))
    return lax.reshape(old, shape)


def positions(indices: tuple[Index, ...], shape: tuple[int, ...]) -> list:
    """For each dimension of a Ref, i32[shape]: the position of every element of an access."""
    places = []
    for index, axes in zip(indices, value_axes(indices)):
        if isinstance(index, Range):
            at = _plus(lax.iota(np.int32, index.size) * np.int32(index.stride), index.start)
        else:
            at = jnp.asarray(index.at, np.int32)
        places.append(lax.broadcast_in_dim(at, shape, axes if np.ndim(at) else ()))
    return places


def _plus(steps, start):
    return steps if isinstance(start, int) and start == 0 else steps + jnp.asarray(start, np.int32)


# --- order
# ---------------------------------------------------------------------------------------------------------


def in_order(kernel: Kernel) -> Kernel:
    """The kernel with no dimension declared parallel along which blocks of some result may overlap."""
    apart = [
        all(output.moves_apart(axis) for output in kernel.outputs)
        for axis in range(len(kernel.grid))
    ]
    return dataclasses.replace(
        kernel,
        compiler_params={
            key: ordered(param, apart) for key, param in kernel.compiler_params.items()
        },
    )


def ordered(params: Any, apart: list[bool]) -> Any:
    """CompilerParams in which only dimensions whose entry in `apart` is true may be "parallel"."""
    semantics = getattr(params, "dimension_semantics", None)
    if semantics is None:
        return params
    words = (
        word if is_apart or str(getattr(word, "value", word)).lower() != "parallel" else "arbitrary"
        for word, is_apart in zip(semantics, apart)
    )
    return dataclasses.replace(params, dimension_semantics=tuple(words))
