"""Loops over time of recurrent layers, operators of our own (frontends/torch/recurrent.py)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .table import op


def _step(kind, x, h, c, weight, bias):
    own = jnp.matmul(h, weight.T) + bias
    if kind == "gru":
        (r, z, n), (own_r, own_z, own_n) = jnp.split(x, 3, -1), jnp.split(own, 3, -1)
        z, n = jax.nn.sigmoid(z + own_z), jnp.tanh(n + jax.nn.sigmoid(r + own_r) * own_n)
        return n + z * (h - n), c
    if kind == "lstm":
        i, f, g, o = jnp.split(x + own, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c
    return (jnp.tanh if kind == "tanh" else jax.nn.relu)(x + own), c


def _loop(kind, gates, h, c, weight, bias, reverse):
    def body(carry, x):
        h, c = _step(kind, x, *carry, weight, bias)
        return (h, c), h

    (h, c), made = lax.scan(body, (h, c), gates, reverse=reverse)
    return made, h, c


@op("pbkern::recur")
def recur(call, kind, gates, h, c, weight, bias, reverse):
    return _loop(kind, gates, h, c, weight, bias, reverse)


@op("pbkern::recur_backward")
def recur_backward(call, kind, gy, gh, gc, gates, h, c, weight, bias, reverse):
    _, vjp = jax.vjp(lambda *state: _loop(kind, *state, reverse), gates, h, c, weight, bias)
    return vjp((gy, gh, gc))
