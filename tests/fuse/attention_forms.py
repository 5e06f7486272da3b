"""Attention as people write it: name -> (function, small arguments). Each is one kernel; layouts are bhsd or bshd."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .checking import ints, rand

EQUATIONS = {
    "bhsd": ("bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd"),
    "bshd": ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"),
}


def attend(q, k, v, bias=None, mask=None, fill=-jnp.inf, cap=None, layout="bhsd", statistics=False):
    """Output, and log-sum-exp f32[b, h, q] beside it if `statistics`."""
    scores, values = EQUATIONS[layout]
    s = jnp.einsum(scores, q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
    s = cap * jnp.tanh(s / cap) if cap else s
    s = s if bias is None else s + bias
    s = s if mask is None else jnp.where(mask, s, fill)
    out = jnp.einsum(values, jax.nn.softmax(s, -1).astype(v.dtype), v)
    return (out, jax.nn.logsumexp(s, -1)) if statistics else out


def lengths(q, k, layout="bhsd"):
    at = layout.index("s")
    return q.shape[at], k.shape[at]


def by_tril(q, k, layout="bhsd"):
    n, m = lengths(q, k, layout)
    return jnp.tril(jnp.ones((n, m), bool), m - n)


def by_iota(q, k, layout="bhsd"):
    n, m = lengths(q, k, layout)
    return lax.broadcasted_iota(int, (n, m), 0) + m - n >= lax.broadcasted_iota(int, (n, m), 1)


def window(q, k, v):
    i, j = jnp.arange(q.shape[2])[:, None], jnp.arange(k.shape[2])
    return attend(q, k, v, mask=(j <= i) & (i - j < 5))


def alibi(q, k, v):
    heads = q.shape[1]
    slopes = 2.0 ** (-8 * jnp.arange(1, heads + 1) / heads)
    i, j = jnp.arange(q.shape[2])[:, None], jnp.arange(k.shape[2])
    return attend(q, k, v, bias=-slopes[:, None, None] * jnp.abs(i - j), mask=j <= i)


def by_segments(q, k, v, a, b):
    return attend(q, k, v, mask=a[:, None, :, None] == b[:, None, None, :], fill=-1e9)


def repeated(q, k, v):
    g = q.shape[1] // k.shape[1]
    return attend(q, jnp.repeat(k, g, 1), jnp.repeat(v, g, 1), mask=by_tril(q, k))


def broadcast(q, k, v):
    (b, h, s, d), g = k.shape, q.shape[1] // k.shape[1]
    k, v = (
        jnp.broadcast_to(x[:, :, None], (b, h, g, s, d)).reshape(b, h * g, s, d) for x in (k, v)
    )
    return attend(q, k, v)


def grouped(q, k, v):
    (b, s, h, d), g = q.shape, k.shape[2]
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q.reshape(b, s, g, h // g, d), k) / d**0.5
    return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores), v).reshape(b, s, h, -1)


def grouped_bhsd(q, k, v):
    (b, h, s, d), g = q.shape, k.shape[1]
    scores = jnp.einsum("bhgqd,bhkd->bhgqk", q.reshape(b, g, h // g, s, d), k) / d**0.5
    return jnp.einsum("bhgqk,bhkd->bhgqd", jax.nn.softmax(scores), v).reshape(b, h, s, -1)


def jax_nn(*names, **fixed):
    """jax.nn.dot_product_attention with further arguments by name."""
    return lambda q, k, v, *rest: jax.nn.dot_product_attention(
        q, k, v, **dict(zip(names, rest)), **fixed
    )


def operands(
    q=17, k=17, heads=3, key_heads=None, width=8, value_width=None, layout="bhsd", dtype="float32"
):
    def one(length, heads, width, seed):
        sizes = {"b": 2, "h": heads, "s": length, "d": width}
        return rand(*(sizes[c] for c in layout), dtype=dtype, seed=seed)

    key_heads = key_heads or heads
    return (
        one(q, heads, width, 1),
        one(k, key_heads, width, 2),
        one(k, key_heads, value_width or width, 3),
    )


def bshd(**sizes):
    return operands(layout="bshd", **sizes)


SEGMENTS = jnp.sort(ints(2, 17, high=3), axis=1)
SOME = rand(2, 1, 17, 17) > -1
NOT_ROW_3 = jnp.arange(17)[:, None] != 3
LENGTHS = ((1, 7), (1, 100), (7, 129), (100, 100), (129, 7), (1, 1))
FILLS = {"-inf": -jnp.inf, "-1e30": -1e30, "finfo.min": float(np.finfo("f").min)}

FORMS = {
    **{f"tril {n}": (lambda q, k, v, f=f: attend(q, k, v, mask=by_tril(q, k), fill=f), operands()) for n, f in FILLS.items()},
    **{f"iota {n}": (lambda q, k, v, f=f: attend(q, k, v, mask=by_iota(q, k), fill=f), operands()) for n, f in FILLS.items()},
    "window": (window, operands()),
    "alibi": (alibi, operands()),
    "bias per head": (lambda q, k, v, b: attend(q, k, v, b), (*operands(), rand(1, 3, 17, 17))),
    "bias per key": (lambda q, k, v, b: attend(q, k, v, b), (*operands(), rand(17))),
    "key padding": (lambda q, k, v, m: attend(q, k, v, mask=m), (*operands(), rand(2, 1, 1, 17) > -0.5)),
    "silent row": (lambda q, k, v, m: attend(q, k, v, mask=m), (*operands(), NOT_ROW_3)),
    "silent row, finite": (lambda q, k, v, m: attend(q, k, v, mask=m, fill=-1e30), (*operands(), NOT_ROW_3)),
    "segments": (by_segments, (*operands(), SEGMENTS, SEGMENTS)),
    "repeated heads": (repeated, operands(heads=6, key_heads=2)),
    "broadcast heads": (broadcast, operands(heads=6, key_heads=2)),
    "grouped heads": (grouped, bshd(heads=6, key_heads=2)),
    "grouped heads, bhsd": (grouped_bhsd, operands(heads=6, key_heads=2)),
    "one key head": (grouped, bshd(heads=6, key_heads=1)),
    "soft cap": (lambda q, k, v: attend(q, k, v, cap=20.0, mask=by_tril(q, k)), operands()),
    "bshd": (lambda q, k, v: attend(q, k, v, layout="bshd"), bshd()),
    "bshd causal": (lambda q, k, v: attend(q, k, v, layout="bshd", mask=by_tril(q, k, "bshd")), bshd()),
    **{f"{a} queries, {b} keys": (attend, operands(a, b)) for a, b in LENGTHS},
    "1 query, bshd": (lambda q, k, v: attend(q, k, v, layout="bshd"), bshd(q=1, k=100)),
    "narrow values": (attend, operands(value_width=5)),
    "wide values, bshd": (lambda q, k, v: attend(q, k, v, layout="bshd"), bshd(value_width=24)),
    "log-sum-exp": (lambda q, k, v: attend(q, k, v, statistics=True), operands()),
    "log-sum-exp, bshd": (
        lambda q, k, v: attend(q, k, v, layout="bshd", mask=by_tril(q, k, "bshd"), statistics=True),
        bshd(),
    ),
    "bfloat16": (attend, operands(dtype="bfloat16", width=16)),
    "bfloat16 causal": (lambda q, k, v: attend(q, k, v, mask=by_tril(q, k)), operands(dtype="bfloat16", width=16)),
    "float16": (attend, operands(dtype="float16")),
    "jax.nn": (jax_nn(), bshd()),
    "jax.nn xla": (jax_nn(implementation="xla"), bshd()),
    "jax.nn causal": (jax_nn(is_causal=True), bshd()),
    "jax.nn scale": (jax_nn(scale=0.3), bshd()),
    "jax.nn bias": (jax_nn("bias"), (*bshd(), rand(2, 3, 17, 17))),
    "jax.nn bias, causal": (jax_nn("bias", is_causal=True), (*bshd(), rand(1, 3, 17, 17))),
    "jax.nn mask": (jax_nn("mask"), (*bshd(), SOME)),
    "jax.nn lengths": (
        jax_nn("query_seq_lengths", "key_value_seq_lengths"),
        (*bshd(), jnp.array([9, 17]), jnp.array([17, 5])),
    ),
    "jax.nn window": (jax_nn(local_window_size=(3, 0)), bshd()),
    "jax.nn grouped": (jax_nn(is_causal=True), bshd(heads=6, key_heads=2)),
    "jax.nn everything": (
        jax_nn(
            "bias", "mask", "query_seq_lengths", "key_value_seq_lengths", is_causal=True, scale=0.2, local_window_size=4
        ),
        (*bshd(), rand(2, 3, 17, 17), SOME, jnp.array([9, 17]), jnp.array([17, 5])),
    ),
}  # fmt: skip
