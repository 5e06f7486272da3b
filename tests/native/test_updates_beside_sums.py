"""Scratch that a sum reads and the next statement overwrites: one pass does both, where each point has its own element."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.targets.cpu.codegen.kernel import lower_kernel

from .running import native

STEPS = 7


def recurrence(axis, update, rows, columns):
    """A kernel and its operands: in each step sums of scores * state along an axis, then the state is update(state, x y)."""

    def body(x_ref, y_ref, o_ref, last_ref, state):
        state[...] = jnp.ones_like(state)

        def step(t, _):
            score = x_ref[t][:, None] if axis == 0 else y_ref[t][None]
            o_ref[t] = jnp.sum(score * state[...], axis=axis)
            state[...] = update(state[...], x_ref[t][:, None] * y_ref[t][None])
            return 0

        lax.fori_loop(0, STEPS, step, 0)
        last_ref[...] = state[...]

    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((STEPS, n)).astype(np.float32) for n in (rows, columns))
    shapes = [(STEPS, columns if axis == 0 else rows), (rows, columns)]
    kernel = pbkern.kernel(body, out_shape=[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes],
                           scratch_shapes=[pbkern.Scratch((rows, columns), "f4")])  # fmt: skip
    return kernel.trace(x, y), x, y


def expected(axis, update, x, y):
    """In float64."""
    x, y = np.float64(x), np.float64(y)
    state, sums = np.ones((x.shape[1], y.shape[1])), []
    for a, b in zip(x, y):
        sums.append(((a[:, None] if axis == 0 else b[None]) * state).sum(axis))
        state = np.asarray(update(state, a[:, None] * b[None]))
    return np.stack(sums), state


UPDATES = {
    "in its place": (lambda s, p: 0.5 * s + p, True),
    "turned around": (lambda s, p: 0.5 * s[::-1] + p, False),
    "shifted": (lambda s, p: 0.5 * jnp.roll(s, 1, 1) + p, False),
    "by a sum of its own": (lambda s, p: 0.1 * s.sum(0, keepdims=True) + p, False),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (64, 64), (5, 17), (130, 3)])
def test_recurrences(name, axis, rows, columns):
    update, _ = UPDATES[name]
    kernel, x, y = recurrence(axis, update, rows, columns)
    for got, want in zip(native(kernel, x, y), expected(axis, update, x, y)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("name", UPDATES)
def test_the_state_is_walked_once(name):
    update, once = UPDATES[name]
    loop = lower_kernel(recurrence(0, update, 24, 40)[0], "k").nests.split("for ")[1]
    inside = [line for line in loop.splitlines() if line.startswith("  ")]
    assert (len([line for line in inside if re.match(" *nest ", line)]) == 1) is once


def test_what_is_written_after_the_sum_reads_the_state_before():
    """The last sum reads what is overwritten: at the end of the sums, when the state would be gone."""

    def body(x_ref, o_ref, state):
        state[...] = x_ref[...]
        old = state[...]
        o_ref[...] = jnp.sum(old, axis=1) + old[:, 0]
        state[...] = old * 2
        o_ref[...] += state[...].sum(1)

    x = np.random.default_rng(0).standard_normal((16, 48)).astype(np.float32)
    scratch = [pbkern.Scratch((16, 48), "f4")]
    kernel = pbkern.kernel(
        body, out_shape=jax.ShapeDtypeStruct((16,), jnp.float32), scratch_shapes=scratch
    ).trace(x)
    (got,) = native(kernel, x)
    np.testing.assert_allclose(got, 3 * np.float64(x).sum(1) + x[:, 0], atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1)])
def test_what_an_update_overwrites_is_not_computed_anew_behind_a_maximum(shape):
    """One element: the update and the maximum over its result have equal dimensions, all of size 1."""

    @pbkern.kernel(
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_shapes=[pbkern.Scratch(shape, jnp.float32)],
    )
    def body(x, o, t):
        t[...] = x[...]
        t[...] = t[...] * x[...] + t[...]
        t[...] = jnp.maximum(t[...], t[...].max())
        o[...] = t[...]

    x = np.arange(3, 3 + shape[0] * shape[1], dtype=np.float32).reshape(shape)
    updated = x * x + x
    np.testing.assert_array_equal(native(body.trace(x), x)[0], np.maximum(updated, updated.max()))
