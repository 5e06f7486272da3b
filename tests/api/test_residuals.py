"""What the forward half of a differentiated function saves for the backward half."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core.jaxprs.evaluation import inline
from pbkern.core.jaxprs.maximum_tests import compare_operands
from pbkern.frontends.jax.residuals import SINK, SOURCE, Flow
from tests.arrays import array


def rand(*shape, seed=0):
    return array(np.random.default_rng(seed).normal(size=shape).astype("f"))


X, W = rand(64, 128), rand(128, 32, seed=1)


def saved_shapes(f, *args):
    """Shapes of what the forward call returns beside the function's own results."""
    _, back = jax.vjp(pbkern.jit(f), *args)
    return sorted(
        x.shape
        for x in jax.tree.leaves(back)
        if not any(x.shape == a.shape and (x == a).all() for a in args)
    )


def check(f, *args):
    wrt = tuple(range(len(args)))
    for got, want in zip(jax.grad(pbkern.jit(f), wrt)(*args), jax.grad(f, wrt)(*args)):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-4 * float(jnp.abs(want).max()))


def elementwise(x):
    return (jnp.tanh(x * 2) * x / (1 + x * x)).sum()


def softmax_of_product(x, w):
    return (jax.nn.softmax(jax.nn.gelu(x @ w) * 2) ** 2).sum()


def layer_norm(x):
    centred = x - x.mean(1, keepdims=True)
    return (centred / jnp.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * x).sum()


@pytest.mark.parametrize(("f", "args", "shapes"), [
    (elementwise, (X,), []),
    (softmax_of_product, (X, W), [(64,), (64,), (64, 32)]),
    (layer_norm, (X,), [(64,), (64,)]),
])  # fmt: skip
def test_only_what_cannot_be_recomputed_is_saved(f, args, shapes):
    saved = [tuple(n for n in s if n != 1) for s in saved_shapes(f, *args)]
    assert sorted(saved) == shapes
    check(f, *args)


def largest_of_rows(x, w):
    y = x @ w * w[0] + w[1]
    return (y - y.mean(1, keepdims=True)).max(0).sum()


def without_negative(x, w):
    return (jnp.maximum(x @ w * w[0] + w[1], 0) ** 2).sum()


def chosen_by_equality(x, w):
    y = jnp.tanh(x @ w * 0.1) * w[0] + w[1]
    return jnp.where(y == y.max(0), y * 3, y * y).sum()


def fractions(x, w):
    y = jnp.tanh(x @ w * 0.1) * w[0] * 9
    return ((y - jnp.floor(y)) * y).sum()


@pytest.mark.parametrize(("f", "decisions"), [
    (largest_of_rows, ["bool"]),
    (without_negative, []),
    (chosen_by_equality, ["bool"]),
    (fractions, ["float32"]),
])  # fmt: skip
def test_decisions_of_recomputed_values_are_saved(f, decisions):
    product = (64, 32)
    _, back = jax.vjp(pbkern.jit(f), X, W)
    saved = [str(x.dtype) for x in jax.tree.leaves(back) if x.shape == product]
    assert sorted(saved) == sorted([*decisions, "float32"])  # and the product
    check(f, X, W)


@pytest.mark.parametrize("smaller", [False, True])
@pytest.mark.parametrize("second", ["array", "number"])
def test_operands_of_a_maximum_are_compared_with_each_other(smaller, second):
    choose = jnp.minimum if smaller else jnp.maximum

    def f(x, y):
        return choose(x, y if second == "array" else 0.5)

    grad = jax.grad(lambda x, y: (f(x, y) ** 2).sum(), (0, 1))
    x = jnp.array([1.0, 0.5, -1, np.nan, 2, np.inf, 0.0, -0.0])
    y = jnp.array([0.5, 0.5, 3, 1, np.nan, np.inf, -0.0, 0.0])
    for got, want in zip(pbkern.jit(grad)(x, y), grad(x, y)):
        np.testing.assert_array_equal(got, want)
    simple = compare_operands(inline(jax.make_jaxpr(grad)(x, y)))
    compared = [eqn for eqn in simple.jaxpr.eqns if eqn.primitive.name == "eq"]
    assert not compared


def test_reverse_over_reverse():
    f = lambda x: (jax.nn.softmax(x * 2) ** 2).sum()
    grad_norm = lambda h: lambda x: (jax.grad(h)(x) ** 2).sum()
    x = X[:4, :5]
    np.testing.assert_allclose(
        jax.grad(grad_norm(pbkern.jit(f)))(x), jax.grad(grad_norm(f))(x), rtol=1e-4, atol=1e-6
    )


def sum_of_squares_twice(x):
    total = (x * x).sum()
    return total, total


def all_kinds_of_results(x):
    total = (x * x).sum()
    return total, (np.float32(2), x, total, x, jnp.floor(x).sum() * 0 + 1)


def pulled_back(f):
    """A function's results, and what their tangents of ones give by reverse mode."""

    def run(x):
        results, back = jax.vjp(f, x)
        return results, back(jax.tree.map(jnp.ones_like, results))

    return run


TRANSFORMATIONS = {
    "value_and_grad": lambda f, aux: jax.value_and_grad(f, has_aux=aux),
    "vjp": lambda f, aux: pulled_back(f),
    "linearize": lambda f, aux: lambda x: jax.linearize(f, x)[1](x),
    "jacrev": lambda f, aux: jax.jacrev(f, has_aux=aux),
    "jvp": lambda f, aux: lambda x: jax.jvp(f, (x,), (x,)),
    "reverse over reverse": lambda f, aux: jax.jacrev(jax.grad(f, has_aux=aux), has_aux=aux),
    "vmap": lambda f, aux: lambda x: jax.vmap(jax.grad(f, has_aux=aux))(x[None]),
}


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize(("f", "has_aux"), [
    (lambda x: np.float32(2), False),
    (lambda x: jnp.floor(x).sum() * 0 + 1, False),
    (lambda x: x[1, 2], False),
    (lambda x: ((x * x).sum(), np.float32(2)), True),
    (lambda x: (jnp.exp(x).sum(), (x, x)), True),
    (sum_of_squares_twice, True),
    (all_kinds_of_results, True),
], ids=["constant", "no dependence", "element", "constant beside", "operands", "twice", "all"])  # fmt: skip
def test_results_that_no_equation_makes(f, has_aux, transformation, monkeypatch):
    """Constants, operands and values that are a result twice."""
    monkeypatch.setenv("PBKERN_FALLBACK", "0")
    x = X[:3, :5]
    transformed = TRANSFORMATIONS[transformation]
    got, want = (jax.tree.leaves(transformed(g, has_aux)(x)) for g in (pbkern.jit(f), f))
    assert len(got) == len(want) > 0
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_random_bits_are_drawn_once():
    def dropout(x, key):
        return (jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0) ** 2).sum()

    key = jax.random.key(0)
    np.testing.assert_allclose(
        jax.grad(pbkern.jit(dropout))(X, key), jax.grad(dropout)(X, key), rtol=1e-6
    )


def test_prints_are_made_once(capfd):
    def printing(x):
        y = jnp.exp(x)
        jax.debug.print("largest: {}", y.max())
        return (y * y).sum()

    made = jax.grad(pbkern.jit(printing))(X[:3, :4])
    jax.effects_barrier()
    np.testing.assert_allclose(made, 2 * np.exp(np.asarray(X[:3, :4], "f8")) ** 2, rtol=1e-5)
    assert capfd.readouterr().out.count("largest: ") == 1


def test_long_functions_are_cut_quickly():
    def f(x):
        for _ in range(150):
            x = jax.nn.softmax(jnp.tanh(x * 1.1) + x) + x
        return x.sum()

    start = time.process_time()
    jax.make_jaxpr(jax.grad(f))(X)
    plain = time.process_time() - start
    start = time.process_time()
    jax.make_jaxpr(jax.grad(pbkern.jit(f)))(X)
    assert time.process_time() - start < 5 * plain + 2


def test_maximum_flow_finds_the_bottleneck():
    flow = Flow()
    for a, b, capacity in (
        (SOURCE, 1, 9),
        (SOURCE, 2, 9),
        (1, 3, 9),
        (2, 3, 9),
        (3, 4, 2),
        (4, SINK, 9),
    ):
        flow.add(a, b, capacity)
    assert flow.saturate() == {SOURCE, 1, 2, 3}
