"""Sums of values that are zero where the others are not (fuse/algebra/sums_of_parts.py), bit by bit as the sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import pbkern
from tests.arrays import array

from .checking import planned

VALUES = [0.0, -0.0, 1.5, -2.0, np.nan, np.inf, -np.inf, 7.0]
DTYPES = ["float32", "float16", "bfloat16", "int32", "int8", "uint8"]


def draw_values(data, shape, dtype):
    count = int(np.prod(shape))
    values = data.draw(st.lists(st.sampled_from(VALUES), min_size=count, max_size=count))
    if not jnp.issubdtype(dtype, jnp.floating):
        values = np.abs(np.nan_to_num(values, posinf=5, neginf=3))
    return array(np.reshape(np.array(values), shape), dtype)


def check(f, *args):
    for got, want in zip(jax.tree.leaves(pbkern.jit(f)(*args)), jax.tree.leaves(jax.jit(f)(*args))):
        got, want = (np.asarray(x.astype(jnp.float32)) for x in (got, want))
        np.testing.assert_array_equal(got, want)
        numbers = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(want[numbers]))


@given(data=st.data(), dtype=st.sampled_from(DTYPES), step=st.integers(1, 3))
def test_padded_parts(data, dtype, step):
    """Parts anywhere along either axis, that may meet or not, summed in a random order."""
    axis, size = data.draw(st.integers(0, 1)), data.draw(st.integers(4, 12))
    whole = [3, 3]
    whole[axis] = size
    beside = draw_values(data, whole, dtype) if data.draw(st.booleans()) else None
    parts, configs = [], []
    for _ in range(data.draw(st.integers(2, 4))):
        start = data.draw(st.integers(0, size - 1))
        count = data.draw(st.integers(1, (size - 1 - start) // step + 1))
        end = start + (count - 1) * step + 1
        shape, config = [3, 3], [(0, 0, 0)] * 2
        shape[axis], config[axis] = count, (start, size - end, step - 1)
        parts.append(draw_values(data, shape, dtype))
        configs.append(config)

    def f(*parts):
        first, *rest = [
            lax.pad(part, np.zeros((), part.dtype), config) for part, config in zip(parts, configs)
        ]
        if beside is not None:
            first = first + beside
        for part in rest:
            first = part + first
        return first

    check(f, *parts)


def test_derivatives_of_columns_are_pieces():
    def f(x, d):
        return jax.vjp(lambda x: x[:, 0] * x[:, 1] + x[:, 2], x)[1](d)[0]

    x, d = array(np.random.default_rng(0).normal(size=(500, 4)), jnp.float32), jnp.ones(500)
    used = {eqn.primitive.name for eqn in planned(f, x, d).jaxpr.eqns}
    assert "concatenate" in used
    assert not used & {"pad", "add_any"}
    check(f, x, d)


def test_derivatives_of_every_second_element_are_columns():
    def f(x, d):
        return jax.vjp(lambda x: x[::2] * 2 + x[1::2] * 3, x)[1](d)[0]

    x, d = jnp.arange(2000.0), jnp.ones(1000)
    plan = planned(f, x, d)
    used = [eqn.primitive.name for eqn in plan.jaxpr.eqns]
    assert "concatenate" in used
    assert "add_any" not in used
    check(f, x, d)


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_choices(data, dtype):
    x, y, c = (draw_values(data, (5,), dtype) for _ in range(3))
    zero = jnp.zeros(5, dtype)

    def f(x, y, c):
        which = (c > 1).astype(jnp.int32)
        three = jnp.clip(c, 0, 2).astype(jnp.int32)
        return (
            lax.select_n(which, x, zero) + lax.select_n(which, zero, y),
            lax.select_n(which, x, zero) + lax.select_n(which, zero, x),
            lax.select_n(which, x, zero) + lax.select_n(which, y, zero),
            lax.select_n(three, x, zero, zero) + lax.select_n(three, zero, zero, y),
        )

    check(f, x, y, jnp.where(jnp.isnan(c), 0, c) if jnp.issubdtype(dtype, jnp.floating) else c)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_derivatives_of_remainders(dtype):
    def f(x, d):
        return jax.vjp(lambda x: jnp.mod(x, jnp.asarray(0.7, dtype)), x)[1](d)[0]

    x = array(np.random.default_rng(0).normal(size=300), dtype)
    assert "rem" not in {eqn.primitive.name for eqn in planned(f, x, x).jaxpr.eqns}
    check(f, x, x)


def test_sums_that_repeat_parts():
    """Terms with dimensions of size 1, which lax repeats: the parts are not of one array."""

    def padded(a, b, c):
        pad = lambda x, front, behind: lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 0), (front, behind, 0)))
        return pad(a, 0, 2) + pad(b, 1, 1) + pad(c, 2, 0)

    def chosen(which, a, b):
        where_not = lax.select(which, a, jnp.zeros_like(a))[:, None]
        where = lax.select(which, jnp.zeros_like(b), b)[None]
        return lax.add(where_not, where)

    rows, columns, one = (
        jnp.full((1, 3, 1), 2.0),
        jnp.full((2, 1, 1), 3.0),
        jnp.full((1, 1, 1), 5.0),
    )
    with pbkern.config.override(cache=False, fallback=False):
        check(padded, rows, columns, one)
        check(chosen, jnp.array([True, False, True]), jnp.arange(1.0, 4.0), jnp.arange(4.0, 7.0))
