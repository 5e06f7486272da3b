"""Updates at known places, reductions with bodies, top_k and max pooling's gradient are fused; values are those of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from .checking import check, check_blocks, ints, planned, rand

X, V = rand(20, 30), rand(18, 28, seed=1)

UPDATES = {
    "set inside": (lambda x, v: x.at[1:-1, 1:-1].set(v), X, V),
    "add inside": (lambda x, v: x.at[1:-1, 1:-1].add(v), X, V),
    "multiply rows": (lambda x, v: x.at[2:].mul(v), X, rand(18, 30)),
    "max": (lambda x, v: x.at[:18, 2:].max(v), X, V),
    "set a row": (lambda x, v: x.at[0].set(v), X, rand(30)),
    "set the last column": (lambda x, v: x.at[:, -1].set(v), X, rand(20)),
    "set a middle dimension": (lambda x, v: x.at[:, 2, 1:].set(v), rand(4, 5, 6), rand(4, 5)),
    "set everything": (lambda x, v: x.at[:].set(v), X, rand(20, 30)),
    "one element": (lambda x: x.at[3, 4].set(1.0), X),
    "outside": (lambda x, v: x.at[25].set(v), X, rand(30)),
    "clipped": (lambda x, v: x.at[25].set(v, mode="clip"), X, rand(30)),
    "a place known when it runs": (lambda x, v, i: x.at[i].set(v), X, rand(30), ints()),
    "beyond the end": (lambda x, v, i: x.at[i + 20].add(v), X, rand(30), ints()),
    "one per row": (
        jax.grad(lambda x, i: (jnp.take_along_axis(x, i[:, None], 1) ** 2).sum()),
        X,
        ints(20, high=30),
    ),
    "dynamic update": (lambda x, v: lax.dynamic_update_slice(x, v, (1, 30)), X, rand(5, 6)),
    "dynamic slice": (lambda x: lax.dynamic_slice(x, (2, 300), (5, 6)), X),
    "borders": (
        lambda x: x.at[0].set(x[1]).at[-1].set(x[-2]).at[:, 0].set(0.0).at[:, -1].add(x[:, 0]),
        X,
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", UPDATES)
def test_updates_are_selects(name, monkeypatch):
    f, *args = UPDATES[name]
    check(f, *args)
    check_blocks(monkeypatch, f, *args, seeds=range(2))


def test_updates_keep_signed_zeros():
    x = jnp.full((6, 8), -0.0)
    plan = planned(lambda x, v: x.at[1:3].add(v), x, rand(2, 8))
    from .oracle import run_program

    (got,) = plan.evaluate([x, rand(2, 8)], run_program)
    assert np.signbit(np.asarray(got)[3:]).all()


def test_updates_inside_a_loop():
    def f(x):
        def step(_, a):
            return a.at[1:-1, 1:-1].set(0.5 * (a[:-2, 1:-1] + a[2:, 1:-1]))

        return lax.fori_loop(0, 5, step, x)

    check(f, X, kernels=1)


def smooth(_, a):
    return a.at[1:-1, 1:-1].set(0.5 * (a[:-2, 1:-1] + a[2:, 1:-1]))


LOOPS = {
    "derivative of a loop": jax.grad(lambda x: (lax.fori_loop(0, 5, smooth, x) ** 2).sum()),
    "derivative of a scan": jax.grad(lambda x: (lax.scan(lambda a, _: (smooth(0, a), None), x, None, length=5)[0] ** 2).sum()),
    "given to a while loop": lambda x, n: (lambda at: lax.while_loop(
        lambda s: s[0] < n, lambda s: (s[0] + 1, s[1].at[at, 2:].set(s[1][0, 2:] * 2)), (0, x))[1])(jnp.array([3])),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_places_are_known_inside_loops_that_are_given_them(name):
    """Derivatives compute the indices of updates before the loop."""
    f, args = LOOPS[name], (X, jnp.int32(3))[: 1 + (name == "given to a while loop")]
    plan = check(f, *args)
    assert "scatter" not in str(plan.jaxpr)
    assert "concatenate" not in str(plan.jaxpr)


def test_one_body_that_is_given_different_places():
    repeat = jax.jit(
        lambda at, x: lax.scan(lambda a, _: (a.at[at].set(a[0] + 1.0), None), x, None, length=2)[0]
    )
    check(lambda x: repeat(jnp.array([7]), repeat(jnp.array([3]), x)), X)


def test_reductions_with_bodies():
    def f(x, y):
        return lax.reduce((x, y), (0.0, 2.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,))

    check(f, X, X * 0.1 + 1)


def test_top_k():
    x = jnp.asarray([[3.0, 1, 3, jnp.nan, 2], [0, 0, 5, 5, -1]])
    check(lambda x: lax.top_k(x, 3), x, strict_target=True)
    check(lambda x: lax.top_k(x, 4), ints(7, 40))
    check(lambda x: lax.top_k(jnp.exp(x), 5), rand(3000), kernels=1)
    check(lambda x: lax.top_k(x, 4), rand(40, 7, 300).swapaxes(0, 2).astype(jnp.bfloat16))
    check(lambda x: [v * 2 for v in lax.top_k(x * 3, 7)], rand(2, 7))
    check(
        lambda x: lax.top_k(x * 2 + 1, 9), rand(20, 300).astype(jnp.bfloat16)
    )  # rounded before it is compared
    check(lambda x: lax.scan(lambda c, r: (c, lax.top_k(r + c, 2)), x[0], x)[1], X)


POOLS = {  # shape, window, strides, padding
    "apart": ((2, 8, 12, 3), (2, 2), (2, 2), "VALID"),
    "apart, with a rest": ((1, 9, 7, 2), (3, 2), (3, 2), "VALID"),
    "lines": ((2, 10, 8, 4), (1, 4), (1, 4), "VALID"),
    "overlapping": ((2, 9, 10, 3), (3, 3), (2, 2), "VALID"),
    "padded": ((2, 9, 10, 3), (3, 3), (2, 2), "SAME"),
    "at every element": ((1, 7, 7, 2), (3, 3), (1, 1), "SAME"),
    "with gaps": ((1, 8, 8, 2), (2, 2), (3, 3), "VALID"),
    "padded on one side": ((1, 7, 9, 2), (2, 3), (2, 1), ((0, 0), (0, 1), (2, 0), (0, 0))),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [
    "padded", "with gaps", "apart",
    *(pytest.param(n, marks=pytest.mark.slow)
      for n in ("padded on one side", "lines", "at every element", "apart, with a rest")),
])  # fmt: skip
def test_gradient_of_max_pooling(name, monkeypatch):
    shape, window, strides, padding = POOLS[name]

    def pool(x):
        return (
            lax.reduce_window(x, -jnp.inf, lax.max, (1, *window, 1), (1, *strides, 1), padding)
            * slopes
        ).sum()

    slopes = 1 + rand(*jax.eval_shape(lambda: lax.reduce_window(
        jnp.zeros(shape), -jnp.inf, lax.max, (1, *window, 1), (1, *strides, 1), padding)).shape)  # fmt: skip
    x = ints(*shape, high=4).astype(jnp.float32)  # with ties
    check(jax.grad(pool), x, kernels=1)
    check(jax.grad(pool), jnp.where(x == 0, jnp.nan, x))
    check(jax.grad(pool), jnp.where(x < 3, -jnp.inf, x))
    check_blocks(monkeypatch, jax.grad(pool), x, seeds=range(2))


def test_gradient_of_min_pooling():
    def pool(x):
        return (lax.reduce_window(x, jnp.inf, lax.min, (3, 3), (2, 2), "SAME") ** 2).sum()

    check(jax.grad(pool), rand(9, 12), kernels=1)
