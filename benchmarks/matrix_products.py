"""Workloads that are products: operands stored either way, deep, tall, thin and odd shapes, a language model's last layer."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .products import product
from .workload import Spec, Workload

VOCABULARY, SMALL_VOCABULARY = 32_000, 301


def last_layer_loss(x, w, labels):
    """float32[tokens, width], float32[width, words], int32[tokens] -> the mean cross-entropy of x @ w."""
    logits = x @ w
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


last_layer_gradient = jax.grad(last_layer_loss, argnums=(0, 1))


def numpy_last_layer_gradient(x, w, labels):
    logits = x @ w
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    p[np.arange(len(labels)), labels] -= 1
    p /= x.dtype.type(len(labels))
    return p @ w.T, x.T @ p


def _oriented(name: str, orientation: str, m: int, k: int, n: int) -> Workload:
    """A product of operands that are stored as an orientation of benchmarks/products.py says."""
    function: Callable = product(orientation)

    def specs(m: int, k: int, n: int) -> tuple[Spec, Spec]:
        return Spec((k, m) if "aT" in orientation else (m, k)), Spec(
            (n, k) if "bT" in orientation else (k, n)
        )

    return Workload(name, function, specs(m, k, n), specs(67, 131, 71), 2.0 * m * k * n, function)


def _last_layer(tokens: int, width: int, words: int) -> tuple[Spec, ...]:
    return (
        Spec((tokens, width)),
        Spec((width, words), scale=width**-0.5),
        Spec((tokens,), high=words),
    )


PRODUCTS = (
    _oriented("matmul_right_transposed", "abT", 1024, 1024, 1024),
    _oriented("matmul_left_transposed", "aTb", 1024, 1024, 1024),
    _oriented("matmul_both_transposed", "aTbT", 1024, 1024, 1024),
    _oriented("matmul_deep", "ab", 512, 8192, 512),
    _oriented("matmul_deep_left_transposed", "aTb", 512, 8192, 512),
    _oriented("matmul_tall", "ab", 32_000, 512, 64),
    _oriented("matmul_thin", "ab", 8, 4096, 4096),
    _oriented("matmul_odd", "aTb", 1000, 777, 1001),
    Workload("last_layer_gradient", last_layer_gradient, _last_layer(256, 256, VOCABULARY),
             _last_layer(19, 24, SMALL_VOCABULARY), 3 * 2.0 * 256 * 256 * VOCABULARY, numpy_last_layer_gradient),
)  # fmt: skip
