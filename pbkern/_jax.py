"""The only importer of private JAX. Tested with jax 0.10.2 (Python 3.11); 0.11.x keeps these names.

Everything else in pbkern uses public JAX: `jax`, `jax.numpy`, `jax.lax`, `jax.ref`, `jax.extend.core`.
"""

from __future__ import annotations

import jax
import numpy as np
from jax._src import source_info_util
from jax._src.state import indexing, types
from jax.extend import core as jex

Var = jex.Var
Literal = jex.Literal


def ref_aval(shape: tuple[int, ...], dtype) -> jax.ref.AbstractRef:
    """A fresh Ref type. JAX rejects one aval object for two arguments, hence no caching."""
    return jax.ref.AbstractRef(jax.core.ShapedArray(tuple(shape), np.dtype(dtype)))


def is_ref(aval) -> bool:
    return isinstance(aval, types.AbstractRef)


def ref_type(aval) -> tuple[tuple[int, ...], np.dtype]:
    """(shape, dtype) of what a Ref type refers to."""
    return tuple(aval.inner_aval.shape), np.dtype(aval.inner_aval.dtype)


def user_line(eqn) -> str | None:
    """`file:line:column (function)` of the user's code that made an equation, or None."""
    text = source_info_util.summarize(eqn.source_info)
    return None if not text or "unknown" in text else text


def ref_indexers(eqn) -> list[tuple]:
    """Index tuples of a get / swap / addupdate equation, outermost first.

    Each entry of a tuple is an int, an atom (Var or Literal: scalar or integer array) or a Slice, which has
    `.start` (int or atom), `.size` and `.stride`.
    """
    number = {"get": 1, "swap": 2, "addupdate": 2}[eqn.primitive.name]
    transforms = jax.tree.unflatten(eqn.params["tree"], eqn.invars[number:])
    found = []
    for t in transforms:
        if not isinstance(t, indexing.NDIndexer):
            raise NotImplementedError(f"Ref transform {type(t).__name__}")
        found.append(tuple(t.indices))
    return found


def is_slice(index) -> bool:
    return isinstance(index, indexing.Slice)


def source_of(eqn):
    """Context in which traced equations carry `eqn`'s source line, and not that of the code that traces."""
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack)
