"""Least squares by gradient descent: 1000 iterations of two matrix-vector products, one native loop."""

import jax
import jax.numpy as jnp
import numpy as np
from compare import compare

from pbkern import polyblocks_jit_jax


@polyblocks_jit_jax(
    compile_options={
        "target": "cpu",
        "debug": False,
        "static_argnums": (2, 3),
    }
)
def gradient_descent(X, D, learning_rate=0.0001, num_iterations=1000):
    """X: float32[samples, features], D: float32[samples] -> weights: float32[features]."""

    def iteration(_, weights):
        error = X @ weights - D
        gradient = X.T @ error / X.shape[0]
        return weights - learning_rate * gradient

    return jax.lax.fori_loop(0, num_iterations, iteration, jnp.zeros(X.shape[1], X.dtype))


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2000, 100), np.float32)
    D = X @ rng.standard_normal(100, np.float32)
    X_JAX = jax.device_put(X, jax.devices("cpu")[0])
    D_JAX = jax.device_put(D, jax.devices("cpu")[0])
    compare(gradient_descent, X_JAX, D_JAX, 0.0001, 1000, static_argnums=(2, 3), calls=3)
    # A static argument is a constant of the compiled program; another value compiles another program.
    compare(gradient_descent, X_JAX, D_JAX, 0.01, 200, static_argnums=(2, 3), calls=3)
