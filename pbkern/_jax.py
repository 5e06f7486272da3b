"""The only importer of private JAX. Tested with jax 0.10.2 (Python 3.11); 0.11.x keeps these names.

Everything else in pbkern uses public JAX: `jax`, `jax.numpy`, `jax.lax`, `jax.ref`, `jax.extend.core`.
"""

from __future__ import annotations

import functools
import pathlib
from types import SimpleNamespace

import jax
import numpy as np
from jax._src import source_info_util
from jax._src.interpreters import mlir
from jax._src.state import indexing, types
from jax._src.state import primitives as state
from jax.extend import core as jex

Var = jex.Var
Literal = jex.Literal
Slice = indexing.Slice

# Our own frames are not the user's: error messages and equations name the line that called us.
source_info_util.register_exclusion(str(pathlib.Path(__file__).parent))


def ref_aval(shape: tuple[int, ...], dtype) -> jax.ref.AbstractRef:
    """A fresh Ref type. JAX rejects one aval object for two arguments, hence no caching."""
    return jax.ref.AbstractRef(jax.core.ShapedArray(tuple(shape), np.dtype(dtype)))


def is_ref(aval) -> bool:
    return isinstance(aval, types.AbstractRef)


def ref_type(aval) -> tuple[tuple[int, ...], np.dtype]:
    """(shape, dtype) of what a Ref type refers to."""
    return tuple(aval.inner_aval.shape), np.dtype(aval.inner_aval.dtype)


def fresh_aval(aval):
    """The same type without weak type, as a new object."""
    if is_ref(aval):
        return ref_aval(*ref_type(aval))
    return jax.core.ShapedArray(aval.shape, aval.dtype)


def user_line(eqn) -> str | None:
    """`file:line:column (function)` of the user's code that made an equation, or None."""
    text = source_info_util.summarize(eqn.source_info)
    return None if not text or "unknown" in text else text


def source_context(eqn):
    """Context manager: equations bound inside belong to the user line that made `eqn`."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


# Operands before the index leaves, per Ref primitive.
REF_OPERANDS = {"get": 1, "swap": 2, "addupdate": 2, "masked_load": 3, "masked_store": 3}
REF_PRIMITIVES = {"get": state.get_p, "swap": state.swap_p, "addupdate": state.addupdate_p}

READ, WRITE = types.ReadEffect, types.WriteEffect


def only_reads(eqn) -> bool:
    """Whether dropping an equation whose results are unused changes nothing."""
    return all(isinstance(e, types.ReadEffect) for e in eqn.effects)


def ref_indexers(eqn) -> list[tuple]:
    """Index tuples of a get / swap / addupdate / masked_load / masked_store equation, outermost first.

    Each entry of a tuple is an int, an atom (Var or Literal: scalar or integer array) or a Slice, which has
    `.start` (int or atom), `.size` and `.stride`.
    """
    return unflatten_indexers(eqn.params["tree"], eqn.invars[REF_OPERANDS[eqn.primitive.name] :])


def unflatten_indexers(tree, leaves) -> list[tuple]:
    """Index tuples from a Ref primitive's `tree` and index operands (atoms or values)."""
    found = []
    for t in jax.tree.unflatten(tree, leaves):
        if not isinstance(t, indexing.NDIndexer):
            raise NotImplementedError(f"Ref transform {type(t).__name__}")
        found.append(tuple(t.indices))
    return found


def flatten_indices(shape: tuple[int, ...], indices: tuple, masked: bool = False) -> tuple[list, object]:
    """(operands, tree) that say `ref[indices]` of a Ref of this shape: one int, array or Slice per dimension.

    With `masked`, constant indices may lie outside the shape.
    """
    arrays = [i for i in indices if not isinstance(i, Slice)]
    gathered = np.broadcast_shapes(*(np.shape(i) for i in arrays)) if arrays else ()
    indexer = indexing.NDIndexer(tuple(indices), tuple(shape), gathered, validate=not masked)
    return jax.tree.flatten((indexer,))


def flatten_subscript(ref, index, masked: bool) -> tuple[object, list, object]:
    """(Ref, operands, tree) of what a user writes as `ref[index]`, where `ref` may be `r.at[...]` already."""
    if not masked:
        base, transforms = state.get_ref_and_transforms(ref, index, "load")
        return (base, *jax.tree.flatten(transforms))
    shape = ref.shape
    index = index if isinstance(index, tuple) else (index,)
    if any(i is ... for i in index):
        at = next(n for n, i in enumerate(index) if i is ...)
        index = (*index[:at], *[slice(None)] * (len(shape) - len(index) + 1), *index[at + 1 :])
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    index = tuple(Slice.from_slice(i, n) if isinstance(i, slice) else i for i, n in zip(index, shape))
    anywhere = tuple(max(n, 2**31 - 1) for n in shape)
    found = indexing.NDIndexer.from_indices_shape(index, anywhere)
    indexer = indexing.NDIndexer(found.indices, tuple(shape), found.int_indexer_shape)
    base, outer = state.get_ref_and_transforms(ref, None, "load")
    return (base, *jax.tree.flatten((*outer, indexer)))


def indexed_type(aval, tree, leaves):
    """Array type of `ref[indices]`."""
    return state.transform_type(jax.tree.unflatten(tree, leaves), aval.inner_aval)


NO_INDICES = jax.tree.flatten(())[1]


def is_slice(index) -> bool:
    return isinstance(index, Slice)


def source_of(eqn):
    """Context in which traced equations carry `eqn`'s source line, and not that of the code that traces."""
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack)


# --- Pallas ------------------------------------------------------------------------------------------------------
# Imported on first use: Pallas costs a third of a second, and most programs have no pallas_call.


@functools.cache
def pallas() -> SimpleNamespace:
    """What the importer needs of Pallas: the primitive, the stock lowering, kinds of block dimensions."""
    from jax._src.pallas import core, pallas_call

    return SimpleNamespace(
        call_p=pallas_call.pallas_call_p,
        stock_lowering=pallas_call._pallas_call_lowering,
        Blocked=core.Blocked,
        Squeezed=core.Squeezed,
        Element=core.Element,
        BoundedSlice=core.BoundedSlice,
        is_dynamic_dim=core.is_dynamic_dim,
    )


def remove_cpu_lowering(primitive) -> None:
    """Undoes `register_lowering(primitive, ..., platform="cpu")`; public JAX has no way."""
    mlir._platform_specific_lowerings["cpu"].pop(primitive, None)


def is_for_export(ctx) -> bool:
    """Whether a lowering's result leaves this process (jax.export)."""
    return bool(ctx.module_context.lowering_parameters.for_export)


NDIndexer, ReshapeTransform = indexing.NDIndexer, types.ReshapeTransform
TransposeTransform, BitcastTransform = types.TransposeTransform, types.BitcastTransform


def is_dropped(var) -> bool:
    """Whether an equation's result variable is never read."""
    return type(var).__name__ == "DropVar"
