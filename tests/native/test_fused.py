"""Fused functions as machine code equal plain JAX: every access rule, workloads at odd sizes, random graphs."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pbkern
from pbkern.lower.rules.coverage import supports
from tests.fuse import checking, test_access, workloads
from tests.fuse.test_random import random_function

from .running import native_program


@pytest.fixture(autouse=True, scope="module")
def compiled():
    """Plans of these tests run on the CPU, and leave to XLA what lowering does not cover."""
    planned = checking.planned
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "run_program", native_program)
        patch.setattr(
            checking, "planned", lambda f, *a, **k: planned(f, *a, **{**k, "supports": supports})
        )
        yield


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", test_access.CASES)
def test_access_rule(name):
    f, *args = test_access.CASES[name]
    checking.check(f, *args, left=name in test_access.LEFT)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [n for n in test_access.CASES if n not in test_access.LEFT])
def test_access_rule_at_odd_blocks(name, monkeypatch):
    f, *args = test_access.CASES[name]
    checking.check_blocks(monkeypatch, f, *args, seeds=range(1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_workload(name):
    f, args, _, _ = workloads.WORKLOADS[name]
    checking.check(f, *args)


@given(
    seed=st.integers(0, 1 << 30),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    count=st.integers(1, 12),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_random_graphs(seed, shape, count):
    rng = np.random.default_rng(seed)
    x, y = (jnp.asarray(rng.integers(-8, 9, size=shape) / 4, jnp.float32) for _ in range(2))
    checking.check(random_function(seed, count), x, y, tolerance=2e-2, left=True)


def test_reductions_over_single_elements():
    """Found by random graphs: merging nests drops dimensions of size 1, also reduced ones."""

    def f(x):
        e = jnp.exp(x - x.max(0, keepdims=True))
        return x.max(0), e / e.sum(0)

    checking.check(f, jnp.asarray([0.7], jnp.float32))
    checking.check(f, jnp.asarray([[0.7, 0.1]], jnp.float32))


def test_padded_gather_stays_inside():
    checking.check(
        lambda x, i: jnp.pad(x[i % 4], ((1, 3), (2, 0))),
        *map(jnp.asarray, (np.eye(4, 5, dtype="f"), np.arange(6))),
    )


@pytest.mark.parametrize("at", [[2, 1, 5, 0], [[2] * 9, [0] * 9]], ids=["rows", "elements"])
def test_gathers_of_what_repeats(at):
    """No element of memory is looked up: all rows are one."""

    def f(x, at):
        rows = jnp.repeat(x, 3, 0)
        return rows[at] if at.ndim == 1 else jnp.take_along_axis(rows, at, 0)

    x, at = np.arange(9, dtype=np.float32)[None], np.array(at, np.int32)
    np.testing.assert_array_equal(pbkern.jit(f)(x, at), f(x, at))


@pytest.mark.parametrize("reduce", [jnp.mean, jnp.max, jnp.sum], ids=lambda f: f.__name__)
def test_reductions_of_padded_places_stay_inside(reduce):
    """At places that are padded, nothing is reduced."""

    def f(x):
        return jnp.pad(reduce(x[..., 1:], 0), ((2, 0), (0, 3)))

    x = jnp.asarray(np.random.default_rng(3).normal(size=(9, 16, 60)), jnp.float32)
    np.testing.assert_allclose(pbkern.jit(f)(x), f(x), rtol=1e-5, atol=1e-6)


def test_values_made_in_either_order_of_dimensions_share_a_nest():
    """A product of two windows: one is made column by column."""

    def f(x):
        a = x[:-2] + x[1:-1] * 2 + x[2:]
        b = (x.T[:, :-2] - x.T[:, 2:]).T
        return a * b + a * a

    x = np.random.default_rng(0).normal(size=(70, 130)).astype("float32")
    a, b = x[:-2] + x[1:-1] * 2 + x[2:], x[:-2] - x[2:]
    np.testing.assert_allclose(pbkern.jit(f)(x), a * b + a * a, rtol=1e-5, atol=1e-5)
