"""Nests that pass over the same data, cut into rows that stay near (targets/cpu/locality/cache_blocking.py), at ragged and
long rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern
from tests.lowered import lowered

from .running import native


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def layer_norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def logsumexp(x):
    return jax.nn.logsumexp(x, axis=-1)


def row_then_column(x):
    """One pass over x: a product with its rows, then one with its columns."""
    w = jnp.cos(jnp.arange(x.shape[1], dtype=x.dtype))
    return jnp.tanh(x @ w / x.shape[1]) @ x


def in_float64(f, x):
    with jax.enable_x64(True):
        return np.asarray(f(jnp.asarray(np.asarray(x, np.float64))))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "f", [softmax, layer_norm, logsumexp, row_then_column], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("shape", [(64, 4096), (37, 5001), (129, 1000), (1, 40000), (3, 7, 2048)])
def test_rows(f, shape):
    if f is row_then_column:
        shape = shape[-2:]
    x = jnp.asarray(np.random.default_rng(5).normal(size=shape) * 3, jnp.float32)
    want = in_float64(f, x)
    np.testing.assert_allclose(
        np.asarray(pbkern.jit(f)(x)), want, rtol=3e-5, atol=3e-6 * np.abs(want).max()
    )


def test_special_rows():
    x = np.random.default_rng(6).normal(size=(16, 4096)).astype(np.float32)
    x[1] = -np.inf
    x[2, 5], x[3, 7], x[4, 9] = np.nan, np.inf, -np.inf
    for f in (softmax, logsumexp):
        got, want = np.asarray(pbkern.jit(f)(x)), np.asarray(jax.jit(f)(x))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows", [65, 650])
def test_sums_of_rows_are_read_once_they_are_whole(rows):
    """What a product of each row is added to is the sum over all rows."""

    def f(x):
        return (jnp.full((31, 31), 0.2, x.dtype) @ (x * 0.5).T).T + x + (x * x).sum(0)

    x = np.random.default_rng(8).normal(size=(rows, 31)).astype(np.float32)
    want = x.sum(1, dtype=np.float64, keepdims=True) * 0.1 + x + (x.astype(np.float64) ** 2).sum(0)
    np.testing.assert_allclose(pbkern.jit(f)(x), want, rtol=1e-5, atol=1e-4)


REDUCTIONS = {"all": lambda x: (x > -3).all(0), "any": lambda x: (x >= 0).any(0), "first": lambda x: x.argmax(0),
              "product": lambda x: (1 + x / 1000).prod(0)}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_whose_parts_are_not_joined(name):
    def reduced(x):
        return REDUCTIONS[name](x - x.max(1, keepdims=True))

    x = np.random.default_rng(7).normal(size=(20, 300)).astype(np.float32)
    np.testing.assert_allclose(pbkern.jit(reduced)(x), reduced(x), rtol=1e-6)


@pytest.mark.parametrize("shape", [(3, 5001), (40, 10007)])
def test_places_of_a_row_that_are_data(shape):
    """What a row's strip stores is read there through indices as well."""

    def f(x, i):
        return jax.nn.log_softmax(x)[jnp.arange(len(x)), i]

    rng = np.random.default_rng(7)
    x, i = rng.normal(size=shape).astype(np.float32), rng.integers(-shape[1], shape[1], shape[0])
    np.testing.assert_allclose(pbkern.jit(f)(x, i), jax.jit(f)(x, i), rtol=1e-5)


def test_mechanism_is_at_work():
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    assert "fetch" in pbkern.jit(softmax).as_text(x, stage="nests")


def test_values_of_rows_do_not_turn_vectors_across_them():
    """Labels and row statistics are contiguous along the rows, the logits across them: those are read at every step."""

    def cross_entropy(x, labels):
        return -(jax.nn.log_softmax(x) * (labels[:, None] == jnp.arange(x.shape[1]))).sum(-1)

    args = jax.ShapeDtypeStruct((4096, 4096), jnp.float32), jax.ShapeDtypeStruct((4096,), jnp.int32)
    assert "fetch" in pbkern.jit(cross_entropy).as_text(*args, stage="nests")


@pytest.mark.parametrize("shape", [(3, 7, 80, 300), (2, 33, 17, 257), (1, 90, 40, 64)])
@pytest.mark.parametrize("f", [jnp.mean, jnp.max], ids=["mean", "max"])
def test_columns_of_joined_rows(shape, f):
    """A few whole rows at a time, where several dimensions of rows are reduced."""
    x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    got = np.asarray(pbkern.jit(lambda x: f(x, axis=(1, 2)))(x))
    np.testing.assert_allclose(
        got, np.asarray(f(x.astype(np.float64), axis=(1, 2))), rtol=2e-6, atol=2e-7
    )


def test_parts_of_rows_are_fetched():
    x = jax.ShapeDtypeStruct((16384, 1000), jnp.float32)
    assert "fetch" in lowered(lambda x: x.sum(0), x)
    narrow = jax.ShapeDtypeStruct((16384, 256), jnp.float32)  # read as they lie
    assert "fetch" not in lowered(lambda x: x.sum(0), narrow)


def test_sums_of_far_rows_are_made_one_after_the_other():
    """Each sum's rows, a few at a time, before the next one's: their results are all that is kept."""

    def f(x):
        return x.reshape(8, 65, 600).sum(1)

    x = np.random.default_rng(4).normal(size=(520, 600)).astype(np.float32)
    got = np.asarray(pbkern.jit(f)(x))
    np.testing.assert_allclose(got, f(x.astype(np.float64)), rtol=2e-6, atol=2e-5)
    loops = [line for line in lowered(f, x).splitlines() if line.lstrip().startswith("for ")]
    assert [len(line) - len(line.lstrip()) for line in loops] == [0, 2]


@pytest.mark.parametrize("shape", [(64, 96, 512), (50, 301, 100), (3, 700, 257)])
@pytest.mark.parametrize("f", [jnp.sum, jnp.max], ids=["sum", "max"])
def test_rows_of_a_sum_that_lie_apart(shape, f):
    """What is next in memory is read next, though it belongs to another sum."""
    x = np.random.default_rng(5).normal(size=shape).astype(np.float32)
    want = f(x.astype(np.float64), axis=(0, 2))
    np.testing.assert_allclose(
        pbkern.jit(lambda x: f(x, axis=(0, 2)))(x), want, rtol=1e-5, atol=2e-4
    )


def test_sums_of_normalised_rows_take_a_few_rows_at_a_time():
    """The sums are vectors along the columns, though statistics of rows are contiguous along the rows."""

    def f(x, dy):
        d = x - x.mean(1, keepdims=True)
        return (dy * d * jax.lax.rsqrt((d * d).mean(1, keepdims=True) + 1e-5)).sum(0)

    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((768,), jnp.float32))
    def whole(x_ref, dy_ref, out_ref):
        out_ref[...] = f(x_ref[...], dy_ref[...])

    x, dy = np.random.default_rng(5).normal(size=(2, 85, 768)).astype(np.float32)
    with jax.enable_x64(True):
        want = jax.jit(f)(x.astype(np.float64), dy.astype(np.float64))
    np.testing.assert_allclose(whole(x, dy), want, rtol=1e-5, atol=2e-5)
    assert "<5*" in pbkern.jit(whole).as_text(x, dy, stage="nests")


def test_fast_math_off_keeps_the_order_of_sums():
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    f = pbkern.jit(softmax, compile_options={"mlir_disable_fast_math": True})
    assert "fetch" not in f.as_text(x, stage="nests")


STEPS = {
    "mean": lambda a, b: (a + b) * 0.5,
    "center": lambda a, b: a - b.max(axis=1, keepdims=True),
    "scale": lambda a, b: a * 0.5 + b.sum(axis=0, keepdims=True) / 64,
    "norm": lambda a, b: a / (1 + (b * b).sum(axis=1, keepdims=True)),
    "clear": lambda a, b: jnp.zeros_like(a),
}
steps = st.lists(
    st.tuples(st.sampled_from(list(STEPS)), *[st.integers(0, 2)] * 3), min_size=2, max_size=4
)
part = st.tuples(st.sampled_from(["always", "first", "last", "odd", "loop"]), steps)


@settings(max_examples=14, deadline=None)
@given(st.lists(part, min_size=1, max_size=4))
def test_scratch_keeps_its_values_between_programs_and_branches(parts):
    """Whole rows are scratch of a strip only where no branch, round or program needs what was there before."""
    rows, columns, programs = 64, 256, 3

    def body(x_ref, o_ref, *scratch):
        first, last = pbkern.program_id(0) == 0, pbkern.program_id(0) == programs - 1

        @pbkern.when(first)
        def _():
            for s in scratch:
                s[...] = jnp.zeros((rows, columns), jnp.float32)

        scratch[0][...] = scratch[0][...] + x_ref[...]
        tests = {"first": first, "last": last, "odd": pbkern.program_id(0) % 2 == 1, "always": True}
        for where, steps in parts:

            def do(*_):
                for name, to, a, b in steps:  # noqa: B023
                    scratch[to][...] = STEPS[name](scratch[a][...], scratch[b][...])

            if where == "loop":
                lax.fori_loop(0, 2, do, None)
            else:
                pbkern.when(tests[where])(do)
        o_ref[...] = scratch[0][...] + 2 * scratch[1][...] - scratch[2][...]

    block = pbkern.BlockSpec((rows, columns), lambda i: (i, 0))
    array = jax.ShapeDtypeStruct((programs * rows, columns), jnp.float32)
    k = pbkern.kernel(
        body,
        grid=(programs,),
        in_specs=[block],
        out_specs=block,
        out_shape=array,
        scratch_shapes=[jax.ShapeDtypeStruct((rows, columns), jnp.float32)] * 3,
    ).trace(array)
    x = np.random.default_rng(1).normal(size=array.shape).astype(np.float32)
    (want,) = pbkern.interpret(k, x)
    (got,) = native(k, x)
    scale = max(
        np.abs(want).max(), np.abs(x).max()
    )  # results may be differences of numbers as large as x
    np.testing.assert_allclose(
        got, want, rtol=1e-4, atol=2e-6 * scale
    )  # sums are taken in another order
