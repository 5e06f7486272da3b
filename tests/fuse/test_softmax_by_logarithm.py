"""Softmax that is written by the logarithm of its sum (fuse/algebra/softmax_by_logarithm.py) is a quotient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

from .checking import planned, rand


def of_log_softmax(x):
    return jnp.exp(jax.nn.log_softmax(x))


def of_columns(x):
    return jnp.exp(jax.nn.log_softmax(x, 0))


def written_out(x):
    m = x.max(-1, keepdims=True)
    return jnp.exp(x - (m + jnp.log(jnp.exp(x - m).sum(-1, keepdims=True))))


def without_kept_dimensions(x):
    m = x.max(-1)
    return jnp.exp(x - (jnp.log(jnp.exp(x - m[:, None]).sum(-1)) + m)[:, None])


def of_all(x):
    m = x.max()
    return jnp.exp(x - (m + jnp.log(jnp.exp(x - m).sum())))


def with_other_readers(x):
    y = jax.nn.log_softmax(x)
    return jnp.exp(y), y.sum(-1)


QUOTIENTS = {
    of_log_softmax: 1,
    of_columns: 0,
    written_out: 1,
    without_kept_dimensions: 1,
    with_other_readers: 1,
}


def of_other_rows(x):
    m = x.max(0, keepdims=True)
    return jnp.exp((x - m) - jnp.log(jnp.exp(x - m).sum(-1, keepdims=True)))


def of_another_maximum(x):
    m, n = x.max(-1, keepdims=True), (2 * x).max(-1, keepdims=True)
    return jnp.exp(x - (n + jnp.log(jnp.exp(x - m).sum(-1, keepdims=True))))


def of_turned_rows(x):
    m = x.max(-1)
    return jnp.exp(x - (m + jnp.log(jnp.exp(x - m[:, None]).sum(-1)))[None])


def guarded(x):
    return jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True))


OTHERS = (of_all, of_other_rows, of_another_maximum, of_turned_rows, guarded)


def names(f, *args):
    return [e.primitive.name for e in planned(f, *args).jaxpr.eqns]


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@pytest.mark.parametrize("f", QUOTIENTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("scale", [1, 300])
def test_quotients(f, scale):
    """Also for large elements, of which differences from the logarithm of the sum have lost digits."""
    x = scale * rand(9, 37)
    got = jax.tree.leaves(pbkern.jit(f)(x))[0]
    np.testing.assert_allclose(
        got, softmax(np.asarray(x, np.float64), QUOTIENTS[f]), rtol=2e-6, atol=1e-37
    )
    assert names(f, x).count("exp") == 1
    if f is not with_other_readers:
        assert "log" not in names(f, x)


@pytest.mark.parametrize("f", [of_log_softmax, written_out], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_rows_with_infinities_and_nan(f, dtype):
    rows = [[1, -np.inf, 3], [-np.inf] * 3, [np.inf, 1, 2], [np.nan, 1, 2], [0, 500, -500]]
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(rows, dtype)
        got, want = (np.asarray(jit(f)(x), np.float64) for jit in (pbkern.jit, jax.jit))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=2e-2 if dtype == "bfloat16" else 1e-6)


@pytest.mark.parametrize("f", OTHERS, ids=lambda f: f.__name__)
def test_what_is_no_softmax_stays(f):
    x = rand(17, 17)
    assert "log" in names(f, x)
    wide = np.asarray(x, np.float64)
    with jax.enable_x64(True):
        want = f(jnp.asarray(wide))
    np.testing.assert_allclose(pbkern.jit(f)(x), want, rtol=1e-5)


def test_attention_divides_its_result():
    def attention(q, k, v):
        return jnp.exp(jax.nn.log_softmax(q @ k.T)) @ v

    q, k, v = rand(20, 8), rand(30, 8), rand(30, 5)
    wide = [np.asarray(a, np.float64) for a in (q, k, v)]
    np.testing.assert_allclose(
        pbkern.jit(attention)(q, k, v),
        softmax(wide[0] @ wide[1].T, -1) @ wide[2],
        rtol=1e-5,
        atol=1e-6,
    )
    order = names(attention, q, k, v)
    assert order.index("div") > max(n for n, name in enumerate(order) if name == "dot_general")
