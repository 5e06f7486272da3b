"""Gradients of attention make scores again instead of storing them; layers of a network do not."""

import contextlib
import math

import jax
import jax.numpy as jnp
import pytest

import pbkern
from pbkern.core.passes import with_settings

from .attention_forms import alibi, attend, by_tril, operands, repeated, window
from .checking import check, planned, rand
from .workloads import f32


def causal(q, k, v):
    return attend(q, k, v, mask=by_tril(q, k))


def gradient(f):
    return lambda q, k, v, given, *rest: jax.vjp(lambda q, k, v: f(q, k, v, *rest), q, k, v)[1](
        given
    )


def intermediates(plan):
    """Elements of the largest array between kernels."""
    return max(
        (math.prod(b.type.shape) for p in plan.programs() for b in p.buffers if b.slot >= 0),
        default=0,
    )


@pytest.mark.parametrize("f", [attend, causal])
def test_gradient_of_attention_stores_no_scores(f):
    plan = planned(gradient(f), *(f32(2, 12, 1024, 64),) * 4)
    assert len(plan.kernels()) <= 3, str(plan.explanation)
    assert intermediates(plan) <= 2 * 12 * 1024


def test_forward_half_saves_statistics_of_rows_only():
    types = (f32(2, 12, 1024, 64),) * 3
    saved = jax.eval_shape(lambda *args: jax.vjp(pbkern.jit(attend), *args)[1], *types)
    assert max(math.prod(x.shape) for x in jax.tree.leaves(saved)) == 2 * 12 * 1024 * 64


ARGS = operands(200, 200, heads=2, width=64)


# Thresholds by which several kernels are made also of so few positions, and all large values computed again.
MERGE_NEVER = {"scores_slack": 1.0, "clear_gain": 0.0}
SETTINGS = {
    "join softmax chains": {"scores_slack": 1.0},
    "merge producers": MERGE_NEVER,
    "merge siblings": MERGE_NEVER,
    "rematerialise": MERGE_NEVER
    | {"cached_share": 0.0, "recomputed_smaller": 0.01, "slack": 100.0},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("f", "args"),
    [
        (attend, ARGS),
        (causal, ARGS),
        (window, operands(300, 300, heads=2, width=64)),
        pytest.param(alibi, ARGS, marks=pytest.mark.slow),
        (lambda q, k, v, b: attend(q, k, v, b, cap=5.0), (*ARGS, rand(2, 200, 200))),
        (
            lambda q, k, v, m: attend(q, k, v, mask=m, fill=-1e30),
            (*ARGS, jnp.arange(200)[:, None] != 3),
        ),
        pytest.param(
            repeated, operands(200, 150, heads=4, key_heads=2, width=16), marks=pytest.mark.slow
        ),
    ],
    ids=["plain", "causal", "window", "alibi", "bias and cap", "silent row", "repeated heads"],
)
def test_gradients_equal_jax(f, args):
    given = rand(*jax.eval_shape(f, *args).shape)
    with contextlib.ExitStack() as stack:
        for name, settings in SETTINGS.items():
            stack.enter_context(with_settings(name, settings))
        plan = check(gradient(f), *args[:3], given, *args[3:], tolerance=2e-5)
    assert any(e.fused and e.why == "computed again by its readers" for e in plan.explanation.edges)


def test_gradients_of_layers_store_activations():
    def loss(w1, w2, x):
        return (jax.nn.gelu(x @ w1) @ w2).sum()

    plan = planned(jax.grad(loss, (0, 1)), f32(768, 3072), f32(3072, 768), f32(8192, 768))
    dots = sum(e.primitive.name == "dot_general" for n in plan.nodes for e in n.eqns)
    assert dots == sum(e.primitive.name == "dot_general" for e in plan.jaxpr.eqns)


def test_grad_through_both_halves_equals_jax():
    args = operands(33, 33, width=16)
    ours = jax.grad(lambda *a: (pbkern.jit(causal)(*a) ** 2).sum(), (0, 1, 2))(*args)
    theirs = jax.grad(lambda *a: (causal(*a) ** 2).sum(), (0, 1, 2))(*args)
    assert all(jnp.allclose(a, b, atol=2e-5) for a, b in zip(ours, theirs))


def last_layer_loss(x, w, labels):
    logits = x @ w
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


@pytest.mark.parametrize(("tokens", "width"), [(256, 256), (100, 96)])
def test_scores_that_are_as_small_as_the_weights_are_stored(tokens, width):
    """Computing them again, twice, would take longer, and the weights and their gradient need as much memory."""
    labels = jax.ShapeDtypeStruct((tokens,), "int32")
    plan = planned(
        jax.grad(last_layer_loss, argnums=(0, 1)), f32(tokens, width), f32(width, 32000), labels
    )
    assert intermediates(plan) == tokens * 32000
    assert not [
        edge for edge in plan.explanation.edges if edge.why == "computed again by its readers"
    ]
