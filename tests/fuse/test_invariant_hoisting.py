"""Dear values that all steps of a loop share are computed before it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern

from .checking import planned, rand

A, X = rand(30, 7), rand(20, 30)


def selective(a, x):
    """A scan in which exp(a), a product and, from inside another loop, a sum of functions never change."""

    def step(h, row):
        g = lax.fori_loop(0, x.shape[0] // 7, lambda i, g: g + jnp.tanh(a).sum(0), h)
        return jnp.exp(-jnp.exp(a)).T @ row * 0.1 + (a.T @ a) @ g * 0.01, g * 2

    return lax.scan(step, jnp.zeros(a.shape[1]), x)


def until(a, x):
    """A loop of unknown length, whose condition has operands of its own."""
    return lax.while_loop(
        lambda c: c[0] < x[0, 0] + 6,
        lambda c: (c[0] + 1, c[1] * 0.5 + jnp.exp(a) @ a.T),
        (0.0, a @ a.T),
    )


def inside(f, *args) -> list[str]:
    """Names of what the loops of `f` compute in their steps."""
    loops = [
        e.params for e in planned(f, *args).jaxpr.eqns if e.primitive.name in ("scan", "while")
    ]
    found = str([p.get("jaxpr", p.get("body_jaxpr")) for p in loops])
    return [
        name
        for name in ("exp", "tanh", "reduce_sum", "transpose", "mul", "dot_general")
        if f" {name}" in found
    ]


@pytest.mark.parametrize(("f", "left"), [(selective, ["mul", "dot_general"]), (until, ["mul"])])
def test_what_never_changes_is_computed_once(f, left):
    assert inside(f, A, X) == left
    for got, want in zip(
        jax.tree.leaves(pbkern.jit(f)(A, X)), jax.tree.leaves(jax.jit(f)(A, X)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


def test_cheap_arithmetic_and_what_grows_stay():
    def f(a, x):
        mask = jnp.tril(jnp.ones((30, 30), bool))
        wide = jnp.exp(jnp.broadcast_to(a[:, 0], (4096, 1, 30)))
        return lax.fori_loop(
            0,
            5,
            lambda i, h: h + jnp.where(mask, 2 * x.T @ x, 0) * i + wide.sum(0),
            jnp.zeros((30, 30)),
        )

    assert inside(f, A, X) == ["mul"]
    grown = lambda a, h: lax.fori_loop(0, 5, lambda i, h: h * jnp.exp(a[:, None] + a[None]), h)
    large = (
        jax.ShapeDtypeStruct((3000,), jnp.float32),
        jax.ShapeDtypeStruct((3000, 3000), jnp.float32),
    )
    assert "exp" in inside(grown, *large)
