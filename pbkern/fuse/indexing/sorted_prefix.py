"""The first elements of sorted lines as one equation, which bodies of kernels compute by sorting and slicing.

Apart, a sort and its slices may be two kernels, with whole sorted lines between them. Elements that
nothing reads need not be sorted, which costs less (targets/cpu/emit/sorts/top_k.py).
"""

from __future__ import annotations

import jax
from jax.extend import core as jex
from jax.interpreters import mlir

from pbkern.core.ops.top_k import first_of_sorted
from pbkern.fuse.access.rules import Access, Pull, require_whole, rules, shapes, whole

# *keys, *others -> their first elements along `dimension`; params: dimension, num_keys, first
first_sorted_p = jex.Primitive("first_sorted")
first_sorted_p.multiple_results = True


@first_sorted_p.def_abstract_eval
def _types(*operands, dimension: int, num_keys: int, first: int):
    shape = tuple(
        first if axis == dimension else size for axis, size in enumerate(operands[0].shape)
    )
    return [jax.core.ShapedArray(shape, operand.dtype) for operand in operands]


@first_sorted_p.def_impl
def _first(*operands, **params):
    return first_of_sorted(operands, **params)


mlir.register_lowering(first_sorted_p, mlir.lower_fun(_first, multiple_results=True))


def first_sorted(operands, **params) -> list:
    """The first elements of sorted lines; parameters as above."""
    return first_sorted_p.bind(*operands, **params)


@rules.register("first_sorted")
def _first_sorted(eqn, out: Access) -> Pull:
    axis = eqn.params["dimension"]
    access = require_whole(eqn, out, (axis,))
    line = tuple(
        whole(shapes(eqn)[0][axis]) if n == axis else span for n, span in enumerate(access)
    )
    return Pull(
        (line,) * len(eqn.invars),
        {},
        lambda ctx, *operands: first_of_sorted(operands, **eqn.params),
        access,
    )
