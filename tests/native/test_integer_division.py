"""Quotients and remainders by constants, against Python's integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern

DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def operands(dtype, divisor) -> np.ndarray:
    """The ends of the type, multiples of the divisor and their neighbours, and random numbers."""
    info, rng = np.iinfo(dtype), np.random.default_rng(0)
    low, high = int(info.min) // abs(divisor) - 1, int(info.max) // abs(divisor) + 1
    near = [
        int(k) * divisor + o
        for k in rng.integers(max(low, -(2**62)), min(high, 2**62), 200)
        for o in (-1, 0, 1)
    ]
    some = [
        info.min,
        info.min + 1,
        0,
        1,
        info.max - 1,
        info.max,
        *map(int, rng.integers(info.min, info.max, 200, dtype=dtype)),
    ]
    return np.array([n for n in (*near, *some) if info.min <= n <= info.max], dtype)


def expected(x, divisor) -> tuple[list[int], list[int]]:
    """Rounded towards zero; the least number by -1 wraps."""
    info = np.iinfo(x.dtype)
    quotients = [abs(int(n)) // abs(divisor) * (1 if (n < 0) == (divisor < 0) else -1) for n in x]
    wrapped = [(q - info.min) % (1 << info.bits) + info.min for q in quotients]
    return wrapped, [int(n) - q * divisor for n, q in zip(x, quotients)]


def check(dtype, divisor):
    x = operands(dtype, divisor)
    with jax.enable_x64(True):
        y = np.asarray(divisor, dtype)
        got = pbkern.jit(lambda x: (lax.div(x, y), lax.rem(x, y)))(jnp.asarray(x))
    for g, w in zip(got, expected(x, divisor)):
        assert g.dtype == dtype
        np.testing.assert_array_equal(np.asarray(g), np.array(w, dtype))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends(dtype):
    info = np.iinfo(dtype)
    for divisor in {
        1,
        2,
        3,
        7,
        13,
        int(info.max),
        int(info.max) - 1,
        int(info.max) // 2,
        int(info.min) or 5,
        -1,
        -7,
    }:
        if info.min <= divisor:
            check(dtype, divisor)


def divisors(dtype):
    info = np.iinfo(dtype)
    return st.tuples(st.just(dtype), st.integers(int(info.min), int(info.max)))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(DTYPES).flatmap(divisors))
def test_any(drawn):
    dtype, divisor = drawn
    if divisor:
        check(dtype, divisor)
