"""Convolutions of dilated inputs, phase by phase (fuse/simplify/convolutions/dilated.py), against jax.jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from tests.arrays import array

NUMBERS = ("NHWC", "HWIO", "NHWC")
RNG = np.random.default_rng(0)


def rand(*shape):
    return array(RNG.normal(size=shape), jnp.float32)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("steps", [(2, 2), (1, 2), (3, 2)])
@pytest.mark.parametrize("taps", [(4, 4), (3, 3), (1, 2), (2, 5)])
@pytest.mark.parametrize("pads", [((1, 1), (1, 2)), ((0, 3), (2, 0)), ((3, 3), (4, 4))])
@pytest.mark.parametrize("size", [(5, 7), (8, 8), (1, 1)])
def test_transposed_convolution(steps, taps, pads, size):
    def f(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), pads, lhs_dilation=steps, dimension_numbers=NUMBERS
        )

    args = rand(2, *size, 3), rand(*taps, 3, 8)
    if 0 in jax.eval_shape(f, *args).shape:
        pytest.skip("no results")
    np.testing.assert_allclose(pbkern.jit(f)(*args), jax.jit(f)(*args), atol=1e-4)


@pytest.mark.parametrize("groups", [1, 4])
def test_channels_first_and_groups(groups):
    def f(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), ((2, 1), (1, 2)), lhs_dilation=(2, 2), feature_group_count=groups
        )

    args = rand(2, 8, 6, 5), rand(16, 8 // groups, 3, 3)
    np.testing.assert_allclose(pbkern.jit(f)(*args), jax.jit(f)(*args), atol=1e-4)


def test_one_kernel_without_the_zeros():
    f = pbkern.jit(lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"))
    x, w = (
        jax.ShapeDtypeStruct((4, 32, 32, 64), jnp.float32),
        jax.ShapeDtypeStruct((4, 4, 64, 64), jnp.float32),
    )
    (kernel,) = f.explain(x, w).kernels
    assert kernel.cost.flops < 1.1 * 2 * 4 * 64 * 64 * 64 * 64 * 2 * 2


def test_gradient_of_a_strided_convolution():
    def loss(x, w):
        y = lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=NUMBERS)
        return (y * jnp.cos(y)).sum()

    args = rand(2, 13, 12, 3), rand(3, 3, 3, 8)
    for got, want in zip(jax.grad(pbkern.jit(loss), (0, 1))(*args), jax.grad(loss, (0, 1))(*args)):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("taps", "stride", "groups"), [(1, 2, 1), (1, 3, 4), (2, 3, 1), (2, 4, 4)])
def test_gradients_of_strides_longer_than_the_kernel(taps, stride, groups):
    """Phases that no tap reaches are zeros: also where another operand is infinite, and nothing is left to XLA."""

    def f(x, w):
        y = lax.conv_general_dilated(
            x, w, (stride, stride), "VALID", dimension_numbers=NUMBERS, feature_group_count=groups
        )
        return (y * y).sum()

    args = rand(2, 7, 8, 4), rand(taps, taps, 4 // groups, 8)
    gradient = pbkern.jit(jax.grad(f, (0, 1)))
    for found, expected in zip(gradient(*args), jax.jit(jax.grad(f, (0, 1)))(*args)):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    assert not gradient.explain(*args).left
