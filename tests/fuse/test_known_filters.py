"""Convolutions with filters that are known at compile time (fuse/simplify/convolutions/known_filters.py), against float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern
from pbkern.core.ops.views import VIEWS

RNG = np.random.default_rng(0)
GAUSSIAN = np.exp(-(np.linspace(-2, 2, 11) ** 2) / 2)
LAYOUTS = [("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC"), ("NCHW", "HWIO", "NHWC")]


def direct(image, taps, padding, dilation=(1, 1)):
    """float64[n, c, h, w], [r, s] -> the sum of taps times elements, by NumPy."""
    image = np.pad(np.float64(image), ((0, 0), (0, 0), *padding))
    sizes = [
        size - (count - 1) * apart
        for size, count, apart in zip(image.shape[2:], taps.shape, dilation)
    ]
    out = np.zeros((*image.shape[:2], *sizes))
    for at in itertools.product(*map(range, taps.shape)):
        i, j = (k * apart for k, apart in zip(at, dilation))
        out += np.float64(taps[at]) * image[:, :, i : i + sizes[0], j : j + sizes[1]]
    return out


def convolved(image, taps, padding, layout=LAYOUTS[0], dilation=(1, 1)):
    """[n, c, h, w] -> the convolution of each channel, through a layout."""
    channels = image.shape[1]
    weights = jnp.asarray(np.broadcast_to(taps, (channels, 1, *taps.shape)).astype(taps.dtype))
    image = jnp.transpose(image, ["NCHW".index(d) for d in layout[0]])
    weights = jnp.transpose(weights, ["OIHW".index(d) for d in layout[1]])
    out = lax.conv_general_dilated(
        image,
        weights,
        (1, 1),
        padding,
        rhs_dilation=dilation,
        dimension_numbers=layout,
        feature_group_count=channels,
    )
    return jnp.transpose(out, [layout[2].index(d) for d in "NCHW"])


def primitives(f, *args):
    return str(pbkern.jit(f).as_text(*args, stage="jaxpr"))


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@settings(max_examples=15, deadline=None)
@given(
    taps=st.sampled_from([(1, 1), (1, 5), (4, 1), (3, 3), (2, 4), (5, 5)]),
    size=st.tuples(st.integers(1, 12), st.integers(1, 37)),
    channels=st.integers(1, 3),
    pads=st.tuples(*[st.integers(0, 3)] * 4),
    dilation=st.sampled_from([(1, 1), (2, 1), (1, 3)]),
    layout=st.sampled_from(LAYOUTS),
    wide=st.booleans(),
)
def test_any_filter(taps, size, channels, pads, dilation, layout, wide):
    padding = (pads[:2], pads[2:])
    reach = [(count - 1) * apart for count, apart in zip(taps, dilation)]
    assume(all(n + sum(pair) > more for n, pair, more in zip(size, padding, reach)))
    with jax.enable_x64(wide):
        dtype = np.float64 if wide else np.float32
        image, known = floats(2, channels, *size).astype(dtype), floats(*taps).astype(dtype)
        f = lambda x: convolved(x, known, padding, layout, dilation)
        assert "conv_general" not in primitives(f, image)
        got, want = pbkern.jit(f)(image), direct(image, known, padding, dilation)
    np.testing.assert_allclose(got, want, atol=1e-12 if wide else 2e-5)


@pytest.mark.parametrize("taps", [5, 11])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outer_products_are_applied_by_dimension(taps, layout):
    line = (GAUSSIAN[:taps] / GAUSSIAN[:taps].sum()).astype(np.float32)
    known, image = np.outer(line, line), floats(1, 3, 24, 35)
    f = lambda x: convolved(x, known, ((taps // 2,) * 2,) * 2, layout)
    text = primitives(f, image)
    assert "conv_general" not in text
    assert text.count("= mul ") <= 2 * taps
    np.testing.assert_allclose(
        pbkern.jit(f)(image), direct(image, known, ((taps // 2,) * 2,) * 2), atol=2e-6
    )


def test_a_filter_that_is_nearly_an_outer_product_is_not_one():
    line = np.arange(1, 6, dtype=np.float32)
    known, image = np.outer(line, line), floats(1, 1, 24, 35)
    known[0, 0] *= 1 + 1e-5
    f = lambda x: convolved(x, known, ((0, 0), (0, 0)))
    assert primitives(f, image).count("= mul ") > 10
    np.testing.assert_allclose(
        pbkern.jit(f)(image), direct(image, known, ((0, 0), (0, 0))), rtol=1e-5, atol=1e-4
    )


def test_equal_taps_and_views_of_constants():
    """A constant of equal numbers is a scalar for the fuser; filters may be turned, reversed and sliced."""
    ones, known = np.ones((3, 3), np.float32), floats(4, 3)

    def f(x):
        y = convolved(x, ones, ((1, 1), (1, 1)))
        flipped = lax.rev(jnp.asarray(known)[1:], (0, 1)).T
        return lax.conv_general_dilated(y, flipped[None, None], (1, 1), "VALID")

    image = floats(1, 1, 17, 20)
    assert "conv_general" not in primitives(f, image)
    want = direct(direct(image, ones, ((1, 1), (1, 1))), known[1:][::-1, ::-1].T, ((0, 0), (0, 0)))
    np.testing.assert_allclose(pbkern.jit(f)(image), want, atol=1e-4)


@pytest.mark.parametrize("taps", [(3, 3), (5, 5)])
def test_infinite_elements_meet_taps_of_zero(taps):
    known, image = np.zeros(taps, np.float32), floats(1, 1, 12, 20)
    known[0] = known[:, 1] = 1.0
    image[0, 0, 5, 7], image[0, 0, 2, 2] = np.inf, np.nan
    f = lambda x: convolved(x, known, ((1, 1), (1, 1)))
    assert "conv_general" not in primitives(f, image)
    np.testing.assert_allclose(pbkern.jit(f)(image), jax.jit(f)(image), atol=1e-5)


def test_gradient_vmap_and_closed_over_filters_in_calls():
    known = floats(3, 3)
    blur = jax.jit(lambda x: jax.scipy.signal.convolve2d(x, known, mode="same"))
    loss = lambda x: (blur(x) ** 2).sum()
    image = floats(3, 11, 19)
    fast = pbkern.jit(lambda x: blur(x[0]))
    assert "conv_general" not in fast.as_text(image, stage="jaxpr")
    np.testing.assert_allclose(fast(image), blur(image[0]), atol=1e-5)
    for f, x in (
        (jax.grad(loss), image[0]),
        (jax.vmap(blur), image),
        (jax.vmap(jax.grad(loss)), image),
    ):
        np.testing.assert_allclose(pbkern.jit(f)(x), jax.jit(f)(x), atol=1e-4)
    inside = jax.grad(lambda x: (pbkern.jit(blur)(x) ** 2).sum())
    np.testing.assert_allclose(inside(image[0]), jax.grad(loss)(image[0]), atol=1e-4)
    batched = jax.vmap(pbkern.jit(blur))
    np.testing.assert_allclose(batched(image), jax.vmap(blur)(image), atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"mlir_disable_fast_math": True}, {"polyblocks_disable_unsafe_math_canonicalizations": True},
     {"mm_conv_precision_mode": "mixed_fp16_fp32"}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options_that_keep_convolutions(options):
    known, image = floats(3, 3), floats(1, 1, 9, 20)
    f = lambda x: convolved(x, known, ((0, 0), (0, 0)))
    fast = pbkern.jit(f, compile_options=options)
    assert "conv_general" in fast.as_text(image, stage="jaxpr")
    np.testing.assert_allclose(
        fast(image), direct(image, known, ((0, 0), (0, 0))), atol=0.1, rtol=0.02
    )


def test_filters_that_stay_convolutions():
    """Strides, different channels, many taps, 16-bit floats."""
    image = floats(1, 2, 20, 20)
    many, apart = floats(7, 7), floats(2, 1, 3, 3)
    cases = {
        "strides": lambda x: lax.conv_general_dilated(
            x[:, :1], jnp.asarray(apart[:1]), (2, 2), "SAME"
        ),
        "channels": lambda x: lax.conv_general_dilated(
            x, jnp.asarray(apart), (1, 1), "SAME", feature_group_count=2
        ),
        "many": lambda x: convolved(x, many, ((0, 0), (0, 0))),
        "half": lambda x: convolved(x.astype(jnp.float16), many[:3, :3].astype(np.float16), "VALID"),
    }  # fmt: skip
    for name, f in cases.items():
        assert "conv_general" in primitives(f, image), name
        np.testing.assert_allclose(
            pbkern.jit(f)(image), jax.jit(f)(image), rtol=2e-2, atol=2e-2, err_msg=name
        )


def test_functions_that_differ_in_their_filters_differ():
    image = floats(1, 1, 9, 20)
    for known in (floats(3, 3), floats(3, 3)):
        got = pbkern.jit(lambda x, taps=known: convolved(x, taps, ((0, 0), (0, 0))))(image)
        np.testing.assert_allclose(got, direct(image, known, ((0, 0), (0, 0))), atol=1e-5)


VIEWED = {
    "reshape of turned dimensions": lambda k: lax.reshape(k, (3, 2, 4), dimensions=(2, 0, 1)),
    "reshape": lambda k: k.reshape(2, 4, 3),
    "transpose": lambda k: k.transpose(1, 2, 0),
    "rev": lambda k: lax.rev(k, (0, 2)),
    "steps": lambda k: k[:, ::2, 1:],
    "broadcast": lambda k: jnp.broadcast_to(k[:, :1], (4, 5, 3)),
    "new dimensions": lambda k: k[None, :, None],
    "squeeze": lambda k: k[:, :1].squeeze(1),
}


@pytest.mark.parametrize("name", VIEWED)
def test_numbers_of_views(name):
    """Each view of a constant that NumPy evaluates has the numbers that JAX gives it."""
    known = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    numbers = known
    for eqn in jax.make_jaxpr(VIEWED[name])(known).jaxpr.eqns:
        numbers = VIEWS[eqn.primitive.name](eqn.params, numbers)
    np.testing.assert_array_equal(numbers, VIEWED[name](jnp.asarray(known)))


def test_gradients_of_grouped_convolutions():
    """JAX turns their filters by a reshape of turned dimensions."""
    known, image = floats(4, 1, 3), floats(1, 2, 9)
    for filters in (known, np.ones_like(known)):
        loss = lambda x, k=filters: (
            lax.conv_general_dilated(x, k, (1,), "VALID", feature_group_count=2) ** 2
        ).sum()
        for f in (jax.grad(pbkern.jit(loss)), pbkern.jit(jax.grad(loss))):
            np.testing.assert_allclose(f(image), jax.grad(loss)(image), atol=1e-4)
