"""Matrix products."""

from __future__ import annotations

import jax.numpy as jnp

from .table import as_type, op

op("aten::mm", "aten::bmm", "aten::matmul", "aten::mv", "aten::dot")(
    lambda call, x, y: jnp.matmul(x, y)
)
op("aten::vdot")(lambda call, x, y: jnp.matmul(jnp.conj(x), y))


def _added(call, base, product, beta, alpha):
    product = product if alpha == 1 else product * as_type(alpha, call.dtype)
    if beta == 0:
        return jnp.broadcast_to(product, call.shape)
    return (base if beta == 1 else base * as_type(beta, call.dtype)) + product


@op("aten::addmm", "aten::baddbmm", "aten::addmv")
def addmm(call, base, x, y, beta, alpha):
    return _added(call, base, jnp.matmul(x, y), beta, alpha)


@op("aten::addbmm")
def addbmm(call, base, x, y, beta, alpha):
    return _added(call, base, jnp.matmul(x, y).sum(0), beta, alpha)


@op("aten::outer", "aten::ger")
def outer(call, x, y):
    return x[:, None] * y[None, :]


@op("aten::linear")
def linear(call, x, weight, bias):
    y = jnp.matmul(x, weight.T)
    return y if bias is None else y + bias
