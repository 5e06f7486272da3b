"""Small factorisations and triangular solves -> lax equations that fuse, or one kernel with a loop.

L = cholesky(A)  ->  a step per column, written out, where columns are few
w, V = eigh(A)   ->  a kernel whose programs take some matrices each
"""

from __future__ import annotations

import math
from collections.abc import Container

import jax

from pbkern.core.ops import linear_algebra
from pbkern.dsl.specs import BlockSpec
from pbkern.dsl.trace import kernel


def factored(
    eqn, operands, *, in_loops: Container[int], largest_of_many: float, per_program: float
) -> list | None:
    """Results of a factorisation or solve of small matrices, None for others.

    in_loops: ids of the equations in control flow. largest_of_many: see Simplify.
    per_program: matrices that a program of a kernel factors.
    """
    if not linear_algebra.is_small(eqn):
        return None
    *batch, height, width = eqn.invars[0].aval.shape
    many = math.prod(batch) > 1 and id(eqn) not in in_loops
    if (many or eqn.primitive.name == "eigh") and max(height, width) > largest_of_many:
        return None
    if linear_algebra.is_written(eqn):
        return linear_algebra.as_equations(eqn, operands)
    return _by_kernel(eqn, operands, int(per_program))


def _by_kernel(eqn, operands, per_program: int) -> list | None:
    if jax.eval_shape(lambda *xs: linear_algebra.as_equations(eqn, xs), *operands) is None:
        return None
    batch = operands[0].shape[:-2]
    count = math.prod(batch)
    block = per_program if count >= per_program else 1

    def rows(shape):
        return (count, *shape[len(batch) :])

    def spec(shape) -> BlockSpec:
        rank = len(shape) - len(batch)
        return BlockSpec((block, *shape[len(batch) :]), lambda i: (i, *[0] * rank))

    def body(*refs):
        given, results = refs[: len(operands)], refs[len(operands) :]
        for ref, result in zip(
            results, linear_algebra.as_equations(eqn, [ref[...] for ref in given])
        ):
            ref[...] = result

    body.__name__ = eqn.primitive.name
    avals = [var.aval for var in eqn.outvars]
    of_batch = kernel(
        body,
        grid=(-(-count // block),),
        in_specs=[spec(operand.shape) for operand in operands],
        out_specs=[spec(aval.shape) for aval in avals],
        out_shape=[jax.ShapeDtypeStruct(rows(aval.shape), aval.dtype) for aval in avals],
    )
    results = of_batch(*[operand.reshape(rows(operand.shape)) for operand in operands])
    return [result.reshape(aval.shape) for result, aval in zip(results, avals)]
