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
