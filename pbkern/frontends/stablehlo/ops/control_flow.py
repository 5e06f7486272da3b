"""Loops, branches, calls, tuples and tokens."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir

from pbkern.frontends.stablehlo.counted_loops import trip_count
from pbkern.frontends.stablehlo.operation import HloOperation
from pbkern.frontends.stablehlo.table import RULES, rule


@rule("stablehlo.while")
def while_(op: HloOperation, *given):
    """Imports a loop. Values that it hands on unchanged are no carries, and a counting loop has a known number of steps."""
    body, test = op.block(1), op.block(0)
    last = [operation.operation for operation in body.operations][-1]
    changing = [k for k, operand in enumerate(last.operands) if operand != body.arguments[k]]
    start = tuple(jnp.asarray(given[position], op.type(position)[1]) for position in changing)

    def every(carry):
        values = list(given)
        for k, value in zip(changing, carry):
            values[k] = value
        return values

    def step(carry):
        results = op.run_block(body, every(carry))
        return tuple(jnp.asarray(results[position], op.type(position)[1]) for position in changing)

    steps = trip_count(op.mlir, given)
    if steps is not None:
        carry, _ = lax.scan(lambda state, _: (step(state), None), start, None, length=steps)
    else:
        carry = lax.while_loop(lambda state: op.run_block(test, every(state))[0], step, start)
    return every(carry)


@rule("stablehlo.case")
def case(op: HloOperation, index):
    """A number of no branch means the last."""
    count = len(op.mlir.regions)
    branches = [_branch(op, k) for k in range(count)]
    return lax.switch(jnp.where((index < 0) | (index >= count), count - 1, index), branches)


@rule("stablehlo.if")
def if_(op: HloOperation, test):
    return lax.cond(test, _branch(op, 0), _branch(op, 1))


def _branch(op: HloOperation, number: int):
    region = op.region(number)
    return lambda: tuple(jnp.asarray(x, op.type(n)[1]) for n, x in enumerate(region()))


@rule("func.call")
def call(op: HloOperation, *operands):
    return op.call(op.text("callee"), operands)


@rule("stablehlo.composite")
def composite(op: HloOperation, *operands):
    """An operation of CHLO by the rule of its name, or else by its decomposition."""
    name = ir.StringAttr(op.attribute("name")).value
    attributes = op.attribute("composite_attributes")
    if (
        name in RULES
        and not op.mlir.regions
        and (attributes is None or not len(ir.DictAttr(attributes)))
    ):
        return RULES.lookup(name)(op, *operands)
    return op.call(op.text("decomposition"), operands)


@rule("stablehlo.tuple")
def tuple_(op: HloOperation, *xs):
    return (tuple(xs),)


@rule("stablehlo.get_tuple_element")
def get_tuple_element(op: HloOperation, xs):
    return xs[op.integer("index")]


@rule("stablehlo.create_token", "stablehlo.after_all")
def token(op: HloOperation, *tokens):
    return (None,)
