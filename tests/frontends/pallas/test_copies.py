"""Copies in TPU kernels whose sizes are values, and the pipelines that JAX makes of copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pbkern.core.errors import UnsupportedOp

F32 = jnp.float32
ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)
SCALARS = pl.BlockSpec(memory_space=pltpu.SMEM)


def copying(select, shape, dtype=F32):
    """f(i32[...], x, y): y with what `select(scalars, x_ref, y_ref)`, two views, says copied from x."""

    def kernel(scalars, x_ref, y_ref, o_ref, sem):
        source, target = select(scalars, x_ref, o_ref)
        copy = pltpu.make_async_copy(source, target, sem)
        copy.start()
        copy.wait()

    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(shape, dtype), in_specs=[SCALARS, ANYWHERE, ANYWHERE], out_specs=ANYWHERE,
        scratch_shapes=[pltpu.SemaphoreType.DMA], input_output_aliases={2: 0},
    )  # fmt: skip


def numbers(shape, dtype="f4"):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


@pytest.mark.parametrize("count", [0, 1, 5, 9])
@pytest.mark.parametrize("dtype", ["f4", "i1", "bool", "bfloat16"])
def test_rows_of_dynamic_number(count, dtype):
    dtype = np.dtype(jnp.dtype(dtype))
    x, y = numbers((9, 5)) % 7, np.zeros((12, 5), dtype)
    x = x.astype(dtype)
    f = copying(lambda s, x, o: (x.at[pl.ds(0, s[0])], o.at[pl.ds(s[1], s[0])]), y.shape, dtype)
    want = y.copy()
    want[2 : 2 + count] = x[:count]
    np.testing.assert_array_equal(
        np.asarray(f(np.array([count, 2], "i4"), x, jnp.asarray(y))), want
    )


def test_rows_of_dynamic_number_are_added():
    def kernel(count, x_ref, y_ref, o_ref, sem):
        copy = pltpu.make_async_copy(
            x_ref.at[pl.ds(0, count[0])], o_ref.at[pl.ds(2, count[0])], sem
        )
        copy.start(add=True)
        copy.wait()

    x, y = numbers((9, 5)) % 7, numbers((12, 5))
    f = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(y.shape, F32), in_specs=[SCALARS, ANYWHERE, ANYWHERE], out_specs=ANYWHERE,
        scratch_shapes=[pltpu.SemaphoreType.DMA], input_output_aliases={2: 0},
    )  # fmt: skip
    want = y.copy()
    want[2:7] += x[:5]
    np.testing.assert_array_equal(f(np.array([5], "i4"), x, jnp.asarray(y)), want)


def test_both_dimensions_of_dynamic_size():
    x, y = numbers((3, 7, 19)), np.zeros((8, 30), "f4")
    f = copying(
        lambda s, x, o: (
            x.at[1, pl.ds(s[0], s[1]), pl.ds(3, s[2])],
            o.at[pl.ds(2, s[1]), pl.ds(s[0], s[2])],
        ),
        y.shape,
    )
    for first, rows, columns in ((0, 7, 16), (2, 3, 1), (1, 6, 0)):
        want = y.copy()
        rows_here = min(rows, 6)
        want[2 : 2 + rows_here, first : first + columns] = x[
            1, first : first + rows_here, 3 : 3 + columns
        ]
        np.testing.assert_array_equal(f(np.array([first, rows, columns], "i4"), x, y), want)


def test_strides_points_and_what_was_reshaped_before():
    x, y = numbers((4, 60)), np.zeros((6, 4), "f4")

    def select(s, x, o):
        return x.reshape(4, 10, 6).at[s[1], pl.ds(1, s[0], 3)], o.reshape(4, 6).at[pl.ds(0, s[0])]

    want = y.reshape(4, 6).copy()
    want[:3] = x.reshape(4, 10, 6)[2, 1::3]
    np.testing.assert_array_equal(
        copying(select, y.shape)(np.array([3, 2], "i4"), x, y), want.reshape(6, 4)
    )


def test_copies_stay_inside_both_arrays():
    """A TPU rounds sizes up to its tiles, and has padding there."""
    x, y = numbers((5, 6)), np.zeros((8, 9), "f4")
    f = copying(
        lambda s, x, o: (
            x.at[pl.ds(s[0], s[1]), pl.ds(s[0], s[1])],
            o.at[pl.ds(6, s[1]), pl.ds(7, s[1])],
        ),
        y.shape,
    )
    want = y.copy()
    want[6:8, 7:9] = x[2:4, 2:4]
    np.testing.assert_array_equal(f(np.array([2, 8], "i4"), x, y), want)


def test_copies_between_slices_of_two_kinds_are_refused():
    x, y = numbers((6, 4)), np.zeros((12, 2), "f4")
    mixed = copying(lambda s, x, o: (x.at[pl.ds(0, s[0]), pl.ds(0, 2)], o), y.shape)
    with pytest.raises(UnsupportedOp, match=r"constant and of dynamic size[\s\S]*test_copies.py"):
        mixed(np.array([3], "i4"), x, y)


def test_an_index_that_became_a_constant_in_a_branch_not_taken():
    def kernel(x_ref, o_ref):
        def step(k, total):
            return jax.lax.cond(k + 1 < 4, lambda: total + x_ref[k + 1], lambda: total)

        o_ref[0] = jax.lax.fori_loop(0, 4, step, x_ref[0], unroll=True)

    x = numbers((4,))
    np.testing.assert_array_equal(
        pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((1,), F32))(x), [6]
    )


# --- pipelines -----------------------------------------------------------------------------------------------------


def pipeline(body, **options):
    def kernel(*refs):
        pltpu.emit_pipeline(body, **options)(*refs)

    return kernel


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(32, 256), (30, 250), (1, 1), (8, 129)])
def test_pipelines_of_whole_and_ragged_blocks(shape):
    def body(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] * 2 + y_ref[...]

    block = pl.BlockSpec((8, 128), lambda i, j: (i, j))
    grid = (pl.cdiv(shape[0], 8), pl.cdiv(shape[1], 128))
    kernel = pipeline(body, grid=grid, in_specs=[block, block], out_specs=[block])
    x, y = np.random.default_rng(0).standard_normal((2, *shape)).astype("f4")
    f = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(shape, F32),
        in_specs=[ANYWHERE] * 2,
        out_specs=ANYWHERE,
    )
    np.testing.assert_allclose(jax.jit(f)(x, y), x * 2 + y, rtol=1e-6, atol=1e-6)


def test_pipelines_accumulate_in_a_block_that_is_visited_again():
    def body(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=F32)

    kernel = pipeline(
        body, grid=(2, 3, 2),
        in_specs=[pl.BlockSpec((8, 128), lambda i, j, k: (i, k)), pl.BlockSpec((128, 128), lambda i, j, k: (k, j))],
        out_specs=[pl.BlockSpec((8, 128), lambda i, j, k: (i, j))],
    )  # fmt: skip
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((16, 256)).astype("f4"), rng.standard_normal((256, 384)).astype("f4")
    f = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((16, 384), F32),
        in_specs=[ANYWHERE] * 2,
        out_specs=ANYWHERE,
    )
    np.testing.assert_allclose(f(x, y), x @ y, rtol=1e-4, atol=1e-4)


def test_kernels_are_told_the_sizes_of_a_tpu():
    assert pltpu.get_tpu_info().num_lanes == 128
    assert not pltpu.is_tpu_device()
