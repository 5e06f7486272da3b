"""Loops: lax.scan, fori_loop and while_loop stay inside one native program.

A loop in a decorated function does not go back to Python or XLA between iterations. Its body is fused like any other
function, and a loop around the kernels calls them.
"""

import jax
import jax.numpy as jnp
import numpy as np

import pbkern


@pbkern.jit
def gradient_descent(x, d):
    """Least squares: float32[n, m], float32[n] -> float32[m]."""

    def step(_, w):
        return w - 0.1 / x.shape[0] * (x.T @ (x @ w - d))

    return jax.lax.fori_loop(0, 200, step, jnp.zeros(x.shape[1]))


rng = np.random.default_rng(0)
x = rng.standard_normal((500, 20), np.float32)
w = rng.standard_normal(20, np.float32)
d = x @ w
np.testing.assert_allclose(gradient_descent(x, d), w, atol=1e-4)

# Nothing is left to XLA, so the loop is native. Its kernels are those of one step.

plan = gradient_descent.explain(x, d)
for k in plan.kernels:
    print(f"{k.name}: {', '.join(op for op, _ in k.ops)}")
assert not plan.left

# Loops whose number of iterations depends on values work, too.


@pbkern.jit
def newton_sqrt(a):
    """Square roots, elementwise, until no element moves by more than one part in a million."""

    def step(state):
        _, y = state
        return y, 0.5 * (y + a / y)

    def moving(state):
        before, y = state
        return jnp.any(jnp.abs(y - before) > 1e-6 * y)

    return jax.lax.while_loop(moving, step, (jnp.zeros_like(a), a))[1]


a = jnp.linspace(1, 100, 1000)
np.testing.assert_allclose(newton_sqrt(a), jnp.sqrt(a), rtol=1e-6)
print(str(newton_sqrt.explain(a)).splitlines()[0])

# A scan collects its steps' results: here a first-order filter along time for many channels at a time.


@pbkern.jit
def smooth(signal):
    """float32[time, channels] -> the same."""

    def step(state, sample):
        state = 0.9 * state + 0.1 * sample
        return state, state

    return jax.lax.scan(step, jnp.zeros(signal.shape[1]), signal)[1]


signal = rng.standard_normal((300, 64), np.float32)
state, expected = np.zeros(64, np.float32), []
for sample in signal:
    state = np.float32(0.9) * state + np.float32(0.1) * sample
    expected.append(state)
np.testing.assert_allclose(smooth(signal), expected, rtol=1e-4, atol=1e-6)
