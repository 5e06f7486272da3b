"""Short rows that are added up together: the lanes of a vector of results are the rows, in their order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.targets.cpu.emit.reductions.horizontal import butterfly_halves
from tests.lowered import TABLE, lowered

pytestmark = pytest.mark.usefixtures("wide_types")
ROWS = (1, 3, 8, 9, 15, 16, 17, 31, 40, 133)
LENGTHS = (8, 13, 16, 17, 40, 64, 100, 128)


@pytest.mark.parametrize("lanes", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("block", [2, 4, 8, 16])
def test_every_lane_ends_with_the_sum_of_its_row(lanes, block):
    rows = [np.random.default_rng(k).integers(0, 1000, lanes) for k in range(lanes)]
    sums, done = rows, 1
    while done < lanes:
        low, high = butterfly_halves(lanes, done, block)
        both = [np.concatenate(pair) for pair in zip(sums[::2], sums[1::2])]
        sums, done = [x[low] + x[high] for x in both], 2 * done
    np.testing.assert_array_equal(sums[0], np.sum(rows, 1))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("length", LENGTHS)
def test_sums_extremes_and_places(rows, length, rng):
    x = rng.standard_normal((rows, length)).astype(np.float32)
    f = pbkern.jit(
        lambda x: (
            x.sum(-1),
            x.max(-1),
            x.min(-1),
            x.argmax(-1),
            x.argmin(-1),
            jnp.sqrt((x * x).sum(-1)) + 1,
        )
    )
    wide = x.astype(np.float64)
    want = (
        wide.sum(-1),
        x.max(-1),
        x.min(-1),
        x.argmax(-1),
        x.argmin(-1),
        np.sqrt((wide * wide).sum(-1)) + 1,
    )
    for got, w in zip(f(x), want):
        np.testing.assert_allclose(got, w, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "dtype",
    ["float64", "bfloat16", "float16", "int32", "int64", "uint8", "int8", "int16", "uint32"],
)
@pytest.mark.parametrize("rows", [5, 16, 37])
def test_types(dtype, rows, rng):
    x = rng.integers(0, 100, (rows, 24)).astype(jnp.dtype(dtype))
    exact = x.astype(np.float64 if x.dtype.kind not in "iu" else x.dtype)
    tolerance = {"rtol": 0.01 if dtype in ("bfloat16", "float16") else 1e-6}
    for f, want in (
        (jnp.sum, exact.sum(-1)),
        (jnp.max, exact.max(-1)),
        (jnp.argmin, exact.argmin(-1)),
    ):
        np.testing.assert_allclose(
            np.asarray(pbkern.jit(lambda x, f=f: f(x, -1))(x), np.float64), want, **tolerance
        )
    if x.dtype.kind in "iu":
        for f in (np.bitwise_and, np.bitwise_or, np.bitwise_xor):
            got = pbkern.jit(lambda x, f=f: getattr(jnp, f.__name__).reduce(x, -1))(x)
            np.testing.assert_array_equal(got, f.reduce(x, -1))


def test_nan_and_signed_zeros_in_extremes():
    x = np.tile(np.float32([-0.0, 0.0, 1, -1] * 4), (33, 1))
    x[::3, 5] = np.nan
    x[1::3] = np.where(x[1::3] == 1, 0, np.where(x[1::3] == -1, -0.0, x[1::3]))
    for f, of in ((jnp.max, np.max), (jnp.min, np.min)):
        got = np.asarray(pbkern.jit(lambda x, f=f: f(x, -1))(x))
        np.testing.assert_array_equal(got, of(x, -1))
        np.testing.assert_array_equal(np.signbit(got[1::3]), of is np.min)


@pytest.mark.parametrize("rows", [4, 16, 50])
def test_products_with_a_shared_operand(rows, rng):
    x, y = rng.standard_normal((7, rows, 40)), rng.standard_normal((7, 40))
    np.testing.assert_allclose(
        pbkern.jit(lambda x, y: jnp.einsum("bij,bj->bi", x, y))(x, y), np.einsum("bij,bj->bi", x, y)
    )
    np.testing.assert_allclose(pbkern.jit(lambda x, v: x @ v)(x[0], y[0]), x[0] @ y[0])


def test_what_follows_is_computed_in_vectors(rng):
    """Also what is read beside the sums, and stores of which some lanes are masked by the end of the rows."""
    x, scale = (
        rng.standard_normal((203, 32)).astype(np.float32),
        rng.standard_normal(203).astype(np.float32),
    )
    f = pbkern.jit(lambda x, scale: jnp.tanh(x.var(-1) * scale) + jnp.arange(203))
    text = f.as_text(x, scale, stage="mlir")
    assert "vector.reduction" not in text
    assert "vector.shuffle" in text
    want = np.tanh(x.astype(np.float64).var(-1) * scale) + np.arange(203)
    np.testing.assert_allclose(f(x, scale), want, rtol=1e-5, atol=1e-5)


def test_results_that_do_not_lie_side_by_side(rng):
    x = rng.standard_normal((20, 24, 16))
    f = pbkern.jit(lambda x: (x.sum(-1).T, jnp.stack([x.max(-1), x.min(-1)], -1)))
    for got, want in zip(f(x), (x.sum(-1).T, np.stack([x.max(-1), x.min(-1)], -1))):
        np.testing.assert_allclose(got, want)


@pytest.mark.parametrize("block", [24, 40, 16])
def test_blocks_that_reach_over_the_end_leave_the_same_bits(block, rng):
    x = rng.standard_normal((101, 48)).astype(np.float32)

    def kernel(x, o):
        o[...] = x[...].sum(-1)

    sums = [_sums(kernel, x, n) for n in (block, 101)]
    np.testing.assert_array_equal(*sums)
    np.testing.assert_allclose(sums[0], x.astype(np.float64).sum(-1), rtol=1e-5, atol=1e-5)


def _sums(body, x, block: int):
    call = pbkern.kernel(
        grid=(-(-len(x) // block),),
        in_specs=[pbkern.BlockSpec((block, x.shape[1]), lambda i: (i, 0))],
        out_specs=pbkern.BlockSpec((block,), lambda i: (i,)),
        out_shape=jax.ShapeDtypeStruct((len(x),), x.dtype),
    )(body)
    return np.asarray(call(x))


@pytest.mark.parametrize("width", [3, 5, 7, 11])
def test_ends_of_rows_are_stored_in_parts_without_mask_registers(width):
    """A store under a mask takes long on processors with AVX2 alone."""
    x = np.random.default_rng(width).standard_normal((50, width)).astype("f")
    places = np.random.default_rng(0).integers(0, 50, 90)
    f = pbkern.jit(lambda x, i: x[i] * 2)
    np.testing.assert_array_equal(f(x, places), x[places] * 2)
    narrow = dataclasses.replace(TABLE, vector_bits=256)
    texts = [lowered(f, x, places, stage="mlir", machine=m) for m in (TABLE, narrow)]
    assert ["vector.maskedstore" in text for text in texts] == [True, False]


@pytest.mark.parametrize("shape", [(9, 21, 3), (4, 17, 2), (1, 5, 3), (3, 1, 4)])
def test_channels_in_front_of_pixels_walk_as_rows(shape):
    """Channels are the first dimension of what is computed, and the last in memory: pixels and channels are one row."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    def f(x):
        planes = jnp.pad(x.transpose(2, 0, 1), ((0, 0), (1, 1), (0, 0)))
        sums = planes[:, 2:] + 2 * planes[:, 1:-1] + planes[:, :-2]
        return jnp.maximum(sums.transpose(1, 2, 0), x)

    wide = np.pad(np.float64(x), ((1, 1), (0, 0), (0, 0)))
    want = np.maximum(wide[2:] + 2 * wide[1:-1] + wide[:-2], x)
    np.testing.assert_allclose(pbkern.jit(f)(x), want, rtol=1e-6, atol=1e-6)


FILTER = np.array([1, 4, 6, 4, 1], np.float32) / 16


def test_pixels_and_channels_are_one_dimension():
    x = jax.ShapeDtypeStruct((64, 80, 3), jnp.float32)

    def f(x):
        columns = lax.conv_general_dilated(
            x.transpose(2, 0, 1)[:, None], FILTER[:, None][None, None], (1, 1), "SAME"
        )
        rows = lax.conv_general_dilated(columns, FILTER[None][None, None], (1, 1), "SAME")
        return jnp.maximum(rows[:, 0].transpose(1, 2, 0), x)

    text = pbkern.jit(f).as_text(x, stage="nests").split("guarded")[0]
    assert "<240" in text
    assert "<80" not in text
