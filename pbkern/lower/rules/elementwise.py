"""Elementwise equations -> lazy values, whose expressions are made where they are wanted.

Known scalars and affine integers stay what they are (`lower/values/scalar_evolution.py`). What the
operations are in MLIR is lower/math/elementwise.py.
"""

from __future__ import annotations

import numpy as np
from jax.extend import core as jex

from pbkern.core.errors import UnsupportedOp
from pbkern.lower.math import elementwise
from pbkern.lower.mlir.element_types import ELEMENTS
from pbkern.lower.nest.addresses import as_affine
from pbkern.lower.nest.conditions.index_tests import BOOL, Folder
from pbkern.lower.nest.ir import Const, Expr, IndexValue, Pool
from pbkern.lower.values.scalar_evolution import known, simplified
from pbkern.lower.values.values import (
    TEST_COST,
    ZERO,
    Index,
    Lazy,
    Value,
    dims_index,
    is_index_only,
)

from .views import index_value

# The cost of the dearest operation of which values of indices are free, masks for example; a table
# of sines is not.
INDEX_ARITHMETIC = 4.0

INT32 = np.dtype(np.int32)


def fold_index(pool: Pool, name: str, dtype: np.dtype, xs: list[Expr]) -> Expr | None:
    """Integer sums and multiples of index expressions stay affine.

    Exact: both sides wrap modulo the dtype's width.
    """
    if name not in ("add", "sub", "mul", "neg") or dtype.kind not in "iu" or dtype.itemsize < 4:
        return None
    left, right = [as_affine(x) for x in (*xs, xs[0])[:2]]
    if left is None or right is None:
        return None
    if name == "mul" and not (left.is_const or right.is_const):
        return None
    result = {
        "add": lambda: left + right,
        "sub": lambda: left - right,
        "neg": lambda: left * -1,
        "mul": lambda: left * right.const if right.is_const else right * left.const,
    }[name]()
    # Far from 64 bits, in which addresses and indices are computed.
    if max([abs(result.const), *(abs(coeff) for _, coeff in result.terms)]) >= 1 << 31:
        return None
    if result.is_const:
        info = np.iinfo(dtype)
        return (
            pool.const(dtype, dtype.type(result.const))
            if info.min <= result.const <= info.max
            else None
        )
    return pool.index(dtype, result)


def elementwise_value(builder, eqn, ins: list[Value]) -> Value:
    """The result of an elementwise equation: of a constant choice an operand, of known scalars a known scalar."""
    out = eqn.outvars[0].aval
    shape, dtype = tuple(out.shape), np.dtype(out.dtype)
    name, at = eqn.primitive.name, builder.line(eqn)
    in_dtypes = tuple(input_.dtype for input_ in ins)
    if name not in elementwise.RULES:
        operands = ", ".join(f"{input_.dtype}{list(input_.shape)}" for input_ in ins)
        raise UnsupportedOp(
            f"kernels cannot compute `{name}`",
            at=at,
            why=f"its operands are {operands}; it has no rule in pbkern/lower/rules",
            hint="call it outside of the kernel, or write it with operations that kernels have",
        )
    if not elementwise.supports(name, in_dtypes, dtype):
        raise UnsupportedOp(
            f"`{name}` is not lowered for these dtypes",
            at=at,
            why=f"({', '.join(map(str, in_dtypes))}) -> {dtype}; covered dtypes: {', '.join(ELEMENTS)}",
            hint="convert the operands with astype, or leave this operation to XLA",
        )
    info = builder.context.info(name, dtype, in_dtypes, eqn.params, at)

    def route(ix: Index):
        return [
            tuple(position if size != 1 else ZERO for position, size in zip(ix, input_.shape))
            if input_.shape
            else ()
            for input_ in ins
        ]

    def combine(pool: Pool, ix: Index, xs: list[Expr]) -> Expr:
        folded = fold_index(pool, name, dtype, xs)
        return pool.op(dtype, info, tuple(xs)) if folded is None else folded

    index_only = all(map(is_index_only, ins))
    tested = name == "select_n" and is_index_only(ins[0])
    if len(ins) == 3 and tested and (constant := always(builder, ins[0])) is not None:
        return ins[2 if constant else 1]
    cost = builder.context.options.op_cost(name)
    if index_only and cost <= INDEX_ARITHMETIC:
        cost = 0.0
    elif tested:
        cost = TEST_COST
    value = Lazy(shape, dtype, tuple(ins), route, combine, cost=cost, index_only=index_only)
    if shape != () or dtype.kind not in "biu":
        return value
    return _named(builder, eqn, simplified(builder, value))


def always(builder, test: Value) -> bool | None:
    """The value of a mask that is known to be the same at all points of all programs: one of indices alone."""
    if not is_index_only(test):
        return None
    dims = [(f"@{k}", size) for k, size in enumerate(test.shape)]
    points = {dim: (0, max(extent - 1, 0)) for dim, extent in dims}
    expr = Folder(builder.pool, builder.bounds | points)(builder.pull(test, dims_index(dims)))
    return bool(expr.value) if isinstance(expr, Const) and expr.dtype == BOOL else None


def _named(builder, eqn, value: Value) -> Value:
    """A known scalar clamp(0, x, constant) as a symbol within these bounds, by which tests of what is made of it fold."""
    low, _, high = eqn.invars if eqn.primitive.name == "clamp" else (None, None, None)
    if (
        not isinstance(low, jex.Literal)
        or not isinstance(high, jex.Literal)
        or low.val != 0
        or value.dtype != INT32
    ):
        return value
    expr = known(builder, value)
    if expr is None or isinstance(expr, Const | IndexValue):
        return value
    symbol = builder.index_symbol(value, int(high.val))
    return index_value((), INT32, lambda ix: symbol, builder)
