"""Convolutions of each channel by itself, padded or not, in all layouts, with NumPy's sums in float64."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern

LAYOUTS = {"rows last": ("NCHW", "OIHW", "NCHW"), "channels last": ("NHWC", "HWIO", "NHWC")}


def reference(x, w, strides, padding, dilation):
    """x: samples, channels, rows, columns; w: channels, 1, taps."""
    per_channel = w.shape[0] // x.shape[1]
    x = np.repeat(x.astype(np.float64), per_channel, 1)
    low, high = np.maximum(padding, 0).T
    x = np.pad(x, [(0, 0), (0, 0), *zip(low, high)])
    for axis, (before, behind) in enumerate(np.minimum(padding, 0)):
        x = x[(slice(None),) * (axis + 2) + (slice(-before, x.shape[axis + 2] + behind),)]
    sizes = [
        (size - (taps - 1) * apart - 1) // step + 1
        for size, taps, apart, step in zip(x.shape[2:], w.shape[2:], dilation, strides)
    ]
    out = np.zeros((*x.shape[:2], *sizes))
    for tap in itertools.product(*map(range, w.shape[2:])):
        part = [
            slice(k * apart, k * apart + (size - 1) * step + 1, step)
            for k, apart, size, step in zip(tap, dilation, sizes, strides)
        ]
        out += x[:, :, part[0], part[1]] * w[:, 0, tap[0], tap[1]].astype(np.float64)[:, None, None]
    return out


def two(values):
    return st.tuples(values, values)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(5, 40), st.integers(5, 70)),
    taps=two(st.integers(1, 5)),
    strides=two(st.integers(1, 2)),
    dilation=two(st.integers(1, 2)),
    padding=two(two(st.integers(-1, 3))),
    per_channel=st.sampled_from([1, 1, 2]),
    after=st.booleans(),
)
def test_they_agree(layout, sizes, taps, strides, dilation, padding, per_channel, after):
    samples, channels, rows, columns = sizes
    spans = [(n - 1) * apart + 1 for n, apart in zip(taps, dilation)]
    if any(n + sum(ends) < span for n, ends, span in zip((rows, columns), padding, spans)):
        return
    rng = np.random.default_rng(sum(sizes))
    x = rng.standard_normal((samples, channels, rows, columns)).astype("f")
    w = rng.standard_normal((channels * per_channel, 1, *taps)).astype("f")

    @pbkern.jit
    def f(x, w):
        y = lax.conv_general_dilated(
            x,
            w,
            strides,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=LAYOUTS[layout],
            feature_group_count=channels,
        )
        return jax.nn.relu(y) + 1 if after else y

    got = f(
        x.transpose(_order("NCHW", LAYOUTS[layout][0])),
        w.transpose(_order("OIHW", LAYOUTS[layout][1])),
    )
    got = np.asarray(got).transpose(_order(LAYOUTS[layout][2], "NCHW"))
    want = reference(x, w, strides, padding, dilation)
    want = np.maximum(want, 0) + 1 if after else want
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def _order(of: str, wanted: str) -> list[int]:
    return [of.index(axis) for axis in wanted]


def nests_inside(x_shape, w_shape, layout) -> str:
    """Text of the programs that are inside the arrays."""
    x, w = np.zeros(x_shape, "f"), np.zeros(w_shape, "f")

    def f(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            "SAME",
            dimension_numbers=LAYOUTS[layout],
            feature_group_count=max(w_shape[0], w_shape[-1]),
        )

    return pbkern.jit(f).as_text(x, w, stage="nests").partition("guarded:")[0]


def test_long_rows_are_not_copied():
    """What pads them is a term less in the nests of their ends."""
    assert "%t" not in nests_inside((1, 8, 200, 200), (8, 1, 3, 3), "rows last")
    assert "%t" in nests_inside((1, 8, 12, 12), (8, 1, 3, 3), "rows last"), (
        "their ends are long work"
    )
