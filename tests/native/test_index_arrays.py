"""Index arrays: affine ones address runs of elements, as slices do; all give what NumPy's indexing gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern
from pbkern import config
from pbkern.dsl.build_programs import kernel_program
from pbkern.targets.cpu.codegen.compile import compile_program
from pbkern.targets.cpu.codegen.kernel import lower_kernel
from pbkern.targets.cpu.lower_options import LowerOptions

from .running import compiled, native

N = 100
X = np.random.default_rng(0).normal(size=N).astype("f")
M = np.random.default_rng(1).normal(size=(9, 20)).astype("f")


def traced(body, out_shape, *arrays, **given):
    return pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct(out_shape, "f"), **given).trace(
        *arrays
    )


def is_vectors(kernel) -> bool:
    """Whether nothing is gathered or stored element by element."""
    nests = lower_kernel(kernel, "k").nests
    return "gather" not in nests and "for " not in nests


# index array of length 20 -> whether it is a run inside 100 elements
INDICES = {
    "program": (lambda: jnp.arange(20) + 7, True),
    "strided": (lambda: jnp.arange(20) * 3 + 2, True),
    "reversed": (lambda: 19 - jnp.arange(20), True),
    "all the same": (lambda: jnp.zeros(20, jnp.int32) + 5, True),
    "clipped, to no effect": (lambda: jnp.clip(jnp.arange(20), 0, 99), True),
    "of another type": (lambda: jnp.arange(20, dtype=jnp.uint32).astype(jnp.int32) + 1, True),
    "negative": (lambda: jnp.arange(20) - 3, False),
    "beyond": (lambda: jnp.arange(20) + 90, False),
    "pairs": (lambda: jnp.arange(20) // 2, False),
    "squares": (lambda: jnp.arange(20) * jnp.arange(20) % 50, False),
}


@pytest.mark.parametrize("name", INDICES)
def test_loads(name):
    make, is_run = INDICES[name]

    def body(x, o):
        o[...] = x[make()]

    k = traced(body, (20,), X)
    index = np.clip(np.asarray(make()), 0, N - 1)  # where NumPy counts from the end, or raises
    np.testing.assert_array_equal(native(k, X)[0], X[index])
    assert is_vectors(k) is is_run


@pytest.mark.parametrize("name", INDICES)
def test_stores(name):
    make, is_run = INDICES[name]

    def body(x, o):
        o[...] = x[...]
        o[make()] = x[:20] * 2

    k = traced(body, (N,), X)
    want = X.copy()
    for i, v in zip(np.asarray(make()), X[:20] * 2):  # in order: the last one stays
        want[min(max(i, 0), N - 1)] = v
    np.testing.assert_array_equal(native(k, X)[0], want)
    assert is_vectors(k) is (is_run and name != "all the same")


@settings(max_examples=16, deadline=None)
@given(st.integers(1, 40), st.integers(1, 130), st.integers(0, 3))
def test_blocks_with_masks(block, n, seed):
    """The pattern of Triton: program * block + arange(block), masked at the end of the array."""
    x = np.random.default_rng(seed).normal(size=n).astype("f")

    def body(x, o):
        at = pbkern.program_id(0) * block + jnp.arange(block)
        inside = at < n
        v = pbkern.load(x, (at,), mask=inside, other=0.0)
        pbkern.store(o, (at,), v * 2, mask=inside)

    k = traced(
        body,
        (n,),
        x,
        grid=(-(-n // block),),
        in_specs=[pbkern.BlockSpec()],
        out_specs=[pbkern.BlockSpec()],
    )
    np.testing.assert_array_equal(native(k, x)[0], x * 2)
    assert "gather" not in lower_kernel(k, "k").nests


def test_tiles_of_two_index_arrays():
    def body(m, o):
        rows, columns = jnp.arange(4)[:, None] * 2 + 1, jnp.arange(6)[None, :] * 3
        o[...] = m[rows, columns]

    k = traced(body, (4, 6), M)
    np.testing.assert_array_equal(native(k, M)[0], M[1:8:2, 0:18:3])
    assert is_vectors(k)


def test_flat_tiles():
    """Row times the row's length plus column."""

    def body(x, o):
        at = jnp.arange(5)[:, None] * 12 + jnp.arange(12)[None, :]
        o[...] = x[...]
        o[at + 20] = x[at] + 1

    k = traced(body, (N,), X)
    want = X.copy()
    want[20:80] = X[:60] + 1
    np.testing.assert_array_equal(native(k, X)[0], want)
    assert is_vectors(k)


def test_flat_tiles_that_overlap_are_stored_in_order():
    def body(x, o):
        o[...] = x[...]
        o[jnp.arange(5)[:, None] * 4 + jnp.arange(12)[None, :]] = x[:60].reshape(5, 12)

    want = X.copy()
    for i in range(5):
        want[4 * i : 4 * i + 12] = X[12 * i : 12 * i + 12]
    np.testing.assert_array_equal(native(traced(body, (N,), X), X)[0], want)


def test_rows_of_a_table_are_runs_along_their_columns():
    table = np.array([3, 0, 3, 8], np.int32)

    def body(t, m, o):
        o[...] = jnp.zeros((9, 20), "f")
        columns = jnp.arange(20)[None, :]
        o[t[...][:, None], columns] = m[t[...][::-1][:, None], columns]

    want = np.zeros_like(M)
    want[table] = M[table[::-1]]
    np.testing.assert_array_equal(native(traced(body, (9, 20), table, M), table, M)[0], want)


@pytest.mark.parametrize("start", [0, 37, 80])
def test_starts_known_when_the_kernel_runs(start):
    s = np.array([start], np.int32)

    def body(s, x, o):
        at = jnp.clip(s[0], 0, 80) + lax.iota(jnp.int32, 20)
        o[...] = pbkern.load(x, (at,), mask=at < N - 1, other=-1.0)

    k = traced(body, (20,), s, X)
    want = np.where(np.arange(start, start + 20) < N - 1, X[start : start + 20], -1)
    np.testing.assert_array_equal(native(k, s, X)[0], want)


def test_loops_over_blocks():
    """Counters of loops are part of the sum; a loop of one turn is none."""

    def body(x, o):
        def turn(i, total):
            return total + pbkern.load(
                x, (i * 32 + jnp.arange(32),), mask=i * 32 + jnp.arange(32) < N, other=0.0
            )

        def once(i, total):
            return total + x[i * 32 + jnp.arange(32)]

        o[...] = lax.fori_loop(0, 4, turn, jnp.zeros(32, "f")) + lax.fori_loop(
            0, 1, once, jnp.zeros(32, "f")
        )

    k = traced(body, (32,), X)
    want = np.pad(X, (0, 28)).reshape(4, 32).astype("d").sum(0) + X[:32]
    np.testing.assert_allclose(native(k, X)[0], want, rtol=1e-6, atol=1e-6)
    nests = lower_kernel(k, "k").nests
    assert "gather" not in nests
    assert nests.count("for ") == 1


def test_blocks_in_an_order_of_their_own():
    """Programs that take blocks in groups of rows: quotients and remainders of the program's index, not affine but bounded."""
    blocks, group = 5, 2

    def body(x, o):
        i = pbkern.program_id(0)
        first = i // (group * blocks) * group
        rows = jnp.minimum(blocks - first, group)
        row, column = first + i % (group * blocks) % rows, i % (group * blocks) // rows
        at = row * 8 + jnp.arange(8)[:, None], column * 16 + jnp.arange(16)[None, :]
        total = lax.fori_loop(
            0, 3, lambda n, t: t + x[at[0], at[1]] * (n + 1.0), jnp.zeros((8, 16), "f")
        )
        o[at[0], at[1]] = total

    x = np.random.default_rng(0).normal(size=(blocks * 8, blocks * 16)).astype("f")
    k = traced(
        body,
        x.shape,
        x,
        grid=(blocks * blocks,),
        in_specs=[pbkern.BlockSpec()],
        out_specs=[pbkern.BlockSpec()],
    )
    np.testing.assert_allclose(native(k, x)[0], x * 6, rtol=1e-6)
    nests = lower_kernel(k, "k").nests
    assert "gather" not in nests
    assert nests.count("for ") == 1


@pytest.mark.parametrize("n", [1, 2, 33, N])
def test_neighbours_under_masks(n):
    """Indices need be right only where the mask holds: those before the array are never counted from its end."""

    def body(x, o):
        at = pbkern.program_id(0) * 32 + jnp.arange(32)
        total = jnp.zeros(32, "f")
        for shift in (-2, 0, 1):
            inside = (at + shift >= 0) & (at + shift < n)
            total += pbkern.load(x, (at + shift,), mask=inside, other=0.0)
        pbkern.store(o, (at,), total, mask=at < n)

    x = X[:n]
    k = traced(
        body,
        (n,),
        x,
        grid=(-(-n // 32),),
        in_specs=[pbkern.BlockSpec()],
        out_specs=[pbkern.BlockSpec()],
    )
    wide = np.pad(x, 2)
    np.testing.assert_allclose(
        native(k, x)[0], wide[:n] + wide[2 : n + 2] + wide[3 : n + 3], rtol=1e-6, atol=1e-6
    )
    assert "gather" not in lower_kernel(k, "k").nests


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16"])
def test_rows_whose_stride_is_an_operand(dtype, masked):
    """Rows are loaded and stored as vectors where they are runs; where their ends say otherwise, element by element."""
    x = (jnp.arange(N) % 61).astype(dtype)

    def body(s, x, o):
        at = jnp.arange(3)[:, None] * s[0] + s[1] + jnp.arange(21)[None, :]
        at = jnp.where(at < 0, at + N, at)  # as JAX counts from the end
        mask = jnp.broadcast_to(jnp.arange(21) < s[2], at.shape) if masked else None
        found = pbkern.load(x, (at,), mask=mask, other=0) if masked else x[at]
        o[...] = x[...]
        pbkern.store(o, (at,), found + found, mask=mask)

    k = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct((N,), dtype)).trace(
        np.zeros(3, np.int32), x
    )
    assert "case" in lower_kernel(k, "k").nests
    call = compiled(k)
    for stride, start, live in [(30, 5, 21), (21, 0, 20), (4, 10, 21), (0, 40, 3), (-30, 70, 21), (40, -10, 21), (35, 20, 21),
                                (2**30, 2**31 - 11, 21), (7, -200, 21)]:  # fmt: skip
        at = (
            np.arange(3, dtype=np.int32)[:, None] * np.int32(stride)
            + np.int32(start)
            + np.arange(21, dtype=np.int32)
        )
        at = np.clip(np.where(at < 0, at + N, at), 0, N - 1)
        want = np.array(x)
        for i, j in np.ndindex(at.shape):
            if not masked or j < live:
                want[at[i, j]] = np.asarray(x)[at[i, j]] + np.asarray(x)[at[i, j]]
        found = call(np.array([stride, start, live], np.int32), np.asarray(x))[0]
        np.testing.assert_array_equal(found, want, err_msg=f"{stride}, {start}")


def test_indices_that_start_anew():
    """Remainders, stored before a loop: rows are vectors where they do not start anew, as the ends tell."""

    def body(s, m, o):
        at = lax.rem(s[0] + jnp.arange(16), 20)

        def turn(i, total):
            return total + m[i + jnp.zeros(16, jnp.int32), at]

        o[...] = lax.fori_loop(0, 9, turn, jnp.zeros(16, "f"))

    k = traced(body, (16,), np.zeros(1, np.int32), M)
    call = compiled(k)
    for start in (0, 4, 5, 19, 20, 23, 41, -1, -17, -20, 2**31 - 8):
        at = np.maximum(np.fmod(np.int32(start) + np.arange(16, dtype=np.int32), 20), 0)
        np.testing.assert_allclose(
            call(np.array([start], np.int32), M)[0], M[:, at].sum(0), rtol=1e-5, atol=1e-5
        )
    assert "scf.if" in lower_kernel(k, "k").text


# ---- indices that reductions of the same kernel make ----------------------------------------------------------------


def along(pick, axis):
    """Elements of x, doubled, along an axis at the places that pick(x) makes of it, one for each place of the others."""
    return lambda x, axis=axis: jnp.take_along_axis(
        x * 2, jnp.expand_dims(pick(x, axis), axis), axis
    )


def counted(x, axis):
    return (x > 0.5).sum(axis).astype(jnp.int32)


def truth(x, axis):
    return (x > 1).any(axis).astype(jnp.int32)


def rounded_mean(x, axis):
    return jnp.floor(jnp.abs(x.mean(axis)) * 3).astype(jnp.int32)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(
    "pick", [jnp.argmax, jnp.argmin, counted, truth, rounded_mean], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("shape", [(2, 3, 4), (6, 8, 1), (16, 5, 9), (17, 3, 20), (5, 2, 256)])
def test_elements_at_a_place_that_a_reduction_finds(shape, pick, axis):
    x = np.random.default_rng(0).normal(size=shape).astype("f")
    f = along(pick, axis)
    np.testing.assert_allclose(pbkern.jit(f)(x), jax.jit(f)(x), rtol=1e-6)


@pytest.mark.parametrize("members", [2, 5, 16])
def test_the_best_of_several_models(members):
    rng = np.random.default_rng(members)
    errors, results = rng.normal(size=(2, members, 37)).astype("f")
    best = lambda e, r: jnp.take_along_axis(r, jnp.argmin(e, 0)[None], 0)[0] + jnp.cos(e).sum(0)
    want = results[errors.argmin(0), np.arange(37)] + np.cos(errors.astype("f8")).sum(0)
    np.testing.assert_allclose(pbkern.jit(best)(errors, results), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [2, 3, 9, 16])
def test_nan_quantiles_of_few_rows(rows):
    x = np.random.default_rng(rows).normal(size=(rows, 21)).astype("f")
    x[np.random.default_rng(1).random(x.shape) < 0.2] = np.nan
    x[0] = 1
    np.testing.assert_allclose(
        pbkern.jit(lambda x: jnp.nanmedian(x, axis=0))(x), np.nanmedian(x, axis=0), rtol=1e-6
    )
    got = pbkern.jit(lambda x: jnp.nanquantile(x, 0.3, axis=0))(x)
    np.testing.assert_allclose(
        got, np.nanquantile(x.astype("f8"), 0.3, axis=0), rtol=1e-5, atol=1e-6
    )


BY_LANES = LowerOptions(vectors=dataclasses.replace(LowerOptions().vectors, gathers_by_lanes=True))


@pytest.mark.parametrize("dtype", ["float32", "int32", "float64", "uint64"])
@pytest.mark.parametrize("length", [1, 5, 64, 91])
def test_elements_that_are_loaded_one_by_one(dtype, length):
    """On processors whose instruction that gathers takes longer; of vectors that the end of an array cuts, too."""
    rng = np.random.default_rng(length)
    table = rng.integers(0, 1 << 30, (7, 50)).astype(dtype)
    rows, columns = (rng.integers(0, size, length, np.int32) for size in table.shape)
    with jax.enable_x64(True):
        kernel = pbkern.kernel(
            lambda t, i, j, o: o.__setitem__(..., t[i[...], j[...]]),
            grid=(1,),
            out_shape=jax.ShapeDtypeStruct((length,), dtype),
        ).trace(table, rows, columns)
        assert "vector.gather" not in lower_kernel(kernel, "k", BY_LANES).main.text
        run = compile_program(kernel_program(kernel), options_of=lambda _: BY_LANES)
        (out,) = run(table, rows, columns)
    np.testing.assert_array_equal(out, table[rows, columns])


def test_far_elements_are_gathered():
    """Of an instruction's loads more are under way than of one after the other."""
    kernel = traced(
        lambda t, i, o: o.__setitem__(..., t[i[...]]), (64,), jnp.zeros(1 << 20), jnp.zeros(64, int)
    )
    assert "vector.gather" in lower_kernel(kernel, "k", BY_LANES).main.text


@pytest.mark.parametrize("machine", [None, "x86-64-v3"])
@pytest.mark.parametrize("places", ["uint8", "int32"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float16", "bfloat16", "bool"])
def test_tables_of_narrow_elements(dtype, places, machine):
    """No instruction gathers them; lengths leave whole vectors and parts of one.

    Places from memory are read one by one, others leave vectors.
    """
    rng = np.random.default_rng(7)
    table = jnp.asarray(rng.integers(0, 200, (3, 256))).astype(dtype)
    rows, columns = rng.integers(0, 3, 1037).astype(places), rng.integers(0, 256, 1037)
    columns = (columns if places == "uint8" else columns - 256).astype(places)

    def look(table, rows, columns):
        return table[rows, columns]

    with config.override(machine=machine):
        got = pbkern.jit(look)(table, rows, columns)
        nests = pbkern.jit(look).as_text(table, rows, columns, stage="nests")
    np.testing.assert_array_equal(np.asarray(got), np.asarray(table)[rows, columns])
    assert "gather " in nests


@pytest.mark.parametrize("machine", [None, "x86-64-v3"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float16", "bfloat16", "bool", "int32"])
@pytest.mark.parametrize("width", [1, 33, 1001])
def test_picked_rows_are_copied_whole(dtype, width, machine):
    """Places are wider than elements, which is no reason for shorter vectors, and neither is a scalar of each row."""
    rng = np.random.default_rng(width)
    table = jnp.asarray(rng.integers(0, 2, (50, width))).astype(dtype)
    rows, scale = rng.integers(-50, 50, 70), rng.integers(0, 2, 70).astype("f")

    def pick(table, rows, scale):
        return table[rows], table[rows] * scale[:, None].astype(dtype)

    with config.override(machine=machine):
        got = pbkern.jit(pick)(table, rows, scale)
    want = np.asarray(table)[rows]
    np.testing.assert_array_equal(np.asarray(got[0]), want)
    np.testing.assert_array_equal(np.asarray(got[1]), want * scale[:, None].astype(want.dtype))


@pytest.mark.parametrize("count", [1, 37, 1000])
@pytest.mark.parametrize("step", [1, 3, -2])
@pytest.mark.parametrize(("size", "mode"), [(1, "clip"), (5, "clip"), (5, "fill")])
def test_windows_at_even_distances(size, mode, step, count):
    """Starts inside the array are places of plain loads; where one may be outside, they are gathered."""
    x = np.random.default_rng(count).normal(size=(3, 3100)).astype("f")

    def windows(x, first):
        starts = (jnp.arange(count) * step + first)[:, None]
        dimensions = lax.GatherDimensionNumbers(
            offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(1,)
        )
        return lax.gather(x, starts, dimensions, (3, size), mode=mode)

    def expected(first):
        starts = np.arange(count) * step + first
        outside = (starts < 0) | (starts > 3100 - size)
        inside = np.clip(starts, 0, 3100 - size)
        found = np.stack([x[:, start : start + size] for start in inside])
        return np.where(outside[:, None, None], np.nan, found) if mode == "fill" else found

    within = 2 * count if step < 0 else 4
    for first in (within, -3, 3100 - size - 1 if step > 0 else 3):
        got = pbkern.jit(lambda x, first=first: windows(x, first) * 1.0)(x)
        np.testing.assert_array_equal(np.asarray(got), expected(first))
    if count < 1000:  # of a ragged last block, starts may be outside
        nests = pbkern.jit(lambda x: windows(x, within) * 1.0).as_text(x, stage="nests")
        assert "gather" not in nests
