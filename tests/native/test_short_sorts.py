"""Lines short enough to be sorted in registers (lower/rules/sorting_network.py), against plain JAX, bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.targets.cpu.codegen.kernel import lower_kernel

SPECIAL = [1.0, 2.0, -3.0, np.nan, 0.0, -0.0, np.inf, -np.inf]


def same(f, *args):
    for got, want in zip(
        *(jax.tree.leaves(jit(f)(*args)) for jit in (pbkern.jit, jax.jit)), strict=True
    ):
        assert got.dtype == want.dtype
        got, want = (np.asarray(v, np.float64) for v in (got, want))
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32", "bool"])
def test_every_axis(dtype):
    x = np.random.default_rng(0).choice(SPECIAL, (7, 5, 33))
    x = jnp.asarray(x if "float" in dtype else np.nan_to_num(x, posinf=9, neginf=4), dtype)
    same(lambda x: [jnp.sort(x, axis) for axis in (0, 1, 2)], x)
    same(lambda x: [jnp.argsort(x, axis) for axis in (0, 1)], x)
    same(lambda x: (jnp.sort(x[:1], 0), jnp.sort(x[:0], 0), jnp.sort(x[:, :2], 1)), x)


def test_several_keys_and_payloads_are_stable():
    rng = np.random.default_rng(1)
    k, l = (jnp.asarray(rng.integers(0, 3, (4, 9, 11)), d) for d in (jnp.int32, jnp.uint8))
    v = jnp.asarray(rng.choice(SPECIAL, (4, 9, 11)), jnp.float32)
    same(lambda k, l, v: lax.sort((k, l, v), dimension=1, num_keys=2), k, l, v)
    same(lambda k, l, v: lax.sort((v, k, l), dimension=0, num_keys=2), k, l, v)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32"])
def test_largest_elements(dtype):
    x = np.random.default_rng(3).choice([*SPECIAL, -np.nan], (40, 9, 3))
    x = jnp.asarray(x if "float" in dtype else np.nan_to_num(x, posinf=9, neginf=4), dtype)
    same(lambda x: (lax.top_k(x, 2), lax.top_k(x[:, 0], 3)), jnp.moveaxis(x, 1, 2))
    assert not pbkern.jit(lambda x: lax.top_k(x, 2)).explain(x).left


def test_medians_are_expressions():
    x = jnp.asarray(np.random.default_rng(2).integers(0, 255, (40, 50)), jnp.uint8)

    def median(x):
        return jnp.median(
            jnp.stack([x[i : 38 + i, j : 48 + j] for i in range(3) for j in range(3)]), 0
        )

    same(median, x)
    text = pbkern.jit(median).as_text(x, stage="nests")
    assert "sort" not in text, text
    assert "gather" not in text, text


@pytest.mark.parametrize(("length", "keys"), [(10, 2), (16, 3)])
def test_few_lines_of_several_keys_are_sorted_once(length, keys):
    """All results share one network, or are sorted in memory."""
    k, l = jnp.asarray(np.random.default_rng(4).integers(0, 3, (2, 14, length)), jnp.float32)

    def f(k, l):
        return lax.sort(
            (k, l, lax.broadcasted_iota(jnp.int32, k.shape, 1)), dimension=1, num_keys=keys
        )

    (kernel,) = pbkern.jit(f).kernels(k, l)
    assert lower_kernel(kernel, "k").nests.count("nest [") <= 2
