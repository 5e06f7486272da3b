"""Chunks of keys that a mask hides are not read; results are those of the mask.

Blocks of keys that may not be read hold NaN: whatever reads them makes results NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pbkern
import pbkern.fuse.tiling.online_analysis
import pbkern.fuse.tiling.schedule
from pbkern.fuse.tiling.hidden_chunks import HIDING_BIAS

from .attention_forms import attend, operands
from .checking import check, rand

CHUNK, KEYS = 8, 44
LEAST = float(np.finfo(np.float32).min)


@pytest.fixture(scope="module", autouse=True)
def short_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pbkern.fuse.tiling.online_analysis, "CHUNK_COLUMNS", CHUNK)
        patch.setattr(pbkern.fuse.tiling.schedule, "NEAR_CHUNK_SHARE", 0.0)
        yield


def by_position(q, k, v, position):
    return attend(q, k, v, mask=jnp.arange(k.shape[2]) <= position)


def by_hidden_position(q, k, v, position):
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    s = jnp.where(jnp.arange(k.shape[2]) > position, LEAST, s)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(s * 0.5, -1), v)


def by_padding(q, k, v, position):
    """A mask that is an operand."""
    return attend(q, k, v, mask=(jnp.arange(k.shape[2]) <= position)[None, None, None])


def by_bias(q, k, v, position):
    return attend(q, k, v, bias=jnp.where(jnp.arange(k.shape[2]) <= position, 0, LEAST))


def by_infinite_bias(q, k, v, position):
    hidden = jnp.where(jnp.arange(k.shape[2]) <= position, 0, -jnp.inf)
    return attend(q, k, v, bias=jax.lax.optimization_barrier(hidden))


def by_scaled_short(q, k, v, position):
    """Scores of 16 bits, changed after they are hidden."""
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.bfloat16)
    s = jnp.where(jnp.arange(k.shape[2]) <= position, s, jnp.bfloat16(-jnp.inf)) * jnp.bfloat16(0.5)
    p = jax.nn.softmax(s.astype(jnp.float32), -1)
    return jnp.einsum("bhqk,bhkd->bhqd", p, v)


def by_exp2(q, k, v, position):
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    s = jnp.where(jnp.arange(k.shape[2]) <= position, s, -1e9)
    p = jnp.exp2(s - s.max(-1, keepdims=True))
    return jnp.einsum("bhqk,bhkd->bhqd", p, v) / p.sum(-1)[..., None]


MASKS = [
    by_position,
    by_hidden_position,
    by_padding,
    by_bias,
    by_infinite_bias,
    by_exp2,
    by_scaled_short,
]
compiled = {f: pbkern.jit(f) for f in MASKS}


def hidden(keys, end, dtype="float32"):
    """`keys` with NaN in the chunks that begin behind position `end`."""
    first = (end // CHUNK + 1) * CHUNK
    return keys.at[:, :, first:].set(jnp.asarray(np.nan, dtype))


@pytest.mark.parametrize("f", MASKS)
@given(position=st.integers(0, KEYS - 1))
def test_reads_the_keys_up_to_a_position(f, position):
    q, k, v = operands(q=3, k=KEYS, width=64)
    got = compiled[f](q, hidden(k, position), hidden(v, position), position)
    np.testing.assert_allclose(got, jax.jit(f)(q, k, v, position), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("f", [by_position, by_infinite_bias])
def test_other_types(f, dtype):
    with jax.enable_x64(dtype == "float64"):
        q, k, v = (rand(1, 2, n, 64, seed=n).astype(dtype) for n in (3, KEYS, KEYS))
        got = pbkern.jit(f)(q, hidden(k, 20, dtype), hidden(v, 20, dtype), 20)
        tolerance = 1e-5 if dtype == "float64" else 2e-2
        want = jax.jit(f)(q, k, v, 20)
        np.testing.assert_allclose(
            np.float64(got), np.float64(want), rtol=tolerance, atol=tolerance
        )


@given(lengths=st.lists(st.integers(0, KEYS), min_size=6, max_size=6), first=st.integers(0, KEYS))
def test_rows_of_several_lengths(lengths, first):
    """Rows without a key are NaN; chunks before the first key are left out as well."""
    q, k, v = operands(q=6, k=KEYS, width=64)
    args = q, k, v, jnp.asarray(lengths), first
    np.testing.assert_allclose(rows(*args), rows_by_jax(*args), rtol=1e-5, atol=1e-5)


def by_rows(q, k, v, lengths, first):
    at = jnp.arange(k.shape[2])
    return attend(q, k, v, mask=(at < lengths[:, None]) & (at >= first))


rows, rows_by_jax = pbkern.jit(by_rows), jax.jit(by_rows)


def test_keys_in_front():
    q, k, v = operands(q=6, k=KEYS, width=64)
    got = rows(q, k, v.at[:, :, :16].set(np.nan), jnp.full(6, KEYS), 16)
    np.testing.assert_allclose(got, by_rows(q, k, v, jnp.full(6, KEYS), 16), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fill", [-np.inf, -1e9, LEAST, -5.0, 0.0, 3.0, np.inf, np.nan])
@pytest.mark.parametrize("position", [-1, 8])
def test_fills(fill, position):
    """Where hidden scores count, or all are hidden, every key is read."""

    def f(q, k, v, position):
        return attend(q, k, v, mask=jnp.arange(k.shape[2]) <= position, fill=fill)

    check(f, *operands(q=5, k=KEYS, width=64), jnp.int32(position), kernels=1, tolerance=1e-5)


@pytest.mark.parametrize("bias", [-5.0, HIDING_BIAS / 10, HIDING_BIAS, -np.inf, np.nan, np.inf])
@pytest.mark.parametrize("shown", [0, 20])
def test_biases(bias, shown):
    def f(q, k, v, bias):
        return attend(q, k, v, bias=bias)

    biases = jnp.where((jnp.arange(KEYS) >= 9) & (jnp.arange(KEYS) < 9 + shown), 0.5, bias)
    check(f, *operands(q=5, k=KEYS, width=64), biases, kernels=1, tolerance=1e-5)


@pytest.mark.parametrize("position", [-1, 20])
def test_hidden_scores_that_are_changed(position):
    """Where every key is hidden, a lower limit makes all of them alike."""

    def f(q, k, v, position):
        s = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        s = jnp.maximum(jnp.where(jnp.arange(k.shape[2]) <= position, s, -jnp.inf), -1e9)
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(s, -1), v)

    check(f, *operands(q=5, k=KEYS, width=64), jnp.int32(position), kernels=1, tolerance=1e-5)


def test_segments():
    def f(q, k, v, of_queries, of_keys):
        return attend(q, k, v, mask=of_queries[:, None] == of_keys)

    args = operands(q=30, k=KEYS, width=64)
    segments = jnp.repeat(jnp.arange(4), 11)
    check(f, *args, segments[:30], segments, kernels=1, tolerance=1e-5)


def test_gradients():
    q, k, v = operands(q=6, k=KEYS, width=64)
    for f in MASKS:
        loss = lambda *args, f=f: (f(*args, 20) ** 2).sum()
        got = pbkern.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
        want = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
        for a, b in zip(got, want):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def explained(f, *args):
    return str(pbkern.jit(f).explain(*args))


def test_explain_tells():
    args = operands(q=3, k=KEYS, width=64)
    told = "columns that the mask does not hide"
    assert all(told in explained(f, *args, 3) for f in MASKS)
    assert told not in explained(attend, *args)


def by_bias_of_one_query(q, k, v, position):
    """A bias that costs a sixteenth of the scores: a select of numbers is as cheap to test as its mask."""
    at = jnp.arange(k.shape[2]) + position[0]
    return attend(q, k, v, bias=jnp.where(at + 1 <= position[1], 0.0, LEAST))


def test_biases_that_select_are_masks():
    q, k, v = operands(q=1, k=KEYS, width=64)
    position = jnp.array([0, 20])
    assert "the mask does not hide" in explained(by_bias_of_one_query, q, k, v, position)
    got = pbkern.jit(by_bias_of_one_query)(q, hidden(k, 20), hidden(v, 20), position)
    want = jax.jit(by_bias_of_one_query)(q, k, v, position)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_guarded_maxima_leave_out_chunks():
    """Rows of which no key is shown stay finite."""

    def f(q, k, v, lengths):
        shown = jnp.arange(k.shape[2]) < lengths[:, None]
        s = jnp.where(shown, jnp.einsum("bhqd,bhkd->bhqk", q, k), -jnp.inf)
        m = s.max(-1, keepdims=True)
        p = jnp.where(shown, jnp.exp(s - jnp.where(m == -jnp.inf, 0, m)), 0)
        sums = p.sum(-1, keepdims=True)
        return jnp.einsum("bhqk,bhkd->bhqd", p, v) / jnp.where(sums == 0, 1, sums)

    q, k, v = operands(q=4, k=KEYS, width=64)
    lengths = jnp.array([3, 0, 17, 8])
    assert "the mask does not hide" in explained(f, q, k, v, lengths)
    got = pbkern.jit(f)(q, hidden(k, 16), hidden(v, 16), lengths)
    np.testing.assert_allclose(got, jax.jit(f)(q, k, v, lengths), rtol=1e-5, atol=1e-5)
    assert not np.asarray(got)[:, :, 1].any()


def test_masks_of_indices_are_no_tests():
    """They shorten loops instead."""
    q, k, v = operands(q=KEYS, k=KEYS, width=64)
    f = lambda q, k, v: attend(q, k, v, mask=jnp.tri(KEYS, dtype=bool))
    assert "the mask does not hide" not in explained(f, q, k, v)
