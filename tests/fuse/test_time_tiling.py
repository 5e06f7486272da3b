"""Stencils and other loops of known length: how many kernels they are, and that they do the steps they say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.core.passes import with_settings
from pbkern.fuse.simplify.driver import simplify
from pbkern.fuse.time_tiling.periodic_borders import with_periodic_halos

from .checking import check, check_blocks, planned, rand
from .workloads import f32


def interior(u):
    return u.at[1:-1, 1:-1].set(0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]))


def padded(u):
    p = jnp.pad(u, 1)
    return 0.25 * (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:])


def around(u):
    return jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1) - 4 * u


def rolled(u):
    return 0.25 * (jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1))


def wrapped(u):
    p = jnp.pad(u, 1, mode="wrap")
    return 0.25 * (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:])


def channel(u):
    """Periodic along the second dimension, walls along the first."""
    p = jnp.pad(u, ((1, 1), (0, 0)))
    return 0.3 * (p[:-2] + p[2:]) + 0.2 * (jnp.roll(u, 2, 1) + jnp.roll(u, -1, 1))


def periodic_wave(state):
    u, before = state
    return 2 * u - before + 0.1 * around(u), u


def wave(state):
    u, before = state
    return 2 * u - before + 0.1 * (4 * padded(u) - 4 * u), u


def gray_scott(state):
    u, v = state
    r = u * v * v
    return u + 0.16 * around(u) - r + 0.035 * (1 - u), v + 0.08 * around(v) + r - 0.1 * v


def shallow_water(state):
    h, u, v = state

    def d(a, axis):
        return 0.5 * (jnp.roll(a, -1, axis) - jnp.roll(a, 1, axis))

    return (
        h - 0.01 * (d(h * u, 0) + d(h * v, 1)),
        u - 0.01 * (u * d(u, 0) + v * d(u, 1) + 9.8 * d(h, 0)),
        v - 0.01 * (u * d(v, 0) + v * d(v, 1) + 9.8 * d(h, 1)),
    )


def heat(u):
    p = jnp.pad(u, 1, mode="edge")
    return u + 0.2 * (p[2:] - 2 * u + p[:-2])


MOVES = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]
WEIGHTS = [4 / 9] + [1 / 9] * 4 + [1 / 36] * 4


def lattice_boltzmann(f):
    """D2Q9: nine densities move to their neighbours and collide."""
    f = jnp.stack([jnp.roll(f[k], e, (0, 1)) for k, e in enumerate(MOVES)])
    density = f.sum(0)
    ux, uy = (sum(e[axis] * f[k] for k, e in enumerate(MOVES)) / density for axis in (0, 1))

    def rest(e, w):
        along = e[0] * ux + e[1] * uy
        return w * density * (1 + 3 * along + 4.5 * along * along - 1.5 * (ux * ux + uy * uy))

    return f - 0.6 * (f - jnp.stack([rest(e, w) for e, w in zip(MOVES, WEIGHTS)]))


def by_fori(step, n):
    return lambda u: lax.fori_loop(0, n, lambda _, s: step(s), u)


def by_scan(step, n):
    return lambda u: lax.scan(lambda s, _: (step(s), None), u, None, length=n)[0]


def by_while(step, n):
    return lambda u: lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, step(s[1])), (0, u))[1]


LOOPS = {"fori": by_fori, "scan": by_scan, "while": by_while}


def random_like(types, seed=0):
    """Positive numbers near 1."""
    make = lambda t: jnp.asarray(
        1 + 0.1 * np.random.default_rng(seed).normal(size=t.shape), t.dtype
    )
    return jax.tree.map(make, types)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("n", "kernels"), [(0, 1), (1, 1), (7, 2), (50, 1), (51, 2)])
def test_loop_forms_are_one_kernel_and_one_for_the_rest(loop, n, kernels):
    plan = planned(LOOPS[loop](interior, n), f32(1024, 1024))
    assert len(plan.kernels()) <= kernels, str(plan.explanation)
    assert not plan.left_to_xla(), str(plan.explanation)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("n", [0, 1, 7])
def test_loop_forms_agree(loop, n):
    check(LOOPS[loop](interior, n), rand(70, 90))


SYSTEMS = {
    "wave": (wave, (f32(1024, 1024),) * 2),
    "Gray-Scott": (gray_scott, (f32(1024, 1024),) * 2),
    "lattice Boltzmann": (lattice_boltzmann, f32(9, 1024, 1024)),
    "reduce_window": (
        lambda u: lax.reduce_window(u, 0.0, lax.add, (3, 3), (1, 1), "SAME") / 9,
        f32(1024, 1024),
    ),
    "heat, 1-D": (heat, f32(1 << 20)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_step_of_several_fields_is_one_kernel(name):
    step, types = SYSTEMS[name]
    plan = planned(by_fori(step, 50), types)
    assert len(plan.kernels()) == 1, str(plan.explanation)
    assert not plan.left_to_xla(), str(plan.explanation)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*SYSTEMS, "shallow water"])
def test_several_fields_agree(name):
    step, types = SYSTEMS.get(name, (shallow_water, (f32(1, 1),) * 3))
    shapes = {1: (1000,), 2: (41, 67), 3: (9, 23, 35)}
    small = jax.tree.map(lambda t: f32(*shapes[len(t.shape)]), types)
    check(by_fori(step, 5), random_like(small))


PERIODIC = {
    "rolls": (rolled, 1),
    "pad by wrapping": (wrapped, 1),
    "one dimension": (channel, 1),
    "wave": (periodic_wave, 2),
    "Gray-Scott": (gray_scott, 2),
    "shallow water": (shallow_water, 3),
}


def small(types):
    """Positive numbers near 0.1, at which no system blows up."""
    return jax.tree.map(lambda x: 0.1 * x, random_like(types))


@pytest.fixture
def tiles(monkeypatch):
    """Several steps share a tile, if a kernel at all: no front of rows (test_time_skewing.py)."""
    monkeypatch.setattr("pbkern.fuse.time_tiling.overlapped.wavefronts", lambda *_: ())


@pytest.fixture
def always_blocked(tiles):
    """Several steps share a tile wherever they can, at whatever price."""
    with with_settings("grow groups", {"steps_gain": np.inf, "most_recompute": np.inf}):
        yield


def fields(count, *shape):
    return f32(*shape) if count == 1 else (f32(*shape),) * count


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PERIODIC)
def test_several_steps_with_periodic_borders_share_a_kernel(name, tiles):
    step, count = PERIODIC[name]
    types = fields(count, 1024, 1024)
    plan = planned(by_fori(step, 40), types)
    assert len(plan.kernels()) == 1, str(plan.explanation)
    assert not plan.left_to_xla(), str(plan.explanation)
    rolls = [op for op, _ in plan.explanation.kernels[0].ops].count("roll")
    once = [
        e.primitive.name
        for e in with_periodic_halos(simplify(jax.make_jaxpr(step)(types))).jaxpr.eqns
    ].count("roll")
    assert rolls >= 2 * once > 0


@pytest.mark.sampled(9)
@pytest.mark.parametrize("shape", [(41, 67), (130, 9), (2, 40), (1, 5), (3, 1)], ids=str)
@pytest.mark.parametrize("name", PERIODIC)
def test_steps_with_periodic_borders_agree(name, shape, always_blocked):
    step, count = PERIODIC[name]
    check(by_fori(step, 6), small(fields(count, *shape)))


def test_empty_arrays_with_periodic_borders_stay_with_xla():
    check(by_fori(rolled, 6), rand(0, 4), left=True)


def ring(u):
    return u + 0.2 * (jnp.roll(u, 1) - 2 * u + jnp.roll(u, -1))


def test_rings_take_several_steps_per_kernel():
    plan = planned(by_fori(ring, 40), f32(1 << 20))
    assert [op for op, _ in plan.explanation.kernels[0].ops].count("roll") >= 4


@pytest.mark.parametrize("n", [1, 2, 3, 7, pytest.param(1000, marks=pytest.mark.slow)])
def test_rings_agree(n, always_blocked, monkeypatch):
    check_blocks(monkeypatch, by_fori(ring, 6), rand(n))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PERIODIC)
def test_steps_with_periodic_borders_agree_whatever_the_blocks(name, always_blocked, monkeypatch):
    step, count = PERIODIC[name]
    check_blocks(monkeypatch, by_fori(step, 6), small(fields(count, 41, 67)))


@pytest.mark.parametrize("dtype", ["uint8", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_periodic_borders_of_every_type(dtype, always_blocked):
    step = lambda u: jnp.where(jnp.roll(u, 1, 0) > u, jnp.roll(u, -2, 1), u)
    check(by_fori(step, 9), jnp.asarray(np.random.default_rng(0).integers(0, 9, (37, 50)), dtype))


@pytest.mark.slow
def test_rolls_of_what_depends_on_the_place(always_blocked):
    """Their values beyond an edge are not those of the same formula there."""
    row = jnp.arange(90.0)[:, None] / 90
    mask = np.random.default_rng(1).random((90, 70)) < 0.5
    steps = {
        "iota along the rolled dimension": lambda u: (
            jnp.roll(u * lax.broadcasted_iota(jnp.float32, u.shape, 0), 1, 0) / 90
        ),
        "iota along the other": lambda u: (
            jnp.roll(u * lax.broadcasted_iota(jnp.float32, u.shape, 1), 1, 0) / 70
        ),
        "an array that is not carried": lambda u: (
            jnp.where(mask, jnp.roll(u, 1, 0), jnp.roll(u, 1, 1)) * row
        ),
        "reversed": lambda u: 0.5 * (jnp.roll(u, 1, 0) + u[::-1]),
        "border set": lambda u: rolled(u).at[0].set(1.0),
        "walls and rolls along one": lambda u: 0.5 * (jnp.roll(padded(u), 1, 0) + u),
        "far": lambda u: 0.5 * (jnp.roll(u, 45, 0) + u),
        "twice": lambda u: 0.5 * jnp.roll(jnp.roll(u, 89, 0) + u, (1, -3), (0, 1)),
        "swapped": lambda u: (
            jnp.concatenate([u[45:], u[:45]]) + 0.1 * jnp.concatenate([u[:45], u[:45]])
        ),
        "transposed": lambda u: (
            0.5 * jnp.roll(u, 1, 0) + 0.1 * jnp.pad(u[:70].T, ((0, 20), (0, 0)))
        ),
    }
    for step in steps.values():
        for n in (1, 9):
            check(by_fori(step, n), rand(90, 70))


def test_periodic_steps_with_sources(always_blocked):
    sources = rand(5, 21, 37)
    check(
        lambda u, v: lax.scan(lambda s, x: (rolled(s) + jnp.roll(x, 1, 0), None), u, v)[0],
        rand(21, 37),
        sources,
    )
    check(lambda u, v: lax.scan(lambda s, x: (rolled(s) + x, None), u, v)[0], rand(21, 37), rand(5))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reducer", [lax.add, lax.max, lax.min])
@pytest.mark.parametrize(
    ("window", "dilation"), [((3, 3), 1), ((1, 4), 2), ((2, 9), 1), ((12, 12), 1)]
)
def test_steps_of_windows_agree(reducer, window, dilation, always_blocked):
    first = {lax.add: 0.0, lax.max: -np.inf, lax.min: np.inf}[reducer]
    step = lambda u: (
        0.1 * lax.reduce_window(u, first, reducer, window, (1, 1), "SAME", None, (dilation,) * 2)
    )
    check(by_fori(step, 6), rand(41, 67))


def with_source(n, u, amplitude):
    return lax.fori_loop(0, n, lambda i, s: padded(s) + amplitude * jnp.sin(0.1 * i), u)


def with_point_source(n, u):
    return lax.fori_loop(0, n, lambda i, s: interior(s).at[10, 12].set(jnp.sin(0.1 * i)), u)


def with_list_of_sources(u, values):
    return lax.scan(lambda s, v: (padded(s) + v, None), u, values)[0]


@pytest.mark.parametrize(("n", "kernels"), [(50, 1), (51, 2), (7, 2)])
def test_sources_that_depend_on_the_step_share_its_kernel(n, kernels):
    for f, args in (
        (functools.partial(with_source, n), (f32(1024, 1024), f32())),
        (functools.partial(with_point_source, n), (f32(1024, 1024),)),
        (with_list_of_sources, (f32(1024, 1024), f32(n))),
    ):
        plan = planned(f, *args)
        assert len(plan.kernels()) <= kernels, str(plan.explanation)
        assert not plan.left_to_xla(), str(plan.explanation)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [0, 1, 5, 7])
def test_sources_that_depend_on_the_step_agree(n):
    u = rand(70, 90)
    check(functools.partial(with_source, n), u, jnp.float32(0.3))
    check(functools.partial(with_point_source, n), u)
    check(with_list_of_sources, u, rand(n))
    check(
        lambda u, v: lax.scan(lambda s, v: (padded(s) + v, None), u, v, reverse=True)[0], u, rand(n)
    )


# name -> (condition, next counter, first counter)
COUNTERS = {
    "up": (lambda i: i < 7, lambda i: i + 1, 0),
    "up, inclusive": (lambda i: i <= 7, lambda i: i + 3, -2),
    "down": (lambda i: i > 0, lambda i: i - 2, 7),
    "down, inclusive": (lambda i: i >= 0, lambda i: i - 1, 3),
    "mirrored": (lambda i: i < 9, lambda i: 4 + i, 1),
    "never": (lambda i: i < 0, lambda i: i + 1, 0),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, t) for n in COUNTERS for t in ("int32", "int8")]
    + [("up", "uint8"), ("mirrored", "uint8")],
)
def test_counters_of_while_loops(name, dtype):
    condition, following, first = COUNTERS[name]

    def f(x):
        step = lambda s: (following(s[0]), jnp.sin(s[1]) + s[0])
        return lax.while_loop(lambda s: condition(s[0]), step, (jnp.asarray(first, dtype), x))

    plan = check(f, rand(5, 7))
    assert "while" not in {e.primitive.name for e in plan.jaxpr.eqns}


def test_loops_that_do_not_count_stay_as_they_are():
    x = rand(5, 7)
    wraps = lambda s: (s[0] + jnp.int8(3), s[1] * 0.5)
    endless = lambda x: lax.while_loop(lambda s: s[0] <= jnp.int8(127), wraps, (jnp.int8(0), x))[1]
    for f in (
        lambda x: lax.while_loop(lambda s: s[0] < 50, lambda s: (s[0] * 2, s[1] + 1), (1, x))[1],
        lambda x: lax.while_loop(
            lambda s: (s[0] < 5) & (s[1].sum() < 9), lambda s: (s[0] + 1, s[1] + 1), (0, x)
        )[1],
        lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + 1), (0, x))[1],
    ):
        check(f, x)
    assert "while" in {e.primitive.name for e in planned(endless, x).jaxpr.eqns}


def test_counted_loops_inside_others():
    def inner(x):
        return lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1]) + s[0]), (0, x)
        )[1]

    check(lambda x: lax.fori_loop(0, 4, lambda i, a: inner(a) + i, x), rand(5, 7))
    check(
        lambda x: lax.while_loop(lambda s: s[0] < 4, lambda s: (s[0] + 1, inner(s[1])), (0, x)),
        rand(5, 7),
    )


def test_counters_as_results_and_in_gradients():
    check(
        lambda x: lax.fori_loop(2, 9, lambda i, s: (s[0] + 2, s[1] * i + s[0]), (5, x)), rand(5, 7)
    )

    @pbkern.jit
    def f(x):
        return lax.fori_loop(0, 4, lambda i, s: jnp.sin(s) * i + s, x).sum()

    x = rand(5, 7)
    np.testing.assert_allclose(jax.grad(f)(x), jax.grad(f.__wrapped__)(x), rtol=1e-5, atol=1e-5)
