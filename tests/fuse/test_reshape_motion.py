"""Values per group of few elements: arithmetic with them runs on whole rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

import pbkern
from pbkern.core.jaxprs.evaluation import inline
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.fuse.indexing.reshape_motion import MoveReshapes

from .checking import check, rand


def group_norm(groups, eps=1e-5, dtype=jnp.float32):
    def f(x, g, b):
        split = x.reshape(*x.shape[:-1], groups, -1).astype(dtype)
        inner = (*range(1, split.ndim - 2), split.ndim - 1)
        mean = split.mean(inner, keepdims=True)
        variance = ((split - mean) ** 2).mean(inner, keepdims=True)
        y = (split - mean) * jax.lax.rsqrt(variance + eps)
        return (y.reshape(x.shape) * g + b).astype(x.dtype)

    return f


def by_hand(x, g, b, groups, eps=1e-5):
    x, g, b = (np.asarray(a, np.float64) for a in (x, g, b))
    split = x.reshape(*x.shape[:-1], groups, -1)
    inner = (*range(1, split.ndim - 2), split.ndim - 1)
    y = (split - split.mean(inner, keepdims=True)) / np.sqrt(split.var(inner, keepdims=True) + eps)
    return y.reshape(x.shape) * g + b


@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 9, 5, 12), 4), ((3, 40, 21), 7), ((1, 33, 96), 32), ((2, 50, 6), 3), ((2, 50, 6), 6)],
)
def test_group_norm(shape, groups):
    x, g, b = rand(*shape), rand(shape[-1], seed=1), rand(shape[-1], seed=2)
    got = pbkern.jit(group_norm(groups))(x, g, b)
    np.testing.assert_allclose(got, by_hand(x, g, b, groups), rtol=1e-4, atol=1e-4)
    grad = lambda *args: jax.grad(lambda *a: jnp.sin(group_norm(groups)(*a)).sum(), (0, 1))(*args)
    check(grad, x, g, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arithmetic_runs_on_whole_rows(dtype):
    x, g, b = (rand(*s, dtype=dtype) for s in ((2, 64, 96), (96,), (96,)))
    closed = inline(jax.make_jaxpr(group_norm(32))(x, g, b))
    after = MoveReshapes()(closed, None).jaxpr
    large = [eqn for eqn in after.eqns if eqn.outvars[0].aval.size == x.size]
    arithmetic = ELEMENTWISE.keys() - {"convert_element_type"}  # sums convert what they read
    shapes = {eqn.outvars[0].aval.shape for eqn in large if eqn.primitive.name in arithmetic}
    assert shapes == {x.shape}


def test_sixteen_bit_floats():
    x, g, b = (rand(*s, dtype="bfloat16") for s in ((2, 40, 12), (12,), (12,)))
    got = pbkern.jit(group_norm(4))(x, g, b)
    np.testing.assert_allclose(np.asarray(got, np.float64), by_hand(x, g, b, 4), atol=0.05)


FORMS = {
    "in a loop": lambda x, m: jax.lax.fori_loop(
        0, 12, lambda k, y: (y.reshape(*y.shape[:-1], 4, 3) * 0.5 - m).reshape(y.shape), x
    ),
    "selected": lambda x, m: jnp.where(m > 0, x.reshape(*x.shape[:-1], 4, 3), m).reshape(x.shape),
    "compared": lambda x, m: (x.reshape(*x.shape[:-1], 4, 3) > m).sum(-1),
    "two arrays": lambda x, m: (
        (x.reshape(*x.shape[:-1], 4, 3) - m) * (2 * x).reshape(*x.shape[:-1], 4, 3)
    ).sum(-1),
    "another shape after": lambda x, m: (x.reshape(*x.shape[:-1], 4, 3) - m).reshape(-1, 6),
    "transposed after": lambda x, m: (x.reshape(*x.shape[:-1], 4, 3) - m).swapaxes(-1, -2),
    "members too": lambda x, m: (
        (x.reshape(*x.shape[:-1], 4, 3) - m) * jnp.arange(3.0) + jnp.arange(4.0)[:, None]
    ),
    "a value per row and group": lambda x, m: (
        x.reshape(*x.shape[:-1], 4, 3) - x.reshape(*x.shape[:-1], 4, 3).max(-1, keepdims=True)
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    check(FORMS[name], rand(7, 30, 12), rand(7, 1, 4, 1, seed=3))


def test_numbers_beside_a_split():
    def f(x, m):
        five = jax.lax.reshape(np.float32(5), (1,))
        return (x.reshape(*x.shape[:-1], 4, 3) - m).reshape(x.shape), five

    closed = jax.make_jaxpr(f)(rand(7, 30, 12), rand(7, 1, 4, 1))
    literal = [eqn for eqn in closed.jaxpr.eqns if isinstance(eqn.invars[0], jex.Literal)]
    assert [eqn.primitive.name for eqn in literal] == ["reshape"]
    check(f, rand(7, 30, 12), rand(7, 1, 4, 1, seed=3))
