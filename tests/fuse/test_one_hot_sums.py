"""Sums under masks of one element per row (fuse/algebra/one_hot_sums.py) pick this element.

References are NumPy in float64 for ordinary rows, and jax.jit for rows with infinite elements and labels outside.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

from .checking import planned, rand


def product(x, labels):
    return -(jax.nn.log_softmax(x) * jax.nn.one_hot(labels, x.shape[-1])).sum(-1)


def mask_first(x, labels):
    return -jnp.sum(jax.nn.one_hot(labels, x.shape[-1]) * jax.nn.log_softmax(x), -1)


def choice(x, labels):
    mask = labels[..., None] == jnp.arange(x.shape[-1])
    return -jnp.where(mask, jax.nn.log_softmax(x), 0.0).sum(-1)


def scaled(x, labels):
    """Arithmetic on both sides of the maximum."""
    return (jax.nn.log_softmax(x * 0.5 + 1) * jax.nn.one_hot(labels, x.shape[-1])).sum(-1) * -1


FORMS = (product, mask_first, choice, scaled)


def reference(x, labels):
    x = np.asarray(x, np.float64)
    log_sum = np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1)) + x.max(-1)
    return log_sum - np.take_along_axis(x, np.asarray(labels)[..., None], -1)[..., 0]


def names(f, *args, **options):
    return [e.primitive.name for e in planned(f, *args, **options).jaxpr.eqns]


@pytest.mark.parametrize("shape", [(7, 3), (13, 301), (3, 5, 40), (2, 9000)])
@pytest.mark.parametrize("f", FORMS)
def test_values(f, shape):
    x = rand(*shape)
    labels = np.random.default_rng(1).integers(0, shape[-1], shape[:-1]).astype(np.int32)
    assert "gather" in names(f, x, labels)
    expected = reference(x * 0.5 + 1 if f is scaled else x, labels)
    np.testing.assert_allclose(pbkern.jit(f)(x, labels), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("f", FORMS)
def test_infinite_elements_and_labels_outside(f):
    x = np.array(rand(12, 700))
    labels = np.random.default_rng(2).integers(1, 700, 12).astype(np.int32)
    labels[0], labels[1] = -1, 700
    x[2, 0], x[3, 0], x[4, 0] = np.inf, -np.inf, np.nan
    x[5], x[6, labels[6]], x[7, labels[7]] = -np.inf, -np.inf, np.inf
    x[8, 0], x[9, 0], x[10] = -3e38, 3e38, -1e30
    np.testing.assert_allclose(pbkern.jit(f)(x, labels), jax.jit(f)(x, labels), rtol=2e-6)


def test_gradient():
    x, labels = rand(9, 50), np.arange(9, dtype=np.int32) * 5

    def loss(x):
        return product(x, labels).mean()

    value, gradient = pbkern.jit(jax.value_and_grad(loss))(x)
    exact = np.asarray(x, np.float64)
    weights = np.exp(exact - exact.max(-1, keepdims=True))
    expected = (weights / weights.sum(-1, keepdims=True) - np.eye(50)[labels]) / 9
    np.testing.assert_allclose(value, reference(x, labels).mean(), rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=2e-5, atol=1e-8)


def test_one_label_for_all_rows():
    x, label = rand(6, 20), np.int32(3)
    result = pbkern.jit(product)(x, label)
    np.testing.assert_allclose(result, reference(x, np.full(6, 3)), rtol=1e-5)


def test_small_labels_that_do_not_count_to_the_end_stay():
    """An iota of int8 repeats itself along a row of 300 elements: several of them are a label."""
    x, labels = rand(4, 300), np.array([0, 5, 44, 100], np.int8)
    np.testing.assert_allclose(
        pbkern.jit(product)(x, labels), jax.jit(product)(x, labels), rtol=1e-5
    )


OTHER_SUMS = {
    "no maximum": lambda x, labels: (x * jax.nn.one_hot(labels, 30)).sum(-1),
    "other comparison": lambda x, labels: (
        (labels[:, None] <= jnp.arange(30)) * jax.nn.log_softmax(x)
    ).sum(-1),
    "along columns": lambda x, labels: (
        jax.nn.log_softmax(x) * jax.nn.one_hot(labels, 30)
    ).sum(0),
    "not zero beside": lambda x, labels: jnp.where(
        labels[:, None] == jnp.arange(30), jax.nn.log_softmax(x), 1.0
    ).sum(-1),
}  # fmt: skip


@pytest.mark.parametrize("f", OTHER_SUMS.values(), ids=OTHER_SUMS)
def test_other_sums_stay(f):
    x, labels = rand(12, 30), np.arange(12, dtype=np.int32)
    assert "gather" not in names(f, x, labels)
    np.testing.assert_allclose(pbkern.jit(f)(x, labels), jax.jit(f)(x, labels), rtol=2e-5)


def test_not_without_rewrites():
    option = {"disable_unsafe_math_canonicalizations": True}
    assert "gather" not in names(product, rand(4, 30), np.arange(4, dtype=np.int32), **option)
