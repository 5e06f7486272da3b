"""Sums over rows of products, taken over what the products contract (fuse/algebra/reassociate_row_sums.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

import pbkern
from pbkern.fuse.algebra.late_division import delay_normalisation
from pbkern.fuse.algebra.reassociate_row_sums import SumResults
from pbkern.fuse.simplify.driver import simplify

from .checking import rand


def plain(p, g, v):
    """What is known, and the sum: of rows of 40 columns, over 2 elements instead."""
    o = jnp.einsum("bqk,bkd->bqd", p, v)
    return o, (p * jnp.einsum("bqd,bkd->bqk", g, v)).sum(-1)


def turned(p, g, v):
    """Results and operands are transposes, and what is contracted comes first."""
    o = jnp.einsum("bkd,bqk->dqb", v, p)
    return o, (jnp.einsum("bkd,bqd->bkq", v, g).transpose(0, 2, 1) * p).sum(2)


def scaled(p, g, v):
    """Factors and divisors of each row, and numbers."""
    o = jnp.einsum("bqk,bkd->bqd", p, v)
    row = 1 + jnp.abs(g[..., :1])
    return o, (3.0 * jnp.einsum("bqd,bkd->bqk", g, v) * row * (p / (row * row))).sum(-1)


def over_two(p, g, v):
    """Rows of two dimensions."""
    p, v = p.reshape(2, 6, 5, 8), v.reshape(2, 5, 8, 2)
    o = jnp.einsum("bqkl,bkld->bqd", p, v)
    return o, (p * jnp.einsum("bqd,bkld->bqkl", g, v)).sum((2, 3))


def by_columns(p, g, v):
    """The sum is over what the product with p keeps."""
    o = jnp.einsum("bqk,bkd->bqd", p, v)
    return o, (p * jnp.einsum("bqd,bkd->bqk", g, v)).sum(1)


def of_another(p, g, v):
    o = jnp.einsum("bqk,bkd->bqd", p, v + 1)
    return o, (p * jnp.einsum("bqd,bkd->bqk", g, v)).sum(-1)


def weighed(p, g, v):
    """A factor that changes along the row."""
    o = jnp.einsum("bqk,bkd->bqd", p, v)
    return o, (p * jnp.einsum("bqd,bkd->bqk", g, v) * v[:, None, :, 0]).sum(-1)


def unknown(p, g, v):
    return p, (p * jnp.einsum("bqd,bkd->bqk", g, v)).sum(-1)


def other_pairs(p, g, v):
    """Known is the product along the other dimension of a square."""
    o = jnp.einsum("bkq,bkd->bqd", p[:, :, :6], v[:, :6])
    return o, (p[:, :, :6] * jnp.einsum("bqd,bkd->bqk", g, v[:, :6])).sum(-1)


def not_summed(p, g, v):
    """Known is the product that keeps the columns."""
    o = jnp.einsum("bqk,bkd->bkqd", p, v)
    return o, (p * jnp.einsum("bqd,bkd->bqk", g, v)).sum(-1)


def beside_columns(p, g, v):
    """Not all of v's columns are summed up."""
    p, v = p.reshape(2, 6, 5, 8), v.reshape(2, 5, 8, 2)
    o = jnp.einsum("bqkl,bkld->bqld", p, v)
    return o, (p * jnp.einsum("bqd,bkld->bqkl", g, v)).sum(2)


def crossed(p, g, v):
    """Known is a product over the same two dimensions, each with the other."""
    p, v = p[..., :36].reshape(2, 6, 6, 6), v[:, :36].reshape(2, 6, 6, 2)
    o = jnp.einsum("bqkl,blkd->bqd", p, v)
    return o, (p * jnp.einsum("bqd,bkld->bqkl", g, v)).sum((2, 3))


def rounded(p, g, v):
    """Weights are rounded before they are multiplied, and so is the derivative of rounded weights."""
    short = jnp.bfloat16
    o = jnp.einsum("bqk,bkd->bqd", p.astype(short).astype(jnp.float32), v)
    d_p = jnp.einsum("bqd,bkd->bqk", g, v).astype(short).astype(jnp.float32)
    return o, (p * d_p).sum(-1)


def known_in_fewer_bits(p, g, v):
    """The known product is rounded, and the other one is not."""
    o = jnp.einsum("bqk,bkd->bqd", p, v, preferred_element_type=jnp.bfloat16)
    return o, (p * jnp.einsum("bqd,bkd->bqk", g, v)).sum(-1)


def rewritten(f):
    """(what a function does, with the sum rewritten if it can be; whether it was). Looked for only beside exponentials."""
    args = rand(2, 6, 40), rand(2, 6, 2, seed=1), rand(2, 40, 2, seed=2)
    closed = jax.make_jaxpr(lambda p, g, v: f(jnp.exp(p), g, v))(*args)
    closed = jax.make_jaxpr(jax.jit(lambda *a: jex.jaxpr_as_fun(closed)(*a), inline=True))(*args)
    made = SumResults()(closed, None)
    products = [str(closed.jaxpr).count("dot_general["), str(made.jaxpr).count("dot_general[")]
    return closed, made, args, products[1] < products[0]


@pytest.mark.parametrize("f", [plain, turned, scaled, over_two])
def test_the_product_is_left_out(f):
    _closed, made, args, left_out = rewritten(f)
    assert left_out
    with jax.enable_x64(True):
        p, g, v = (np.asarray(a, np.float64) for a in args)
        want = f(jnp.exp(p), g, v)
    for a, b in zip(jex.jaxpr_as_fun(made)(*args), want):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max())


@pytest.mark.parametrize(
    "f",
    [
        by_columns,
        of_another,
        weighed,
        unknown,
        other_pairs,
        not_summed,
        beside_columns,
        crossed,
        known_in_fewer_bits,
    ],
)
def test_other_sums_stay(f):
    assert not rewritten(f)[-1]


def attention(q, k, v):
    s = jnp.einsum("hqd,hkd->hqk", q, k)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(s), v)


def gradient(*args):
    return jax.grad(lambda *args: (attention(*args) ** 2).sum(), (0, 1, 2))(*args)


def sums_of_rows(jaxpr) -> int:
    return sum(
        e.primitive.name == "reduce_sum" and e.invars[0].aval.shape == (2, 50, 50)
        for e in jaxpr.eqns
    )


def test_gradients_of_attention_use_its_result():
    """Of sums over rows of scores, that of softmax is left."""
    args = [rand(2, 50, 8, seed=n) for n in range(3)]
    simple = delay_normalisation(
        simplify(jax.make_jaxpr(gradient)(*args), unsafe_math=True, platform="cpu")
    )
    assert sums_of_rows(simple.jaxpr) == 2
    assert sums_of_rows(SumResults()(simple, None).jaxpr) == 1
    with jax.enable_x64(True):
        want = jax.jit(gradient)(*(np.asarray(a, np.float64) for a in args))
    for a, b in zip(pbkern.jit(gradient)(*args), want):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def gradient_of_softmax(p, g, v):
    """What it subtracts from rounded derivatives is their sum: zero is left where a row has one weight."""
    o = jnp.einsum("bqk,bkd->bqd", p.astype(jnp.bfloat16).astype(jnp.float32), v)
    d_p = jnp.einsum("bqd,bkd->bqk", g, v).astype(jnp.bfloat16).astype(jnp.float32)
    return o, p * d_p - (p * d_p).sum(-1, keepdims=True)


def test_rounding_does_not_hide_a_product():
    """Its error is that of weights of 8 bits, whose products' magnitudes add up to this."""
    _closed, made, args, left_out = rewritten(rounded)
    assert left_out
    p, g, v = (np.asarray(a, np.float64) for a in args)
    p = np.exp(p)
    _, total = jex.jaxpr_as_fun(made)(*args)
    want = (p * np.einsum("bqd,bkd->bqk", g, v)).sum(-1)
    magnitude = (p * np.einsum("bqd,bkd->bqk", abs(g), abs(v))).sum(-1)
    assert (np.abs(total - want) < 2.0**-8 * magnitude).all()


def test_rounding_that_is_asked_for_stays():
    class Emulated:
        rounds = True

    closed, *_ = rewritten(rounded)
    made = SumResults()(closed, Emulated())
    assert str(made.jaxpr).count("dot_general[") == str(closed.jaxpr).count("dot_general[")


def test_derivatives_are_not_rounded_beside_a_sum_that_is_not():
    closed, made, *_ = rewritten(gradient_of_softmax)
    conversions = [
        [e for e in jaxpr.eqns if e.primitive.name == "convert_element_type"]
        for jaxpr in (closed.jaxpr, made.jaxpr)
    ]
    assert [e.invars[0].aval.shape for e in conversions[0]].count((2, 6, 40)) == 4
    assert [e.invars[0].aval.shape for e in conversions[1]].count((2, 6, 40)) == 2, "of the weights"
