"""JAX's types where its own hints are wider than what it returns. mypy reads them; when run, they do almost nothing."""

from __future__ import annotations

from typing import cast

from jax.core import ShapedArray
from jax.extend import core as jex

Atom = jex.Var | jex.Literal


def array_aval(atom: Atom) -> ShapedArray:
    """The type of an atom that is an array.

    The hints call it AbstractValue, which has neither shape nor dtype.
    """
    return cast(ShapedArray, atom.aval)
