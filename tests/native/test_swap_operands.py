"""Products with vectors along rows of their other operand, where those that lie along their results would be short."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.core.affine import Affine
from pbkern.lower.nest.ir import Buf, Nest, Pool, Reduction, Store
from pbkern.targets.cpu.schedule.register_tiles.choice import choose
from tests.arrays import array
from tests.lowered import lowered

CHANNELS_FIRST = ("NCHW", "OIHW", "NCHW")
RTOL = {"float64": 1e-13, "float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}


def draw(shape, dtype, seed):
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


def convolution(**params):
    params = {
        "window_strides": (1, 1),
        "padding": "SAME",
        "dimension_numbers": CHANNELS_FIRST,
    } | params
    return lambda x, w: jax.nn.relu(lax.conv_general_dilated(x, w, **params))


def check(f, x, w):
    """Against the same function in float64, relative to the largest result."""
    got = np.asarray(pbkern.jit(f)(x, w), np.float64)
    with jax.enable_x64(True):
        want = np.asarray(f(np.asarray(x, np.float64), np.asarray(w, np.float64)))
    np.testing.assert_allclose(got, want, atol=RTOL[x.dtype.name] * np.abs(want).max(), rtol=0)


def products(f, *args) -> list[dict[str, int]]:
    """Sizes of the free dimensions of each product of a function, by name, the one along which sums are stored last."""
    heads = re.findall(r"nest \[(.*)\][^\n]*\n +acc0 dot[^\n]*=", lowered(f, *args))
    return [{d: int(n) for d, n in re.findall(r"(\w+)<(\d+)(?!\*|\d)", head)} for head in heads]


WINDOWS = {"same": {}, "strided": {"window_strides": (2, 2)}, "dilated": {"rhs_dilation": (2, 1)}}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("params", WINDOWS.values(), ids=WINDOWS)
def test_channels_fill_vectors_that_rows_of_images_do_not(dtype, params):
    """131 channels: panels are cut into runs of unequal length. 40 results: the last panel is narrower."""
    with jax.enable_x64(dtype == "float64"):
        x, w, f = (
            draw((2, 131, 7, 7), dtype, 1),
            draw((40, 131, 3, 3), dtype, 2),
            convolution(**params),
        )
        lengths = {[*sizes.values()][-1] for sizes in products(f, x, w)}
        assert dtype == "float64" or all(
            n % 8 == 0 for n in lengths
        )  # 7 of 8 lanes of float64 may stay
        check(f, x, w)


def test_groups_are_turned_one_by_one():
    x, w, f = (
        draw((2, 96, 7, 7), "float32", 1),
        draw((96, 32, 3, 3), "float32", 2),
        convolution(feature_group_count=3),
    )
    assert {[*sizes.values()][-1] for sizes in products(f, x, w)} == {32}
    check(f, x, w)


def test_full_rows_stay():
    """Of 32 pixels, all lanes of two vectors are used: turning would only cost."""
    x, w, f = draw((1, 32, 8, 32), "float32", 1), draw((32, 32, 3, 3), "float32", 2), convolution()
    assert {[*sizes.values()][-1] for sizes in products(f, x, w)} == {32}
    assert "sums" not in pbkern.jit(f).as_text(x, w, stage="nests")
    check(f, x, w)


def test_results_that_interleave():
    """Each phase of a transposed convolution stores every second element of its rows."""
    f = convolution(padding=((1, 2), (1, 2)), lhs_dilation=(2, 2))
    x, w = draw((2, 64, 7, 7), "float32", 1), draw((64, 64, 4, 4), "float32", 2)
    assert all([*sizes.values()][-1] % 16 == 0 for sizes in products(f, x, w))
    check(f, x, w)


def test_fast_math_off_adds_in_order():
    """Sums are not cut into runs where they may not be reassociated."""
    x, w = draw((1, 131, 9, 9), "float32", 1), draw((40, 131, 3, 3), "float32", 2)
    f = pbkern.jit(convolution(padding="VALID"), compile_options={"mlir_disable_fast_math": True})
    want = np.zeros((1, 40, 7, 7), np.float32)
    for i, h, v in np.ndindex(131, 3, 3):
        want += np.asarray(x[:, i, None, h : h + 7, v : v + 7] * w[None, :, i, h, v, None, None])
    np.testing.assert_array_equal(f(x, w), np.maximum(want, 0))


def test_vectors_do_not_run_along_short_windows():
    """A row of a 5 x 5 window is contiguous in image and filter, but its lanes are few, and added to one another."""
    pool, at = Pool(), {d: Affine.symbol(d) for d in "oyxihw"}
    f32, dims, reduced = (
        np.dtype(np.float32),
        {"o": 64, "y": 14, "x": 14},
        {"i": 64, "h": 5, "w": 5},
    )
    image, filters, out = (
        Buf("image", (64, 18, 18), f32),
        Buf("filters", (64, 64, 5, 5), f32),
        Buf("out", (64, 14, 14), f32),
    )
    left = pool.load(f32, image, (at["i"], at["y"] + at["h"], at["x"] + at["w"]), False)
    right = pool.load(f32, filters, tuple(at[d] for d in "oihw"), False)
    store = Store(out, tuple(at[d] for d in "oyx"), pool.accumulator(f32, 0), inner=False)
    nest = Nest(dims | reduced, tuple(reduced), (Reduction("dot", (left, right), f32),), (store,))
    assert choose(nest).vector == "x"


def test_gradients_of_images_and_filters():
    f = convolution()
    g = lambda x, w: jax.grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1))(x, w)
    x, w = draw((2, 48, 7, 7), "float32", 1), draw((32, 48, 3, 3), "float32", 2)
    for got, want in zip(pbkern.jit(g)(x, w), g(x, w)):
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def test_small_images_share_what_is_made_of_filters():
    """A program takes several images of 7 x 7 pixels, and gradients of several channels of filters of 3 x 3 places."""
    x, w, f = draw((8, 64, 7, 7), "float32", 1), draw((256, 64, 3, 3), "float32", 2), convolution()
    gradient = lambda x, w: jax.grad(lambda w: f(x, w).sum())(w)
    (kernel,) = pbkern.jit(f).kernels(x, w)
    assert kernel.outputs[0].dims[0].size >= 4
    assert min(d.size for d in pbkern.jit(gradient).kernels(x, w)[-1].outputs[0].dims[:2]) >= 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32"])
def test_integers_wrap(dtype):
    x, w = (
        jnp.asarray(np.random.default_rng(0).integers(0, 100, s), dtype)
        for s in ((2, 40, 7, 7), (33, 40, 3, 3))
    )
    np.testing.assert_array_equal(pbkern.jit(convolution())(x, w), convolution()(x, w))
