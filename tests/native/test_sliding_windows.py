"""Stencils that keep in registers what neighbouring points share (targets/cpu/schedule/sliding_windows.py, stage_inlining.py),
against float64."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern
from pbkern import config
from pbkern.lower.build_options import BuildOptions
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.parse import parse
from pbkern.targets.cpu.schedule.nest_schedule import CPU_DIALECT, NestSchedule
from pbkern.targets.cpu.schedule.sliding_windows import Visits


def five_points(a):
    p = jnp.pad(a, 1)
    return 0.25 * (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:])


def inner_nine_points(a):
    rows = a[:-2] + a[1:-1] + a[2:]
    return a.at[1:-1, 1:-1].set((rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]) / 9)


def far_neighbours(a):
    p = jnp.pad(a, ((0, 0), (17, 17)))
    return 0.5 * a + 0.25 * (p[:, :-34] + p[:, 34:])


def transport(a):
    return a - 0.3 * (a - jnp.roll(a, 1, axis=1)) - 0.2 * (a - jnp.roll(a, 1, axis=0))


def iterate(step, steps):
    return lambda a: jax.lax.fori_loop(0, steps, lambda _, x: step(x), a)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "step", [five_points, inner_nine_points, far_neighbours, transport], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("shape", [(300, 517), (64, 1000), (129, 33), (260, 272)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dynamic_strides(step, shape, dtype):
    x = np.random.default_rng(3).normal(size=shape)
    with jax.enable_x64(True):
        want = np.asarray(iterate(step, 8)(jnp.asarray(x)))
        got = np.asarray(pbkern.jit(iterate(step, 8))(jnp.asarray(x, dtype)))
    assert got.dtype == dtype
    np.testing.assert_allclose(
        got, want, rtol=0, atol=np.abs(want).max() * (1e-6 if dtype == "float32" else 1e-14)
    )


@pytest.mark.parametrize("shape", [(5000,), (40, 30, 70)])
def test_other_ranks(shape):
    def step(a):
        inner = tuple(slice(1, -1) for _ in shape)
        around = [
            a[(*inner[:k], s, *inner[k + 1 :])]
            for k in range(a.ndim)
            for s in (slice(None, -2), slice(2, None))
        ]
        return a.at[inner].set(sum(around) / len(around))

    x = np.random.default_rng(4).normal(size=shape)
    with jax.enable_x64(True):
        want = np.asarray(iterate(step, 6)(jnp.asarray(x)))
    got = np.asarray(pbkern.jit(iterate(step, 6))(jnp.asarray(x, jnp.float32)))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_integers():
    x = np.random.default_rng(5).integers(-1000, 1000, (200, 300)).astype(np.int32)
    step = lambda a: a.at[1:-1, 1:-1].set(a[1:-1, 1:-1] + a[1:-1, :-2] - a[1:-1, 2:])
    np.testing.assert_array_equal(pbkern.jit(iterate(step, 5))(x), jax.jit(iterate(step, 5))(x))


@pytest.mark.skipif(
    pbkern.cpu.machine().vector_bits < 512, reason="this computer cannot run code for x86-64-v4"
)
def test_mechanism_is_at_work():
    """Where a load across two lines costs two accesses; processors for which it costs one need no shuffles."""
    x = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    with config.override(machine="x86-64-v4"):
        text = pbkern.jit(iterate(five_points, 50)).as_text(x, stage="mlir")
    assert "vector.shuffle" in text


# ---------------------------------------------------------------- stages


def weighted(offsets, weights):
    """A sum of slices at offsets of up to (3, 5)."""

    def apply(a):
        high, wide = a.shape[0] - 3, a.shape[1] - 5
        return sum(w * a[i : i + high, j : j + wide] for (i, j), w in zip(offsets, weights))

    return apply


@st.composite
def pipelines(draw):
    """Two or three stages of slices, each with its weights, and the combination of the last with the image's middle."""
    offset = st.tuples(st.integers(0, 3), st.integers(0, 5))
    stages = []
    for _ in range(draw(st.integers(2, 3))):
        offsets = draw(st.lists(offset, min_size=1, max_size=7, unique=True))
        stages.append(weighted(offsets, [0.5 + k / 8 for k in range(len(offsets))]))
    padded, compared = draw(st.booleans()), draw(st.booleans())

    def pipeline(a):
        x = jnp.pad(a, 2) if padded else a
        for stage in stages:
            x = stage(x)
        middle = a[: x.shape[0], : x.shape[1]]
        return jnp.where(abs(x - middle) < 1, middle, 2 * x) if compared else x

    return pipeline, compared


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(1024, 1024), (700, 1003)], ids=str)
@given(drawn=pipelines(), seed=st.integers(0, 9))
@settings(max_examples=7, deadline=None)
def test_pipelines(shape, drawn, seed):
    pipeline, compared = drawn
    x = np.random.default_rng(seed).normal(size=shape)
    with jax.enable_x64(True):
        want = np.asarray(jax.jit(pipeline)(x))
    got = np.asarray(pbkern.jit(pipeline)(jnp.asarray(x, jnp.float32)))
    wrong = abs(got - want) > 1e-5 * np.abs(want).max()
    assert wrong.sum() <= (
        20 if compared else 0
    )  # a comparison of nearly equal sides may go the other way


@pytest.mark.parametrize("rows", [60, 694, 700, 1019, 1024])
def test_rows_past_the_end_of_a_stage(rows):
    """Masks hold where the last block's points lie, not where its stage is taken three rows further."""
    stages = [
        weighted(offsets, [0.5, 0.625])
        for offsets in ([(0, 0), (2, 0)], [(0, 0), (3, 0)], [(3, 2)])
    ]

    def pipeline(a):
        a = jnp.pad(a, 2)
        for stage in stages:
            a = stage(a)
        return a

    whole = np.full(
        (rows + 40, 1003), 1e30, np.float32
    )  # what is read beyond the rows does not go unnoticed
    whole[:rows] = np.random.default_rng(0).normal(size=(rows, 1003))
    x = np.asarray(whole[:rows], np.float64)
    with jax.enable_x64(True):
        want = np.asarray(jax.jit(pipeline)(x))
    got = np.asarray(pbkern.jit(pipeline)(whole[:rows]))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def blur_colours(a):
    rows = sum(w * a[k : a.shape[0] - 4 + k] for k, w in enumerate((1, 4, 6, 4, 1))) / 16
    return sum(w * rows[:, k : a.shape[1] - 4 + k] for k, w in enumerate((1, 4, 6, 4, 1))) / 16


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "shape", [(1080, 640, 3), (601, 1021, 1), (5, 200_000, 3), (300_000, 5, 1)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_interleaved_colours(shape, dtype):
    x = np.random.default_rng(7).integers(-50, 50, shape).astype(np.float64)
    step = (lambda a: a[:-2] + a[1:-1] - a[2:]) if dtype == "int32" else blur_colours
    two = (lambda a: step(a)[:, 1:] - 2 * step(a)[:, :-1]) if dtype == "int32" else step
    want = two(x)
    got = np.asarray(pbkern.jit(two)(jnp.asarray(x, dtype))).astype(np.float64)
    np.testing.assert_allclose(
        got, want, rtol=0, atol={"float32": 1e-4, "bfloat16": 0.6, "int32": 0}[dtype]
    )


def test_steps_hand_on_what_the_next_one_reads_and_nothing_that_it_is_made_of():
    """Sums over windows of products: a sum of two rows is handed on, and the products are not."""
    text = """
    %a0: float32[64,1024]
    %a1: float32[32,1000]
    nest [d0<32, d1<1000]
      v0 = mul(%a0[d0, d1], %a0[d0, d1])
      v1 = add(v0, (v0 at d0 + 1))
      %a1[d0, d1] = add(v1, (v1 at d1 + 1))"""
    (nest,) = parse(textwrap.dedent(text).strip(), NestContext(BuildOptions()), CPU_DIALECT)[0]
    schedule = NestSchedule(lanes=16, vector="d1", jam={"d0": 4}, order=("d0",))
    carried = Visits(nest, schedule, 1).carried.values()
    assert [expr.info.primitive for expr, _ in carried] == ["add"] * 4


def test_stages_share_a_loop():
    x = jax.ShapeDtypeStruct((1080, 1920, 3), jnp.float32)
    nests = pbkern.jit(blur_colours).as_text(x, stage="nests")
    assert " at " in nests
    assert "%t" not in nests


@pytest.mark.parametrize("shape", [(400_000,), (64, 20_011)], ids=str)
def test_neighbours_of_what_strips_made(shape):
    def smoothed(x, w):
        y = jax.nn.softmax(x, -1) * w
        return y[..., :-2] + 2 * y[..., 1:-1] + y[..., 2:]

    x, w = np.random.default_rng(9).normal(size=(2, *shape))
    with jax.enable_x64(True):
        want = np.asarray(jax.jit(smoothed)(x, w))
    got = np.asarray(pbkern.jit(smoothed)(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


def test_loops_over_stencils_of_scratch():
    def body(x, o, t, s):
        t[...] = x[...]
        s[...] = jnp.zeros_like(s)

        def step(k, _):
            t[5:69] = 0.5 * t[5:69] + s[5:69]
            s[5:69] = t[4:68] + t[6:70]

        jax.lax.fori_loop(0, 4, step, None)
        o[...] = t[...]

    scratch = [pbkern.Scratch((96,), jnp.float32), pbkern.Scratch((96,), jnp.float32)]
    kernel = pbkern.kernel(
        body, out_shape=jax.ShapeDtypeStruct((96,), jnp.float32), scratch_shapes=scratch
    )
    x = np.random.default_rng(11).normal(size=96).astype(np.float32)
    t, s = x.astype(np.float64), np.zeros(96)
    for _ in range(4):
        t[5:69] = 0.5 * t[5:69] + s[5:69]
        s[5:69] = t[4:68] + t[6:70]
    np.testing.assert_allclose(np.asarray(kernel(x)), t, rtol=1e-5, atol=1e-5)


def test_rows_are_rounded_alike_wherever_they_lie():
    """Blocks overlap at the end of an array, so that rows have several places in the steps of a loop."""
    weights = np.float32([0.06, 0.24, 0.4, 0.24, 0.06])

    def blur(a):
        rows = sum(w * a[k : a.shape[0] - 4 + k] for k, w in enumerate(weights))
        return sum(w * rows[:, k : a.shape[1] - 4 + k] for k, w in enumerate(weights))

    x = np.random.default_rng(6).normal(size=(331, 1920)).astype(np.float32)
    whole = np.asarray(pbkern.jit(blur)(x))
    for cut in (1, 2, 3, 5):
        np.testing.assert_array_equal(pbkern.jit(blur)(x[cut:]), whole[cut:])


def same(a, weights, axis):
    """A padded convolution with one filter."""
    rows, columns = (len(weights), 1) if axis == 0 else (1, len(weights))
    kernel = jnp.asarray(weights, a.dtype).reshape(1, 1, rows, columns)
    return jax.lax.conv_general_dilated(a[None, None], kernel, (1, 1), "SAME")[0, 0]


def columns_last(a):
    return same(same(a, [1, 4, 6, 4, 1], 0), [1, 4, 6, 4, 1], 1)


def columns_first(a):
    return same(same(a, [1, 4, 6, 4, 1], 1), [1, 2, 1], 0)


def columns_twice(a):
    return same(same(a, [1, -2, 1.5], 1), [0.5, 1, 4, 1, 2], 1)


def read_again_outside(a):
    """The padded stage is a result, too."""
    blurred = same(a, [1, 4, 1], 0)
    return same(blurred, [1, 4, 2], 1), blurred


def ones_beside(a):
    """Elements beside the rows are not all zero, nor as many on both sides."""
    rows = a[:-2] + 2 * a[1:-1] - a[2:]
    p = jnp.concatenate([jnp.ones_like(rows[:, :3]), rows, rows[:, :1] * 2], axis=1)
    return p[:, :-4] + p[:, 1:-3] * 0.5 - p[:, 4:]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "f",
    [columns_last, columns_first, columns_twice, read_again_outside, ones_beside],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("shape", [(1080, 1920), (600, 1003), (2000, 70), (50, 33)], ids=str)
def test_padded_stages(f, shape):
    x = np.random.default_rng(11).normal(size=shape)
    with jax.enable_x64(True):
        want = jax.jit(f)(x)
    got = pbkern.jit(f)(jnp.asarray(x, jnp.float32))
    for result, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        expected = np.asarray(expected)
        np.testing.assert_allclose(
            np.asarray(result), expected, rtol=0, atol=2e-6 * np.abs(expected).max()
        )


def test_padded_stages_share_a_loop():
    """But for the ends of rows, which scratch holds."""
    x = jax.ShapeDtypeStruct((1080, 1920), jnp.float32)
    nests = pbkern.jit(columns_last).as_text(x, stage="nests")
    assert " at " in nests


def test_masks_of_rows_are_those_of_the_rows_that_a_step_reads():
    """Two convolutions: the second one reads rows of the first, which are masked by their own numbers."""

    @pbkern.kernel(
        grid=(64,),
        in_specs=[
            pbkern.BlockSpec((pbkern.Element(17, padding=(2, 0)), 1017), lambda i: (i * 16 - 2, 0))
        ],
        out_specs=[pbkern.BlockSpec((16, 1018), lambda i: (i, 0))],
        in_types=[jax.ShapeDtypeStruct((1024, 1024), jnp.float32)],
        out_shape=jax.ShapeDtypeStruct((1022, 1018), jnp.float32),
    )
    def pipeline(x, y):
        padded = lax.pad(x[...], jnp.float32(0), ((0, 0, 0), (2, 0, 0)))
        row = lax.broadcasted_iota(jnp.int32, (17, 1), 0) + pbkern.program_id(0) * 16
        shown = lax.broadcast_in_dim((row >= 2) & (row < 1026), (17, 1019), (0, 1))
        o = 0.0 + 0.5 * lax.select(shown, padded, jnp.zeros_like(padded))
        y[...] = 0.5 * o[:16, :1018] + 0.625 * o[:16, 1:] + 0.75 * o[1:, :1018]

    x = np.random.default_rng(0).uniform(0, 4, (1024, 1024)).astype(np.float32)
    o = np.zeros((1026, 1026))
    o[2:, 2:] = 0.5 * x
    want = 0.5 * o[:1022, :1018] + 0.625 * o[:1022, 1:1019] + 0.75 * o[1:1023, :1018]
    with config.override(fallback=False):
        np.testing.assert_allclose(pipeline(x), want, atol=1e-5)
