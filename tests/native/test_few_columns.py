"""Products with few columns run along the reduction (targets/cpu/packing/few_columns.py), alone, in batches and in pairs of
bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from tests.lowered import lowered, on

ERRORS = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 2e-6, "float64": 1e-14}


def compared(f, *arrays, dtype):
    with jax.enable_x64(dtype == "float64"):
        args = [jnp.asarray(a, dtype) for a in arrays]
        got = np.asarray(pbkern.jit(f)(*args), np.float64)
        wide = [np.asarray(a, np.float64) for a in args]
    return got, wide


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(("rows", "depth", "columns"), [
    (300, 2048, 8), (257, 1000, 3), (64, 1001, 5), (100, 514, 15), (33, 300, 2), (1000, 2048, 1), (1, 2050, 9), (256, 2048, 8),
])  # fmt: skip
def test_products(rows, depth, columns, dtype):
    r = np.random.default_rng(depth)
    got, (x, w) = compared(
        jnp.matmul, r.normal(size=(rows, depth)), r.normal(size=(depth, columns)), dtype=dtype
    )
    np.testing.assert_allclose(got, x @ w, rtol=0, atol=ERRORS[dtype] * np.abs(x @ w).max())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(
    "shape", [(5, 33, 1024, 8), (3, 70, 515, 2), (1, 16, 300, 5), (4, 1, 600, 8)]
)
def test_batches(shape, dtype):
    batch, rows, depth, columns = shape
    r = np.random.default_rng(rows)
    got, (x, w) = compared(
        jnp.matmul,
        r.normal(size=(batch, rows, depth)),
        r.normal(size=(batch, depth, columns)),
        dtype=dtype,
    )
    np.testing.assert_allclose(got, x @ w, rtol=0, atol=ERRORS[dtype] * np.abs(x @ w).max())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("shape", [(700, 1500), (2048, 1024), (513, 2049), (1, 3000), (3000, 1)])
def test_vectors(shape, dtype):
    r = np.random.default_rng(1)
    for f, n in ((lambda x, v: x @ v, shape[1]), (lambda x, v: v @ x, shape[0])):
        got, (x, v) = compared(f, r.normal(size=shape), r.normal(size=n), dtype=dtype)
        np.testing.assert_allclose(got, f(x, v), rtol=0, atol=ERRORS[dtype] * np.abs(f(x, v)).max())


def test_mechanisms_are_at_work():
    def nests(f, *shapes, dtype="float32"):
        return lowered(f, *(jax.ShapeDtypeStruct(s, dtype) for s in shapes))

    assert "fetch" in nests(lambda v, x: v @ x, (4096,), (4096, 4096))
    assert "= %a1[" in nests(jnp.matmul, (16, 256, 1024), (16, 1024, 8))  # the copy of the columns
    words = nests(jnp.matmul, (8192, 2048), (2048, 8), dtype="bfloat16")
    assert "dot by dpbf16ps= %a0.words" in words
    assert "d1<8, k2<1024*" in words


@pytest.mark.parametrize(
    ("columns", "parts"), [(4096, 2), (4100, 2), (1000, 2), (32768, 8), (10, 1)]
)
def test_each_core_has_one_part_of_long_rows(columns, parts):
    """Two cores: a product of one row reads its operand once, parts of rows as long as sums that stay near."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3000,), (3000, columns))]
    with on():
        (kernel,) = pbkern.jit(lambda v, x: v @ x).kernels(*shapes)
    assert np.prod(kernel.grid, dtype=int) == parts


@pytest.mark.parametrize(("depth", "columns"), [(77, 9001), (1025, 4100), (300, 5000), (3, 40000)])
def test_products_of_one_row_in_parts(depth, columns):
    r = np.random.default_rng(depth)
    got, (v, x) = compared(
        lambda v, x: v @ x + 1,
        r.normal(size=depth),
        r.normal(size=(depth, columns)),
        dtype="float32",
    )
    np.testing.assert_allclose(got, v @ x + 1, rtol=0, atol=2e-6 * np.abs(v @ x).max())


@pytest.mark.parametrize(("columns", "rows", "depth"), [(112, 256, 320), (35, 7, 33), (112, 1, 9)])
def test_channels_of_images(columns, rows, depth):
    """Few channels, as of an image that is resized: vectors run along the weights' columns, which are neighbours."""
    f = lambda w, x: jnp.einsum("kx,ykc->xyc", w, x)
    r = np.random.default_rng(0)
    got, wide = compared(
        f, r.normal(size=(depth, columns)), r.normal(size=(rows, depth, 3)), dtype="float32"
    )
    want = np.einsum("kx,ykc->xyc", *wide)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_channels_of_images_leave_the_weights_in_place():
    f = lambda w, x: jnp.einsum("kx,ykc->xyc", w, x)
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((320, 112), (256, 320, 3))]
    text = lowered(f, *shapes)
    assert text.count("nest [") == 1
    assert "vector='d0'" in text
