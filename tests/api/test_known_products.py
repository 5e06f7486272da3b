"""Products that are known, in tangents and so in what is saved for gradients (frontends/jax/known_products.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex

import pbkern
from pbkern.core.jaxprs.walks import equations
from pbkern.frontends.jax.known_products import use_known_products
from tests.arrays import array

HEADS, TOKENS, WIDTH = 2, 50, 8


def rand(*shape, seed=0):
    return array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def operands():
    return [rand(HEADS, TOKENS, WIDTH, seed=n) for n in range(3)]


def scores(q, k):
    return jnp.einsum("hqd,hkd->hqk", q, k) * 0.3


def result(p, v):
    return jnp.einsum("hqk,hkd->hqd", p, v)


def softmax(q, k, v):
    return result(jax.nn.softmax(scores(q, k), -1), v)


def causal(q, k, v):
    s = scores(q, k)
    row, key = (lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (1, 2))
    return result(jax.nn.softmax(jnp.where(row >= key, s, -jnp.inf), -1), v)


def filled(q, k, v):
    s = scores(q, k)
    row, key = (lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (1, 2))
    return result(jax.nn.softmax(jnp.where(row >= key, s, -1e30), -1), v)


def of_exponentials(q, k, v):
    """The maximum has a tangent."""
    s = scores(q, k)
    p = jnp.exp(s - s.max(-1, keepdims=True))
    return result(p / p.sum(-1, keepdims=True), v)


def of_powers_of_two(q, k, v):
    s = scores(q, k)
    p = jnp.exp2(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return result(p / p.sum(-1, keepdims=True), v)


def of_a_logarithm(q, k, v):
    s = scores(q, k)
    return result(jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)), v)


def divided_late(q, k, v):
    s = scores(q, k)
    p = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return result(p, v) / p.sum(-1, keepdims=True)


def dropped(q, k, v):
    """Some of the weights are zero after the sum is taken."""
    p = jax.nn.softmax(scores(q, k), -1)
    kept = np.random.default_rng(3).random(p.shape) < 0.75
    return result(jnp.where(kept, p / 0.75, 0), v)


def weighed(q, k, v):
    """Weights times an array."""
    p = jax.nn.softmax(scores(q, k), -1)
    return result(p * np.random.default_rng(3).random((TOKENS, TOKENS)).astype(p.dtype), v)


def by_columns(q, k, v):
    """Scores have a row per key."""
    p = jax.nn.softmax(jnp.swapaxes(scores(q, k), 1, 2), 1)
    return jnp.einsum("hkq,hkd->hdq", p, v)


def grouped(q, k, v):
    """Heads share keys."""
    s = jnp.einsum("hqd,kd->hqk", q, k[0]) * 0.3
    return jnp.einsum("hqk,kd->hqd", jax.nn.softmax(s, -1), v[0])


def beside_a_layer(q, k, v):
    out = softmax(q, k, v)
    return softmax(jnp.tanh(out), k, v) + out


WITH_KNOWN = [
    softmax, causal, filled, of_exponentials, of_powers_of_two, of_a_logarithm, dropped, weighed, by_columns, grouped,
    beside_a_layer,
]  # fmt: skip


def tangents(f, *args):
    """A function and its tangents."""
    return jax.make_jaxpr(lambda *both: jax.jvp(f, both[: len(args)], both[len(args) :]))(
        *args, *args
    )


def exact(f, *args):
    with jax.enable_x64(True):
        return f(*(jnp.asarray(np.asarray(x, np.float64)) for x in args))


def check(got, want, error):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert np.abs(np.asarray(a, np.float64) - b).max() <= error * np.abs(b).max()


@pytest.mark.parametrize("f", WITH_KNOWN)
def test_tangents(f):
    args = operands()
    closed = tangents(f, *args)
    made = use_known_products(closed)
    assert made is not closed
    values = [*args, *reversed(args)]
    check(jax.jit(jex.jaxpr_as_fun(made))(*values), exact(jex.jaxpr_as_fun(closed), *values), 1e-5)


@pytest.mark.parametrize("f", [*WITH_KNOWN, divided_late])
def test_gradients(f):
    args = operands()
    weights = rand(*jax.eval_shape(f, *args).shape, seed=4)
    loss = lambda f: lambda *args: (f(*args) * weights.astype(args[0].dtype)).sum()
    got = jax.grad(loss(pbkern.jit(f)), (0, 1, 2))(*args)
    check(got, exact(jax.grad(loss(f), (0, 1, 2)), *args), 1e-5)


def halves(f, *args, **options):
    """The forward half of a compiled function and the backward one."""
    compiled = pbkern.jit(f, compile_options=options)
    both = jax.make_jaxpr(lambda *args: jax.vjp(compiled, *args)[1](args[0]))(*args).jaxpr
    calls = [eqn for eqn in equations(both) if eqn.primitive.name == "pbkern_call"]
    return [eqn.params["jaxpr"].jaxpr for eqn in calls]


def sums_of_rows(jaxpr) -> int:
    """Sums over a row of scores."""
    shape = (HEADS, TOKENS, TOKENS)
    sums = [e for e in equations(jaxpr) if e.primitive.name == "reduce_sum"]
    return sum(eqn.invars[0].aval.shape == shape for eqn in sums)


@pytest.mark.parametrize("f", [softmax, causal, dropped, of_a_logarithm])
def test_the_result_is_saved_for_sums_of_rows(f):
    forward, backward = halves(f, *operands())
    assert sums_of_rows(forward) == 1
    assert sums_of_rows(backward) == 0
    saved = [var.aval.shape for var in forward.outvars[1:]]
    assert (HEADS, TOKENS, TOKENS) not in saved


@pytest.mark.parametrize(
    "options",
    [
        {"mlir_disable_fast_math": True},
        {"polyblocks_disable_unsafe_math_canonicalizations": True},
        {"emulate_precision_casts": True},
    ],
)
def test_sums_stay_where_options_say_so(options):
    _, backward = halves(softmax, *operands(), **options)
    assert sums_of_rows(backward) == 1


def test_prints_are_made_once(capfd):
    def printing(q, k, v):
        jax.debug.print("largest: {}", q.max())
        return (softmax(q, k, v) ** 2).sum()

    args = operands()
    jax.block_until_ready(jax.grad(pbkern.jit(printing))(*args))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("largest: ") == 1


def rounded(q, k, v):
    """Weights of 16 bits, as derivatives of weights are in JAX."""
    s = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=jnp.float32)
    row, key = (lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (1, 2))
    p = jax.nn.softmax(jnp.where(row >= key, s, -jnp.inf), -1).astype(q.dtype)
    return jnp.einsum("hqk,hkd->hqd", p, v, preferred_element_type=jnp.float32).astype(q.dtype)


def test_rows_of_one_key_have_no_gradient():
    """The first query sees one key: its derivatives of weights are the sum that is subtracted, to the last bit but one."""
    args = [x.astype(jnp.bfloat16) for x in operands()]
    _, backward = halves(rounded, *args)
    assert sums_of_rows(backward) == 0
    loss = lambda f: lambda *args: (f(*args).astype(jnp.float32) ** 2).sum()
    got = jax.grad(loss(pbkern.jit(rounded)), (0, 1, 2))(*args)
    want = exact(jax.grad(loss(rounded), (0, 1, 2)), *args)
    check(got, want, 2.0**-6)
    assert np.abs(np.asarray(got[0][:, 0], np.float64)).max() < 1e-5 * np.abs(want[0]).max()


def short_values(q, k, v):
    """As many columns of values as there are keys."""
    return result(jax.nn.softmax(scores(q, k[:, :8]), -1), v[:, :8])


def of_others(q, k, v):
    """What the weights multiply is another array in the result."""
    p = jax.nn.softmax(scores(q, k), -1)
    return p.sum(), v


def squares(q, k, v):
    """No weights."""
    s = scores(q, k)
    return result(s * s / (s * s).sum(-1, keepdims=True), v)


@pytest.mark.parametrize("f", [short_values, of_others, squares, divided_late])
def test_other_functions_stay(f):
    closed = tangents(f, *operands())
    assert use_known_products(closed) is closed
