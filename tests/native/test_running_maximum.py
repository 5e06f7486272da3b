"""Exponentials of long rows in one pass (lower/passes/strips/running_maximum.py): accuracy, special values, and which
functions it applies to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern


def logsumexp(x):
    return jax.nn.logsumexp(x, axis=-1)


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def log_softmax(x):
    return jax.nn.log_softmax(x, axis=-1)


def cross_entropy(x):
    return -jnp.take_along_axis(log_softmax(x), jnp.arange(len(x))[:, None] * 3, -1)[:, 0]


def gradient(x):
    return jax.grad(lambda x: cross_entropy(x).mean())(x)


def softmax_gradient(x):
    return jax.vjp(softmax, x)[1](jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape))[0]


def one_hot_loss(x):
    return -(log_softmax(x) * jax.nn.one_hot(jnp.arange(len(x)) * 5, x.shape[-1])).sum(-1)


def chosen_loss(x):
    return -log_softmax(x)[jnp.arange(len(x)), jnp.arange(len(x)) * 5]


def greatest_and_sum(x):
    m = x.max(-1)
    return m, jnp.exp2(x - m[:, None]).sum(-1)


def weighed(x):
    """Another sum beside that of exponentials, and a factor of each."""
    p = jnp.exp(x - x.max(-1, keepdims=True))
    return (p * jnp.abs(x)).sum(-1) / p.sum(-1), (x * x).sum(-1)


def products_of_exponentials(x):
    """No sum says whether there is NaN among the elements."""
    m = x.max(-1, keepdims=True)
    return m, (jnp.exp(x - m) * jnp.arange(x.shape[-1])).sum(-1)


FUNCTIONS = [
    logsumexp, softmax, log_softmax, cross_entropy, gradient, softmax_gradient, one_hot_loss, greatest_and_sum, weighed,
    products_of_exponentials,
]  # fmt: skip
KINDS = [
    "normal",
    "far",
    "rising",
    "peak at the end",
    "first elements apart",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("wide", "falling", "steps")),
]
NAMES = [f.__name__ for f in FUNCTIONS]


def nests(f, *args):
    return pbkern.jit(f).as_text(*args, stage="nests")


def is_leveled(f, *args) -> bool:
    return "maxnum" in nests(f, *args)


def picked_loss(x):
    """As it is written with labels: what is picked of a row is read beside its sums."""
    return logsumexp(x) - jnp.take_along_axis(x, jnp.arange(len(x))[:, None] * 3, -1)[:, 0]


@pytest.mark.parametrize("f", [logsumexp, cross_entropy, picked_loss])
def test_the_next_strips_of_long_rows_are_asked_for(f):
    assert " prefetch %a0 + " in nests(f, jax.ShapeDtypeStruct((512, 32_000), jnp.float32))


def rows(kind: str, shape) -> np.ndarray:
    rng, n = np.random.default_rng(7), shape[-1]
    z = rng.normal(size=shape)
    ramp = np.linspace(0, 60, n)
    return {
        "normal": z, "wide": 10 * z, "far": z - 900, "rising": ramp + 0 * z, "falling": -ramp + 0 * z,
        "steps": np.floor(ramp / 5) * 1.9 + z / 100, "peak at the end": z - 40 * (np.arange(n) < n - 3),
        "first elements apart": z - 50 * (np.arange(n) < 3000),
    }[kind]  # fmt: skip


def errors(got, want) -> np.ndarray:
    """In units of the last place of the largest result of each row."""
    got, want = (np.atleast_2d(np.asarray(a, np.float64)) for a in (got, want))
    return np.abs(got - want) / np.spacing(np.abs(want).max(-1, keepdims=True).astype(np.float32))


@pytest.mark.sampled(15)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("f", FUNCTIONS, ids=NAMES)
def test_errs_about_as_much_as_jax(f, kind):
    """At most twice as much in the median, and three times at the worst element, where terms of gradients cancel."""
    for shape in ((5, 8192), (3, 10007)):
        x = rows(kind, shape).astype(np.float32)
        with jax.enable_x64(True):
            want = jax.tree.leaves(jax.jit(f)(x.astype(np.float64)))
        got, theirs = jax.tree.leaves(pbkern.jit(f)(x)), jax.tree.leaves(jax.jit(f)(x))
        for g, w, t in zip(got, want, theirs):
            assert np.median(errors(g, w)) <= max(2 * np.median(errors(t, w)), 2)
            assert errors(g, w).max() <= max(3 * errors(t, w).max(), 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("f", FUNCTIONS, ids=NAMES)
def test_it_is_at_work(f):
    assert is_leveled(f, jax.ShapeDtypeStruct((512, 32000), jnp.float32))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float64])
@pytest.mark.parametrize("shape", [(4, 32000), (2, 25_001)])
def test_other_types(dtype, shape):
    with jax.enable_x64(True):
        x = jnp.asarray(rows("normal", shape) * 3, dtype)
        eps = float(jnp.finfo(dtype).eps)
        for f in (logsumexp, softmax, cross_entropy, greatest_and_sum):
            assert is_leveled(f, jax.ShapeDtypeStruct((512, shape[1]), dtype))
            want = jax.tree.leaves(f(x.astype(jnp.float64)))
            for g, w in zip(jax.tree.leaves(pbkern.jit(f)(x)), want):
                assert g.dtype == dtype
                np.testing.assert_allclose(
                    np.asarray(g, np.float64), w, rtol=20 * eps, atol=4 * eps * np.abs(w).max()
                )


def special_rows(n: int) -> np.ndarray:
    """NaN and infinities at the start, in the middle and at the end of rows; among elements of any size."""
    x = np.random.default_rng(8).normal(size=(16, n)).astype(np.float32)
    x[1:5] -= 300
    x[0] = -np.inf
    x[1, :5000] = -np.inf
    x[2, -5000:] = -np.inf
    x[3, 3], x[4, -3], x[5, 4000], x[6, 3] = np.inf, np.inf, np.nan, np.nan
    x[7, 5], x[7, 6000] = np.inf, np.nan
    x[8] = np.finfo(np.float32).min
    x[9, :6000] = np.finfo(np.float32).min
    x[10, 100:] = np.finfo(np.float32).min
    x[11] = np.inf
    x[12, ::2], x[12, 1::2] = -np.inf, 80
    x[13, 7], x[13, -7] = np.finfo(np.float32).max, -np.inf
    x[14] = 0
    return x


@pytest.mark.sampled(9)
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("n", [8192, 10007, pytest.param(32000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("f", FUNCTIONS, ids=NAMES)
def test_special_values(f, n):
    x = special_rows(n)
    if f is weighed:
        x = x[np.abs(x).max(-1) < 1e30]  # squares that overflow are not what this is about
    # XLA's fused maxima pass over NaN, so functions are not compiled for comparison. Compiled, by XLA as well, a product with
    # a mask is a choice: an infinity times zero is no NaN.
    reference = chosen_loss if f is one_hot_loss else f
    for g, w in zip(jax.tree.leaves(pbkern.jit(f)(x)), jax.tree.leaves(reference(x))):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("n", [8192, 10007])
def test_masked_rows(n):
    x = special_rows(n)
    mask = np.random.default_rng(9).random(x.shape) < 0.7
    mask[2], mask[5, 4000], mask[6, 3], mask[3, 3] = False, False, True, False
    mask[13] = np.arange(n) > 7000
    functions = [
        lambda x, m: jax.nn.logsumexp(x, axis=-1, where=m),
        lambda x, m: jax.nn.softmax(x, axis=-1, where=m),
        lambda x, m: jax.nn.softmax(jnp.where(m, x, -jnp.inf), axis=-1),
        lambda x, m: jax.nn.softmax(jnp.where(m, x, jnp.finfo(x.dtype).min), axis=-1),
    ]
    for f in functions:
        assert is_leveled(f, *(jax.ShapeDtypeStruct((512, n), t) for t in (jnp.float32, bool)))
        np.testing.assert_allclose(
            pbkern.jit(f)(x, mask), jax.jit(f)(x, mask), rtol=2e-5, atol=1e-6
        )


def test_exponentials_that_only_some_elements_take_part_in_stay_in_range():
    """The greatest is of fewer elements than the sum: no strip's own level may be taken off the others."""

    def f(x):
        m = jnp.where(x < 5, x, -100.0).max(-1, keepdims=True)
        return jnp.exp(x - m - 1).sum(-1), jnp.exp(x - m).sum(-1)

    x = rows("normal", (4, 8192)).astype(np.float32)
    x[:, 3000:5000] += 80
    for g, w in zip(pbkern.jit(f)(x), jax.jit(f)(x)):
        np.testing.assert_allclose(g, w, rtol=1e-5)


def test_exponentials_that_are_results_are_left_alone():
    """What is stored for others is less the greatest of the whole row."""

    def f(x):
        p = jnp.exp(x - x.max(-1, keepdims=True))
        return p, p.sum(-1)

    x = rows("wide", (8, 8192)).astype(np.float32)
    for g, w in zip(pbkern.jit(f)(x), f(x)):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("f", [softmax, cross_entropy, logsumexp], ids=lambda f: f.__name__)
def test_one_kernel(f):
    text = nests(f, jax.ShapeDtypeStruct((512, 32000), jnp.float32))
    assert "k0_" in text
    assert "k1_" not in text
