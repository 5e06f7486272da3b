"""Steps of a stencil that follow each other through an array, row by row: any border, shape and number of steps."""

import dataclasses
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.core.machine import DEFAULT_MACHINE
from pbkern.core.passes import with_settings
from pbkern.fuse.simplify.driver import simplify
from pbkern.fuse.tiling import time_skewing
from pbkern.fuse.time_tiling import overlapped
from pbkern.targets.cpu.costs import CpuCosts

from .checking import check, planned, rand
from .test_time_tiling import PERIODIC, SYSTEMS, by_fori, fields, interior, padded, rolled, small
from .workloads import f32

STEPS = {"zeros": (padded, 1), "kept": (interior, 1), "wave": (SYSTEMS["wave"][0], 2), **PERIODIC}


def asymmetric(u):
    """Rows from two before to one behind, the last columns of a window, and a place of its own."""
    p = jnp.pad(u, ((2, 1), (0, 3)), constant_values=1.0)
    row = lax.broadcasted_iota(u.dtype, u.shape, 0)
    return 0.3 * p[:-3, 3:] + 0.3 * p[3:, :-3] + 0.2 * p[2:-1, 1:-2] + 0.1 * row / u.shape[0]


def varying(c, v):
    """A step by coefficients of each place and of each row, read around it."""

    def step(u):
        flux = 0.5 * (c[1:] + c[:-1]) * (u[1:] - u[:-1])
        return (
            u
            + 0.2 * jnp.pad(flux, ((0, 1), (0, 0)))
            - 0.2 * jnp.pad(flux, ((1, 0), (0, 0)))
            + 0.01 * v[:, None]
        )

    return step


def staggered(state):
    """Fields on the cells' middles and edges (FDTD): each has rows and columns of its own number."""
    e, h, g = state
    h = h - 0.3 * (e[1:] - e[:-1])
    g = g + 0.3 * (e[:, 1:] - e[:, :-1])
    curl = (g[1:-1, 1:] - g[1:-1, :-1]) - (h[1:, 1:-1] - h[:-1, 1:-1])
    return e.at[1:-1, 1:-1].add(0.3 * curl), h, g


def framed(state):
    """An array of sums within another with a frame, which keeps its border."""
    u, p = state
    u = 0.2 * u + 0.1 * sum(p[k : k + u.shape[0], 2 * k : 2 * k + u.shape[1]] for k in range(7))
    return u, p.at[3:-3, 6:-6].set(0.9 * u)


OF_SEVERAL_SHAPES = {
    "staggered": (staggered, [(0, 0), (-1, 0), (0, -1)]),
    "framed": (framed, [(-6, -12), (0, 0)]),
}


@pytest.fixture
def fronts(monkeypatch):
    """fronts(k, l2_bytes): only the k-th front counts, at whatever price, of as many steps as that cache holds rows for."""
    every = overlapped.fronts_of
    monkeypatch.setattr("pbkern.fuse.time_tiling.overlapped.STEPS", ())

    def choose(k: int, l2_bytes: int = 1 << 20) -> None:
        def only(body, step, counts, length, machine, *rest):
            machine = dataclasses.replace(machine, l2_bytes=l2_bytes)
            return islice(every(body, step, counts, length, machine, *rest), k, k + 1)

        monkeypatch.setattr("pbkern.fuse.time_tiling.overlapped.fronts_of", only)

    with with_settings("grow groups", {"steps_gain": np.inf}):
        yield choose


def is_front(plan) -> bool:
    return any(k.scratch for k in plan.kernels())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", STEPS)
def test_fronts_agree_in_the_interpreter(name, fronts):
    """Whose scratch holds NaN at first, and which knows no index outside a block."""
    step, count = STEPS[name]
    fronts(1)
    assert is_front(check(by_fori(step, 5), small(fields(count, 21, 19))))


def native(f, *args):
    """Compares with jax.jit; returns the report."""
    compiled = pbkern.jit(f)
    got, want = jax.tree.leaves(compiled(*args)), jax.tree.leaves(jax.jit(f)(*args))
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(
            np.asarray(g, np.float64), np.asarray(w, np.float64), rtol=1e-5, atol=1e-5
        )
    return compiled.explain(*args)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("k", "l2_bytes", "shape"), [
    (1, 1 << 20, (101, 300)),  # all steps in one turn, on two cores
    (3, 1 << 17, (101, 300)),  # several turns
    pytest.param(0, 1 << 16, (17, 33), marks=pytest.mark.slow),
    pytest.param(0, 1 << 20, (101, 300), marks=pytest.mark.slow),
    pytest.param(1, 1 << 16, (130, 67), marks=pytest.mark.slow),
    pytest.param(1, 1 << 20, (17, 33), marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize("name", STEPS)
def test_fronts_agree(name, k, l2_bytes, shape, fronts):
    step, count = STEPS[name]
    fronts(k, l2_bytes)
    report = native(by_fori(step, 23), small(fields(count, *shape)))
    assert "steps of a loop" in str(report)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OF_SEVERAL_SHAPES)
@pytest.mark.parametrize(
    ("k", "l2_bytes", "shape"),
    [(0, 1 << 20, (41, 52)), (1, 1 << 20, (102, 67)), (1, 1 << 16, (101, 39))],
)
def test_carries_of_several_shapes_agree(name, k, l2_bytes, shape, fronts):
    step, less = OF_SEVERAL_SHAPES[name]
    state = [0.1 * rand(*(n + d for n, d in zip(shape, by))) for by in less]
    fronts(k, l2_bytes)
    native(by_fori(step, 13), tuple(state))
    assert is_front(check(by_fori(step, 5), tuple(state)))


def test_carries_too_short_for_all_programs_take_no_front(fronts):
    fronts(1)
    step, _ = OF_SEVERAL_SHAPES["framed"]
    assert not is_front(check(by_fori(step, 5), (rand(5, 30), rand(11, 42))))


def recorded(step, count, n):
    """n steps, and of each: a point, a row, a column, the largest change, the energy, and all after a change of scale."""

    def loop(*state):
        def one(old, _):
            new = step(*old) if count > 1 else (step(*old),)
            u = new[0]
            values = (
                u[3, 2],
                old[-1][-1],
                2 * u[:, 1],
                jnp.abs(u - old[0]).max(),
                jnp.sqrt((u.astype(jnp.float32) ** 2).sum()) + u[0, 0],
                u.sum(1),
                (0.5 * u + old[0])[1:-1],
                0.5 * u,
            )
            return new, values

        return lax.scan(one, state, None, length=n)

    return loop


RECORDED = {
    "zeros": (padded, 1),
    "rolled": (rolled, 1),
    "wave": (lambda u, v: SYSTEMS["wave"][0]((u, v)), 2),
}


@pytest.mark.parametrize("name", RECORDED)
def test_values_of_each_step_are_stored_by_the_front(name, fronts):
    step, count = RECORDED[name]
    fronts(1)
    state = [rand(21, 19) for _ in range(count)]
    assert is_front(check(recorded(step, count, 5), *state))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("k", "l2_bytes", "shape", "n"),
    [(1, 1 << 20, (101, 300), 13), (3, 1 << 17, (101, 300), 50), (0, 1 << 16, (17, 33), 11)],
)
@pytest.mark.parametrize("name", RECORDED)
def test_values_of_each_step_agree(name, k, l2_bytes, shape, n, fronts):
    step, count = RECORDED[name]
    fronts(k, l2_bytes)
    native(recorded(step, count, n), *(0.1 * rand(*shape) for _ in range(count)))


def test_values_of_steps_with_elements_agree(fronts):
    """Values read what each step is given, and what all steps read."""
    fronts(1)
    weights, u, xs = rand(45), rand(67, 45), rand(9, 45)

    def f(weights, u, xs):
        def one(s, x):
            s = padded(s) + x
            return s, (s[5] * x + weights, (s * weights).max(), x[0])

        return lax.scan(one, u, xs)

    native(f, weights, u, xs)


def test_points_that_are_recorded_take_no_pass_over_memory():
    def f(u):
        return lax.scan(lambda s, _: (padded(s), padded(s)[100, 7]), u, None, length=50)

    plan = planned(f, f32(2048, 2048))
    assert "50 steps of a loop" in str(plan.explanation)


def test_steps_that_read_more_on_one_side_agree(fronts):
    fronts(1, 1 << 16)
    native(by_fori(asymmetric, 11), 0.1 * rand(67, 301))


def test_steps_that_read_rows_of_other_arrays_agree(fronts):
    fronts(1)
    c, v, u = rand(67, 45), rand(67), rand(67, 45)
    native(lambda c, v, u: by_fori(varying(c, v), 9)(u), c, v, u)
    native(lambda c, u: by_fori(lambda s: rolled(s) + 0.1 * jnp.roll(c, 1, 0), 9)(u), c, u)
    native(lambda u, xs: lax.scan(lambda s, x: (padded(s) + x, None), u, xs)[0], u, rand(9))
    native(
        lambda u, xs: lax.scan(lambda s, x: (padded(s) + x[:, None], None), u, xs)[0],
        u,
        rand(9, 67),
    )
    native(
        lambda u, xs: lax.scan(lambda s, x: (rolled(s) + jnp.roll(x, 1, 0), None), u, xs)[0],
        u,
        rand(9, 67, 45),
    )
    native(lambda u: lax.fori_loop(0, 9, lambda i, s: padded(s) + jnp.sin(0.1 * i), u), u)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "uint8", "bool"])
def test_every_type_agrees(dtype, fronts):
    fronts(1)
    step = lambda u: jnp.where(jnp.roll(u, 1, 0) > u, jnp.roll(u, -2, 1), u)
    with jax.enable_x64(dtype == "float64"):
        native(
            by_fori(step, 9), jnp.asarray(np.random.default_rng(0).integers(0, 9, (37, 150)), dtype)
        )


def in_space(u):
    p = jnp.pad(u, 1)
    return (p[:-2, 1:-1, 1:-1] + p[2:, 1:-1, 1:-1] + p[1:-1, :-2, 1:-1] + p[1:-1, 2:, 1:-1]
            + p[1:-1, 1:-1, :-2] + p[1:-1, 1:-1, 2:]) / 6  # fmt: skip


def in_rolled_space(u):
    return sum(jnp.roll(u, s, d) for d in range(3) for s in (1, -1)) / 6 + 0.01 * jnp.roll(
        u, (1, 1), (1, 2)
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("step", [in_space, in_rolled_space])
@pytest.mark.parametrize("k", [0, 1, 6])
def test_planes_of_three_dimensions_agree(step, k, fronts):
    fronts(k)
    native(by_fori(step, 7), rand(19, 21, 35))


def test_planes_that_meet_in_a_page_whatever_their_width(fronts):
    """Of 64 lines, whose length is whole cache lines, a plane is whole pages."""
    fronts(6)
    assert is_front(planned(by_fori(in_space, 3), f32(9, 64, 5)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(4, 5), (5, 1), (4, 64), (9, 2), (1, 3), (0, 4)], ids=str)
def test_small_arrays_agree(shape, fronts):
    fronts(0)
    check(by_fori(padded, 6), rand(*shape), left=0 in shape)
    check(by_fori(rolled, 6), rand(*shape), left=0 in shape)


def test_a_long_loop_goes_through_memory_once():
    plan = planned(by_fori(padded, 50), f32(2048, 2048))
    (kernel,) = plan.kernels()
    assert kernel.scratch, str(plan.explanation)
    assert kernel.grid == (2,), str(plan.explanation)
    assert "50 steps of a loop" in str(plan.explanation)
    ((launch,),) = (program.steps for program in plan.programs())
    assert launch.kernel == kernel  # no copies before or behind it


def convolved(weights, layout="NCHW", **options):
    """A step of one filter for each channel."""
    taps = {"NCHW": "OIHW", "NHWC": "HWIO"}[layout]
    channels = weights.shape[taps.index("O")]

    def step(u):
        return lax.conv_general_dilated(u, weights, (1, 1), "SAME", dimension_numbers=(layout, taps, layout),
                                        feature_group_count=channels, **options)  # fmt: skip

    return step


CONVOLUTIONS = {
    "one image": ((1, 1, 60, 70), convolved(0.2 * rand(1, 1, 3, 3))),
    "even": ((1, 1, 33, 50), convolved(0.2 * rand(1, 1, 2, 4))),
    "dilated": ((1, 1, 40, 70), convolved(0.2 * rand(1, 1, 3, 3), rhs_dilation=(2, 1))),
    "images of channels": ((2, 3, 40, 48), convolved(0.2 * rand(3, 1, 3, 3))),
    "channels last": ((1, 40, 48, 3), convolved(0.2 * rand(3, 3, 1, 3), "NHWC")),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_that_keep_channels_apart(name, fronts):
    fronts(3)
    shape, step = CONVOLUTIONS[name]
    native(by_fori(step, 6), rand(*shape))


def test_a_convolved_image_goes_through_memory_once():
    weights = 0.2 * rand(3, 3)
    step = lambda u: convolved(weights[None, None])(u[None, None])[0, 0]
    plan = planned(by_fori(step, 20), f32(1024, 1024))
    assert is_front(plan), str(plan.explanation)
    assert len(plan.programs()[0].steps) == 1, str(plan.explanation)


def test_reach_and_lag():
    body = jax.make_jaxpr(asymmetric)(f32(64, 64))
    wave, _ = next(
        time_skewing.wavefronts(simplify(body), (0, 1), [set()], 8, CpuCosts.of(DEFAULT_MACHINE), 2)
    )
    assert wave.reach == (-2, 1)
    assert wave.lag == 3
