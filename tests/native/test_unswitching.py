"""Selects among arrays by a scalar: the side that is not taken is not read."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

N = 3000


@pytest.fixture
def arrays(rng):
    return [rng.standard_normal(N).astype(np.float32) for _ in range(12)]


def cases(f, *args) -> int:
    return pbkern.jit(f).as_text(*args, stage="nests").count("case %s")


@pytest.mark.parametrize("flag", [False, True])
def test_one_of_two(flag, arrays):
    a, b, c, *_ = arrays
    f = lambda flag, a, b, c: (jnp.where(flag, a * 2, b + 1) + c, jnp.where(flag, a, b).max())
    got = pbkern.jit(f)(flag, a, b, c)
    np.testing.assert_allclose(got[0], (a * 2 if flag else b + 1) + c, rtol=1e-6)
    assert got[1] == (a if flag else b).max()
    assert cases(f, flag, a, b, c) >= 2


@pytest.mark.parametrize("count", [2, 3, 12])
def test_one_of_a_stack(count, arrays):
    f = lambda i, *x: jnp.stack(x)[i] * 2
    g = pbkern.jit(f)
    for i in (-count, -1, 0, 1, count - 1, count + 5):
        np.testing.assert_array_equal(g(i, *arrays[:count]), jax.jit(f)(i, *arrays[:count]))
    assert cases(f, 0, *arrays[:count]) == 2 * (count - 1)


def test_by_what_the_same_kernel_computes(arrays):
    a, b, *_ = arrays
    f = lambda x, a, b: jnp.where(jnp.sin(x) > 0, a, b) * 3
    for x in (1.0, 4.0, np.nan):
        np.testing.assert_allclose(
            pbkern.jit(f)(x, a, b), (a if np.sin(x) > 0 else b) * np.float32(3)
        )


def test_several_flags(arrays):
    a, b, c, d, *_ = arrays
    f = lambda p, q, a, b, c, d: jnp.where(p, a, b) + jnp.where(q, c, d)
    for p in (False, True):
        for q in (False, True):
            np.testing.assert_array_equal(
                pbkern.jit(f)(p, q, a, b, c, d), (a if p else b) + (c if q else d)
            )


def test_the_code_does_not_grow_without_bound(arrays):
    def f(flags, *arrays):
        return sum(jnp.where(flags[k], a, b) for k, (a, b) in enumerate(itertools.pairwise(arrays)))

    flags = np.arange(11) % 3 == 0
    want = sum(a if flags[k] else b for k, (a, b) in enumerate(itertools.pairwise(arrays)))
    np.testing.assert_allclose(pbkern.jit(f)(flags, *arrays), want, rtol=1e-5, atol=1e-5)
    assert cases(f, flags, *arrays) <= 2 * 12


def test_nothing_is_copied_where_both_sides_read_the_same(arrays):
    a, b, *_ = arrays
    assert cases(lambda flag, a: jnp.where(flag, a, -a), True, a) == 0
    assert cases(lambda flag, a, b: jnp.where(flag, a - b, a), True, a, b) == 0
    assert cases(lambda flag, a, b: jnp.where(flag, a, b), True, a[:20], b[:20]) == 0
    assert cases(lambda flags, a, b: jnp.where(flags, a, b), a > 0, a, b) == 0


@pytest.mark.parametrize(("rows", "columns"), [(1, 700), (7, 513), (33, 1001), (40, 3)])
@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16"])
def test_rows(rows, columns, dtype, rng):
    """Masks of rows: one side alone reads an array, both do, tests inside of one another, rows around an edge."""
    x, y = (jnp.asarray(rng.integers(-100, 100, (rows, columns)), dtype) for _ in range(2))
    m, n = (jnp.asarray(rng.random(rows) < 0.5) for _ in range(2))

    def f(m, n, x, y):
        rows = jnp.arange(len(m))[:, None]
        return (
            jnp.where(m[:, None], x, 0),
            jnp.where(m[:, None], x, jnp.where(n[:, None], y, x + y)),
            jnp.where(rows < 5, x + 1, y),
            jnp.pad(x, ((min(2, len(m) - 1),) * 2, (1, 1)), mode="reflect"),
        )

    for got, want in zip(pbkern.jit(f)(m, n, x, y), f(m, n, x, y)):
        np.testing.assert_array_equal(got, want)
