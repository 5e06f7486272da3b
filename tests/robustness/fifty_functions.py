"""Fifty small functions of two arrays, of every kind that passes treat apart."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

X = np.linspace(-2, 2, 7 * 33, dtype=np.float32).reshape(7, 33)
Y = np.cos(X)


def attention(x, y):
    return jax.nn.softmax(x @ y.T * 0.3, -1) @ y


def stencil(x, y):
    z = x[:, :-2] + 2 * x[:, 1:-1] + x[:, 2:]
    return z[:-2] * 0.25 + z[1:-1] * 0.5 + z[2:] * 0.25


def loop(x, y):
    return lax.fori_loop(0, 5, lambda i, c: c * 0.9 + y * i, x)


def layer_norm(x, y):
    m = x.mean(-1, keepdims=True)
    return (x - m) * lax.rsqrt(((x - m) ** 2).mean(-1, keepdims=True) + 1e-5) * y


def scattered(x, y):
    taken = jnp.take(x, jnp.arange(5) % 3, axis=0)
    return x.at[jnp.argsort(y[:, 0])].add(y[:, :1]), jnp.sort(y, axis=1), jnp.cumsum(x, 1), taken


def convolved(x, y):
    image, w = x[None, None, :, :32], y[:2, :9].reshape(2, 1, 3, 3)
    return jax.nn.relu(lax.conv_general_dilated(image, w, (1, 1), "SAME")), (x.T @ y).astype(
        jnp.bfloat16
    )


FUNCTIONS = {f.__name__: f for f in (attention, stencil, loop, layer_norm, scattered, convolved)}
MORE = {
    "log_softmax": lambda x, y: jax.nn.log_softmax(x) - y,
    "median": lambda x, y: jnp.median(x * y, axis=1),
    "variance": lambda x, y: (x * y).var(1),
    "transposed": lambda x, y: x.T @ y + y.T @ x,
    "gelu": lambda x, y: jax.nn.gelu(x) * y,
    "argmax": lambda x, y: (jnp.argmax(x * y, 1), jnp.argmin(y, 0)),
    "where": lambda x, y: jnp.where(x > y, x, y[::-1]),
    "complex": lambda x, y: jnp.abs(x + 1j * y),
    "integers": lambda x, y: (x * 100).astype(jnp.int32) // 7 % 5,
    "scan": lambda x, y: lax.scan(lambda c, r: (c * 0.5 + r, c.sum()), x[0], y),
    "outer": lambda x, y: jnp.outer(x[0], y[0]),
    "while": lambda x, y: lax.while_loop(lambda c: c.sum() < 50, lambda c: c * 1.1 + 1, x),
    "pad": lambda x, y: jnp.pad(x, 2) * 2,
    "cond": lambda x, y: lax.cond(x[0, 0] > 0, lambda: x, lambda: y),
    "gradient": jax.grad(lambda x, y: jnp.tanh(x @ y.T).sum()),
    "top_k": lambda x, y: lax.top_k(x, 3),
    "repeat": lambda x, y: jnp.repeat(x, 3, axis=1),
    "flip": lambda x, y: x[:, ::-1] * y,
    "logsumexp": lambda x, y: jax.nn.logsumexp(x * 3, 1),
    "einsum": lambda x, y: jnp.einsum("ij,ik->jk", x, y),
    "blur": lambda x, y: (x[:-1] + x[1:]) @ y[:, :5].repeat(7, 0)[:33],
    "cumprod": lambda x, y: jnp.cumprod(1 + x * 0.1, 0),
    "reversed_cumsum": lambda x, y: lax.cumsum(x, axis=1, reverse=True),
    "roll": lambda x, y: jnp.roll(x, (2, 5), (0, 1)) - y,
    "concatenated": lambda x, y: jnp.concatenate([x, y[:3], x * 2]),
    "tril": lambda x, y: jnp.tril(x @ y.T) - y[:, :7],
    "update": lambda x, y: lax.dynamic_update_slice(x, y[:2, :3], (jnp.argmax(y[:, 0]), 4)),
    "rows": lambda x, y: x.sum(1) - y[:, 0],
    "batched": lambda x, y: jnp.einsum("bi,bj->bij", x, y).sum(0),
    "norms": lambda x, y: x / jnp.linalg.norm(y, axis=1)[:, None],
    "max_pool": lambda x, y: lax.reduce_window(x, -jnp.inf, lax.max, (2, 3), (1, 2), "SAME"),
    "gather": lambda x, y: x[jnp.array([3, 0, 6]), jnp.argsort(y[:3], axis=1)[:, 0]],
    "bits": lambda x, y: (x > 0) ^ (y > 0),
    "one_hot": lambda x, y: jax.nn.one_hot(jnp.argmax(x, 1), 33) * y,
    "cosine": lambda x, y: jnp.cos(x) ** 2 + jnp.sin(y) ** 2,
    "cross_entropy": lambda x, y: -(jax.nn.log_softmax(x) * jax.nn.softmax(y)).sum(1),
    "moments": lambda x, y: (x.mean(), x.std(0)),
    "jacobi": lambda x, y: lax.fori_loop(
        0, 3, lambda i, u: u.at[1:-1, 1:-1].set((u[:-2, 1:-1] + u[2:, 1:-1]) / 2), x
    ),
    "histogram": lambda x, y: jnp.zeros(5).at[jnp.clip(x + 2, 0, 4).astype(jnp.int32)].add(y),
    "half": lambda x, y: x.astype(jnp.float16) @ y.T.astype(jnp.float16),
    "erf": lambda x, y: jax.scipy.special.erf(x) * y,
    "random": lambda x, y: jax.random.uniform(jax.random.key(3), x.shape) * 0 + x,
    "sorted_pairs": lambda x, y: lax.sort((x, y), dimension=1),
    "attention_gradient": jax.grad(lambda x, y: (jax.nn.softmax(x @ y.T) @ y).sum()),
    "clamp": lambda x, y: lax.clamp(-1.0, x, y * 0 + 1),
}
