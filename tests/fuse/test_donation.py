"""Kernels that write their results into donated operands, and those that must not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

from .checking import rand


def step(x, g):
    return x - 0.1 * jnp.tanh(g)


def stencil(x, g):
    return (
        x.at[1:-1, 1:-1].set(0.25 * (x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:])) + g
    )


def two_results(x, g):
    return x + g, x * jnp.exp(g)


def rows(g):
    return (100 * g[0]).astype(jnp.int32) % len(g)


# name -> (function, whether its kernel writes into its first operand)
FUNCTIONS = {
    "elementwise": (step, True),
    "with a row": (lambda x, g: jnp.where(x > 0, x, g[0]) * 2, True),
    "read twice": (lambda x, g: jnp.sin(x) * x + x, True),
    "stencil": (stencil, False),
    "transposed": (lambda x, g: x.T + g, False),
    "reversed": (lambda x, g: x[::-1] + g, False),
    "product": (lambda x, g: x @ g, False),
    "rows": (lambda x, g: x / x.sum(1, keepdims=True), False),
    "cumulative": (lambda x, g: jnp.cumsum(x, 1), False),
    "two results": (two_results, True),
    "scattered into": (lambda x, g: jnp.tanh(x.at[rows(g)].add(g * 2)), True),
    "scattered into after arithmetic": (lambda x, g: (x * 2).at[:, rows(g)].set(g), True),
    "scattered into itself": (lambda x, g: x.at[rows(g)].add(x), False),
    "another type": (lambda x, g: (x > g).astype(jnp.int32), False),
    "passed on": (lambda x, g: (x + g, x), False),
    "read by two kernels": (lambda x, g: (x @ g).sum(0) + jnp.sort(x + g, 0), False),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("n", [1, 33, 300])
def test_donated_operands(name, n):
    f, in_place = FUNCTIONS[name]
    x, g = 1 + jnp.abs(rand(n, n)), 1 + jnp.abs(rand(n, n, seed=1))
    want, place = jax.jit(f)(x, g), x.unsafe_buffer_pointer()
    compiled = pbkern.jit(f, donate_argnums=0)
    if n > 1:  # of one element, much is elementwise
        assert any(k.aliases for k in compiled.kernels(x, g)) == in_place
    if in_place and n == 300:
        assert compiled.lower(x, g).compile().memory_analysis().temp_size_in_bytes < x.nbytes
    got = compiled(x, g)
    assert x.is_deleted() or name == "another type"
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    if in_place:
        assert jax.tree.leaves(got)[0].unsafe_buffer_pointer() == place


def test_operands_that_are_not_given_up_stay():
    x, g = rand(300, 300), rand(300, 300, seed=1)
    kept, wide = np.asarray(x).copy(), np.asarray(x, np.float64)
    updated = wide - 0.1 * np.tanh(np.asarray(g, np.float64))
    inner = pbkern.jit(step, donate_argnums=0)
    for f, want in (
        (pbkern.jit(step), updated),
        (jax.jit(lambda x, g: inner(x, g) + x), updated + wide),
        (jax.jit(jax.vmap(inner)), updated),
        (jax.jit(jax.grad(lambda x, g: (inner(x, g) ** 2).sum())), 2 * updated),
    ):
        np.testing.assert_allclose(f(x, g), want, rtol=1e-5, atol=1e-5)
        assert not x.is_deleted()
        np.testing.assert_array_equal(x, kept)


def adam(p, m, v, g):
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 0.1 * m / (jnp.sqrt(v) + 1e-8), m, v


@pytest.mark.parametrize("results", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_states_are_updated_in_place(results):
    def update(*args):
        made = adam(*args)
        return [made[k] for k in results]

    for shape in ((1001, 77), (3,)):
        p, m, v, g = (1 + jnp.abs(rand(*shape, seed=k)) for k in range(4))
        want = jax.jit(update)(p, m, v, g)
        compiled = pbkern.jit(update, donate_argnums=(0, 1, 2))
        assert len(compiled.kernels(p, m, v, g)[0].aliases) == 3
        places = [x.unsafe_buffer_pointer() for x in (p, m, v)]
        got = compiled(p, m, v, g)
        assert [x.unsafe_buffer_pointer() for x in got] == places
        for a, b in zip(got, want):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_updates_in_place_many_times():
    x, g = rand(1000, 77), rand(1000, 77, seed=1)
    update, want = pbkern.jit(step, donate_argnums=0), np.asarray(x, np.float64)
    for _ in range(20):
        x, want = update(x, g), want - 0.1 * np.tanh(np.asarray(g, np.float64))
    np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-5)
