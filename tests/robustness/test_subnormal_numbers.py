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
