"""Products and other reductions of one kernel: each has a nest of its own, of narrow integers as well."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

FUNCTIONS = {
    "maximum of an operand": lambda x, y: x @ y + x.max(),
    "sum": lambda x, y: x @ y + x.sum(dtype=x.dtype),
    "two products": lambda x, y: x @ y + x @ x,
    "rows": lambda x, y: jnp.stack([x, y]) @ y + jnp.stack([y, x]).max(1),
    "correlation": lambda x, y: jnp.convolve(x, y[:2], mode="valid").max() + x @ y,
    "loop": lambda x, y: jax.lax.fori_loop(
        0, 3, lambda i, c: c + x[i] + x.max() + x @ y, jnp.zeros((), x.dtype)
    ),
}


@pytest.mark.parametrize("size", [3, 5, 16, 33])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "float32", "bfloat16"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sampled(16)
def test_each_sum_has_all_of_its_terms(name, dtype, size):
    x, y = (np.arange(size) % 3).astype(dtype), (np.arange(size) % 2).astype(dtype)
    expected = FUNCTIONS[name](*(jnp.asarray(v, jnp.int32) for v in (x, y)))
    result = pbkern.jit(FUNCTIONS[name])(x, y)
    np.testing.assert_array_equal(np.asarray(result, np.float64), np.asarray(expected, np.float64))


def test_the_same_on_a_gpu():
    x, y = (np.arange(16) % 3).astype("int8"), np.ones(16, "int8")
    (result,) = jax.tree.leaves(pbkern.simulate(lambda x, y: x @ y + x.max(), x, y).results)
    assert result == 17
