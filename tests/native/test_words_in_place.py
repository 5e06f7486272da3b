"""Products of few rows by words of both operands where they are (targets/cpu/packing/words_in_place.py), and squares of words
that are turned while they are packed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from tests.lowered import lowered

TYPES = [("int8", "int8"), ("uint8", "uint8"), ("uint8", "int8"), ("int8", "uint8")]
SHAPES = [
    (1, 512, 33), (1, 2052, 7), (2, 4096, 18), (3, 516, 1), (4, 2048, 40), (5, 2052, 9), (8, 4096, 70), (15, 2048, 65),
    (16, 260, 129), (33, 68, 47), (1, 515, 9), (7, 1022, 20),
]  # fmt: skip


def rows_by_rows(x, w, out="int32"):
    return jax.lax.dot_general(
        x, w, (((x.ndim - 1,), (x.ndim - 1,)), ((), ())), preferred_element_type=jnp.dtype(out)
    )


def drawn(rng, dtype, shape):
    """All values of the type; the ends are a fourth of them."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    x = rng.integers(low, high + 1, shape)
    x = np.where(rng.random(shape) < 0.25, rng.choice([low, high], shape), x)
    return x.astype(dtype)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_bytes(shape, types):
    rows, depth, columns = shape
    rng = np.random.default_rng(depth)
    x, w = drawn(rng, types[0], (rows, depth)), drawn(rng, types[1], (columns, depth))
    want = x.astype(np.int64) @ w.T.astype(np.int64)
    for out in ("int32", "int16"):
        got = pbkern.jit(lambda x, w, out=out: rows_by_rows(x, w, out))(x, w)
        np.testing.assert_array_equal(got, want.astype(out))
    got = pbkern.jit(lambda x, w: jnp.maximum(rows_by_rows(x, w) - 5, 0))(x, w)
    np.testing.assert_array_equal(got, np.maximum(want - 5, 0).astype(np.int32))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("shape", [(3, 1, 1024, 20), (2, 5, 2048, 9), (4, 8, 516, 33)])
def test_batches_of_bytes(shape, types):
    batch, rows, depth, columns = shape
    rng = np.random.default_rng(rows)
    x, w = drawn(rng, types[0], (batch, rows, depth)), drawn(rng, types[1], (batch, columns, depth))
    f = lambda x, w: jax.lax.dot_general(
        x, w, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.int32
    )
    want = np.einsum("bmk,bnk->bmn", x.astype(np.int64), w.astype(np.int64))
    np.testing.assert_array_equal(pbkern.jit(f)(x, w), want.astype(np.int32))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape",
    [(1, 1024, 40), (1, 515, 9), (2, 2048, 18), (8, 4096, 70), (20, 132, 51), (65, 260, 47)],
)
def test_products_of_16_bits(shape, dtype):
    rows, depth, columns = shape
    rng = np.random.default_rng(depth)
    x, w = (jnp.asarray(rng.normal(size=(n, depth)), dtype) for n in (rows, columns))
    want = np.asarray(x, "f8") @ np.asarray(w, "f8").T
    got = np.asarray(pbkern.jit(rows_by_rows, static_argnums=2)(x, w, dtype), "f8")
    error = {"bfloat16": 6e-3, "float16": 1e-3}[dtype]
    np.testing.assert_allclose(got, want, rtol=0, atol=error * np.abs(want).max())


def test_rows_are_read_once_and_in_words():
    def nests(rows, dtype):
        shapes = (jax.ShapeDtypeStruct(s, dtype) for s in ((rows, 4096), (4096, 4096)))
        return lowered(lambda x, w: x @ w.T, *shapes)

    for rows in (1, 2, 8):
        assert "by vpdpbusd= xor(%a1.words" in nests(rows, "int8")
    assert "vector='k2'" in nests(1, "bfloat16")
    assert "transpose='k2'" in nests(64, "int8")
    assert "transpose='k2'" in nests(64, "bfloat16")
