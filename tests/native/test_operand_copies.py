"""Copies of broadcast operands: in the type that is multiplied, rows apart, what windows share once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from tests.arrays import array
from tests.lowered import lowered


def draw(shape, dtype, seed):
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


def convolution(stride=1):
    return lambda x, w: lax.conv_general_dilated(
        x, w, (stride, stride), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW")
    )


def check(f, args, tolerance):
    got = np.asarray(pbkern.jit(f)(*args), np.float64)
    with jax.enable_x64(True):
        want = np.asarray(f(*(a.astype(jnp.float64) for a in args)))
    np.testing.assert_allclose(got, want, atol=tolerance * np.abs(want).max(), rtol=0)


def broadcast_operand(f, *args) -> tuple[str, list[int]]:
    """The first operand of the function's product, without its indices, and the sizes of the nest that stores it."""
    nests = lowered(f, *args)
    (load,) = set(re.findall(r"dot= (%\w+)\[", nests))
    found = re.search(rf"nest \[([^\]]*)\][^\n]*\n *{load}\[", nests)
    return load, [int(n) for n in re.findall(r"<(\d+)", found[1])] if found else []


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-3), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("stride", [1, 2])
def test_windows_are_converted_once(dtype, tolerance, stride):
    """Each pixel belongs to up to 9 windows: 32 images of 9 x 9 pixels are converted, not 9 times those."""
    x, w = draw((1, 32, 9, 9), dtype, 1), draw((64, 32, 3, 3), dtype, 2)
    f = convolution(stride)
    _, sizes = broadcast_operand(f, x, w)
    assert np.prod(sizes) == 32 * 81
    check(f, (x, w), tolerance)


def test_every_second_row_alone_is_copied():
    x, w = draw((64, 2, 128), "float16", 1), draw((128, 64), "float16", 2)
    f = lambda x, w: jnp.dot(x[:, 1], w)
    _, sizes = broadcast_operand(f, x, w)
    assert sizes[-1] == 128
    assert np.prod(sizes) <= 64 * 128
    check(f, (x, w), 1e-3)


def test_filters_that_collide_are_moved_apart():
    """Filters of 512 channels begin a multiple of 2 KB apart: those of a register tile would share a few cache sets."""
    x, w = draw((1, 512, 6, 66), "float32", 1), draw((128, 512, 3, 3), "float32", 2)
    f = convolution()
    nests = lowered(f, x, w)
    (copy,) = set(re.findall(r"dot= .*, (%t\d+)\[", nests))
    assert re.search(rf"nest \[d\d+<\d+, d\d+<\d+\].*\n *{copy}\[", nests)
    check(f, (x, w), 1e-5)


def test_copies_are_of_their_own_loops():
    """Runs of channels each convert their own part of the image."""
    x, w = draw((1, 200, 9, 9), "float16", 1), draw((64, 200, 3, 3), "float16", 2)
    f = convolution()
    check(f, (x, w), 1e-3)
    check(lambda x, w: f(x, w) + f(2 * x, w), (x, w), 1e-3)


def test_filters_of_interleaved_results_are_moved_apart():
    """Each phase of a transposed convolution takes every second place of its windows, of filters 8 KB apart."""
    x, w = draw((1, 128, 14, 14), "float32", 1), draw((64, 128, 4, 4), "float32", 2)
    f = lambda x, w: lax.conv_general_dilated(
        x,
        w,
        (1, 1),
        ((1, 2), (1, 2)),
        lhs_dilation=(2, 2),
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )
    nests = pbkern.jit(f).as_text(x, w, stage="nests")
    assert re.search(r"dot= ", nests)
    assert not re.search(r"dot= .*%a\d+\[", nests)
    check(f, (x, w), 1e-5)
