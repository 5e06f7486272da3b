"""Torch's attention of CPUs, and its gradient: both compute the scores, which are never kept."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern.core.errors import UnsupportedOp

from .table import op


def _scores(q, k, causal, mask, scale):
    """Of queries [..., m, d] and keys [..., n, d], in float32 for shorter types: [..., m, n]."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    wide = jnp.promote_types(q.dtype, np.float32)
    scores = jnp.matmul(q, jnp.swapaxes(k, -1, -2), preferred_element_type=wide) * np.asarray(scale, wide)
    if mask is not None:
        scores = jnp.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask
    if causal:
        rows, columns = (lax.broadcasted_iota(np.int32, scores.shape[-2:], d) for d in (0, 1))
        scores = jnp.where(rows >= columns, scores, -np.inf)
    return scores


def _shared(x, heads):
    """Keys or values [batch, fewer heads, n, d], each for several neighbouring heads of queries."""
    return x if x.shape[-3] == heads else jnp.repeat(x, heads // x.shape[-3], axis=-3)


def _summed(g, heads):
    """The gradient of `_shared`."""
    return g if g.shape[-3] == heads else g.reshape(*g.shape[:-3], heads, -1, *g.shape[-2:]).sum(-3)


def _check(dropout) -> None:
    if dropout:
        raise UnsupportedOp("attention with dropout of its own", why=f"dropout_p is {dropout}")


@op("aten::_scaled_dot_product_flash_attention_for_cpu")
def attention(call, q, k, v, dropout=0.0, causal=False, *, attn_mask=None, scale=None):
    """(results, logarithms of the sums of exponentials of each query's scores). A query without keys has zeros."""
    _check(dropout)
    k, v = (_shared(x, q.shape[-3]) for x in (k, v))
    scores = _scores(q, k, causal, attn_mask, scale)
    top = scores.max(-1, keepdims=True)
    if attn_mask is not None:
        top = jnp.where(top == -np.inf, 0, top)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    shown = jnp.where(total == 0, 1, total) if attn_mask is not None else total
    made = jnp.matmul(weights / shown, v.astype(weights.dtype))
    return made, (jnp.log(total) + top)[..., 0] if 1 in call.used else jnp.zeros(call.shapes[1], total.dtype)


@op("aten::_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(call, g, q, k, v, made, sums, dropout, causal, *, attn_mask=None, scale=None):
    _check(dropout)
    heads = k.shape[-3]
    k, v = (_shared(x, q.shape[-3]) for x in (k, v))
    scores = _scores(q, k, causal, attn_mask, scale)
    sums = sums[..., None]
    weights = jnp.exp(scores - (jnp.where(sums == -np.inf, 0, sums) if attn_mask is not None else sums))
    wide, factor = weights.dtype, 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    q, k, v, g, made = (x.astype(wide) for x in (q, k, v, g, made))
    to_v = jnp.matmul(jnp.swapaxes(weights, -1, -2), g)
    share = jnp.sum(g * made, -1, keepdims=True)
    to_scores = weights * (jnp.matmul(g, jnp.swapaxes(v, -1, -2)) - share) * np.asarray(factor, wide)
    to_k = jnp.matmul(jnp.swapaxes(to_scores, -1, -2), q)
    return jnp.matmul(to_scores, k), _summed(to_k, heads), _summed(to_v, heads)
