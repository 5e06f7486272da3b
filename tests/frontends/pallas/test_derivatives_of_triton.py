"""Derivatives of kernels in the style of Triton, which address rows and columns by arrays that count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.experimental.pallas.ops.gpu import layer_norm, rms_norm, softmax

import pbkern
from pbkern.errors import UnsupportedKernel


@pytest.fixture(autouse=True)
def installed():
    with pbkern.pallas.installed():
        yield


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check(f, exact, *xs, rounding=3e-5):
    """The gradient of sum(f * weights), against that of the plain function in float64."""
    weights = numbers(*np.shape(f(*xs)), seed=9)
    every = tuple(range(len(xs)))
    got = jax.grad(lambda *xs: (f(*xs) * weights).sum(), every)(*xs)
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in xs]
        want = jax.grad(lambda *xs: (exact(*xs) * weights).sum(), every)(*wide)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=rounding * max(abs(np.asarray(b)).max(), 0.1))


def normal(x, scale, shift, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + eps) * scale + shift


def root_mean_square(x, scale, shift, eps=1e-5):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale + shift


@pytest.mark.parametrize("columns", [1, 96, 128, 300])
def test_layer_norm_of_jax(columns):
    f = lambda *xs: layer_norm.layer_norm_forward(*xs, eps=1e-5)[0]
    check(f, normal, numbers(2, 3, columns), numbers(columns, seed=1), numbers(columns, seed=2))


@pytest.mark.parametrize("columns", [1, 96, 300])
def test_rms_norm_of_jax(columns):
    f = lambda *xs: rms_norm.rms_norm_forward(*xs, eps=1e-5)[0]
    xs = numbers(2, 3, columns), numbers(columns, seed=1), numbers(columns, seed=2)
    check(f, root_mean_square, *xs)


def test_softmax_of_jax():
    check(softmax.softmax, lambda x: jax.nn.softmax(x, axis=-1), numbers(5, 100))


ROWS, COLUMNS = 8, 16


def tiles(x_ref, y_ref, o_ref, *, shape):
    """One tile of rows and columns, with masks at both ends."""
    rows = pl.program_id(0) * ROWS + jnp.arange(ROWS)[:, None]
    columns = jnp.arange(COLUMNS)[None, :] + pl.program_id(1) * COLUMNS
    places = tuple(jnp.broadcast_arrays(rows, columns))
    mask = (places[0] < shape[0]) & (places[1] < shape[1])
    x = plt.load(x_ref.at[places], mask=mask, other=0.0)
    y = plt.load(y_ref.at[places], mask=mask, other=0.0)
    plt.store(o_ref.at[places], jnp.sin(x) * y, mask=mask)


@pytest.mark.parametrize("shape", [(1, 1), (8, 16), (19, 33), (3, 50)])
def test_tiles_with_masks(shape):
    call = pl.pallas_call(
        functools.partial(tiles, shape=shape),
        grid=(pl.cdiv(shape[0], ROWS), pl.cdiv(shape[1], COLUMNS)),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    check(call, lambda x, y: jnp.sin(x) * y, numbers(*shape), numbers(*shape, seed=1))


def one_row(x_ref, o_ref, *, columns):
    """A row of its own per program, addressed by a number, with columns that count in steps of a loop."""
    row = pl.program_id(0)

    @pl.loop(0, pl.cdiv(columns, COLUMNS))
    def _(step):
        at = step * COLUMNS + jnp.arange(COLUMNS)
        mask = at < columns
        x = plt.load(x_ref.at[row, at], mask=mask, other=0.0)
        plt.store(o_ref.at[row, at], jnp.exp(x) * x, mask=mask)


@pytest.mark.parametrize("columns", [1, 16, 37])
def test_a_row_and_columns_that_count(columns):
    call = pl.pallas_call(
        functools.partial(one_row, columns=columns),
        grid=(3,),
        out_shape=jax.ShapeDtypeStruct((3, columns), jnp.float32),
    )
    check(call, lambda x: jnp.exp(x) * x, numbers(3, columns))


def flat_tiles(x_ref, y_ref, o_ref, *, shape, block, strides, masked):
    """Tiles of flat arrays: x and the result in rows of a stride of their own, y in columns."""
    rows = pl.program_id(0) * block[0] + jnp.arange(block[0])
    columns = pl.program_id(1) * block[1] + jnp.arange(block[1])
    mask, other = None, None
    if masked:
        mask, other = (rows < shape[0])[:, None] & (columns < shape[1])[None, :], 0.0
    of_rows = lambda stride: rows[:, None] * stride + columns[None, :]
    x = plt.load(x_ref.at[of_rows(strides[0])], mask=mask, other=other)
    y = plt.load(y_ref.at[columns[None, :] * strides[1] + rows[:, None]], mask=mask, other=other)
    plt.store(o_ref.at[of_rows(strides[2])], jnp.sin(x) * y, mask=mask)


def flat_call(shape, block, strides, masked=True):
    kernel = functools.partial(flat_tiles, shape=shape, block=block, strides=strides, masked=masked)
    size = shape[0] * strides[2]

    def tiled(x, y):
        return pl.pallas_call(
            lambda x_ref, y_ref, _, o_ref: kernel(x_ref, y_ref, o_ref),
            grid=(pl.cdiv(shape[0], block[0]), pl.cdiv(shape[1], block[1])),
            out_shape=jax.ShapeDtypeStruct((size,), jnp.float32),
            input_output_aliases={2: 0},
        )(x, y, jnp.zeros(size))

    def exact(x, y):
        x, y = x.reshape(shape[0], -1)[:, : shape[1]], y.reshape(shape[1], -1)[:, : shape[0]]
        return jnp.pad(jnp.sin(x) * y.T, ((0, 0), (0, strides[2] - shape[1]))).reshape(-1)

    return tiled, exact, (numbers(shape[0] * strides[0]), numbers(shape[1] * strides[1], seed=1))


def check_flat(shape, block, gaps=(0, 0, 0), masked=True):
    strides = shape[1] + gaps[0], shape[0] + gaps[1], shape[1] + gaps[2]
    call, exact, xs = flat_call(shape, block, strides, masked)
    check(call, exact, *xs)


def squares(f):
    return lambda *xs: (f(*xs) ** 2).sum()


AROUND = {
    "tangents": lambda f, xs: jax.jvp(f, xs, xs)[1],
    "vmap of gradient": lambda f, xs: jax.vmap(jax.grad(squares(f), (0, 1)))(
        *[np.stack([x, x / 2]) for x in xs]
    ),
    "gradient of vmap": lambda f, xs: jax.grad(squares(jax.vmap(f, (0, None))), (0, 1))(
        np.stack([xs[0], -xs[0]]), xs[1]
    ),
    "gradient of gradient": lambda f, xs: jax.grad(squares(jax.grad(squares(f))))(*xs),
}  # fmt: skip


@pytest.mark.parametrize("around", AROUND)
def test_flat_tiles_go_with_other_transformations(around):
    call, exact, xs = flat_call((5, 7), (4, 8), (7, 6, 9))
    got = AROUND[around](call, xs)
    with jax.enable_x64(True):
        want = AROUND[around](exact, [np.asarray(x, np.float64) for x in xs])
        want = jax.tree.map(np.asarray, want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-5 * float(abs(b).max()))


@settings(max_examples=6, deadline=None)
@given(
    st.tuples(st.integers(1, 13), st.integers(1, 21)),
    st.tuples(st.sampled_from([1, 4, 8]), st.sampled_from([1, 8, 16])),
    st.tuples(*[st.integers(0, 3)] * 3),
)
def test_flat_tiles_with_strides(shape, block, gaps):
    """Blocks may be wider than rows: a mask keeps rows apart."""
    check_flat(shape, block, gaps)


def test_flat_tiles_without_masks():
    check_flat((8, 12), (4, 6), (1, 0, 2), masked=False)


def test_masks_that_always_hold():
    """A block of all columns; JAX folds the mask, as every position is known."""

    def kernel(x_ref, o_ref):
        columns, row = jnp.arange(COLUMNS), pl.program_id(0)
        x = plt.load(x_ref.at[row, columns], mask=columns < COLUMNS, other=0.0)
        plt.store(o_ref.at[row, columns], jnp.exp(x), mask=columns < COLUMNS)

    shape = jax.ShapeDtypeStruct((3, COLUMNS), jnp.float32)
    check(pl.pallas_call(kernel, grid=(3,), out_shape=shape), jnp.exp, numbers(3, COLUMNS))


@pytest.mark.parametrize("start", [0, 1])
def test_slices_with_strides(start):
    def kernel(x_ref, o_ref):
        turn = pl.program_id(0) * 2
        o_ref[...] = jnp.zeros_like(o_ref)
        o_ref[pl.ds(turn + start, 3, 2)] = jnp.sin(x_ref[pl.ds(turn, 3, 3)])

    shape = jax.ShapeDtypeStruct((6,), jnp.float32)
    call = pl.pallas_call(kernel, grid=(1,), out_shape=shape)
    exact = lambda x: jnp.zeros(6, x.dtype).at[start::2].set(jnp.sin(x[::3]))
    check(call, exact, numbers(7))


def test_places_that_run_backwards():
    def kernel(x_ref, o_ref):
        back = 7 - jnp.arange(8)
        plt.store(o_ref.at[back], jnp.sin(x_ref[back]), mask=back < 7)
        o_ref[7] = 0.0

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8,), jnp.float32))
    check(call, lambda x: jnp.sin(x).at[7].set(0), numbers(8))


@settings(max_examples=6, deadline=None)
@given(
    st.tuples(st.integers(1, 7), st.integers(1, 11)),
    st.tuples(st.sampled_from([1, 4]), st.sampled_from([2, 8, 16])),
    st.sampled_from([(True, True), (True, False), (False, True)]),
)
def test_flat_tiles_that_run_backwards(shape, block, turned):
    """Blocks may be wider than rows."""
    axes = [axis for axis, is_turned in enumerate(turned) if is_turned]

    def kernel(x_ref, o_ref):
        places = [pl.program_id(n) * block[n] + jnp.arange(block[n]) for n in (0, 1)]
        mask = (places[0] < shape[0])[:, None] & (places[1] < shape[1])
        back = [shape[n] - 1 - places[n] if turned[n] else places[n] for n in (0, 1)]
        x = plt.load(x_ref.at[places[0][:, None] * shape[1] + places[1]], mask=mask, other=0.0)
        plt.store(o_ref.at[back[0][:, None] * shape[1] + back[1]], jnp.sin(x), mask=mask)

    size = shape[0] * shape[1]
    grid = tuple(pl.cdiv(length, width) for length, width in zip(shape, block))
    call = pl.pallas_call(kernel, grid=grid, out_shape=jax.ShapeDtypeStruct((size,), jnp.float32))
    check(call, lambda x: jnp.flip(jnp.sin(x).reshape(shape), axes).reshape(-1), numbers(size))


def test_places_that_are_chosen_among_constants():
    """A select_n of literals, as a buffer's number."""

    def kernel(n_ref, x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        o_ref[jnp.where(n_ref[0] == 0, 1, 0)] = jnp.sin(x_ref[...])

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((2, 4), jnp.float32))
    exact = lambda x: jnp.stack([jnp.zeros_like(x), jnp.sin(x)])
    check(lambda x: call(jnp.zeros(1, jnp.int32), x), exact, numbers(4))


def test_rows_that_overlap_are_refused():
    def kernel(x_ref, o_ref):
        places = jnp.arange(4)[:, None] * 3 + jnp.arange(4)[None, :]
        plt.store(o_ref.at[places], x_ref[...], mask=x_ref[...] > 0)

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((16,), jnp.float32))
    with pytest.raises(UnsupportedKernel, match="not known to name each element once"):
        jax.grad(lambda x: call(x).sum())(jnp.ones((4, 4)))


def test_atomic_additions_are_gathers_backwards():
    def kernel(bin_ref, x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        plt.atomic_add(o_ref, (bin_ref[...],), jnp.sin(x_ref[...]), mask=bin_ref[...] >= 0)

    tile = pl.BlockSpec((8,), lambda i: (i,))
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    bins = np.random.default_rng(3).integers(-1, 4, 24)
    call = lambda x: pl.pallas_call(kernel, grid=(3,), in_specs=[tile, tile], out_shape=shape)(
        bins, x
    )
    one_hot = bins[:, None] == np.arange(4)
    check(call, lambda x: jnp.sin(x) @ one_hot.astype(x.dtype), numbers(24))
    assert "scan" not in str(
        pbkern.jit(lambda x: jax.vjp(call, x)[1](jnp.ones(4))).kernels(numbers(24))
    )


def stored_at(places):
    def kernel(x_ref, i_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        plt.store(o_ref.at[places(i_ref)], x_ref[...], mask=x_ref[...] > 0)

    return lambda x, i: pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8,), jnp.float32))(
        x, i
    )


@pytest.mark.parametrize(
    "places",
    [
        lambda i: i[...],
        lambda i: jnp.arange(8) // 2,
        lambda i: jnp.arange(8) + i[...],
        lambda i: jnp.where(i[...] < 0, jnp.arange(8), i[...]),
    ],
    ids=["given", "twice", "moved one by one", "chosen"],
)
def test_places_that_do_not_count_are_refused(places):
    x, i = jnp.asarray(numbers(8)), jnp.arange(8, dtype=jnp.int32)
    with pytest.raises(UnsupportedKernel, match="not known to name each element once"):
        jax.grad(lambda x: stored_at(places)(x, i).sum())(x)
