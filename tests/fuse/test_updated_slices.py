"""Slices that a scan updates in few places: nothing else of them is copied, and results are those of JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern
from pbkern.core.passes import with_settings
from pbkern.fuse.loops.updated_slices import SlicesToCarries

from .checking import check, planned, rand
from .test_in_place_updates import copied_in_loops

LAYERS = 3
CACHES = rand(LAYERS, 40, 5)
ROWS = rand(LAYERS, 5, seed=1)
X = rand(5, seed=2)


def small():
    """A `with` block in which slices of any size become parts of carries."""
    return with_settings("slices to carries", {"fewest_slice_bytes": 0})


def layers(step, reverse=False):
    """The function (x, rows, caches) -> a scan over layers that starts at x."""
    return lambda x, rows, caches: lax.scan(step, x, (rows, caches), reverse=reverse)


def put(cache, row, at):
    return lax.dynamic_update_slice(cache, row[None], (at, 0))


def place(x):
    """A position that only the values tell."""
    return jnp.int32(jnp.abs(x).sum() * 10) % 45


def updated(x, layer):
    row, cache = layer
    return x + row, put(cache, x * row, place(x))


def updated_and_read(x, layer):
    row, cache = layer
    cache = put(cache, x * row, place(x))
    return jnp.tanh(cache.sum(0)), cache


def scattered(x, layer):
    row, cache = layer
    cache = cache.at[place(x)].set(x * row)
    return jnp.tanh(cache.sum(0)), cache


def added(x, layer):
    row, cache = layer
    return x + row, cache.at[place(x), jnp.array([3, 1])].add(2.0)


def column(x, layer):
    row, cache = layer
    return x + row, cache.at[:, place(x) % 5].set(x.sum())


def two_updates(x, layer):
    row, cache = layer
    at = place(x)
    return x + row, put(put(cache, x, at), row, at + 1)


def read_twice(x, layer):
    row, cache = layer
    return x + cache.mean(0), put(cache, row, place(x))


def also_a_carry(c, layer):
    x, _ = c
    row, cache = layer
    cache = put(cache, x * row, place(x))
    return (x + row, cache), cache


def two_results(x, layer):
    row, cache = layer
    cache = put(cache, row, place(x))
    return x + row, (cache, cache)


def two_caches(x, layer):
    row, cache = layer
    first, second = cache[:20], cache[20:]
    return x + row, (put(first, row, place(x)), put(second, x, place(x)))


STEPS = [
    updated, updated_and_read, scattered, added, column, two_updates, read_twice, two_results, two_caches,
]  # fmt: skip


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_equals_jax(step, reverse):
    with small():
        check(layers(step, reverse), X, ROWS, CACHES)


def test_a_slice_that_is_carried_too():
    with small():
        check(layers(also_a_carry), (X, CACHES[0]), ROWS, CACHES)


@pytest.mark.parametrize("step", [updated_and_read, scattered], ids=lambda step: step.__name__)
def test_batches(step):
    batched = jax.vmap(layers(step), (0, None, 0))
    with small():
        check(batched, rand(4, 5), ROWS, rand(4, LAYERS, 40, 5))


@pytest.mark.parametrize(
    "step", [updated_and_read, scattered, added], ids=lambda step: step.__name__
)
def test_gradients(step):
    def loss(x, rows, caches):
        x, caches = layers(step)(x, rows, caches)
        return (x**2).sum() + jnp.sin(caches).sum()

    with small():
        check(jax.grad(loss, (0, 1, 2)), X, ROWS, CACHES, tolerance=1e-3)


def tokens(step, count=4):
    """A scan over tokens of a scan over layers, as decoding has it."""

    def f(x, rows, caches):
        def token(c, _):
            x, caches = layers(step)(c[0], rows, c[1])
            return (x, caches), x

        return lax.scan(token, (x, caches), None, length=count)

    return f


@pytest.mark.parametrize("step", [updated_and_read, scattered], ids=lambda step: step.__name__)
def test_loops_in_loops(step):
    with small():
        check(tokens(step), X, ROWS, CACHES)


@pytest.mark.parametrize(
    "f",
    [layers(updated_and_read), layers(scattered, reverse=True), tokens(updated_and_read), tokens(scattered)],
    ids=["one loop", "backwards", "two loops", "two loops, scattered"],
)  # fmt: skip
def test_nothing_of_a_cache_is_copied_in_loops(f):
    caches = rand(LAYERS, 1000, 5)
    plan = planned(f, X, ROWS, caches)
    (program,) = plan.programs()
    for shape in (caches.shape, caches.shape[1:], (1, *caches.shape[1:])):
        assert not copied_in_loops(program, shape), program
    kernels = plan.explanation.kernels
    assert max(kernel.cost.bytes_moved for kernel in kernels) < 1.1 * caches[0].nbytes
    assert min(kernel.cost.bytes_moved for kernel in kernels) < 0.01 * caches[0].nbytes


def carries(f, *args, **limits):
    """How many carries the scan of a function has after the pass."""
    (scan,) = (
        eqn
        for eqn in SlicesToCarries(**limits)(jax.make_jaxpr(f)(*args), None).jaxpr.eqns
        if eqn.primitive.name == "scan"
    )
    return scan.params["num_carry"]


def test_small_slices_stay_slices():
    """A loop over little data is one kernel."""
    closed = jax.make_jaxpr(layers(updated))(X, ROWS, CACHES)
    assert SlicesToCarries()(closed, None) is closed
    assert carries(layers(updated), X, ROWS, CACHES, fewest_slice_bytes=0) == 2


def much(x, layer):
    _, cache = layer
    return x + 1, lax.dynamic_update_slice(cache, cache[:30] * 2, (place(x), 0))


@pytest.mark.parametrize("step", [much, read_twice], ids=["large windows", "old values are read"])
def test_other_slices_stay_slices(step):
    assert carries(layers(step), X, ROWS, CACHES, fewest_slice_bytes=0) == 1


@settings(max_examples=25)
@given(
    st.integers(1, 4), st.integers(1, 9), st.integers(1, 4), st.sampled_from(["float32", "int32", "bfloat16", "bool"]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_drawn(length, rows, width, dtype, reverse, scatters):
    rng = np.random.default_rng(length * 100 + rows * 10 + width)
    caches = jnp.asarray(rng.integers(0, 2, (length, rows, width)), dtype)
    values = jnp.asarray(rng.integers(0, 2, (length, width)), dtype)
    places = jnp.asarray(rng.integers(-2, rows + 2, length), jnp.int32)

    def step(c, layer):
        cache, value, at = layer
        cache = cache.at[at].set(value) if scatters else put(cache, value, at)
        return c + 1, cache

    f = lambda *xs: lax.scan(step, jnp.int32(0), xs, reverse=reverse)
    changes = {"fewest_slice_bytes": 0, "least_share": 1}
    with with_settings("slices to carries", changes):
        got = pbkern.jit(f)(caches, values, places)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(f)(caches, values, places))):
        np.testing.assert_array_equal(g, w)
