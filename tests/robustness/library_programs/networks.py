"""Layers and training steps: equinox, flax linen and nnx."""

import jax
import jax.numpy as jnp
from jax import lax

from .registry import program, waves


@program("equinox")
def equinox_mlp():
    import equinox as eqx

    model = eqx.nn.MLP(5, 3, 32, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(arrays, x, y):
        return jnp.mean((jax.vmap(eqx.combine(arrays, rest))(x) - y) ** 2)

    return loss, (arrays, waves(40, 5), waves(40, 3, shift=1.0))


@program("equinox")
def equinox_attention_and_norm():
    import equinox as eqx

    keys = jax.random.split(jax.random.key(1), 2)
    model = (
        eqx.nn.MultiheadAttention(3, 24, key=keys[0]),
        eqx.nn.LayerNorm(24),
        eqx.nn.GRUCell(24, 10, key=keys[1]),
    )
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(arrays, x):
        attention, norm, cell = eqx.combine(arrays, rest)
        y = x + attention(jax.vmap(norm)(x), x, x, mask=jnp.tril(jnp.ones((17, 17), bool)))
        hidden, _ = lax.scan(lambda h, row: (cell(row, h), None), jnp.zeros(10, x.dtype), y)
        return jnp.sum(hidden**2)

    return loss, (arrays, waves(17, 24))


@program("equinox")
def equinox_convolution_and_batch_norm():
    import equinox as eqx

    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")
    layers = (
        eqx.nn.Conv2d(2, 4, 3, padding=1, key=jax.random.key(2)),
        norm,
        eqx.nn.MaxPool2d(2, 2),
    )
    arrays, rest = eqx.partition(layers, eqx.is_inexact_array)

    def loss(arrays, state, images):
        convolution, norm, pool = eqx.combine(arrays, rest)

        def one(image, state):
            y, state = norm(convolution(image), state)
            return pool(jax.nn.relu(y)), state

        y, state = jax.vmap(one, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            images, state
        )
        return jnp.mean(y**2), state

    return loss, (arrays, state, waves(6, 2, 10, 12))


@program("flax.linen", "optax")
def flax_linen_step():
    import flax.linen as nn
    import optax

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            # No bias before a norm: its gradient is zero, and Adam would divide rounding by rounding.
            x = nn.Conv(6, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
            x = nn.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1)
            return nn.Dense(5)(nn.Dropout(0.3, deterministic=not train)(nn.gelu(nn.Dense(20)(x))))

    model, optimizer = Model(), optax.adamw(1e-2)
    images, labels = waves(8, 10, 10, 2), jnp.arange(8) % 5
    variables = model.init(jax.random.key(0), images, False)

    def step(parameters, statistics, moments, images, labels):
        def loss(parameters):
            logits, changed = model.apply({"params": parameters, "batch_stats": statistics}, images, True,
                                          mutable=["batch_stats"], rngs={"dropout": jax.random.key(1)})  # fmt: skip
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), changed

        (value, changed), gradient = jax.value_and_grad(loss, has_aux=True)(parameters)
        updates, moments = optimizer.update(gradient, moments, parameters)
        return value, optax.apply_updates(parameters, updates), changed["batch_stats"], moments

    parameters = variables["params"]
    return step, (parameters, variables["batch_stats"], optimizer.init(parameters), images, labels)


@program("flax.nnx", "optax")
def flax_nnx_step():
    import optax
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embedding = nnx.Embed(11, 12, rngs=rngs)
            # No bias of keys: softmax cancels it, and Adam would divide rounding by rounding.
            self.attention = nnx.MultiHeadAttention(3, 12, decode=False, use_bias=False, rngs=rngs)
            self.norm, self.dropout = nnx.LayerNorm(12, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
            self.out = nnx.Linear(12, 11, rngs=rngs)

        def __call__(self, tokens):
            x = self.embedding(tokens)
            return self.out(
                self.dropout(x + self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens)))
            )

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    graph, parameters, others = nnx.split((model, optimizer), nnx.Param, ...)
    tokens = jnp.arange(4 * 9).reshape(4, 9) * 7 % 11

    def step(parameters, others, tokens):
        model, optimizer = nnx.merge(graph, parameters, others, copy=True)

        def loss(model):
            logits = model(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value, nnx.state((model, optimizer))

    return step, (parameters, others, tokens)
