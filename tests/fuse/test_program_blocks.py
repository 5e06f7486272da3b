"""Loops over wide values: one kernel of several programs, where elements need nothing of each other in any step."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern
from pbkern.fuse.partition import control_regions

from .checking import check, planned, rand

STEPS = 13
# Steps of loops that would be unrolled if they were short.
LONG = 60


def linear(a, b):
    return lax.scan(lambda h, x: (x[0] * h + x[1],) * 2, jnp.zeros(a.shape[1:]), (a, b))


def state_space(dt, u):
    """As many channels as wanted, each with 5 states, which are summed in every step."""
    rates = -jnp.arange(1.0, 6.0)

    def step(h, x):
        dt, u = x
        h = jnp.exp(dt[:, None] * rates) * h + (dt * u)[:, None]
        return h, h.sum(-1)

    return lax.scan(step, jnp.zeros((u.shape[1], 5)), (jnp.abs(dt), u))[1]


def layers(x):
    """Batch and channels: both are cut."""
    return lax.scan(lambda h, x: (jnp.tanh(h) + x,) * 2, jnp.zeros(x.shape[1:]), x, reverse=True)


def positions(x):
    """What a step does depends on the place of an element."""

    def step(h, x):
        place = jnp.arange(h.shape[0])[:, None]
        return jnp.where(place % 3 == 0, h * 0.5 + x, 0.2 * jnp.cumsum(h, 1) + place), None

    return lax.scan(step, x[0], x)[0]


def padded(x):
    """Elements behind the shift are zero: each reads others of its row, not of other rows."""
    shifted = lambda h: jnp.pad(h[:, :-1], ((0, 0), (1, 0)))
    return lax.scan(lambda h, x: (0.5 * shifted(h) + x, h[:, 0]), x[0], x)


def branching(x, choices):
    def step(h, xs):
        x, choice = xs
        return lax.switch(choice, [jnp.sin, lambda h: 0.9 * h, lambda h: h + x], h), h

    return lax.scan(step, x[0], (x, choices))


def nested(x):
    def step(h, x):
        inner = lambda i, h: h + 0.1 * (x * i - h.mean(-1, keepdims=True))
        return lax.fori_loop(0, 3, inner, h), None

    return lax.scan(step, x[0], x)[0]


def until(x, n):
    def step(state):
        count, h = state
        return count + 1, 0.5 * h + x

    return lax.while_loop(lambda s: s[0] * s[0] < n, step, (jnp.int32(0), x))


def swapped(a, b):
    step = lambda _, s: (s[1], 0.5 * (s[0] + 0.3 * jnp.cumsum(s[1], 1)))
    return lax.fori_loop(0, LONG, step, (a, b))


def handed_on(a, b):
    """Each carry is made of what the others have been: a step stores three that read each other."""

    def step(s, _):
        a, b, c = s
        return (b, 0.5 * (a + c), 0.3 * (b - a)), None

    return lax.scan(step, (a, b, a - b), None, length=LONG)[0]


def summed(x):
    """A step stores what it carries where it is summed."""
    return lax.scan(
        lambda h, x: (h * x[:, None] + 0.1, (h * x[:, None] + 0.1).sum(1)),
        x[:, :5] @ jnp.ones((5, 16)),
        x.T,
    )


def steered(x, gains):
    """All programs compute the same scalar from step to step."""

    def step(state, xs):
        (h, gain), (x, more) = state, xs
        gain = jnp.tanh(gain + more)
        return (gain * h + x, gain), None

    return lax.scan(step, (x[0], jnp.float32(0.5)), (x, gains))[0][0]


def products(matrix, x):
    """Small matrices: each element of the batch has its product."""
    return lax.scan(lambda h, x: (jnp.tanh(h @ matrix + x), h[:, 0]), x[0], x)


N = 1001
CUT = {
    "linear": (linear, (rand(STEPS, N), rand(STEPS, N))),
    "state_space": (state_space, (rand(STEPS, N), rand(STEPS, N))),
    "layers": (layers, (rand(STEPS, 7, 301),)),
    "positions": (positions, (rand(LONG, N, 3),)),
    "padded": (padded, (rand(STEPS, 97, 11),)),
    "branching": (branching, (rand(STEPS, N), np.arange(STEPS, dtype=np.int32) % 3)),
    "nested": (nested, (rand(STEPS, N, 3),)),
    "until": (lambda x, n: until(x, n)[1], (rand(N), np.int32(50))),
    "swapped": (swapped, (rand(N, 3), rand(N, 3))),
    "handed on": (handed_on, (rand(N), rand(N))),
    "summed": (summed, (rand(N, STEPS),)),
    "steered": (steered, (rand(LONG, N), rand(LONG))),
    "products": (products, (0.3 * rand(4, 4), rand(STEPS, 131, 4))),
    "doubles": (lambda x: linear(x, x), (np.asarray(rand(STEPS, N), np.float64),)),
    "halves": (layers, (rand(STEPS, 3, 301).astype(jnp.bfloat16),)),
    "integers": (lambda x: linear(x, x), (np.arange(STEPS * N, dtype=np.int32).reshape(STEPS, N),)),
}


def loop_grids(plan) -> list[tuple[int, ...]]:
    return [
        kernel.grid for kernel in plan.kernels() if "scan" in kernel.name or "while" in kernel.name
    ]


@pytest.mark.parametrize("name", CUT)
def test_programs_share_what_is_independent(name):
    f, args = CUT[name]
    with jax.enable_x64(name == "doubles"):
        plan = check(f, *args)
        ((programs, *_),) = loop_grids(plan)
        assert programs > 1
        for got, want in zip(
            jax.tree.leaves(pbkern.jit(f)(*args)), jax.tree.leaves(jax.jit(f)(*args)), strict=True
        ):
            assert got.dtype == want.dtype
            tolerance = 0.05 if name == "halves" else 2e-4
            got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_grid_axes_cut_batches_and_channels():
    f, args = CUT["layers"]
    assert len(loop_grids(planned(f, *args))[0]) == 2


def rolled(x):
    return lax.fori_loop(0, STEPS, lambda _, h: 0.5 * jnp.roll(h, 1) + h, x)


def normalised(x):
    return lax.fori_loop(0, STEPS, lambda _, h: h / (1 + h.max()), x)


def turned(x):
    return lax.fori_loop(0, STEPS, lambda _, h: 0.5 * h.T + 1, x)


def counting(x):
    """A result that is no part of a program's."""
    return until(x, 50)


@pytest.mark.parametrize("f", [rolled, normalised, turned, counting])
def test_other_loops_are_not_cut(f):
    plan = check(f, rand(31, 31) if f is turned else rand(997), tolerance=1e-3)
    assert not any(grid for grid in loop_grids(plan))


def test_loops_that_one_program_ends_soon_are_not_cut():
    f = lambda a, b: linear(a, b)
    assert loop_grids(planned(f, rand(3, 200), rand(3, 200))) == [()]


@settings(max_examples=25, deadline=None)
@given(
    steps=st.integers(1, 5),
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    total=st.integers(0, 3),
    reverse=st.booleans(),
    late=st.booleans(),
)
def test_values_of_steps_agree_with_numpy(steps, shape, total, reverse, late):
    """`total`: the dimension that each step sums over, if there is one; `late`: whether what it carries is read."""
    shape = (*shape, 37)
    xs = np.random.default_rng(steps).standard_normal((steps, *shape)).astype("f")
    axis = total if total < len(shape) else None

    def step(c, x, where, tanh, sums):
        c = where(x > 0, 0.5 * c + x, tanh(c))
        if axis is not None:
            c = c - 0.01 * sums(c)
        return c, (c, c > 0)

    def f(xs):
        sums = lambda c: c.sum(axis, keepdims=True)
        final, rest = lax.scan(
            lambda c, x: step(c, x, jnp.where, jnp.tanh, sums),
            jnp.zeros(xs.shape[1:]),
            xs,
            reverse=reverse,
        )
        return (final, *rest) if late else rest

    values, c = [], np.zeros(shape)
    for x in xs[::-1] if reverse else xs:
        c, rest = step(c, x, np.where, np.tanh, lambda c: c.sum(axis, keepdims=True))
        values.append(rest)
    stacked = map(np.stack, zip(*(values[::-1] if reverse else values)))
    expected = (c, *stacked) if late else tuple(stacked)
    for got, want in zip(pbkern.jit(f)(xs), expected, strict=True):
        if want.dtype == bool:  # zero is near for a few
            assert (np.asarray(got) != want).mean() < 1e-2
        else:
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-4)


def test_small_stencils_take_several_steps_in_a_tile():
    """Each step reads neighbours: tiles that recompute their borders take half the time of a loop over single steps."""
    step = lambda _, h: h + 0.1 * (jnp.roll(h, 1, 1) - 2 * h + jnp.roll(h, -1, 1))
    assert not loop_grids(check(lambda x: lax.fori_loop(0, LONG, step, x), rand(4, 50)))


def test_no_tiles_are_searched_for_loops_that_programs_share(monkeypatch):
    searched = []
    tile_time = control_regions.tile_time
    monkeypatch.setattr(
        control_regions, "tile_time", lambda *args: searched.append(1) or tile_time(*args)
    )
    step = lambda _, h: 3.7 * h * (1 - h)
    assert loop_grids(planned(lambda x: lax.fori_loop(0, LONG, step, x), rand(N))) != [()]
    assert not searched
    planned(lambda x: lax.fori_loop(0, LONG, lambda _, h: 0.5 * (h + jnp.roll(h, 1)), x), rand(N))
    assert searched


def test_sums_of_what_is_carried_are_taken_together():
    """Each point reads what it overwrites itself: rows of sums still share vectors, and nothing is copied in a step."""
    text = pbkern.jit(summed).as_text(*CUT["summed"][1], stage="nests")
    in_loop = re.search(r"\nfor .*\n((?:  .*\n)+)", text)[1]
    assert "batched_rows" in in_loop
    assert in_loop.count("nest [") == 1
