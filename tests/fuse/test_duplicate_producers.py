"""What several groups compute: masks stay copies, sums of residual networks are made once."""

import jax
import jax.numpy as jnp
import pytest

from pbkern.fuse.partition.partitioner import Partitioner

from .checking import check, planned, rand


def norm(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def residual(x, *weights):
    for w in weights:
        x = x + norm(x) @ w
    return norm(x)


def attentive(x, *weights):
    """Layers of causal attention with one mask for all, from one projection each."""
    length, width = x.shape[-2:]
    mask = jnp.tril(jnp.ones((length, length), bool))
    for w in weights:
        q, k, v = jnp.split(norm(x) @ w, 3, -1)
        scores = jnp.where(mask, q @ k.swapaxes(-1, -2) / width**0.5, -jnp.inf)
        x = x + jax.nn.softmax(scores) @ v
    return x


def layers(count, width, factor=1):
    return [rand(width, factor * width, seed=k) / width**0.5 for k in range(count)]


def test_layers_of_a_residual_network_are_equal_kernels():
    made = planned(residual, rand(64, 256), *layers(6, 256))
    contents = [k.content for k in made.kernels()]
    assert len(contents) >= 6
    assert len(set(contents)) <= 4
    assert max(len(k.in_types) for k in made.kernels()) <= 3  # x, what is added to it, a weight


def test_residual_network_equals_jax():
    check(residual, rand(64, 96), *layers(3, 96), tolerance=1e-5)


@pytest.mark.parametrize("length", [128, 512])
def test_a_mask_for_all_layers_is_part_of_each(length):
    made = planned(attentive, jnp.zeros((2, length, 64)), *layers(3, 64, 3))
    reading = [k for k in made.kernels() if any(t.dtype == bool for t in k.in_types)]
    assert not reading
    assert all("iota" in k.source() for k in made.kernels() if "exp" in k.source())
    assert len(made.kernels()) <= 6


def test_masked_layers_equal_jax():
    check(attentive, rand(2, 65, 32), *layers(2, 32, 3), tolerance=1e-5)


def test_a_mask_that_is_also_a_result_is_stored_once():
    def f(x, y):
        mask = jnp.arange(300)[:, None] >= jnp.arange(200)
        return mask, jnp.where(mask, x, 0).sum(0), jnp.where(mask, jnp.exp(y), 1).sum(1)

    check(f, rand(300, 200), rand(300, 200), tolerance=1e-5)


def test_numbers_of_indices_that_are_dear_are_stored():
    """Random numbers follow from indices, too, but no reader foresees them."""

    def f(x, y):
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
        return jnp.where(kept, x, 0) @ y, jnp.where(kept, x, 1).T @ x

    plan = planned(
        f, rand(700, 700), rand(700, 700, seed=1)
    )  # of less data, a copy is cheaper than a store
    assert sum("^" in k.source() for k in plan.kernels()) == 1
    check(f, rand(64, 64), rand(64, 64, seed=1), tolerance=1e-5)


def scanned(x, weights):
    """The layers of `attentive` in a scan, of which the mask is a constant."""
    length, width = x.shape[-2:]
    mask = jnp.where(jnp.arange(length)[:, None] >= jnp.arange(length), 0.0, -jnp.inf)

    def layer(x, w):
        q, k, v = jnp.split(norm(x) @ w, 3, -1)
        return x + jax.nn.softmax(q @ k.swapaxes(-1, -2) / width**0.5 + mask) @ v, None

    return jax.lax.scan(layer, x, weights)[0]


def test_masks_of_loops_are_made_in_their_bodies():
    made = planned(scanned, jnp.zeros((2, 256, 64)), jnp.zeros((3, 64, 192)))
    (attention,) = [k for k in made.kernels() if "exp" in k.source()]
    assert "iota" in attention.source()
    assert all(t.shape[-2:] != (256, 256) for t in attention.in_types)


def test_masked_loops_equal_jax():
    check(scanned, rand(2, 65, 32), rand(3, 32, 96) / 6, tolerance=1e-5)


def test_masks_of_loops_in_loops():
    def f(x):
        mask = jnp.tril(jnp.ones((40, 50), bool))
        inner = lambda x: jax.lax.fori_loop(
            0, 2, lambda _, y: jnp.where(mask, jnp.sin(y), y.T[:1, :1]), x
        )
        return jax.lax.fori_loop(0, 3, lambda _, y: inner(y) + mask, x)

    check(f, rand(40, 50), tolerance=1e-5)


def test_layers_on_one_chain_are_tried_in_proportion_to_their_number(monkeypatch):
    attempt, tried = Partitioner.attempt, []

    def counted(parts, eqns, *more):
        tried[-1] += len(eqns)
        return attempt(parts, eqns, *more)

    monkeypatch.setattr(Partitioner, "attempt", counted)
    for count in (24, 48):
        tried.append(0)
        planned(residual, rand(16, 64), *layers(count, 64))
    assert tried[1] < 2.5 * tried[0]
