"""Chains of reductions are one kernel each, and as accurate as JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

from .checking import check, planned, rand
from .reduction_forms import FORMS


@pytest.mark.parametrize("name", FORMS)
def test_equals_jax(name):
    f, args, _, _ = FORMS[name]
    check(f, *args, kernels=1, tolerance=2e-5)


@pytest.mark.parametrize("name", FORMS)
def test_kernel_count_at_full_size(name):
    f, _, types, kernels = FORMS[name]
    plan = planned(f, *types)
    assert len(plan.kernels()) == kernels and not plan.left_to_xla(), str(plan.explanation)


def logsumexp(x):
    m = x.max(-1, keepdims=True)
    return m[..., 0] + np.log(np.exp(x - m).sum(-1))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


# name -> (JAX, NumPy in float64)
ACCURATE = {
    "sum": (lambda x: x.sum(-1), lambda x: x.sum(-1)),
    "mean": (lambda x: x.mean(-1), lambda x: x.mean(-1)),
    "variance": (lambda x: x.var(-1), lambda x: x.var(-1)),
    "norm": (lambda x: jnp.linalg.norm(x, axis=-1), lambda x: np.linalg.norm(x, axis=-1)),
    "softmax": (jax.nn.softmax, softmax),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, -1), logsumexp),
    "layer norm": (
        lambda x: (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5),
        layer_norm,
    ),
    "product": (lambda x: x @ x.T, lambda x: x @ x.T),
}


def deviation(got, want):
    """Root of the mean square of the error: rounding of one row or another is luck."""
    return float(np.sqrt(np.mean(np.square(got - want))))


def bound(theirs, want, dtype):
    """Twice JAX's error, or two units in the last place of the largest result."""
    unit = float(jnp.finfo(dtype).eps) * np.abs(want).max()
    return max(2 * deviation(theirs, want), 2 * unit)


CASES = [(n, offset, t) for n in ACCURATE for offset in (0, 1000) for t in ("float32", "bfloat16", "float16")]
# Products of equal signs add up in one chain over the whole depth.
LONG_CHAINS = pytest.mark.xfail(strict=True, reason="one accumulator per element of a product, however deep it is")


@pytest.mark.parametrize(
    "name, offset, dtype",
    [pytest.param(*c, marks=LONG_CHAINS if c == ("product", 1000, "float32") else ()) for c in CASES],
)
def test_as_accurate_as_jax(name, offset, dtype):
    f, exact = ACCURATE[name]
    if offset and dtype == "float16" and name in ("sum", "norm", "product", "variance", "layer norm"):
        offset = 8  # sums of squares stay in range
    for size in (1, 3, 1000, 4097, 100001):
        x = (rand(16, size) + offset).astype(dtype)
        want = exact(np.asarray(x, np.float64))
        ours, theirs = (np.asarray(jit(f)(x), np.float64) for jit in (pbkern.jit, jax.jit))
        assert deviation(ours, want) <= bound(theirs, want, dtype), size


def test_as_accurate_as_jax_in_double_precision():
    with jax.enable_x64(True):
        for name, (f, exact) in ACCURATE.items():
            for size in (3, 4097):
                x = jnp.asarray(np.random.default_rng(0).normal(1000, 1, (16, size)))
                want = exact(np.asarray(x, np.longdouble)) if name != "norm" else exact(np.asarray(x))
                ours, theirs = (np.asarray(jit(f)(x)) for jit in (pbkern.jit, jax.jit))
                assert ours.dtype == np.float64
                assert deviation(ours, want) <= bound(theirs, want, "float64"), (name, size)


@pytest.mark.parametrize("f", [jnp.sum, jnp.var, lambda x: jax.nn.softmax(x @ x.T)], ids=["sum", "var", "softmax of product"])
def test_every_call_gives_the_same_bits(f):
    x, f = rand(301, 2003), pbkern.jit(f)
    first = np.asarray(f(x)).tobytes()
    assert all(np.asarray(f(x)).tobytes() == first for _ in range(50))
