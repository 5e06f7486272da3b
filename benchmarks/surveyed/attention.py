"""Attention in many dresses, and what surrounds it."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

dot = jax.nn.dot_product_attention


def plain(q, k, v):
    return jnp.einsum(
        "hqk,hkd->hqd", jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k) / q.shape[-1] ** 0.5), v
    )


def causal(q, k, v):
    s = jnp.einsum("hqd,hkd->hqk", q, k) / q.shape[-1] ** 0.5
    s = jnp.where(jnp.tril(jnp.ones(s.shape[1:], bool)), s, -jnp.inf)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(s), v)


def window(width, q, k, v):
    s = jnp.einsum("hqd,hkd->hqk", q, k) / q.shape[-1] ** 0.5
    i, j = jnp.arange(s.shape[1])[:, None], jnp.arange(s.shape[2])[None]
    return jnp.einsum(
        "hqk,hkd->hqd", jax.nn.softmax(jnp.where((j <= i) & (i - j < width), s, -1e30)), v
    )


def alibi(q, k, v):
    s = jnp.einsum("hqd,hkd->hqk", q, k) / q.shape[-1] ** 0.5
    i, j = jnp.arange(s.shape[1])[:, None], jnp.arange(s.shape[2])[None]
    slope = 2.0 ** (-8.0 * (jnp.arange(q.shape[0]) + 1) / q.shape[0])
    s = jnp.where(j <= i, s + slope[:, None, None] * (j - i), -jnp.inf)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(s), v)


def soft_cap(q, k, v):
    s = 30 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5 / 30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)


def key_padding(q, k, v, keep):
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
    s = jnp.where(keep[:, None, None, :], s, -1e9)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(s), v)


def grouped(q, k, v):
    q = q.reshape(k.shape[0], -1, *q.shape[1:])
    s = jnp.einsum("kgqd,kjd->kgqj", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("kgqj,kjd->kgqd", jax.nn.softmax(s), v)


def decode(q, k, v, length):
    s = jnp.einsum("hd,shd->hs", q, k) / q.shape[-1] ** 0.5
    s = jnp.where(jnp.arange(k.shape[0]) < length[0], s, -jnp.inf)
    return jnp.einsum("hs,shd->hd", jax.nn.softmax(s), v)


def rotary(x):
    d = x.shape[-1] // 2
    angle = jnp.arange(x.shape[-2])[:, None] * 10000.0 ** (-jnp.arange(d) / d)
    a, b = x[..., :d], x[..., d:]
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1
    )


def multi_head(x, wq, wk, wv, wo, heads):
    q, k, v = ((x @ w).reshape(x.shape[0], heads, -1) for w in (wq, wk, wv))
    s = jnp.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(s), v).reshape(x.shape) @ wo


def linear_attention(q, k, v):
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    return (
        jnp.einsum("hqd,hdv->hqv", q, jnp.einsum("hkd,hkv->hdv", k, v))
        / jnp.einsum("hqd,hd->hq", q, k.sum(1))[..., None]
    )


def relative_bias(q, k, v, table):
    s = jnp.einsum("hqd,hkd->hqk", q, k) / q.shape[-1] ** 0.5
    n = s.shape[-1]
    offset = jnp.arange(n)[None] - jnp.arange(n)[:, None] + n - 1
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(s + table[:, offset]), v)


def gradient(f):
    return jax.grad(lambda *a: jnp.sum(f(*a) ** 2), argnums=(0, 1, 2))


H8 = ("f32[8,512,64]",) * 3
CASES = {
    "plain_512": (plain, *H8),
    "plain_odd": (plain, "f32[5,333,40]", "f32[5,501,40]", "f32[5,501,72]"),
    "plain_small": (plain, *("f32[4,64,32]",) * 3),
    "plain_tiny": (plain, *("f32[2,10,8]",) * 3),
    "plain_wide": (plain, *("f32[2,512,256]",) * 3),
    "plain_3000": (plain, *("f32[2,3000,64]",) * 3),
    "plain_bf16": (plain, *("bf16[8,512,64]",) * 3),
    "plain_f64": (plain, *("f64[4,256,64]",) * 3),
    "causal_700": (causal, *("f32[6,700,64]",) * 3),
    "causal_4096": (causal, *("f32[1,4096,64]",) * 3),
    "causal_bf16": (causal, *("bf16[8,512,64]",) * 3),
    "window_128": (functools.partial(window, 128), *("f32[4,1024,64]",) * 3),
    "alibi": (alibi, *H8),
    "soft_cap": (soft_cap, *("f32[2,256,8,32]",) * 3),
    "key_padding": (key_padding, *("f32[4,8,256,64]",) * 3, "bool[4,256]"),
    "grouped": (grouped, "f32[8,512,64]", "f32[2,512,64]", "f32[2,512,64]"),
    "decode": (decode, "f32[16,64]", "f32[2048,16,64]", "f32[2048,16,64]", "i32[1]<2000"),
    "rotary": (rotary, "f32[16,1024,64]"),
    "rotary_attention": (lambda q, k, v: causal(rotary(q), rotary(k), v), *H8),
    "multi_head": (functools.partial(multi_head, heads=8), "f32[256,512]", *("f32[512,512]",) * 4),
    "linear_attention": (linear_attention, *("f32[8,1024,64]",) * 3),
    "relative_bias": (relative_bias, *("f32[8,256,64]",) * 3, "f32[8,511]"),
    "dot": (dot, *("f32[2,256,8,64]",) * 3),
    "dot_causal": (functools.partial(dot, is_causal=True), *("f32[2,512,8,64]",) * 3),
    "dot_grouped": (dot, "f32[2,256,8,64]", "f32[2,256,2,64]", "f32[2,256,2,64]"),
    "dot_bf16": (functools.partial(dot, is_causal=True), *("bf16[2,512,8,64]",) * 3),
    "dot_short_queries": (dot, "f32[4,16,8,64]", "f32[4,1024,8,64]", "f32[4,1024,8,64]"),
    "gradient": (gradient(plain), *("f32[4,256,64]",) * 3),
    "gradient_causal": (gradient(causal), *("f32[4,512,64]",) * 3),
    "gradient_dot": (gradient(functools.partial(dot, is_causal=True)), *("f32[2,256,4,64]",) * 3),
    # Weights as small as those of a model: with larger ones each softmax has one element, and gradients lose digits.
    "gradient_multi_head": (
        jax.grad(
            lambda x, *ws: (multi_head(x, *(w / 512**0.5 for w in ws), heads=8) ** 2).sum(),
            argnums=(0, 1, 2, 3, 4),
        ),
        "f32[256,512]",
        *("f32[512,512]",) * 4,
    ),
    "scores_only": (lambda q, k: jax.nn.softmax(q @ k.mT / 8), "f32[8,512,64]", "f32[8,512,64]"),
    "value_by_max": (
        lambda q, k, v: jnp.einsum(
            "hqk,hkd->hqd", jax.nn.one_hot(jnp.argmax(q @ k.mT, -1), 256), v
        ),
        *("f32[8,256,64]",) * 3,
    ),
    "two_layers": (lambda x, w: plain(plain(x @ w, x, x), x, x), "f32[4,256,64]", "f32[64,64]"),
    "log_softmax_scores": (
        lambda q, k: lax.reduce_max(jax.nn.log_softmax(q @ k.mT), (2,)),
        "f32[8,512,64]",
        "f32[8,512,64]",
    ),
    "sigmoid_attention": (lambda q, k, v: jax.nn.sigmoid(q @ k.mT / 8) @ v, *H8),
    "relu_attention": (lambda q, k, v: (jax.nn.relu(q @ k.mT / 8) ** 2) @ v, *H8),
    "vmap_plain": (jax.vmap(plain), *("f32[3,4,200,64]",) * 3),
}
