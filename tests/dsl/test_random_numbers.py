"""jax.random in bodies gives the numbers that the same calls give outside, native and interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.dsl.printer import same_kernel

WORDS = jax.random.key_data(jax.random.key(7))
SHAPE = (6, 17)


def wrapped(words):
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def add_more(n, carry):
    key, total = carry
    return jax.random.fold_in(key, n), total + jax.random.uniform(key, SHAPE)


DRAWS = {
    "legacy key": (lambda words: jax.random.uniform(words, SHAPE), jnp.float32),
    "typed key": (lambda words: jax.random.bits(wrapped(words), SHAPE, jnp.uint32), jnp.uint32),
    "seed": (lambda words: jax.random.randint(jax.random.key(words[0]), SHAPE, 3, 9, jnp.int32), jnp.int32),
    "split": (lambda words: jnp.stack([
        jax.random.bernoulli(k, 0.3, SHAPE[1:]) for k in jax.random.split(wrapped(words), SHAPE[0])]), jnp.bool_),
    "chosen and stacked": (lambda words: jax.random.bits(jnp.where(
        words[0] > 3, jnp.stack([wrapped(words)] * 2), jax.random.split(wrapped(words)))[1], SHAPE, jnp.uint16), jnp.uint16),
    "carried": (lambda words: lax.fori_loop(0, 3, add_more, (wrapped(words), jnp.zeros(SHAPE)))[1], jnp.float32),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DRAWS)
def test_draws(name):
    draw, dtype = DRAWS[name]

    def body(words_ref, o_ref):
        o_ref[...] = draw(words_ref[...])

    with jax.legacy_prng_key("allow"):
        kernel = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct(SHAPE, dtype))
        traced, want = kernel.trace(WORDS), draw(WORDS)
    for got in (kernel(WORDS), pbkern.interpret(traced, WORDS)[0]):
        np.testing.assert_allclose(got, want, rtol=0 if np.dtype(dtype).kind in "iub" else 1e-6)
    assert same_kernel(pbkern.rebuild(traced.source()), traced)


def test_dropout_of_each_program():
    def body(words_ref, x_ref, o_ref):
        key = jax.random.fold_in(wrapped(words_ref[...]), pbkern.program_id(0))
        o_ref[...] = jnp.where(jax.random.bernoulli(key, 0.75, x_ref.shape), x_ref[...] / 0.75, 0)

    x = np.random.default_rng(0).normal(size=(512, 40)).astype("f4")
    rows = pbkern.BlockSpec((64, 40), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(x.shape, "f4")
    dropout = pbkern.kernel(
        body, grid=(8,), in_specs=[pbkern.BlockSpec(), rows], out_specs=rows, out_shape=out
    )
    got = np.asarray(pbkern.jit(lambda w, x: dropout(w, x * 2) / 2)(WORDS, x))
    keys = [jax.random.fold_in(wrapped(WORDS), i) for i in range(8)]
    kept = np.concatenate([jax.random.bernoulli(k, 0.75, (64, 40)) for k in keys])
    np.testing.assert_allclose(got, np.where(kept, x / 0.75, 0), rtol=1e-6)
