"""Loops of many short steps: carries of a few numbers, and stencils whose borders follow from their neighbours."""

import jax
import jax.numpy as jnp
from jax import lax

STEPS = 20_000


def logistic(x, r):
    return lax.fori_loop(0, STEPS, lambda _, x: r * x * (1 - x), x)


def lorenz(x, y, z):
    def step(state, _):
        x, y, z = state
        return (
            x + 0.1 * (y - x),
            y + 0.01 * (x * (28 - z) - y),
            z + 0.01 * (x * y - 8 / 3 * z),
        ), None

    return lax.scan(step, (x, y, z), None, length=STEPS)[0]


def moving_average(x):
    def step(mean, v):
        mean = 0.9 * mean + 0.1 * v
        return mean, mean

    return lax.scan(step, jnp.float32(0), x)[1]


def newton_root(a):
    return lax.fori_loop(0, STEPS, lambda _, x: 0.5 * (x + a / x), a)


def branches(x):
    def step(c, _):
        return lax.cond(c > 0.5, lambda c: 1.9 * c * (1 - c), lambda c: c + 0.1, c), None

    return lax.scan(step, x, None, length=STEPS)[0]


def random_integers(seed):
    def step(state, _):
        state = state * jnp.uint32(1664525) + jnp.uint32(1013904223)
        return state, (state >> 8).astype(jnp.float32)

    return lax.scan(step, seed, None, length=STEPS)[1]


def welford(x):
    def step(state, v):
        n, mean, squares = state
        n, d = n + 1, v - mean
        mean = mean + d / n
        return (n, mean, squares + d * (v - mean)), None

    return lax.scan(step, (jnp.float32(0),) * 3, x)[0]


def runge_kutta(f, y, h=0.01, steps=5_000):
    def step(y, _):
        k1 = f(y)
        k2 = f(y + h / 2 * k1)
        k3 = f(y + h / 2 * k2)
        k4 = f(y + h * k3)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return y, y

    return lax.scan(step, y, None, length=steps)


def van_der_pol(y):
    return runge_kutta(lambda y: jnp.array([y[1], 3 * (1 - y[0] ** 2) * y[1] - y[0]]), y)[1]


def bisection(a):
    def root(offset):
        def halve(state):
            low, high, count = state
            middle = 0.5 * (low + high)
            below = middle**3 < a
            return jnp.where(below, middle, low), jnp.where(below, high, middle), count + 1

        start = jnp.float32(0), 10 + offset, 0
        return lax.while_loop(lambda s: (s[1] - s[0] > 1e-6) & (s[2] < 60), halve, start)[0]

    return lax.fori_loop(0, 300, lambda i, total: total + root(jnp.float32(i)), jnp.float32(0))


def collatz(n):
    def length(n):
        def step(state):
            n, count = state
            return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1

        return lax.while_loop(lambda s: s[0] != 1, step, (n, 0))[1]

    return lax.fori_loop(0, 2_000, lambda i, total: total + length(i + 1), n)


def sides(u):
    u = u.at[:, 0].set(u[:, 1]).at[:, -1].set(u[:, -2])
    return u.at[0].set(u[1]).at[-1].set(u[-2])


def neighbours(u):
    return u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]


def jacobi_of_sides(u):
    def step(_, u):
        return sides(u.at[1:-1, 1:-1].set(0.25 * neighbours(u)))

    return lax.fori_loop(0, 50, step, u)


def wave_of_sides(u, before):
    def step(_, state):
        u, before = state
        laplacian = neighbours(u) - 4 * u[1:-1, 1:-1]
        return sides((2 * u - before).at[1:-1, 1:-1].add(0.1 * laplacian)), u

    return lax.fori_loop(0, 50, step, (u, before))


def heat_of_edges(u):
    def step(_, u):
        p = jnp.pad(u, 1, mode="edge")
        return u + 0.2 * (neighbours(p) - 4 * u)

    return lax.fori_loop(0, 50, step, u)


CASES = {
    "logistic": (lambda x: logistic(jax.nn.sigmoid(x), jnp.float32(3.2)), "f32[]"),
    "lorenz": (lorenz, "f32[]", "f32[]", "f32[]"),
    "moving_average": (moving_average, "f32[20000]"),
    "newton_root": (newton_root, "f32[]>1"),
    "branches": (lambda x: branches(jax.nn.sigmoid(x)), "f32[]"),
    "random_integers": (random_integers, "u32[]"),
    "welford": (welford, "f32[20000]"),
    "matrix_3": (lambda a, y: runge_kutta(lambda y: -(a @ a.T) @ y, y)[0], "f32[3,3]", "f32[3]"),
    "van_der_pol": (van_der_pol, "f32[2]"),
    "bisection": (bisection, "f32[]>1"),
    "collatz": (collatz, "i32[]<1"),
    "jacobi_of_sides": (jacobi_of_sides, "f32[1024,1024]"),
    "wave_of_sides": (wave_of_sides, "f32[1024,1024]", "f32[1024,1024]"),
    "heat_of_edges": (heat_of_edges, "f32[1024,1024]"),
}
