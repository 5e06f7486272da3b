"""Small factorisations and triangular solves -> lax equations that fuse, or one kernel with a loop.

L = cholesky(A)  ->  a step per column, written out, where columns are few
w, V = eigh(A)   ->  a kernel whose programs take some matrices each
"""

from __future__ import annotations

import math
from contextvars import ContextVar

import jax

from pbkern.core.ops import linear_algebra
from pbkern.dsl.specs import BlockSpec
from pbkern.dsl.trace import kernel

# Are equations those of a loop's body or of a branch?
in_control_flow: ContextVar[bool] = ContextVar("in control flow", default=False)


def factored(eqn, operands, *, largest_of_many: float, per_program: float) -> list | None:
    """Results of a factorisation or solve of small matrices, None for others.

    largest_of_many: see Simplify. per_program: matrices that a program of a kernel factors.
    """
    in_loop = in_control_flow.get()
    if not linear_algebra.is_small(eqn, tall=in_loop):
        return None
    shape = linear_algebra.matrix_shape(eqn)
    many = eqn.invars[0].aval.size > math.prod(shape) and not in_loop
    if (many or eqn.primitive.name == "eigh") and max(shape) > largest_of_many:
        return None
    if linear_algebra.is_written(eqn):
        return linear_algebra.as_equations(eqn, operands)
    return _by_kernel(eqn, operands, int(per_program))


def _by_kernel(eqn, operands, per_program: int) -> list | None:
    if jax.eval_shape(lambda *xs: linear_algebra.as_equations(eqn, xs), *operands) is None:
        return None
    batch = operands[0].shape[: -len(linear_algebra.matrix_shape(eqn))]
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
