"""Arrays that jitted functions close over, called in loops and branches: the loops are native, and their results right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern

X = np.random.default_rng(0).normal(size=(7, 3)).astype("f")
SIDES = np.array([2.5, 3.0, 4.5], "f")
TABLE = np.arange(21, dtype="f").reshape(7, 3) / 10
wrapped = jax.jit(lambda x: (x + SIDES / 2) % SIDES - SIDES / 2)
deeper = jax.jit(lambda x: wrapped(x) * TABLE)


def counted(x):
    return lax.fori_loop(0, 5, lambda i, x: wrapped(x * 1.5) + i, x)


def scanned(x):
    return lax.scan(lambda c, row: (wrapped(c + row), c * SIDES), x[0], x)


def until(x):
    return lax.while_loop(
        lambda c: jnp.abs(c).sum() + jnp.abs(wrapped(c)).sum() < 300, lambda c: c * 1.5 + 1, x
    )


def branches(x):
    return lax.cond(x[0, 0] > 0, deeper, lambda x: wrapped(x) - 1, x) + lax.cond(
        x[0, 0] > 9, deeper, wrapped, x
    )


def nested(x):
    return lax.fori_loop(
        0, 3, lambda i, x: lax.fori_loop(0, 2, lambda j, x: deeper(x) + j, wrapped(x)), x
    ) + deeper(x)


def derived(x):
    return jax.grad(lambda x: (counted(x) ** 2).sum())(x)


@pytest.mark.parametrize(
    "f", [counted, scanned, until, branches, nested, derived], ids=lambda f: f.__name__
)
def test_bodies_read_constants_of_jitted_functions(f):
    compiled = pbkern.jit(f)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5),
        compiled(X),
        jax.jit(f)(X),
    )
    assert not any("constants" in left.why for left in compiled.explain(X).left)


@pytest.mark.parametrize("f", [counted, scanned, nested], ids=lambda f: f.__name__)
def test_such_loops_are_native(f):
    assert not pbkern.jit(f).explain(X).left
