"""Comparisons of signs and remainders of integers (fuse/algebra/sign_tests.py) are one comparison, with the same result."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pbkern

from .checking import planned

X = np.array([-128, -127, -14, -13, -7, -6, -1, 0, 1, 6, 7, 13, 14, 126, 127], np.int32)
COMPARISONS = [operator.lt, operator.le, operator.eq, operator.ne, operator.ge, operator.gt]


def names(f, *args):
    return [eqn.primitive.name for eqn in planned(f, *args).jaxpr.eqns]


@pytest.mark.parametrize("divisor", [7, -7, 1, 64, -2])
def test_floor_division_compares_once(divisor):
    found = names(lambda x: x // divisor, X)
    assert found.count("lt") + found.count("gt") == 1
    for f in (lambda x: x // divisor, lambda x: x % divisor):
        assert not {"sign", "and", "ne"} & set(names(f, X))
    np.testing.assert_array_equal(pbkern.jit(lambda x: x // divisor)(X), X // divisor)
    np.testing.assert_array_equal(pbkern.jit(lambda x: x % divisor)(X), X % divisor)


def test_divisors_that_are_values_keep_their_tests():
    assert "and" in names(lambda x, y: x // y, X, X)


def test_floats_keep_their_tests():
    """NaN has no sign."""
    x = np.array([np.nan, -0.0, 0.0, 1.0, -2.5, np.inf, -np.inf], np.float32)
    f = lambda x: (jnp.sign(x) != 1) & (x != 0) | (x == np.inf) | (x != np.nan)
    names(f, x)
    np.testing.assert_array_equal(pbkern.jit(f)(x), f(x))


@st.composite
def conditions(draw, depth=3):
    """A condition on x, its sign and its remainder: (x, sign, remainder) -> truth values."""
    if depth == 0 or draw(st.booleans()):
        which, number = draw(st.integers(0, 2)), draw(st.sampled_from([-2, -1, 0, 1, 2]))
        compare = draw(st.sampled_from(COMPARISONS))
        return lambda *values: compare(values[which], number)
    left, right = draw(conditions(depth - 1)), draw(conditions(depth - 1))
    kind = draw(st.sampled_from(["and", "or", "not", "is", "is not"]))
    if kind == "not":
        return lambda *values: ~left(*values)
    if kind in ("is", "is not"):
        truth, compare = draw(st.booleans()), operator.eq if kind == "is" else operator.ne
        return lambda *values: compare(left(*values), truth)
    join = operator.and_ if kind == "and" else operator.or_
    return lambda *values: join(left(*values), right(*values))


@given(conditions(), st.sampled_from([3, -5, 1, 16]))
def test_random_conditions(condition, divisor):
    def f(x):
        return condition(x, jnp.sign(x), jax.lax.rem(x, jnp.full_like(x, divisor)))

    want = condition(X, np.sign(X), np.fmod(X, divisor))
    np.testing.assert_array_equal(pbkern.jit(f)(X), want)
