"""Small windows of donated operands are written in place, also where their place would make them a select."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pbkern

from .checking import rand

ROWS, WIDTH = 400, 16

WRITES = {
    "a row": lambda x, v, i: x.at[i].set(v[0]),
    "a row by an index array": lambda x, v, i: x.at[i[None]].set(v[:1]),
    "a row at a known place": lambda x, v, i: x.at[7].set(v[0]),
    "two, one after the other": lambda x, v, i: x.at[i].set(v[0]).at[i + 1].add(v[1]),
    "a slice": lambda x, v, i: jax.lax.dynamic_update_slice(x, v, (i, 0)),
    "a slice at a known place": lambda x, v, i: jax.lax.dynamic_update_slice(x, v, (5, 0)),
    "a column": lambda x, v, i: x.at[:, i].set(v[0, 0]),
    "an element": lambda x, v, i: x.at[i, 3].multiply(v[0, 0]),
}


def compiled(write):
    return pbkern.jit(lambda x, v, i: (write(x, v, i), v.sum()), donate_argnums=0)


COMPILED = {name: compiled(write) for name, write in WRITES.items()}


@pytest.mark.parametrize("name", WRITES)
@given(i=st.integers(-ROWS - 2, ROWS + 2))
def test_equals_jax(name, i):
    x, v, i = rand(ROWS, WIDTH), rand(3, WIDTH, seed=1), jnp.int32(i)
    want = jax.jit(WRITES[name])(x, v, i)
    got, total = COMPILED[name](jnp.array(x), v, i)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(total, v.sum(), rtol=1e-5)


@pytest.mark.parametrize("name", WRITES)
def test_touches_the_window_alone(name):
    args = [
        jax.ShapeDtypeStruct(s, d)
        for s, d in (((ROWS, WIDTH), "f4"), ((3, WIDTH), "f4"), ((), "i4"))
    ]
    explanation = COMPILED[name].explain(*args)
    limit = ROWS * WIDTH * 4 / 2 if name != "a column" else ROWS * WIDTH * 4
    assert explanation.as_dict()["bytes_moved"] < limit, str(explanation)


def test_readers_of_the_old_value():
    f = lambda x, v, i: (x.at[i].set(v), (x * 2).sum(1))
    x, v = rand(ROWS, WIDTH), rand(WIDTH, seed=1)
    want = jax.jit(f)(x, v, 5)
    got = pbkern.jit(f, donate_argnums=0)(jnp.array(x), v, 5)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_large_windows_stay_selects():
    """They fuse with what computes them."""
    f = pbkern.jit(lambda x: x.at[1:-1].set(jnp.sin(x[1:-1])), donate_argnums=0)
    x = rand(ROWS, WIDTH)
    assert len(f.kernels(x)) == 1
    np.testing.assert_allclose(f(jnp.array(x)), x.at[1:-1].set(jnp.sin(x[1:-1])), rtol=1e-5)
