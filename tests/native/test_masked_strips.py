"""Nests cut into strips that masks silence (lower/passes/strips/strip_mining.py): attention with masks that move with the
program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern


def attention(q, k, v, mask, fill):
    scores = jnp.where(mask(q.shape[1], k.shape[1]), jnp.einsum("hqd,hkd->hqk", q, k) * 0.25, fill)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, axis=-1), v)


def positions(rows, columns):
    return jnp.arange(rows)[:, None], jnp.arange(columns)[None, :]


def causal(rows, columns):
    i, j = positions(rows, columns)
    return i >= j


def aligned_at_the_end(rows, columns):
    i, j = positions(rows, columns)
    return i + (columns - rows) >= j


def window(rows, columns):
    i, j = positions(rows, columns)
    return (i >= j) & (i - j < 100)


def ahead(rows, columns):
    i, j = positions(rows, columns)
    return j - i > 40  # the last rows see nothing


def inverted(rows, columns):
    i, j = positions(rows, columns)
    return ~(j > i)


MASKS = [causal, aligned_at_the_end, window, ahead, inverted]


def operands(rows, columns, width=16, dtype=jnp.float32):
    rng = np.random.default_rng(rows + columns)
    return [jnp.asarray(rng.normal(size=(3, n, width)), dtype) for n in (rows, columns, columns)]


def in_float64(q, k, v, mask, fill):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.where(
        np.asarray(mask(q.shape[1], k.shape[1])), np.einsum("hqd,hkd->hqk", q, k) * 0.25, fill
    )
    with np.errstate(invalid="ignore"):
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hqk,hkd->hqd", p / p.sum(-1, keepdims=True), v)


def is_cut(f, *args) -> bool:
    return any(
        line.lstrip().startswith("let ") for line in f.as_text(*args, stage="nests").splitlines()
    )


@pytest.mark.sampled(10)
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("fill", [-np.inf, -1e30, -5.0, 0.0])
@pytest.mark.parametrize(("rows", "columns"), [(1024, 1024), (600, 1000)])
def test_masked_attention(mask, fill, rows, columns):
    args = operands(rows, columns)
    f = pbkern.jit(lambda q, k, v: attention(q, k, v, mask, fill))
    got = np.asarray(f(*args))
    np.testing.assert_allclose(got, in_float64(*args, mask, fill), rtol=2e-5, atol=2e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.__name__)
def test_strips_are_skipped(mask):
    """The mechanism is at work at these shapes, not only the plain nests."""
    assert is_cut(
        pbkern.jit(lambda q, k, v: attention(q, k, v, mask, -jnp.inf)), *operands(2048, 2048, 64)
    )


def test_low_precision():
    args = operands(1024, 1024, 64, jnp.bfloat16)
    f = lambda q, k, v: attention(q, k, v, causal, -jnp.inf)
    want = in_float64(*args, causal, -np.inf)
    ours, jaxs = (
        np.abs(np.asarray(g(*args), np.float64) - want).max() for g in (pbkern.jit(f), jax.jit(f))
    )
    assert ours <= 2 * jaxs


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_special_values_of_live_keys(bad):
    """A row that sees NaN or an infinity among its scores is what jax.jit makes of it, and no other row is."""
    q, k, v = operands(1024, 1024)
    k = k.at[:, 700].set(bad)
    f = lambda q, k, v: attention(q, k, v, causal, -jnp.inf)
    got, want = np.asarray(pbkern.jit(f)(q, k, v)), np.asarray(jax.jit(f)(q, k, v))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_masked_row_sums():
    """Not only attention: a masked product of rows with columns."""

    def f(x, w):
        i, j = positions(*x.shape)
        kept = jnp.where(i >= j, jnp.exp(x), 0.0)
        return kept @ w, kept.sum(1)

    rng = np.random.default_rng(3)
    x, w = (
        jnp.asarray(rng.normal(size=(1500, 1500)), jnp.float32),
        jnp.asarray(rng.normal(size=(1500, 24)), jnp.float32),
    )
    kept = np.tril(np.exp(np.asarray(x, np.float64)))
    for got, want in zip(pbkern.jit(f)(x, w), (kept @ np.asarray(w, np.float64), kept.sum(1))):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


def for_keys(mask, fill, given):
    """What gradients with respect to keys and values are made of: sums over the queries, whose maxima and sums are given."""
    q, k, v = given

    def f(m, total, g):
        scores = jnp.where(
            mask(q.shape[1], k.shape[1]), jnp.einsum("hqd,hkd->hqk", q, k) * 0.25, fill
        )
        p = jnp.exp(scores - m[..., None]) / total[..., None]
        change = jnp.where(mask(q.shape[1], k.shape[1]), p * jnp.einsum("hqd,hkd->hqk", g, v), 0)
        return jnp.einsum("hqk,hqd->hkd", p, g), jnp.einsum("hqk,hqd->hkd", change, q)

    return f


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mask", [causal, window])
@pytest.mark.parametrize("fill", [-np.inf, -1e30, -5.0])
def test_queries_that_do_not_see_a_key_are_skipped(mask, fill):
    """Their exponentials are 0 unless what the mask leaves is not small: every query has a test of its own."""
    q, k, v = operands(1024, 1024)
    g = operands(1024, 1024)[2] * 0.5
    scores = jnp.where(mask(1024, 1024), jnp.einsum("hqd,hkd->hqk", q, k) * 0.25, fill)
    m = scores.max(-1)
    args = m, jnp.exp(scores - m[..., None]).sum(-1), g
    f = pbkern.jit(lambda q, k, v, *args: for_keys(mask, fill, (q, k, v))(*args))
    assert is_cut(f, q, k, v, *args)
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) for a in (q, k, v, *args)]
        want = for_keys(mask, fill, wide[:3])(*wide[3:])
    for a, b in zip(f(q, k, v, *args), want):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
