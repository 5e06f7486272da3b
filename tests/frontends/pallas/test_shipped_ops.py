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
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as tpu_paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as ragged
from jax.experimental.pallas.ops.tpu.random import philox, threefry
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from tests.arrays import array


def normal(*shape, seed=0):
    return array(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def close(got, want, tolerance=2e-3):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want
    )


def softmax_attention(q, k, v, scale=1.0, causal=False):
    """[..., heads, length, width] attention in the plain way."""
    scores = jnp.einsum("...qd,...kd->...qk", q, k) * scale
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("...qk,...kd->...qd", jax.nn.softmax(scores, -1), v)


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_attention_forward_and_backward(causal):
    q, k, v = (normal(1, 128, 2, 64, seed=s) for s in range(3))
    f = lambda *a: (attention.mha(*a, None, causal=causal) ** 2).sum()
    g = lambda *a: (attention.mha_reference(*a, None, causal=causal) ** 2).sum()
    close(
        attention.mha(q, k, v, None, causal=causal),
        attention.mha_reference(q, k, v, None, causal=causal),
    )
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
    k, v = (
        jnp.moveaxis(p[:, table], 1, 0).reshape(2, 2, 1, 64, 64) for p in pages
    )  # [batch, kv head, 1, length, width]
    scores = jnp.einsum(
        "bhgd,bhgkd->bhgk", q.reshape(2, 2, 4, 64), jnp.broadcast_to(k, (2, 2, 4, 64, 64))
    )
    scores = jnp.where(jnp.arange(64) < lengths[:, None, None, None], scores, -jnp.inf)
    want = jnp.einsum(
        "bhgk,bhgkd->bhgd", jax.nn.softmax(scores, -1), jnp.broadcast_to(v, (2, 2, 4, 64, 64))
    )
    close(got, want.reshape(2, 8, 64))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("inline", "cores"), [(True, None), (False, None), (True, "kv_head"), (False, "batch")]
)
def test_paged_attention_of_tpus(inline, cores):
    """It multiplies in bfloat16."""
    q = normal(2, 8, 128) * 0.1
    pages = normal(2, 32, 16, 128, seed=1), normal(2, 32, 16, 128, seed=2)
    table = jnp.asarray(np.random.default_rng(3).permutation(32).reshape(2, 16), jnp.int32)
    lengths = jnp.array([200, 77], jnp.int32)
    options = {"pages_per_compute_block": 4, "inline_seq_dim": inline, "megacore_mode": cores}
    got = tpu_paged_attention(q, *pages, lengths, table, **options)
    k, v = (jnp.moveaxis(p[:, table], 1, 0).reshape(2, 2, 256, 128) for p in pages)
    scores = jnp.einsum("bhgd,bhkd->bhgk", q.reshape(2, 2, 4, 128), k)
    scores = jnp.where(jnp.arange(256) < lengths[:, None, None, None], scores, -jnp.inf)
    close(
        got, jnp.einsum("bhgk,bhkd->bhgd", jax.nn.softmax(scores, -1), v).reshape(2, 8, 128), 1e-2
    )


@pytest.mark.slow
def test_ragged_paged_attention():
    """Sequences of several lengths at once, some of them still being read in."""
    q, pages = normal(64, 8, 128), normal(64, 16, 4, 128, seed=1)
    lengths, starts = (
        jnp.array([40, 100, 17, 0], jnp.int32),
        jnp.array([0, 30, 47, 64, 64], jnp.int32),
    )
    table = jnp.asarray(np.random.default_rng(2).integers(0, 64, (4, 8)), jnp.int32)
    arguments = q, pages, lengths, table, starts, jnp.array([3], jnp.int32)
    got = ragged.ragged_paged_attention(
        *arguments, sm_scale=0.1, num_kv_pages_per_block=2, num_queries_per_block=16
    )
    close(got, ragged.ref_ragged_paged_attention(*arguments, sm_scale=0.1))


def test_normalisations_and_softmax():
    x, w, b = normal(2, 64, 128), normal(128, seed=1), normal(128, seed=2)
    close(layer_norm.layer_norm(x, w, b), layer_norm.layer_norm_reference(x, w, b))
    f = lambda op: jax.grad(lambda *a: (op(*a) ** 2).sum(), (0, 1, 2))(x, w, b)
    close(f(layer_norm.layer_norm), f(layer_norm.layer_norm_reference), 1e-2)
    close(rms_norm.rms_norm(x, w, b), rms_norm.rms_norm_reference(x, w, b))
    close(softmax.softmax(normal(32, 128)), jax.nn.softmax(normal(32, 128)))


def test_matmul():
    x, y = normal(256, 256), normal(256, 256, seed=1)
    close(matmul.matmul(x, y, block_shape=(128, 128), block_k=128), x @ y, 1e-3)


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_flash_attention(causal):
    q, k, v = (normal(1, 2, 256, 128, seed=s) for s in range(3))
    close(
        flash_attention.flash_attention(q, k, v, causal=causal, sm_scale=0.1),
        softmax_attention(q, k, v, 0.1, causal),
    )
    f = lambda op: jax.grad(lambda *a: (op(*a) ** 2).sum(), (0, 1, 2))(q, k, v)
    close(
        f(lambda *a: flash_attention.flash_attention(*a, causal=causal, sm_scale=0.1)),
        f(lambda *a: softmax_attention(*a, 0.1, causal)),
        1e-2,
    )


def test_splash_attention():
    mask = splash_attention_mask.MultiHeadMask(
        [splash_attention_mask.CausalMask((256, 256)) for _ in range(2)]
    )
    q, k, v = (normal(2, 256, 128, seed=s) * 0.3 for s in range(3))
    close(
        splash_attention_kernel.make_splash_mha_single_device(mask)(q, k, v),
        softmax_attention(q, k, v, 1.0, True),
    )


def test_grouped_matmul():
    x, w, sizes = (
        normal(256, 128),
        normal(4, 128, 128, seed=1),
        np.array([64, 32, 100, 60], np.int32),
    )
    group = np.repeat(np.arange(4), sizes)
    close(gmm(x, w, jnp.asarray(sizes)), jnp.einsum("mk,mkn->mn", x, w[group]))


def test_grouped_query_decoding_with_bounds():
    q, k, v = normal(2, 8, 64), normal(2, 256, 2, 64, seed=1), normal(2, 256, 2, 64, seed=2)
    start, end = jnp.array([3, 100], jnp.int32), jnp.array([200, 256], jnp.int32)
    close(decode_attention.gqa(q, k, v), decode_attention.gqa_reference(q, k, v))
    close(
        decode_attention.gqa(q, k, v, start, end),
        decode_attention.gqa_reference(q, k, v, start, end),
    )


def test_attention_with_segments():
    q, k, v = (normal(1, 128, 2, 64, seed=s) for s in range(3))
    segments = jnp.asarray(np.repeat([[0, 1, 2]], [50, 30, 48], axis=1), jnp.int32)
    close(attention.mha(q, k, v, segments), attention.mha_reference(q, k, v, segments))
    q, k, v = (normal(1, 2, 256, 128, seed=s) for s in range(3))
    segments = jnp.asarray(np.repeat([[0, 1]], [100, 156], axis=1), jnp.int32)
    ids = flash_attention.SegmentIds(segments, segments)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * 0.1
    scores = jnp.where(segments[:, None, :, None] == segments[:, None, None, :], scores, -jnp.inf)
    want = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1), v)
    close(flash_attention.flash_attention(q, k, v, segment_ids=ids, sm_scale=0.1), want)


@pytest.mark.slow
def test_splash_attention_backward_and_local():
    q, k, v = (normal(2, 256, 128, seed=s) * 0.3 for s in range(3))
    for local in (False, True):
        one = (
            splash_attention_mask.LocalMask((256, 256), (64, 0), 0)
            if local
            else splash_attention_mask.CausalMask((256, 256))
        )
        kernel = splash_attention_kernel.make_splash_mha_single_device(
            splash_attention_mask.MultiHeadMask([one] * 2)
        )
        inside = jnp.asarray(np.asarray(one[:, :]))

        def plain(q, k, v, inside=inside):
            scores = jnp.where(inside, jnp.einsum("hqd,hkd->hqk", q, k), -jnp.inf)
            return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, -1), v)

        close(kernel(q, k, v), plain(q, k, v))
        f = lambda op: jax.grad(lambda *a: (op(*a) ** 2).sum(), (0, 1, 2))(q, k, v)
        close(f(kernel), f(plain), 1e-2)


def test_grouped_query_splash_attention():
    q, k, v = normal(4, 256, 128) * 0.3, normal(256, 128, seed=1) * 0.3, normal(256, 128, seed=2)
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((256, 256))] * 4)
    got = splash_attention_kernel.make_splash_mqa_single_device(mask)(q, k, v)
    close(
        got, softmax_attention(q, *(jnp.broadcast_to(x, (4, 256, 128)) for x in (k, v)), 1.0, True)
    )


def test_grouped_matmul_backward():
    x, w, sizes = (
        normal(256, 128),
        normal(4, 128, 128, seed=1),
        np.array([64, 32, 100, 60], np.int32),
    )
    group = np.repeat(np.arange(4), sizes)
    f = lambda op: jax.grad(lambda *a: (op(*a) ** 2).sum(), (0, 1))(x, w)
    close(
        f(lambda x, w: gmm(x, w, jnp.asarray(sizes))),
        f(lambda x, w: jnp.einsum("mk,mkn->mn", x, w[group])),
        1e-2,
    )


def test_norms_of_rows_that_no_block_divides():
    x, w, b = normal(3, 7, 100), normal(100, seed=1), normal(100, seed=2)
    close(layer_norm.layer_norm(x, w, b), layer_norm.layer_norm_reference(x, w, b))
    close(rms_norm.rms_norm(x, w, b), rms_norm.rms_norm_reference(x, w, b))
    close(softmax.softmax(normal(9, 50)), jax.nn.softmax(normal(9, 50)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_floats(dtype):
    q, k, v = (normal(1, 128, 2, 64, seed=s).astype(dtype) for s in range(3))
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    close(
        attention.mha(q, k, v, None, sm_scale=0.1).astype("f4"),
        attention.mha_reference(*wide, None, sm_scale=0.1),
        3e-2,
    )
    x, y = normal(256, 256).astype(dtype), normal(256, 256, seed=1).astype(dtype)
    got = matmul.matmul(x, y, block_shape=(128, 128), block_k=128, out_dtype=jnp.float32)
    close(got, x.astype("f4") @ y.astype("f4"), 1e-2)


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


def milliseconds(f, x, runs):
    """Shortest of several runs."""
    jax.block_until_ready(f(x))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(f(x))
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def test_softmax_is_50_times_faster_than_the_interpreter():
    x = normal(512, 512)
    native, interpreted = (
        milliseconds(jax.jit(functools.partial(softmax.softmax, interpret=i)), x, runs=5)
        for i in (False, True)
    )
    assert interpreted > 50 * native, f"{native:.2f} ms native, {interpreted:.2f} ms interpreted"
