"""Torch's attention of CPUs, and its gradient: both compute the scores, which are never kept."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern.core.errors import UnsupportedOp

from .table import op

# Fewest rows of queries at a time in the gradient of causal attention. Source: not recorded.
FEWEST_QUERY_ROWS = 128
# Most parts of the rows of queries in the gradient of causal attention. Source: not recorded.
MOST_QUERY_PARTS = 4


def _scores(q, k, causal, mask, scale, first=0):
    """Scores [..., m, n] of queries [..., m, d], from number `first` on, and keys [..., n, d], in float32 for shorter types."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    wide = jnp.promote_types(q.dtype, np.float32)
    scores = jnp.matmul(q, jnp.swapaxes(k, -1, -2), preferred_element_type=wide) * np.asarray(
        scale, wide
    )
    if mask is not None:
        scores = jnp.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask
    if causal:
        rows, columns = (lax.broadcasted_iota(np.int32, scores.shape[-2:], dim) for dim in (0, 1))
        scores = jnp.where(rows + np.int32(first) >= columns, scores, -np.inf)
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
def attention(call, q, k, v, dropout, causal, *, attn_mask, scale):
    """(results, logarithms of the sums of exponentials of each query's scores).

    A query without keys has zeros.
    """
    _check(dropout)
    k, v = (_shared(x, q.shape[-3]) for x in (k, v))
    scores = _scores(q, k, causal, attn_mask, scale)
    top = scores.max(-1, keepdims=True)
    # Rows without keys are NaN until they are replaced at the end: so what comes before is a softmax, which fuses.
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    result = jnp.matmul(weights / total, v.astype(weights.dtype))
    logarithms = jnp.log(total) + top if 1 in call.used else jnp.zeros_like(total)
    if attn_mask is not None:
        is_empty = top == -np.inf
        result = jnp.where(is_empty, 0, result)
        logarithms = jnp.where(is_empty, -np.inf, logarithms)
    return result, logarithms.reshape(call.shapes[1])


@op("aten::_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(call, g, q, k, v, out, sums, dropout, causal, *, attn_mask, scale):
    """Causal queries come in parts, each with the keys up to its last one: more than half of the others' work is masked."""
    _check(dropout)
    heads, (num_queries, _), num_keys = k.shape[-3], q.shape[-2:], k.shape[-2]
    k, v = (_shared(x, q.shape[-3]) for x in (k, v))
    parted = causal and attn_mask is None
    rows = (
        max(-(-num_queries // MOST_QUERY_PARTS), FEWEST_QUERY_ROWS)
        if parted
        else max(num_queries, 1)
    )
    to_q, to_keys = [], []
    for first in range(0, max(num_queries, 1), rows):
        keys = min(first + rows, num_keys) if parted else num_keys
        queries = [
            lax.slice_in_dim(x, first, min(first + rows, num_queries), axis=-2)
            for x in (g, q, out, sums[..., None])
        ]
        seen = [lax.slice_in_dim(x, 0, keys, axis=-2) for x in (k, v)]
        part, *of_keys = _gradients(*queries, *seen, causal, attn_mask, scale, first)
        to_q.append(part)
        to_keys.append([_with_zeros(key, num_keys) for key in of_keys])
    to_k, to_v = (functools.reduce(jnp.add, parts) for parts in zip(*to_keys))
    return jnp.concatenate(to_q, -2), _summed(to_k, heads), _summed(to_v, heads)


def _gradients(g, q, out, sums, k, v, causal, mask, scale, first):
    """(with respect to queries, to keys, to values) of some queries, from number `first` on."""
    scores = _scores(q, k, causal, mask, scale, first)
    weights = jnp.exp(scores - (jnp.where(sums == -np.inf, 0, sums) if mask is not None else sums))
    wide, factor = weights.dtype, 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    q, k, v, g, out = (x.astype(wide) for x in (q, k, v, g, out))
    to_v = jnp.matmul(jnp.swapaxes(weights, -1, -2), g)
    share = jnp.sum(g * out, -1, keepdims=True)
    to_scores = (
        weights * (jnp.matmul(g, jnp.swapaxes(v, -1, -2)) - share) * np.asarray(factor, wide)
    )
    return jnp.matmul(to_scores, k), jnp.matmul(jnp.swapaxes(to_scores, -1, -2), q), to_v


def _with_zeros(x, n: int):
    """[..., fewer, d] -> [..., n, d]"""
    return (
        x
        if x.shape[-2] == n
        else jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, n - x.shape[-2]), (0, 0)))
    )
