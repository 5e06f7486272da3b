"""Stencils whose borders are set from rows near them: wavefronts with bodies of their own for the first and last rows."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern

from .checking import check, planned, rand
from .test_time_skewing import fronts, is_front, native  # noqa: F401
from .test_time_tiling import by_fori, interior, padded
from .workloads import f32


def laplacian(u):
    return u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]


def copied(u):
    """Each border is its neighbour (no flux)."""
    u = u.at[:, 0].set(u[:, 1]).at[:, -1].set(u[:, -2])
    return u.at[0].set(u[1]).at[-1].set(u[-2])


def jacobi(u):
    return copied(interior(u))


def wave(state):
    u, before = state
    return copied((2 * u - before).at[1:-1, 1:-1].add(0.1 * laplacian(u))), u


def one_sided(u):
    """Differences of second order at the first and last rows, a column from far inside."""
    u = u.at[1:-1, 1:-1].add(0.2 * laplacian(u))
    u = u.at[0].set((4 * u[1] - u[2]) / 3).at[-1].set((4 * u[-2] - u[-3]) / 3)
    return u.at[:, 0].set(u[:, 3])


def first_only(u):
    return padded(u).at[0].set(u[2])


def last_only(u):
    return padded(u).at[-1].add(0.1 * u[-3])


def joined(u):
    """Borders that are concatenated to the rest."""
    rest = 0.25 * (laplacian(u) + 4 * u[1:-1, 1:-1])
    rest = jnp.concatenate([rest[:1], rest, rest[-1:]], 0)
    return jnp.concatenate([rest[:, :1], rest, rest[:, -1:]], 1)


def by_masks(u):
    row = jnp.arange(u.shape[0])[:, None]
    border = (row == 0) | ~(row < u.shape[0] - 1)
    return jnp.where(border, jnp.where(row == 0, u[1], u[-2]), padded(u))


def absorbing(state):
    """Fields on the cells' middles and edges, of which the first and last waves leave (Mur)."""
    e, h = state
    h = h - 0.3 * (e[1:] - e[:-1])
    new = e.at[1:-1].add(-0.3 * (h[1:] - h[:-1]))
    new = new.at[0].set(e[1] + 0.2 * (new[1] - e[0]))
    return new.at[-1].set(e[-2] + 0.2 * (new[-2] - e[-1])), h


def channel(u):
    """No flux along rows, periodic along columns."""
    across = jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1)
    u = u.at[1:-1].set(0.25 * (u[:-2] + u[2:] + across[1:-1]))
    return u.at[0].set(u[1]).at[-1].set(u[-2])


def padded_by(mode):
    def step(u):
        return u + 0.2 * laplacian(jnp.pad(u, 1, mode=mode))

    return step


def far_ends(u):
    """Ends of two columns and three, made of others."""
    p = jnp.concatenate([0.5 * u[:, 4:6], u, u[:, :1], u[:, -3:-1]], 1)
    return 0.3 * padded(u) + 0.2 * (p[:, :-5] + p[:, 5:])


def recorded(u):
    return jacobi(u), (u[0], jacobi(u)[-1, 3])


# Step, and how many rows fewer each of its fields has.
STEPS = {
    "jacobi": (jacobi, [0]),
    "wave": (wave, [0, 0]),
    "one-sided": (one_sided, [0]),
    "first only": (first_only, [0]),
    "last only": (last_only, [0]),
    "joined": (joined, [0]),
    "by masks": (by_masks, [0]),
    "absorbing": (absorbing, [0, 1]),
    "channel": (channel, [0]),
    "edge": (padded_by("edge"), [0]),
    "reflect": (padded_by("reflect"), [0]),
    "symmetric": (padded_by("symmetric"), [0]),
    "far ends": (far_ends, [0]),
}


def state_of(fewer, rows, columns):
    fields = tuple(0.1 * rand(rows - less, columns) for less in fewer)
    return fields if len(fields) > 1 else fields[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("k", "l2_bytes", "shape"), [(1, 1 << 20, (26, 19)), (0, 1 << 14, (43, 17))]
)
@pytest.mark.parametrize("name", STEPS)
def test_they_agree_in_the_interpreter(name, k, l2_bytes, shape, fronts):  # noqa: F811
    step, fewer = STEPS[name]
    fronts(k, l2_bytes)
    assert is_front(check(by_fori(step, 5), state_of(fewer, *shape)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("k", "l2_bytes", "shape"),
    [
        (1, 1 << 20, (101, 300)),
        (3, 1 << 17, (101, 300)),
        (2, 1 << 15, (130, 67)),
        (0, 1 << 14, (43, 17)),
    ],
)
@pytest.mark.parametrize("name", STEPS)
def test_they_agree(name, k, l2_bytes, shape, fronts):  # noqa: F811
    step, fewer = STEPS[name]
    fronts(k, l2_bytes)
    native(by_fori(step, 23), state_of(fewer, *shape))


def from_rows(above, below):
    """The first row is set from that many rows below it, the last one from as many above it."""

    def step(u):
        u = u.at[1:-1, 1:-1].add(0.2 * laplacian(u))
        u = u.at[0].set(0.6 * u[above] + 0.3 * u[1]) if above else u
        return u.at[-1].set(0.6 * u[-1 - below] + 0.3 * u[-2]) if below else u

    return step


@pytest.mark.parametrize(("above", "below"), [(2, 0), (3, 0), (4, 1), (0, 3), (2, 2), (3, 4)])
@pytest.mark.parametrize("k", range(4))
def test_rows_wait_across_turns(above, below, k, fronts):  # noqa: F811
    """Rows that wait for a later one are still there when the scratch buffer's rows have moved back in between."""
    for l2_bytes, shape in ((1 << 14, (43, 17)), (1 << 15, (64, 33)), (1 << 16, (90, 67))):
        fronts(k, l2_bytes)
        native(by_fori(from_rows(above, below), 23), 0.1 * rand(*shape))


def test_values_of_each_step_are_stored(fronts):  # noqa: F811
    fronts(1)
    native(lambda u: lax.scan(lambda s, _: recorded(s), u, None, length=13), 0.1 * rand(67, 45))


def test_a_long_loop_goes_through_memory_once():
    plan = planned(by_fori(jacobi, 50), f32(2048, 2048))
    (kernel,) = plan.kernels()
    assert kernel.scratch, str(plan.explanation)
    assert "50 steps of a loop" in str(plan.explanation)


def test_borders_at_hand_cost_no_lag():
    """The rows between need no more of the step before than without borders; the first row waits for the second."""
    plan = planned(by_fori(jacobi, 50), f32(2048, 2048))
    without = planned(by_fori(interior, 50), f32(2048, 2048))
    rows, columns = without.kernels()[0].scratch[0].shape
    assert plan.kernels()[0].scratch[0].shape == (rows + 1, columns)


def other_end(u):
    u = interior(u)
    return u.at[-1].set(u[1])


def fixed_row(u):
    return interior(u) + 0.1 * u[500]


def largest(u):
    u = interior(u)
    return u / jnp.abs(u).max()


def turned(u):
    return interior(u) + 0.1 * u[::-1]


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (other_end, "sets a border from the array's other end"),
        (fixed_row, "reads rows at a fixed place"),
        (largest, "needs more than the neighbours of an element"),
        (turned, "reads rows in another order"),
    ],
)
def test_a_report_names_the_line_that_keeps_steps_apart(step, why):
    text = str(pbkern.jit(by_fori(step, 50)).explain(f32(1024, 1024)))
    (line,) = [line for line in text.splitlines() if why in line]
    assert "of its steps" in line
    first = step.__code__.co_firstlineno
    places = [f"{__file__}:{number}:" for number in range(first, first + 4)]
    assert any(place in line for place in places), line


@pytest.mark.parametrize("step", [interior, jacobi, lambda u: jnp.sin(u), lambda u: u @ u])
def test_a_report_names_no_line_of_other_loops(step):
    assert "of its steps" not in str(pbkern.jit(by_fori(step, 50)).explain(f32(1024, 1024)))


def test_a_border_set_from_the_other_end_agrees():
    native(by_fori(other_end, 9), np.asarray(0.1 * rand(67, 45)))
