"""Reductions in two stages (fuse/split/reductions.py): every cut of every shape, products of deviations, places of extrema."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pbkern
from pbkern.core.passes import with_settings
from pbkern.testing import assert_kernels
from tests.arrays import array
from tests.cores import of_several_cores
from tests.lowered import lowered

from .checking import COSTS, check, planned, set_sizes
from .workloads import f32


@pytest.fixture(autouse=True)
def small_runs(monkeypatch):
    """Small arrays are cut as large ones are."""
    set_sizes(monkeypatch, stage_bytes=1)
    with with_settings("split reductions", {"run_elements": 64}):
        yield


@pytest.fixture
def runs_as_they_are(monkeypatch):
    monkeypatch.undo()
    with with_settings("split reductions", {}):
        yield


def rand(shape, seed=0, offset=0.0):
    return array(np.random.default_rng(seed).normal(size=shape) + offset, jnp.float32)


def covariance(x, y, axes):
    return ((x - x.mean(axes, keepdims=True)) * (y - y.mean(axes, keepdims=True))).sum(axes)


def normalised(x, y, axes):
    return (x - x.mean(axes, keepdims=True)) / (x.std(axes, keepdims=True) + 1e-3) + y


FUNCTIONS = {
    "mean": lambda x, y, axes: jnp.mean(x * y, axes),
    "max": lambda x, y, axes: jnp.max(x + y, axes),
    "variance": lambda x, y, axes: jnp.var(x * 2 + y, axes),
    "both": lambda x, y, axes: (x.mean(axes), x.var(axes), y.min(axes)),
    "covariance": covariance,
    "normalised": normalised,
    "logsumexp": lambda x, y, axes: jax.nn.logsumexp(x * 3 + y, axes),
    "softmax": lambda x, y, axes: jax.nn.softmax(x * 3 - y, axes),
}
cut = st.integers(1, 3).flatmap(lambda rank: st.tuples(
    st.lists(st.integers(1, 40), min_size=rank, max_size=rank).map(tuple),
    st.sets(st.integers(0, rank - 1), min_size=1, max_size=rank).map(lambda s: tuple(sorted(s)))))  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(cut, st.sampled_from(list(FUNCTIONS)), st.sampled_from([0.0, 100.0]))
def test_as_in_float64(shape_and_axes, name, offset):
    shape, axes = shape_and_axes
    x, y = rand(shape, 1, offset), rand(shape, 2, offset)
    with jax.enable_x64(True):
        want = jax.tree.leaves(
            FUNCTIONS[name](np.asarray(x, np.float64), np.asarray(y, np.float64), axes)
        )
    got = jax.tree.leaves(pbkern.jit(FUNCTIONS[name], static_argnums=2)(x, y, axes))
    n = math.prod(shape[d] for d in axes)
    for g, w in zip(got, want):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=2e-6 * n * (1 + offset))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("offset", [pytest.param(0.0, marks=pytest.mark.slow), 1000.0])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((64, 333), (0, 1)), ((16, 7, 6, 32), (0, 1, 2)), ((2, 4096), (1,)), ((3000, 5), (0,))],
)
def test_variance_errs_no_more_than_twice_what_jax_errs(shape, axes, offset):
    errors = []
    for seed in range(15):
        x = rand(shape, seed, offset)
        want = np.asarray(x, np.float64).var(axes)
        errors.append([np.abs(np.asarray(f(x), np.float64) / want - 1).max()
                       for f in (pbkern.jit(lambda x: x.var(axes)), jax.jit(lambda x: x.var(axes)))])  # fmt: skip
    ours, theirs = np.median(errors, axis=0)
    assert ours <= max(2 * theirs, 2 * 2.0**-23)


@of_several_cores
def test_one_pass_reads_what_covariance_needs(runs_as_they_are):
    x = f32(4096, 1024)
    assert_kernels(jnp.var, (x,), 1)
    assert_kernels(lambda x, y: covariance(x, y, (0, 1)) / (x.std() * y.std()), (x, x), 1)
    assert_kernels(
        lambda x: (x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2))),
        (f32(16, 56, 56, 256),),
        4,
    )


@of_several_cores
def test_one_pass_reads_what_logarithms_of_sums_need(runs_as_they_are):
    x = f32(4096, 1024)
    assert_kernels(jax.nn.logsumexp, (x,), 1)
    assert_kernels(lambda x: jax.nn.logsumexp(x, 0), (f32(100_000, 64),), 1)
    assert_kernels(lambda x: jax.nn.softmax(x, (0, 1)), (x,), 2)
    assert_kernels(
        lambda x: jax.nn.softmax(x, 0), (f32(100_000, 64),), 2
    )  # sums of runs do not wait for the greatest of all


INF, NAN = np.inf, np.nan


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "rows",
    [
        {0: -INF},
        {3: -INF, 4: -200.0},
        dict.fromkeys(range(16), -INF),
        {5: INF},
        {2: INF, 3: -INF},
        {7: NAN},
    ],
)
def test_exponentials_of_what_is_not_finite(rows):
    def f(x):
        return jax.nn.logsumexp(x), jax.nn.softmax(x, (0, 1)), jnp.exp(x - x.max()).sum()

    x = np.array(rand((16, 64), 1, -200.0))
    for row, value in rows.items():
        x[row] = value
    compiled = pbkern.jit(f)
    exponentials = [
        e for e in compiled.build((x,), {})[0].fused.jaxpr.eqns if e.primitive.name == "exp"
    ]
    assert len(exponentials) > 2  # of runs and of what they are less than the greatest
    for got, want in zip(compiled(x), jax.jit(f)(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4)


def test_factors_that_are_repeated():
    """Of a row and a matrix, deviations have different shapes."""

    def f(x, y):
        return ((x - x.mean()) * (y - y.mean())).sum()

    x, y = rand((24, 40), 1), rand((1, 40), 2)
    for args in ((x, y), (y, x)):
        want = f(*(np.asarray(a, np.float64) for a in args))
        np.testing.assert_allclose(pbkern.jit(f)(*args), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision(dtype):
    x = rand((2, 4096), 3).astype(dtype)
    for f in (
        lambda x: x.var(),
        lambda x: jax.lax.reduce_sum_p.bind(x, axes=(0, 1), out_sharding=None),
    ):
        want = np.asarray(jax.jit(f)(x), np.float64)
        np.testing.assert_allclose(
            np.asarray(pbkern.jit(f)(x), np.float64), want, rtol=2e-2, atol=1.0
        )


def test_places_of_extrema_in_narrow_integers_and_of_booleans():
    x = rand((100,), 4)
    for dtype in (jnp.int8, jnp.uint8, jnp.int16):
        f = lambda x: jax.lax.argmax(x, 0, dtype)  # noqa: B023
        np.testing.assert_array_equal(pbkern.jit(f)(x), f(x))
    for y in (x > 0, x > 9, x < 9):
        for f in (jnp.argmax, jnp.argmin):
            np.testing.assert_array_equal(pbkern.jit(f)(y), f(y))


EXTREMA = {
    "ties": np.repeat([3.0, 1, 3, 2], 50),
    "nan": np.where(np.arange(200) % 77 == 76, np.nan, np.arange(200.0)),
    "infinite": np.full(200, -np.inf),
    "last": np.arange(200.0),
    "ragged": np.arange(199.0) % 23,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("f", [jnp.argmax, jnp.argmin], ids=["argmax", "argmin"])
@pytest.mark.parametrize("name", EXTREMA)
def test_places_of_extrema(f, name):
    x = jnp.asarray(EXTREMA[name], jnp.float32)
    for y in (x, -x, x[None], jnp.stack([x, x[::-1]])):
        np.testing.assert_array_equal(pbkern.jit(lambda x: f(x, axis=-1))(y), f(y, axis=-1))
        np.testing.assert_array_equal(pbkern.jit(f)(y), f(y))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
def test_places_of_extrema_of_integers(dtype):
    info = np.iinfo(dtype)
    for x in (
        np.full(300, info.min, dtype),
        np.full(300, info.max, dtype),
        np.arange(300).astype(dtype),
    ):
        for f in (jnp.argmax, jnp.argmin):
            np.testing.assert_array_equal(pbkern.jit(f)(x), f(x))


@pytest.mark.parametrize("f", [jnp.sum, jnp.max, jnp.prod], ids=["sum", "max", "prod"])
@pytest.mark.parametrize("shape", [(2, 40, 5, 8), (3, 33, 4, 3), (1, 17, 1, 2)])
def test_few_neighbours_are_reduced_behind_columns(f, shape, monkeypatch):
    set_sizes(monkeypatch, stage_bytes=1 << 18)
    check(lambda x: f(x, axis=(1, 3)), 1 + 0.1 * rand(shape), tolerance=1e-5)


@pytest.mark.parametrize("axes", [(1, 2), (0, 1, 2), (1, 2, 3)])
@pytest.mark.parametrize("name", ["both", "covariance", "logsumexp"])
def test_runs_within_each_index_of_other_dimensions(name, axes):
    shape = (3, 10, 12, 8)
    x, y = rand(shape, 1), rand(shape, 2)
    plan = check(lambda x, y: FUNCTIONS[name](jnp.abs(x), y, axes), x, y, tolerance=2e-5)
    assert any(e.params.get("outer") for e in plan.jaxpr.eqns)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "f", [jnp.sum, jnp.var, lambda x: jnp.exp(x).max((0, 1, 2))], ids=["sum", "var", "max"]
)
def test_what_makes_images_is_done_by_the_programs_that_reduce_them(f, dtype, runs_as_they_are):
    plan = planned(lambda x: f(jnp.abs(x)), jax.ShapeDtypeStruct((32, 56, 56, 64), dtype))
    (kernel,) = plan.kernels()
    assert math.prod(kernel.grid) >= 32


def first_block(f, *shape):
    """The block of its operand that one program of the first kernel reads."""
    first = planned(f, jax.ShapeDtypeStruct(shape, jnp.float32)).kernels()[0]
    return first.inputs[0].ref_shape


@pytest.mark.parametrize("f", [jnp.sum, jnp.max, jnp.var], ids=["sum", "max", "var"])
def test_far_rows_are_read_in_long_parts(f, runs_as_they_are):
    rows, columns = first_block(lambda x: f(x, axis=0), 8192, 4096)
    assert rows < 8192
    assert 4 * columns >= COSTS.sizes.far_row_bytes


def test_enough_sums_of_far_rows_are_not_cut(runs_as_they_are):
    assert first_block(lambda x: x.sum(1), 64, 512, 600) == (1, 512, 600)


@pytest.mark.parametrize("n", [64, 131, 1000])
def test_runs_of_what_is_made_as_a_whole(n):
    """The last run ends behind the array, where a running sum has no elements."""
    check(lambda x: (jnp.cumsum(x).sum(), jnp.sort(x).max()), rand((n,)), tolerance=1e-3, left=True)


@pytest.mark.parametrize("shape", [(64, 4096, 256), (32, 1000, 1000), (16, 2048, 512)])
def test_far_rows_of_batches_are_read_once(shape, runs_as_they_are):
    """A second pass over what outgrows the private cache would come from memory."""
    for f in (lambda x: x.var(1), lambda x: jax.nn.logsumexp(x, 1)):
        plan = planned(f, f32(*shape))
        blocks = [m.ref_shape for k in plan.kernels() for m in k.inputs if m.array.shape == shape]
        assert len(blocks) == 1
        assert blocks[0][0] == 1
        assert blocks[0][1] < shape[1]
        assert blocks[0][2] == shape[2]


@pytest.mark.parametrize("columns", [200, 256])
def test_sums_of_a_run_are_one_pass_over_it(columns, runs_as_they_are):
    """Also where it has as many columns as rows."""
    text = lowered(lambda x: x.var(0), f32(2048, 32, columns))
    assert "acc2 sum" in text.split("k1_")[0]


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((64, 512, 512), True), ((500, 300, 100), True), ((64, 64, 112 * 112), False)],
)
def test_short_rows_that_lie_apart_are_read_one_after_the_other(shape, rows, runs_as_they_are):
    """Long ones are read by a program for each sum."""
    block = first_block(lambda x: x.sum((0, 2)), *shape)
    assert (block[0] < shape[0]) == rows


def test_differences_from_a_constant_beside_variances(runs_as_they_are):
    def f(x):
        return x.var(0) + (2.5 - x).max(0), 1.0 - x.sum()

    check(f, rand((700, 130), 3), tolerance=1e-3)


def test_only_what_nothing_else_is_made_of_is_passed_over_once(runs_as_they_are):
    """Normalised values read x again: rows stay whole, and with their program."""

    def normalised(x):
        y = x - x.mean(1, keepdims=True)
        return y * jax.lax.rsqrt((y * y).mean(1, keepdims=True) + 1e-5)

    assert first_block(lambda x: x.var(1), 64, 4096, 256)[1] < 4096
    assert first_block(normalised, 64, 4096, 256)[1] == 4096
