"""Reductions of rows of every length: extremes with NaN and zeros of both signs, products in lanes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
import pbkern.cpu
from pbkern import config

from .test_other_machines import runs_here

pytestmark = pytest.mark.usefixtures("wide_types")
LENGTHS = (1, 2, 5, 8, 16, 20, 33, 64, 100, 257)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int32", "uint8"])
def test_extremes(dtype, length, rng):
    x = rng.integers(0, 200, (60, length)).astype(dtype)
    if x.dtype.kind not in "iu":
        x = rng.standard_normal((60, length)).astype(jnp.dtype(dtype))
        x[:20][rng.random((20, length)) < 0.3] = np.nan
        x[10:20][rng.random((10, length)) < 0.3] = -np.nan
        x[20:40] = np.where(rng.random((20, length)) < 0.5, 0.0, -0.0)
        x[40:50][rng.random((10, length)) < 0.5] = np.inf
        x[45:55][rng.random((10, length)) < 0.5] = -np.inf
    f = lambda x: (x.max(-1), x.min(-1), x.T.max(0), x.T.min(0))
    for got, pick in zip(pbkern.jit(f)(x), (-1, 0, -1, 0)):
        # In the total order, by sign and then by size, the last element is the maximum with -0 < 0, and the first the minimum.
        by_sign = np.sort(x.astype(np.float64), -1)
        want = by_sign[:, pick]
        want = np.where(np.isnan(by_sign[:, -1]), np.nan, want)
        np.testing.assert_array_equal(np.asarray(got, np.float64), want)
    for got, sign in zip(
        pbkern.jit(f)(x[20:40]), (np.min, np.max, np.min, np.max)
    ):  # a negative sign is the larger sign bit
        if x.dtype.kind not in "iu":
            np.testing.assert_array_equal(
                np.signbit(np.asarray(got, np.float64)),
                sign(np.signbit(x[20:40].astype(float)), -1),
            )


@pytest.mark.sampled(9)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8", "int64"])
def test_products(dtype, length, rng):
    x = (
        rng.integers(1, 7, (50, length))
        if "int" in dtype
        else np.exp(rng.uniform(-0.5, 0.5, (50, length)))
    )
    x = x.astype(dtype)
    got = pbkern.jit(lambda x: x.prod(-1))(x)
    if "int" in dtype:
        np.testing.assert_array_equal(got, x.prod(-1, dtype=got.dtype))
    else:
        np.testing.assert_allclose(
            got, x.astype(np.float64).prod(-1), rtol=length * np.finfo(dtype).eps
        )
    assert pbkern.jit(lambda x: x.prod(-1))(x[:, :0]).tolist() == [1] * 50


def test_products_in_order_without_fast_math(rng):
    """Lanes would multiply numbers far apart: large ones with large ones."""
    x = np.tile(np.float32([1e30, 1e-30]), (20, 32))
    exact = pbkern.jit(lambda x: x.prod(-1), compile_options={"mlir_disable_fast_math": True})(x)
    np.testing.assert_allclose(exact, np.ones(20), rtol=1e-5)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "dtype", ["uint8", "uint16", "bool", "int8", "uint32", "float64", "bfloat16"]
)
@pytest.mark.parametrize("length", [3, 7, 17, 40])
def test_places_of_extremes(dtype, length, rng):
    x = rng.integers(0, 2 if dtype == "bool" else 250, (30, length)).astype(dtype)
    for f, want in ((jnp.argmax, np.argmax), (jnp.argmin, np.argmin)):
        np.testing.assert_array_equal(
            pbkern.jit(lambda x, f=f: f(x, -1))(x), want(x.astype(np.float64), -1)
        )
        np.testing.assert_array_equal(
            pbkern.jit(lambda x, f=f: f(x, -1))(x[0]), want(x[0].astype(np.float64))
        )


def test_functions_before_sums_along_rows_are_computed_in_vectors(rng):
    """The sums go from one element to the next."""
    x = rng.standard_normal((30, 70))
    f = lambda x: jnp.cumsum(jnp.tanh(x) * jnp.exp(x), 1)
    np.testing.assert_allclose(
        pbkern.jit(f)(x), np.cumsum(np.tanh(x) * np.exp(x), 1), rtol=1e-12, atol=1e-12
    )
    (ordered,) = (
        nest
        for nest in pbkern.jit(f).as_text(x, stage="nests").split("nest ")
        if "] ordered" in nest
    )
    assert "tanh" not in ordered
    assert "exp" not in ordered
    cheap = pbkern.jit(lambda x: jnp.cumsum(x * 2 + 1, 1)).as_text(x, stage="nests")
    assert cheap.count("nest [") == 1


def test_equal_scaled_numbers_cancel(rng):
    x = rng.integers(0, 256, (300, 3)).astype(np.uint8)
    x[:, 2] = x[:, 1]
    f = lambda x: (x[:, 1].astype(jnp.float32) / 255 - x[:, 2].astype(jnp.float32) / 255) % 6
    np.testing.assert_array_equal(pbkern.jit(f)(x), np.zeros(300))


@pytest.mark.parametrize("length", [3, 10, 20])
def test_short_rows_before_a_sum_over_all_points(length, rng):
    """Also rows that nothing is loaded for."""
    x, labels = rng.standard_normal((500, length)), rng.integers(0, length, 500)

    def loss(x, labels):
        return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1).mean()

    got = pbkern.jit(loss)(x, labels)
    shifted = x - x.max(1, keepdims=True)
    want = (np.log(np.exp(shifted).sum(1)) - shifted[np.arange(500), labels]).mean()
    np.testing.assert_allclose(got, want, rtol=1e-12)
    counted = lambda s: jnp.sqrt(
        lax.broadcasted_iota(jnp.float64, (500, length), 1).sum(1) + s
    ).sum()
    np.testing.assert_allclose(
        pbkern.jit(counted)(1.0), 500 * np.sqrt(length * (length - 1) / 2 + 1), rtol=1e-12
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("columns", [1, 2, 3, 5, 8, 17])
@pytest.mark.parametrize("name", ["sum", "max", "argmin", "argmax", "var"])
def test_few_columns_of_long_batches(name, columns):
    """Results of several batches take turns, so that no step waits for the one before."""
    x = np.random.default_rng(columns).integers(-9, 9, (11, 333, columns)).astype(np.float32)
    x[3, 200:, 0] = np.nan
    got = pbkern.jit(lambda x: getattr(x, name)(1))(x)
    np.testing.assert_allclose(got, getattr(x.astype(np.float64), name)(1), rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("length", [31, 64, 96, 640, 2000])
@pytest.mark.parametrize("result", ["float32", "bfloat16"])
def test_bfloat16_of_two_vectors_is_taken_by_turns(result, length, rng):
    """Sums, extremes and sums of squares of rows, with NaN."""
    x = rng.standard_normal((9, length)).astype(jnp.bfloat16)
    x[4, length // 2] = np.nan
    wide = x.astype(np.float64)

    def f(x):
        y = x.astype(jnp.float32)
        sums = y.sum(-1), (y * y).sum(-1)
        return *(total.astype(result) for total in sums), x.max(-1), x.min(-1)

    sums, squares, high, low = (np.asarray(got, np.float64) for got in pbkern.jit(f)(x))
    step = float(jnp.finfo(result).eps)
    for got, terms in ((sums, wide), (squares, wide**2)):
        bound = step * np.abs(terms.sum(-1)) + 2.0**-17 * np.abs(terms).sum(-1) + 1e-37
        wrong = np.abs(got - terms.sum(-1)) > bound
        assert not wrong.any(), np.abs(got - terms.sum(-1)) / bound
    np.testing.assert_array_equal(high, wide.max(-1))
    np.testing.assert_array_equal(low, wide.min(-1))


@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("shape", [(60, 200, 150), (7, 5, 33), (3, 4, 200)])
def test_rows_in_parts_of_larger_rows(shape, reduce, rng):
    """Sums over the first and the last axis: an accumulator for each row of the middle one."""
    x = rng.standard_normal(shape).astype(np.float32)
    got = pbkern.jit(lambda x: getattr(x, reduce)((0, 2)))(x)
    want = getattr(x.astype(np.float64), reduce)((0, 2))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=2e-6 * np.sqrt(shape[0] * shape[2]))


def test_powers_are_rounded_with_a_sum(rng):
    """A cube less twice the number, and equal powers, whose difference stays zero."""
    x = np.abs(rng.standard_normal(1000)).astype(np.float32) + 2
    wide = x.astype(np.float64)
    f = lambda x, y: (x**3 - 2 * x, x**2 + y, 2 * x + y, x**2 - y**2, x**3 - y**3)
    cube, square, double, *zeros = pbkern.jit(f)(x, x.copy())
    for got, want in ((cube, wide**3 - 2 * wide), (square, wide**2 + wide), (double, 3 * wide)):
        np.testing.assert_allclose(got, want, rtol=3e-7)
    assert all((np.asarray(zero) == 0).all() for zero in zeros)


def test_factors_of_few_channels_are_computed_once(rng):
    """The root of each channel's variance is stored, not computed for each of its pixels."""
    x = rng.standard_normal((500, 32)).astype(np.float32)
    f = pbkern.jit(lambda x: x / jnp.sqrt((x * x).mean(0) + 1e-5))
    want = x / np.sqrt((x.astype(np.float64) ** 2).mean(0) + 1e-5)
    np.testing.assert_allclose(f(x), want, rtol=1e-5, atol=1e-6)
    divisions = [line for line in f.as_text(x, stage="nests").splitlines() if "sqrt" in line]
    assert len(divisions) == 1
    assert "%t" in divisions[0].split("=")[0]


@pytest.mark.parametrize("machine", [None, "x86-64-v3"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("axis", [0, 1, (0, 2)])
def test_extremes_of_columns_and_pairs_keep_nan_and_signs_of_zeros(machine, dtype, axis, rng):
    if machine is not None and not runs_here(machine):
        pytest.skip("the processor has no AVX2")
    choices = np.array([0.0, -0.0, -1.5, 2.5, -np.inf, np.inf, np.nan, -np.nan])
    odds = np.array([0.1, 0.8, 0.02, 0.01, 0.02, 0.01, 0.02, 0.02])
    x = rng.choice(choices, (7, 19, 37), p=odds).astype(jnp.dtype(dtype))
    x[:, :, ::3] = np.where(x[:, :, ::3] == x[:, :, ::3], x[:, :, ::3], -0.0)  # few NaN there

    def f(x):
        y = x[::-1]
        return x.max(axis), x.min(axis), jnp.maximum(x, y), jnp.minimum(x, y)

    with config.override(machine=machine):
        got = pbkern.jit(f)(x)
    wide = x.astype(np.float64)
    pairs = np.stack([wide, wide[::-1]])
    wanted = [_extreme(wide, axis, pick) for pick in (-1, 0)]
    wanted += [_extreme(pairs, 0, pick) for pick in (-1, 0)]
    for result, want in zip(got, wanted):
        result = np.asarray(result, np.float64)
        np.testing.assert_array_equal(result, want)
        numbers = want == want
        np.testing.assert_array_equal(np.signbit(result)[numbers], np.signbit(want)[numbers])


def _extreme(x: np.ndarray, axis: int | tuple[int, ...], pick: int) -> np.ndarray:
    """The maximum (-1) or minimum (0) with -0 < 0, NaN where one is."""
    axes = (axis,) if isinstance(axis, int) else axis
    rows = np.moveaxis(x, axes, range(-len(axes), 0))
    rows = rows.reshape(*rows.shape[: -len(axes)], -1)
    order = np.lexsort((~np.signbit(rows), rows), axis=-1)
    best = np.take_along_axis(rows, order, -1)[..., pick]
    return np.where(np.isnan(rows).any(-1), np.nan, best)


def test_maxima_beside_places_of_maxima():
    """A search has two accumulators, and is one reduction."""
    x = np.random.default_rng(0).standard_normal((5, 37)).astype(np.float32)
    place, most, least = pbkern.jit(lambda x: (x.argmax(1), x.max(1), x.min(1)))(x)
    np.testing.assert_array_equal(place, x.argmax(1))
    np.testing.assert_array_equal(most, x.max(1))
    np.testing.assert_array_equal(least, x.min(1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [9, 100])
def test_extremes_of_columns_of_16_bit_floats_fill_registers(dtype, rows, rng):
    x = jnp.asarray(rng.standard_normal((rows, 1001)), dtype)
    x = x.at[3, 2].set(jnp.nan).at[:, 3].set(jnp.inf)
    extremes = pbkern.jit(lambda x: (x.min(0), x.max(0)))
    wide = np.asarray(x.astype(jnp.float32))
    for got, want in zip(extremes(x), (wide.min(0), wide.max(0)), strict=True):
        np.testing.assert_array_equal(got.astype(jnp.float32), want)
    lanes = pbkern.jit(lambda x: x.min(0)).as_text(x, stage="nests")
    assert f"lanes={pbkern.cpu.machine().vector_bits // 16}" in lanes
