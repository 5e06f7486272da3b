"""Numbers below the smallest normal one, where XLA's threads flush them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern


@pytest.mark.parametrize("towards", [1.0, -1.0, 0.0, np.inf, -np.inf, np.nan, 1e-45])
def test_nextafter(towards):
    """Comparisons of floats take subnormal numbers for zeros."""
    x = np.array(
        [1e-45, -1e-45, 1e-40, 0.0, -0.0, 1.1754944e-38, 1.1754942e-38, 1, np.inf, -np.inf, 3e38],
        "f4",
    )
    got = np.asarray(pbkern.jit(lambda x: jax.lax.nextafter(x, jnp.full_like(x, towards)))(x))
    np.testing.assert_array_equal(got.view("i4"), np.nextafter(x, np.float32(towards)).view("i4"))


@pytest.mark.parametrize("count", [1, 3, 12, 50])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_signs(dtype, count):
    info = jnp.finfo(dtype)
    least, normal = float(info.smallest_subnormal), float(info.tiny)
    numbers = [
        -least,
        least,
        0.0,
        -0.0,
        -3 * least,
        normal - least,
        -normal,
        2.5,
        np.inf,
        -np.inf,
        np.nan,
        -7,
    ]
    x = np.resize(numbers, count).astype(jnp.dtype(dtype))
    want = np.sign(x.astype("f8"))
    with jax.enable_x64(True):
        found = [pbkern.jit(jnp.sign)(x)]
        found.append(pbkern.simulate(pbkern.jit(jnp.sign), x).results)
    for got in found:
        got = np.asarray(got, "f8").reshape(-1)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(x.astype("f8")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_angles_of_points_on_the_axes(dtype):
    """Which coordinate is zero and which one is not tells the angle."""
    least = float(jnp.finfo(dtype).smallest_subnormal)
    sizes = [0.0, -0.0, 3 * least, -3 * least, 5.0, -5.0, np.inf, -np.inf, np.nan]
    y, x = (part.ravel().astype(jnp.dtype(dtype)) for part in np.meshgrid(sizes, sizes))
    with np.errstate(all="ignore"):
        is_subnormal = [(part != 0) & (np.abs(part.astype("f8")) < 1e-30) for part in (y, x)]
    diagonal = is_subnormal[0] & is_subnormal[1]
    y, x = y[~diagonal], x[~diagonal]
    with jax.enable_x64(True):
        got = np.asarray(pbkern.jit(jnp.arctan2)(y, x)).astype("f8")
    want = np.arctan2(y.astype("f8"), x.astype("f8"))
    np.testing.assert_allclose(got, want, rtol=float(jnp.finfo(dtype).eps), atol=1e-37)


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_powers_with_exponents_beside_zero(dtype, count):
    """They are numbers that are no integers, and have signs: powers of numbers below zero are not defined."""
    least = float(jnp.finfo(dtype).smallest_subnormal)
    bases = [-np.inf, np.inf, -2.5, 2.5, -1.0, 1.0, 0.0, -0.0, np.nan]
    exponents = [3 * least, -3 * least, 0.0, -0.0, 1.0, 2.0, -0.5]
    x, y = (part.ravel().astype(jnp.dtype(dtype)) for part in np.meshgrid(bases, exponents))
    with np.errstate(all="ignore"):
        want = np.power(x.astype("f8"), y.astype("f8"))
    for place in range(0, len(x), count):
        some = slice(place, place + count)
        with jax.enable_x64(True):
            got = np.asarray(pbkern.jit(jnp.power)(x[some], y[some])).astype("f8")
        np.testing.assert_allclose(got, want[some], rtol=2 * float(jnp.finfo(dtype).eps))


def test_powers_of_subnormal_numbers_in_float64():
    x = np.array([5e-324, 1e-310, -1e-310, 2e-308, -1e-310])
    y = np.array([0.5, -0.5, 0.5, 0.75, -0.25])
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.longdouble), y.astype(np.longdouble)).astype("f8")
    with jax.enable_x64(True):
        got = pbkern.jit(jnp.power)(x, y)
    np.testing.assert_allclose(got, want, rtol=1e-15)
