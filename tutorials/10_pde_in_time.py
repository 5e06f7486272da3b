"""A partial differential equation in time: a stencil, stepped by fori_loop, is one kernel for all steps.

The heat equation u_t = u_xx + u_yy on the unit square, zero on its boundary, by explicit Euler steps on n by n inner
points: each point becomes a weighted sum of itself and its four neighbours. Written as below, every step would read
and write the whole array. Fusion lets the steps follow each other through it instead: while rows enter the cache, the
first step computes the next few of its own, the second those two rows behind it, and so on, so that the array goes
through memory once for as many steps as the cache holds rows for.
"""

import jax
import jax.numpy as jnp
import numpy as np

import pbkern

N, STEPS = 254, 40
H = 1 / (N + 1)
DT = 0.2 * H * H  # explicit steps are stable up to 0.25 h^2


@pbkern.jit
def heat(u):
    """STEPS steps from float32[n, n]."""

    def step(_, u):
        p = jnp.pad(u, 1)  # the boundary is zero
        around = p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]
        return u + DT / H**2 * (around - 4 * u)

    return jax.lax.fori_loop(0, STEPS, step, u)


# sin(pi x) sin(pi y) keeps its shape and decays; so it does on the grid, by a factor per step that is known exactly.

x = np.arange(1, N + 1) * H
mode = np.sin(np.pi * x)[:, None] * np.sin(np.pi * x)[None, :]
factor = 1 - 8 * DT / H**2 * np.sin(np.pi * H / 2) ** 2
u = jnp.asarray(mode, jnp.float32)
np.testing.assert_allclose(heat(u), mode * factor**STEPS, atol=2e-5)
print(
    f"after {STEPS} steps the peak is {float(heat(u).max()):.6f}, exactly {factor**STEPS * mode.max():.6f}"
)

# One kernel, which is launched for a number of steps at once: a loop over rows, in which a loop over steps makes a few rows
# of each.

(report,) = heat.explain(u).kernels
assert report.steps > 1
print(f"{STEPS} steps: one kernel, {report.steps} steps per launch, grid {report.grid}")

# Several fields work alike. The wave equation needs two time levels, which are carried from step to step.


@pbkern.jit
def wave(u, before):
    """STEPS leapfrog steps of u_tt = u_xx + u_yy: float32[n, n] twice -> the same."""

    def step(_, state):
        u, before = state
        p = jnp.pad(u, 1)
        around = p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]
        return 2 * u - before + 0.25 * (around - 4 * u), u

    return jax.lax.fori_loop(0, STEPS, step, (u, before))


angle = 2 * np.arcsin(np.sqrt(0.5) * np.sin(np.pi * H / 2))  # the mode turns by this much per step
then, now = wave(u, jnp.asarray(mode * np.cos(angle), jnp.float32))[::-1]
np.testing.assert_allclose(now, mode * np.cos(STEPS * angle), atol=1e-3)
print(
    f"wave equation: {len(wave.kernels(u, u))} kernel(s), the standing wave is at {float(now.max()):.4f} of its height"
)
