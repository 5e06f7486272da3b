"""Values that a kernel makes in nests of their own, stored under masks: cumulative operations, reductions, products, sorts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

SHAPE = (5, 8)
MADE = {
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "cumsum of columns": lambda x: jnp.cumsum(x, 0),
    "cumprod backwards": lambda x: jax.lax.cumprod(x, 1, reverse=True),
    "cummax": lambda x: jax.lax.cummax(x, 0),
    "cummin": lambda x: jax.lax.cummin(x, 1),
    "cumlogsumexp": lambda x: jax.lax.cumlogsumexp(x, 1),
    "sort": lambda x: jnp.sort(x, 1),
    "sums": lambda x: jnp.broadcast_to(x.sum(1, keepdims=True), SHAPE),
    "product": lambda x: jnp.dot(x[:, :5], x),
}
MASKS = {
    "of indices": lambda x: jnp.broadcast_to(jnp.arange(SHAPE[1]) < 5, SHAPE),
    "of values": lambda x: x > 0,
    "of neither": lambda x: jnp.zeros(SHAPE, bool),
}


@pytest.mark.sampled(18)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("target", ["cpu", "nvgpu"])
def test_only_what_the_mask_takes_is_stored(target, made, mask, rng):
    x = rng.uniform(-2, 2, SHAPE).astype(np.float32)

    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct(SHAPE, jnp.float32))
    def kernel(x, o):
        o[...] = jnp.full(SHAPE, -7.0)
        pbkern.store(o, ..., MADE[made](x[...]), mask=MASKS[mask](x[...]))

    if target == "cpu":
        result = kernel(x)
    else:
        (result,) = pbkern.simulate(kernel, x).results
    with jax.disable_jit():
        expected = np.where(MASKS[mask](x), MADE[made](jnp.asarray(x)), -7)
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-5)
