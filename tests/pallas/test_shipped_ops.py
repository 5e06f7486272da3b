"""The target-neutral kernels that ship with JAX run unchanged, agree with their references and beat the interpreter."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.gpu import (
    attention,
    decode_attention,
    layer_norm,
    paged_attention,
    rms_norm,
    softmax,
)
from jax.experimental.pallas.ops.tpu import flash_attention, matmul
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.experimental.pallas.ops.tpu.random import philox, threefry
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def close(got, want, tolerance=2e-3):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want)


def softmax_attention(q, k, v, scale=1.0, causal=False):
    """[..., heads, length, width] attention in the plain way."""
    scores = jnp.einsum("...qd,...kd->...qk", q, k) * scale
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("...qk,...kd->...qd", jax.nn.softmax(scores, -1), v)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_forward_and_backward(causal):
    q, k, v = (normal(1, 128, 2, 64, seed=s) for s in range(3))
    f = lambda *a: (attention.mha(*a, None, causal=causal) ** 2).sum()  # noqa: E731
    g = lambda *a: (attention.mha_reference(*a, None, causal=causal) ** 2).sum()  # noqa: E731
    close(attention.mha(q, k, v, None, causal=causal), attention.mha_reference(q, k, v, None, causal=causal))
    close(jax.grad(f, (0, 1, 2))(q, k, v), jax.grad(g, (0, 1, 2))(q, k, v), 1e-2)


def test_decode_attention():
    q, k, v = normal(2, 16, 64), normal(2, 256, 64, seed=1), normal(2, 256, 64, seed=2)
    close(decode_attention.mqa(q, k, v), decode_attention.mqa_reference(q, k, v))


def test_paged_attention():
    q = normal(2, 8, 64)
    pages = normal(2, 16, 8, 64, seed=1), normal(2, 16, 8, 64, seed=2)
    table = jnp.asarray(np.random.default_rng(3).permutation(16).reshape(2, 8), jnp.int32)
    lengths = jnp.array([60, 33], jnp.int32)
    got = paged_attention.paged_attention(q, *pages, table, lengths, k_splits=4)
    k, v = (jnp.moveaxis(p[:, table], 1, 0).reshape(2, 2, 1, 64, 64) for p in pages)  # [batch, kv head, 1, length, width]
    scores = jnp.einsum("bhgd,bhgkd->bhgk", q.reshape(2, 2, 4, 64), jnp.broadcast_to(k, (2, 2, 4, 64, 64)))
    scores = jnp.where(jnp.arange(64) < lengths[:, None, None, None], scores, -jnp.inf)
    want = jnp.einsum("bhgk,bhgkd->bhgd", jax.nn.softmax(scores, -1), jnp.broadcast_to(v, (2, 2, 4, 64, 64)))
    close(got, want.reshape(2, 8, 64))


def test_normalisations_and_softmax():
    x, w, b = normal(2, 64, 128), normal(128, seed=1), normal(128, seed=2)
    close(layer_norm.layer_norm(x, w, b), layer_norm.layer_norm_reference(x, w, b))
    f = lambda op: jax.grad(lambda *a: (op(*a) ** 2).sum(), (0, 1, 2))(x, w, b)  # noqa: E731
    close(f(layer_norm.layer_norm), f(layer_norm.layer_norm_reference), 1e-2)
    close(rms_norm.rms_norm(x, w, b), rms_norm.rms_norm_reference(x, w, b))
    close(softmax.softmax(normal(32, 128)), jax.nn.softmax(normal(32, 128)))


def test_matmul():
    x, y = normal(256, 256), normal(256, 256, seed=1)
    close(matmul.matmul(x, y, block_shape=(128, 128), block_k=128), x @ y, 1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention(causal):
    q, k, v = (normal(1, 2, 256, 128, seed=s) for s in range(3))
    close(flash_attention.flash_attention(q, k, v, causal=causal, sm_scale=0.1), softmax_attention(q, k, v, 0.1, causal))
    f = lambda op: jax.grad(lambda *a: (op(*a) ** 2).sum(), (0, 1, 2))(q, k, v)  # noqa: E731
    close(
        f(lambda *a: flash_attention.flash_attention(*a, causal=causal, sm_scale=0.1)),
        f(lambda *a: softmax_attention(*a, 0.1, causal)),
        1e-2,
    )


def test_splash_attention():
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((256, 256)) for _ in range(2)])
    q, k, v = (normal(2, 256, 128, seed=s) * 0.3 for s in range(3))
    close(splash_attention_kernel.make_splash_mha_single_device(mask)(q, k, v), softmax_attention(q, k, v, 1.0, True))


def test_grouped_matmul():
    x, w, sizes = normal(256, 128), normal(4, 128, 128, seed=1), np.array([64, 32, 100, 60], np.int32)
    group = np.repeat(np.arange(4), sizes)
    close(gmm(x, w, jnp.asarray(sizes)), jnp.einsum("mk,mkn->mn", x, w[group]))


def test_counter_based_random_numbers():
    key = jnp.array([7, 11], jnp.uint32)
    from jax.extend.random import threefry_2x32

    shape = (8, 256)
    got = threefry.threefry_2x32_count(key, shape, shape, shape)
    low = jnp.arange(np.prod(shape), dtype=jnp.uint32)
    want = threefry_2x32(key, jnp.concatenate([jnp.zeros_like(low), low]))
    high, low = jnp.split(want, 2)
    np.testing.assert_array_equal(got, (high ^ low).reshape(shape))
    bits = philox.philox_4x32_count(key, shape) if hasattr(philox, "philox_4x32_count") else None
    if bits is not None:
        assert abs(np.asarray(bits, np.float64).mean() / 2**32 - 0.5) < 0.02


def milliseconds(f, *args, runs):
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - start)
    return 1e3 * sorted(times)[runs // 2]


def test_attention_is_far_faster_than_the_interpreter():
    q = normal(1, 512, 4, 64)
    f = [jax.jit(functools.partial(attention.mha, segment_ids=None, interpret=i)) for i in (False, True)]
    native, interpreted = milliseconds(f[0], q, q, q, runs=5), milliseconds(f[1], q, q, q, runs=3)
    assert interpreted > 3 * native, f"{native:.2f} ms native, {interpreted:.2f} ms interpreted"
