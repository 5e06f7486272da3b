"""Slices read the case of a select or of a concatenation that they hold, and compute the same."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pbkern.core.jaxprs.walks import equations
from pbkern.fuse.indexing.slices_of_cases import read_cases
from pbkern.fuse.simplify.driver import simplify

from .checking import check, rand


def operands_of_slices(f, *args):
    """Names of what makes the operands of slices; "" for arguments."""
    closed = read_cases(simplify(jax.make_jaxpr(f)(*args)))
    eqns = list(equations(closed.jaxpr))
    makers = {var: eqn.primitive.name for eqn in eqns for var in eqn.outvars}
    return [makers.get(e.invars[0], "") for e in eqns if e.primitive.name == "slice"]


def column(x):
    return lax.broadcasted_iota(jnp.int32, x.shape, 1)


def beside(x, y):
    return jnp.where(column(x) < 1, y, x)[:, 3:5]


def within(x, y):
    return jnp.where(column(x) >= 2, y, x)[:, 2:]


def across(x, y):
    return jnp.where(column(x) < 2, y, x)[:, 1:4]


def either(x, y):
    ends = (column(x) == 0) | ~(column(x) < 6)
    return jnp.where(ends, y, x)[:, 1:5:2]


def chained(x, y):
    z = jnp.where(column(x) < 1, y, x)
    return jnp.where(column(x) > 5, x + 1, z)[:, 2:3]


def joined(x, y):
    return lax.slice(jnp.concatenate([x, y], 1), (0, 7), (3, 10))


def joined_across(x, y):
    return lax.slice(jnp.concatenate([x, y], 1), (0, 6), (3, 9))


def in_a_loop(x, y):
    return lax.fori_loop(0, 100, lambda _, x: x.at[:, :1].set(beside(x, y)[:, :1]), x)


ARGS = rand(3, 7), rand(3, 7)


@pytest.mark.parametrize(
    ("f", "made_by"),
    [
        (beside, ""),
        (within, ""),
        (either, ""),
        (chained, ""),
        (joined, ""),
        (across, "select_n"),
        (joined_across, "concatenate"),
    ],
)
def test_they_read_the_case(f, made_by):
    assert operands_of_slices(f, *ARGS) == [made_by]


@pytest.mark.parametrize(
    "f", [beside, within, across, either, chained, joined, joined_across, in_a_loop]
)
def test_they_agree(f):
    check(f, *ARGS)
