"""First elements of long sorted lines (targets/cpu/emit/sorts/top_k.py), against NumPy's stable sort: ties, NaN, falling order,
payloads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import pbkern
import pbkern.pallas
from pbkern.targets.cpu.codegen.kernel import lower_kernel

from .running import native

RNG = np.random.default_rng(0)


def top(k, dtype="f"):
    """A kernel: the k largest elements of each line, and their places."""

    def kernel(x, values, places):
        values[...], places[...] = lax.top_k(x[...], k)

    def call(x):
        shape = (*x.shape[:-1], k)
        out = [jax.ShapeDtypeStruct(shape, x.dtype), jax.ShapeDtypeStruct(shape, np.int32)]
        with pbkern.pallas.installed():
            return jax.jit(pl.pallas_call(kernel, out_shape=out))(x)

    return call


def check(x, k):
    values, places = top(k)(x)
    falling = -np.asarray(x, "f8")
    want = np.argsort(falling, axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(places, want)
    np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(x), want, -1))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("length", [127, 128, 129, 1000, 4099])
@pytest.mark.parametrize("k", [1, 2, 16, 33])
def test_top_of_random_lines(length, k):
    check(RNG.standard_normal((3, length)).astype("f"), k)


@pytest.mark.parametrize("name", ["rising", "falling", "equal", "few", "integers"])
def test_orders_and_ties(name):
    n = np.arange(1500.0)
    x = {
        "rising": n,
        "falling": -n,
        "equal": n * 0,
        "few": n % 7,
        "integers": (n * 7919 % 1499).astype(np.int32),
    }[name]
    x = x if name == "integers" else x.astype("f")
    check(np.stack([x, x[::-1]]), 8)


def test_bfloat16_and_nan():
    x = (
        jnp.asarray(RNG.standard_normal((2, 600)), jnp.bfloat16)
        .at[0, 300]
        .set(jnp.nan)
        .at[1, 5]
        .set(-jnp.inf)
    )
    got, want = top(9)(x), lax.top_k(x, 9)
    for a, b in zip(got, want):
        np.testing.assert_array_equal(np.asarray(a, "f4"), np.asarray(b, "f4"))


def sorted_slices(parts):
    """Two keys and a payload; each part is a slice of the sorted lines that is read."""

    def kernel(k, l, v, *out):
        lines = lax.sort((k[...], l[...], v[...]), dimension=1, num_keys=2)
        for o, (which, low, high) in zip(out, parts):
            o[...] = lines[which][:, low:high]

    out = [
        jax.ShapeDtypeStruct((4, high - low), np.float32 if w == 2 else np.int32)
        for w, low, high in parts
    ]
    keys = [RNG.integers(0, 9, (4, 700)).astype(np.int32) for _ in range(2)]
    return pbkern.kernel(kernel, out_shape=out), [*keys, RNG.standard_normal((4, 700)).astype("f")]


@pytest.mark.parametrize(
    "parts", [[(2, 0, 5)], [(0, 0, 20), (2, 3, 40), (1, 7, 8)], [(1, 690, 700)]]
)
def test_slices_of_sorted_lines(parts):
    kernel, arrays = sorted_slices(parts)
    order = np.lexsort((arrays[1], arrays[0]), axis=-1)  # stable
    for got, (which, low, high) in zip(native(kernel.trace(*arrays), *arrays), parts):
        np.testing.assert_array_equal(
            got, np.take_along_axis(arrays[which], order, -1)[:, low:high]
        )


def test_lines_that_are_read_whole_are_sorted_whole():
    def kernel(x, o):
        o[...] = lax.sort(x[...])

    made = pbkern.kernel(kernel, out_shape=jax.ShapeDtypeStruct((2, 600), "f"))
    assert ", first" not in lower_kernel(made.trace(np.ones((2, 600), "f")), "k").nests
    kernel, arrays = sorted_slices([(2, 0, 5)])
    assert "by 2, first 5" in lower_kernel(kernel.trace(*arrays), "k").nests


@pytest.mark.sampled(6)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_few_first_are_found_without_sorting(k, dtype):
    """Ties, both zeros, NaN of both signs and the ends of the integers, along both dimensions."""
    x = RNG.integers(0, 9, (6, 11)).astype(dtype)
    if np.dtype(dtype).kind != "i" and dtype != "uint8":
        x[0, :5], x[1] = [0.0, -0.0, np.nan, -np.nan, np.inf], np.nan
    else:
        x[0], x[1, ::2] = np.iinfo(dtype).min, np.iinfo(dtype).max
    for axis in (0, 1):
        f = pbkern.jit(lambda x, axis=axis: lax.top_k(x, k, axis=axis))
        for got, want in zip(f(x), lax.top_k(x, k, axis=axis)):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(np.asarray(got, "f8"), np.asarray(want, "f8"))
        assert "sort" not in f.as_text(x, stage="nests")
