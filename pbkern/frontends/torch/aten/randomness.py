"""Operators that draw numbers.

They depend on torch.manual_seed alone: each call of a graph draws one seed from Torch's generator.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .table import op

NAMES = (
    "aten::rand",
    "aten::rand_like",
    "aten::randn",
    "aten::randn_like",
    "aten::bernoulli",
    "aten::randint",
    "aten::randint_like",
    "aten::normal_functional",
    "aten::native_dropout",
    "aten::uniform",
    "aten::exponential",
    "aten::randperm",
)


@op("aten::rand", "aten::rand_like")
def rand(call, *args, **_):
    return jax.random.uniform(call.key(), call.shape, call.dtype)


@op("aten::randn", "aten::randn_like")
def randn(call, *args, **_):
    return jax.random.normal(call.key(), call.shape, call.dtype)


@op("aten::uniform")
def uniform(call, x, low, high, **_):
    return jax.random.uniform(call.key(), call.shape, call.dtype, low, high)


@op("aten::exponential")
def exponential(call, x, rate, **_):
    return jax.random.exponential(call.key(), call.shape, call.dtype) / rate


@op("aten::normal_functional")
def normal(call, x, mean, std, **_):
    return mean + std * jax.random.normal(call.key(), call.shape, call.dtype)


@op("aten::bernoulli")
def bernoulli(call, x, p=None, **_):
    return jax.random.bernoulli(call.key(), x if p is None else p, call.shape).astype(call.dtype)


@op("aten::native_dropout")
def dropout(call, x, p, train):
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    is_kept = jax.random.bernoulli(call.key(), 1 - p, x.shape)
    return jnp.where(is_kept, x / (1 - p) if p < 1 else 0 * x, 0), is_kept


@op("aten::randint", "aten::randint_like")
def randint(call, *args, **_):
    numbers = [arg for arg in args if isinstance(arg, int)]
    low, high = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
    return jax.random.randint(call.key(), call.shape, low, high, "int64").astype(call.dtype)


@op("aten::randperm")
def randperm(call, n, **_):
    return jax.random.permutation(call.key(), n)
