"""Convolutions whose filter is larger than their image (fuse/simplify/convolutions/exchanged.py), against jax.jit."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import pbkern
from tests.arrays import array

RNG = np.random.default_rng(0)
PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


def rand(*shape):
    return array(RNG.normal(size=shape), jnp.float32)


@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    taps=st.tuples(st.integers(1, 7), st.integers(3, 8)),
    pads=st.tuples(*[st.integers(0, 9)] * 4),
    strides=PAIRS,
    of_image=PAIRS,
    of_filter=PAIRS,
    numbers=st.sampled_from(
        [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("CHWN", "IHWO", "HWNC")]
    ),
)
def test_larger_filters(sizes, taps, pads, strides, of_image, of_filter, numbers):
    def f(x, w):
        return lax.conv_general_dilated(
            x, w, strides, (pads[:2], pads[2:]), of_image, of_filter, numbers
        )

    def shape(letters, **extents):
        return [extents[letter] for letter in letters]

    args = (
        rand(*shape(numbers[0], N=2, C=3, H=sizes[0], W=sizes[1])),
        rand(*shape(numbers[1], O=5, I=3, H=taps[0], W=taps[1])),
    )
    try:
        jax.eval_shape(f, *args)
    except (TypeError, ValueError):  # the filter does not fit the padded image
        return
    np.testing.assert_allclose(pbkern.jit(f)(*args), jax.jit(f)(*args), atol=1e-4)


def test_the_smaller_operand_is_the_filter():
    def f(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), ((26, 26), (26, 26)))

    x, w = rand(4, 8, 3, 3), rand(16, 8, 28, 28)
    (kernel,) = pbkern.jit(f).explain(x, w).kernels
    assert kernel.cost.flops < 1.1 * 2 * 4 * 16 * 8 * 28 * 28 * 3 * 3
    want = jax.jit(f)(x, w)
    np.testing.assert_allclose(pbkern.jit(f)(x, w), want, atol=1e-3)


def test_gradients_of_gradients():
    def loss(w, x):
        return (lax.conv_general_dilated(x, w, (1, 1), "SAME") ** 2).sum()

    def along(w, x, d):
        return jax.vjp(jax.grad(loss), w, x)[1](d)

    args = rand(4, 5, 3, 3), rand(2, 5, 14, 14), rand(4, 5, 3, 3)
    for got, want in zip(pbkern.jit(along)(*args), jax.jit(along)(*args)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
