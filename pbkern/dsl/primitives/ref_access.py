"""Ref access equations -> one canonical view of them, shared by lowering, printing and the interpreter.

Five primitives touch Refs: JAX's get, swap and addupdate, and our masked_load and masked_store.
`canonical_access` (used while tracing) composes chained indexers (`ref.at[a][b]`) into one index
per dimension, so that afterwards `ref_access` can say of every equation: which Ref, which elements,
which value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import UnsupportedOp
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import literal_value
from pbkern.core.lazy_dataclass import dataclass

# Most elements, or cells of a grid, that are marked one by one.
MOST_MARKED = 1 << 20

Atom = Any  # a jaxpr's Var or Literal; while retracing or interpreting, a value


@dataclass(frozen=True, slots=True)
class Point:
    """One position of a dimension, which the value lacks."""

    at: int | Atom


@dataclass(frozen=True, slots=True)
class Range:
    """`size` positions from `start`, `stride` apart."""

    start: int | Atom
    size: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class GatheredIndex:
    """Positions given by an integer array.

    All Gathers of an access have one shape and are read together.

    Their shape stands in the value where the Gathers and Points stand in the index, or first if a
    Range is between them (NumPy's rule).
    """

    at: Atom


Index = Point | Range | GatheredIndex


@dataclass(frozen=True, slots=True)
class RefAccess:
    """An equation's access to a Ref.

    Attributes:
      kind: "load" (results: the elements), "store" (get's counterpart; `eqn.outvars`, if any and
        used, are the elements before) or "add" (elements += value).
      ref: the Ref's variable.
      indices: one per dimension of the Ref.
      value: what is stored or added; None for a load.
      mask: bool array of the value's shape: which elements take part. None: all.
      other: what a masked load gives elsewhere; None without mask.
    """

    kind: str
    ref: Atom
    indices: tuple[Index, ...]
    value: Atom | None = None
    mask: Atom | None = None
    other: Atom | None = None


def is_whole(index: Index, extent: int) -> bool:
    """Whether an index takes all of a dimension of this extent."""
    if not isinstance(index, Range) or not isinstance(index.start, int):
        return False
    return (index.start, index.size) == (0, extent) and (index.stride == 1 or extent <= 1)


def constant_positions(index: Index) -> int | slice | None:
    """The positions of an index as NumPy takes them; None where they are values."""
    match index:
        case Point(int(at)):
            return at
        case Range(int(start), size, stride):
            return slice(start, start + size * stride, stride)
    return None


def stays(index: Index, extent: int) -> bool:
    """Whether an access means the same without a mask that always holds, which keeps slices from being moved inside."""
    match index:
        case Point(int(at)):
            return 0 <= at < extent
        case Range(int(start), size, stride):
            return size == 0 or 0 <= start <= extent - (size - 1) * stride - 1
    return isinstance(index, GatheredIndex)


def value_axes(indices: Sequence[Index]) -> list[tuple[int, ...]]:
    """Per dimension of the Ref, the dimensions of the value along which its index runs; () for a Point."""
    advanced = [axis for axis, i in enumerate(indices) if not isinstance(i, Range)]
    gathered = next((np.ndim(i.at) for i in indices if isinstance(i, GatheredIndex)), 0)
    together = bool(advanced) and advanced == list(range(advanced[0], advanced[-1] + 1))
    before = sum(isinstance(i, Range) for i in indices[: advanced[0]]) if together else 0
    axes: list[tuple[int, ...]] = []
    seen = 0
    for index in indices:
        if isinstance(index, Range):
            axes.append((seen if seen < before else seen + gathered,))
            seen += 1
        else:
            axes.append(
                tuple(range(before, before + gathered)) if isinstance(index, GatheredIndex) else ()
            )
    return axes


KINDS = {
    "get": "load",
    "swap": "store",
    "addupdate": "add",
    "masked_load": "load",
    "masked_store": "store",
}


def is_ref_access(eqn) -> bool:
    return eqn.primitive.name in KINDS


def ref_access(eqn) -> RefAccess:
    """The access of a get, swap, addupdate, masked_load or masked_store equation.

    Raises UnsupportedOp if chained indexers need arithmetic (not in traced kernels: tracing
    composes them).
    """
    name, operands = eqn.primitive.name, eqn.invars
    shape, _ = _jax.ref_type(operands[0].aval)
    try:
        indices = compose(shape, _jax.ref_indexers(eqn), np.add, np.multiply)
    except (TypeError, NotImplementedError) as e:
        raise UnsupportedOp(
            f"`{name}` with this chain of indices",
            at=_jax.user_line(eqn),
            why=str(e),
            hint="index the Ref once",
        ) from None
    return _access(name, operands, indices)


def value_access(eqn, operands: Sequence) -> RefAccess:
    """The access of an equation whose operands are known values.

    Indices are arrays here, never numbers: of these, negative ones would count from the end, as
    those do that are constants in the source. One that a kernel computes is outside.
    """
    number = _jax.REF_OPERANDS[eqn.primitive.name]
    shape, _ = _jax.ref_type(eqn.invars[0].aval)
    indexers = _jax.unflatten_indexers(eqn.params["tree"], list(map(np.asarray, operands[number:])))
    return _access(eqn.primitive.name, operands, compose(shape, indexers, np.add, np.multiply))


def _access(name: str, operands: Sequence, indices: tuple[Index, ...]) -> RefAccess:
    match name:
        case "get":
            return RefAccess("load", operands[0], indices)
        case "masked_load":
            return RefAccess("load", operands[0], indices, None, operands[1], operands[2])
        case "masked_store":
            return RefAccess("store", operands[0], indices, operands[1], operands[2])
        case _:
            return RefAccess(KINDS[name], operands[0], indices, operands[1])


def compose(shape: tuple[int, ...], indexers: Sequence[tuple], add, mul) -> tuple[Index, ...]:
    """Chained index tuples -> one Index per dimension of the Ref. `add`, `mul` combine non-constant offsets."""
    result: list[Index] = [Range(0, size) for size in shape]
    for indexer in indexers:
        open_dims = [(axis, i) for axis, i in enumerate(result) if isinstance(i, Range)]
        if any(isinstance(i, GatheredIndex) for i in result):
            raise NotImplementedError("an index after an array index")
        for (dim, outer), index in zip(open_dims, indexer):
            result[dim] = narrow(outer, index, add, mul)
    return tuple(result)


def narrow(outer: Range, raw, add, mul) -> Index:
    """The positions of `outer` that one entry of JAX's index tuple takes."""
    return _within(outer, as_index(raw, outer.size), add, mul)


def as_index(raw, extent: int) -> Index:
    """One entry of JAX's index tuple. Constant negative points count from the end, as in NumPy."""
    if _jax.is_slice(raw):
        return Range(_static(raw.start), int(raw.size), int(raw.stride) if raw.size > 1 else 1)
    if np.ndim(
        raw
        if not isinstance(raw, (jex.Var, jex.Literal))
        else np.empty(array_aval(raw).shape, bool)
    ):
        return GatheredIndex(raw)
    at = _static(raw)
    return Point(at + extent if isinstance(at, int) and at < 0 else at)


def _static(x) -> int | Atom:
    if isinstance(x, jex.Literal):
        x = literal_value(x)
    return int(x) if isinstance(x, (int, np.integer)) else x


def _within(outer: Range, inner: Index, add, mul) -> Index:
    def position(i):
        scaled = (
            i
            if outer.stride == 1
            else i * outer.stride
            if isinstance(i, int)
            else mul(i, outer.stride)
        )
        if isinstance(outer.start, int) and outer.start == 0:
            return scaled
        if isinstance(scaled, int) and (scaled == 0 or isinstance(outer.start, int)):
            return outer.start if scaled == 0 else outer.start + scaled
        return add(outer.start, scaled)

    match inner:
        case Point(at):
            return Point(position(at))
        case GatheredIndex(at):
            return GatheredIndex(position(at))
        case Range(start, size, stride):
            return Range(position(start), size, stride * outer.stride if size > 1 else 1)


# --- while tracing
# -----------------------------------------------------------------------------------------------


def canonical_access(eqn, operands: Sequence) -> list:
    """Binds a Ref access equation again with one index per dimension; whole-Ref accesses without any."""
    number = _jax.REF_OPERANDS[eqn.primitive.name]
    shape, _ = _jax.ref_type(eqn.invars[0].aval)
    indexers = _jax.unflatten_indexers(eqn.params["tree"], operands[number:])
    return bind_access(
        eqn.primitive, shape, operands[:number], compose(shape, indexers, add_index, mul_index)
    )


def bind_access(
    primitive, shape: tuple[int, ...], operands: Sequence, indices: tuple[Index, ...], **params
) -> list:
    """Binds a Ref primitive on `operands` with these indices of a Ref of this shape, and its other `params`.

    Without a mask, constant indices are kept inside it, as lax.dynamic_slice keeps those that are
    values: a branch that is never taken may hold one that became a constant.
    """
    masked = primitive.name.startswith("masked")
    indices = indices if masked else tuple(map(_inside, indices, shape))
    if all(is_whole(index, size) for index, size in zip(indices, shape)):
        leaves: list = []
        tree = _jax.NO_INDICES
    else:
        gathered = next(
            (np.shape(index.at) for index in indices if isinstance(index, GatheredIndex)), ()
        )
        leaves, tree = _jax.flatten_indices(
            shape, tuple(_raw(index, gathered) for index in indices), masked
        )
    results = primitive.bind(*operands, *leaves, tree=tree, **params)
    return results if primitive.multiple_results else [results]


def _inside(index: Index, extent: int) -> Index:
    match index:
        case Point(int(at)):
            return Point(min(at, extent - 1))
        case Range(int(start), size, stride) if size:
            return Range(min(start, extent - (size - 1) * stride - 1), size, stride)
    return index


def _raw(index: Index, gathered: tuple[int, ...]):
    """An Index as JAX's indexers hold it; beside Gathers, Points are arrays too."""
    match index:
        case Range(start, size, stride):
            return _jax.Slice(start, size, stride)
        case Point(at) | GatheredIndex(at):
            at = np.int32(at) if isinstance(at, int) else at
            return lax.broadcast(at, gathered) if gathered and np.shape(at) == () else at


def add_index(a, b):
    """a + b, where a constant takes the other's type."""
    if isinstance(a, (int, np.generic)):
        a, b = b, a
    b = b.astype(a.dtype) if hasattr(b, "astype") else np.asarray(b, a.dtype)[()]
    return lax.add(*jnp.broadcast_arrays(a, b)) if np.ndim(a) != np.ndim(b) else lax.add(a, b)


def mul_index(a, k: int):
    """a * k for an index value a."""
    return lax.mul(a, lax.full_like(a, k) if np.ndim(a) else np.asarray(k, a.dtype)[()])


def rewrite(eqn, *operands) -> list | None:
    """retrace's rewrite rule of the DSL: Ref accesses with one index per dimension."""
    return canonical_access(eqn, operands) if is_ref_access(eqn) else None
