"""Log-likelihoods with lgamma, and their gradients with digamma, are kernels that leave nothing to XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import betaln, digamma, gammaln, xlogy

import pbkern
from pbkern.testing import assert_fused, assert_kernels


def poisson(k, rate):
    return (xlogy(k, rate) - rate - gammaln(k + 1)).sum()


def beta(a, b):
    return (a * jnp.log(0.3) + b * jnp.log(0.7) - betaln(a, b)).sum()


def negative_binomial(k, r):
    return (
        gammaln(k + r) - gammaln(k + 1) - gammaln(r) + r * jnp.log(0.3) + k * jnp.log(0.7)
    ).sum()


def rows_of_dirichlet(x, a):
    return gammaln(a.sum(-1)) - gammaln(a).sum(-1) + ((a - 1) * jnp.log(x)).sum(-1)


def operands(*shape):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.uniform(low, 9, shape), "float32") for low in (0.01, 0.5)]


LIKELIHOODS = (poisson, beta, negative_binomial)


@pytest.mark.parametrize("f", LIKELIHOODS, ids=lambda f: f.__name__)
def test_likelihoods(f):
    args = operands(10_007)
    gradient = jax.grad(f, (0, 1))
    assert_kernels(pbkern.jit(f), args, 1)
    assert_kernels(pbkern.jit(gradient), args, 1)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in args]
        value, slopes = jax.jit(f)(*wide), jax.jit(gradient)(*wide)
    np.testing.assert_allclose(pbkern.jit(f)(*args), value, rtol=2e-6)
    for got, want in zip(pbkern.jit(gradient)(*args), slopes, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_rows():
    x, a = operands(33, 70)
    x /= x.sum(-1, keepdims=True)
    assert_fused(rows_of_dirichlet, (x, a))
    np.testing.assert_allclose(
        pbkern.jit(rows_of_dirichlet)(x, a), rows_of_dirichlet(x, a), rtol=1e-4
    )


@pytest.mark.parametrize("interpret", [False, True])
def test_in_written_kernels(interpret):
    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((64,), jnp.float32), interpret=interpret)
    def both(x, o):
        o[...] = jax.lax.lgamma(x[...]) * jax.lax.digamma(x[...])

    x = jnp.linspace(0.1, 12, 64)
    np.testing.assert_allclose(both(x), gammaln(x) * digamma(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("f", [gammaln, digamma], ids=lambda f: f.__name__)
def test_types(f, dtype):
    with jax.enable_x64(True):
        x = jnp.linspace(-6.3, 20, 999).astype(dtype)
        got, want = (np.asarray(g(x), np.float64) for g in (pbkern.jit(f), jax.jit(f)))
        tolerance = (80 if dtype in ("float32", "float64") else 2) * float(
            jnp.finfo(dtype).eps
        )  # most of it XLA's
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
