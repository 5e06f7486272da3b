"""Sums in the nest of their one reader, which may read them in several ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from tests.arrays import array


def product(x, w):
    return lax.reshape(jnp.dot(x, w), (5,))


def updated(v):
    """v with 1 subtracted from its last three elements: they are read as padding's operand, and as they are."""
    changed = lax.pad(v[2:5] - 1, np.zeros((), v.dtype), [(2, 0, 0)])
    return jnp.where(jnp.arange(5) >= 2, changed, v)


BODIES = {
    "updated": lambda x, w: updated(product(x, w)),
    "updated twice": lambda x, w: updated(updated(product(x, w)) * 2),
    "padded alone": lambda x, w: lax.pad(product(x, w)[:3], np.zeros((), x.dtype), [(0, 2, 0)]),
    "sum of a row": lambda x, w: updated((x.reshape(64, 1) * w).sum(0)),
}


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("name", BODIES)
def test_a_sum_that_padding_reads_too(name, dtype):
    body = BODIES[name]

    @pbkern.kernel(
        grid=(),
        in_specs=[pbkern.BlockSpec(), pbkern.BlockSpec()],
        out_specs=[pbkern.BlockSpec()],
        out_shape=jax.ShapeDtypeStruct((5,), dtype),
    )
    def kernel(x, w, out):
        out[...] = body(x[...], w[...])

    rng = np.random.default_rng(0)
    x, w = (array(rng.integers(0, 9, shape).astype(dtype)) for shape in ((1, 64), (64, 5)))
    sums = np.asarray(x, np.int64)[0] @ np.asarray(w, np.int64)
    step = np.array([0, 0, 1, 1, 1])
    wanted = {
        "updated": sums - step,
        "updated twice": (sums - step) * 2 - step,
        "padded alone": np.array([*sums[:3], 0, 0]),
        "sum of a row": sums - step,
    }[name]
    np.testing.assert_array_equal(kernel(x, w), wanted)
