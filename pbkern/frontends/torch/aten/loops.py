"""Loops over time of recurrent layers, operators of our own (frontends/torch/recurrent.py)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .table import op


def _step(kind, x, hidden, cell, weight, bias):
    recurrent = jnp.matmul(hidden, weight.T) + bias
    if kind == "gru":
        (r, z, n), (own_r, own_z, own_n) = jnp.split(x, 3, -1), jnp.split(recurrent, 3, -1)
        z, n = jax.nn.sigmoid(z + own_z), jnp.tanh(n + jax.nn.sigmoid(r + own_r) * own_n)
        return n + z * (hidden - n), cell
    if kind == "lstm":
        i, f, g, o = jnp.split(x + recurrent, 4, -1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(cell), cell
    return (jnp.tanh if kind == "tanh" else jax.nn.relu)(x + recurrent), cell


def _loop(kind, gates, hidden, cell, weight, bias, reverse):
    def body(carry, x):
        new_hidden, new_cell = _step(kind, x, *carry, weight, bias)
        return (new_hidden, new_cell), new_hidden

    (hidden, cell), outputs = lax.scan(body, (hidden, cell), gates, reverse=reverse)
    return outputs, hidden, cell


@op("pbkern::recur")
def recur(call, kind, gates, hidden, cell, weight, bias, reverse):
    return _loop(kind, gates, hidden, cell, weight, bias, reverse)


@op("pbkern::recur_backward")
def recur_backward(call, kind, gy, gh, gc, gates, hidden, cell, weight, bias, reverse):
    _, vjp = jax.vjp(lambda *state: _loop(kind, *state, reverse), gates, hidden, cell, weight, bias)
    return vjp((gy, gh, gc))
