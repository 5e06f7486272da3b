"""Functions of jax.numpy that have primitives of their own work in bodies, native and interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

X = np.arange(32, dtype="f4").reshape(4, 8)
FUNCTIONS = {
    "stack": lambda x: jnp.stack([x, x + 1], 1),
    "split": lambda x: jnp.concatenate(jnp.split(x, [3, 5], 1)[::-1], 1),
    "unstack": lambda x: sum(jnp.unstack(x, axis=1)),
    "tile": lambda x: jnp.tile(x, (2, 1, 3)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bodies_take(name):
    f = FUNCTIONS[name]

    def body(x_ref, o_ref):
        o_ref[...] = f(x_ref[...])

    kernel = pbkern.kernel(body, out_shape=jax.eval_shape(f, X))
    for got in (kernel(X), pbkern.interpret(kernel.trace(X), X)[0]):
        np.testing.assert_array_equal(got, f(X))
    assert f"'{name}'" not in kernel.trace(X).source()
