"""Two sums along short rows that are added: each is along vectors, none is written out inside the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern


@pytest.mark.parametrize("length", [16, 20, 3])
def test_tangents_of_products_with_rows(length):
    rng = np.random.default_rng(0)
    a, c = (rng.normal(size=(1000, length)).astype("f") for _ in range(2))
    b, d = (rng.normal(size=length).astype("f") for _ in range(2))
    f = pbkern.jit(lambda a, b, c, d: jax.jvp(jnp.matmul, (a, b), (c, d))[1])
    want = c.astype("d") @ b + a.astype("d") @ d
    np.testing.assert_allclose(f(a, b, c, d), want, atol=1e-5)


def test_sums_of_vectors_stay_sums():
    rows, row = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32000, 16), (16,)))
    nests = pbkern.jit(lambda a, b, c, d: a @ b + c @ d).as_text(
        rows, row, rows, row, stage="nests"
    )
    assert nests.count("dot=") == 2
