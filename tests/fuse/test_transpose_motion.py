"""Transposes around convolutions cancel, whatever surrounds them; values stay."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from .checking import check, rand

X = rand(2, 9, 11, 4)


def nchw(x, w, stride=1, groups=1):
    y = x.transpose(0, 3, 1, 2)
    y = lax.conv_general_dilated(y, w, (stride, 1), "SAME", feature_group_count=groups)
    return jax.nn.relu(y * 2).transpose(0, 2, 3, 1)


def two_layers(x, w, v):
    y = x.transpose(0, 3, 1, 2)
    y = jnp.tanh(lax.conv_general_dilated(y, w, (1, 1), "SAME"))
    y = lax.conv_general_dilated(y[:, :, 1:, :-1], v, (1, 1), "VALID") + 1
    return y.transpose(0, 2, 3, 1)


def single_channels(image, k):
    y = jnp.pad(image.transpose(2, 0, 1), ((0, 0), (2, 2), (0, 0)), mode="constant")[:, None]
    return lax.conv_general_dilated(y, k, (1, 1), "VALID")[:, 0].transpose(1, 2, 0)


def other_numbers(x, w):
    y = lax.conv_general_dilated(
        x.transpose(3, 1, 2, 0), w, (1, 2), "SAME", dimension_numbers=("CHWN", "OIHW", "HWNC")
    )
    return y.transpose(2, 0, 1, 3)


CANCEL = {
    "one": (nchw, X, rand(6, 4, 3, 3)),
    "strided": (lambda x, w: nchw(x, w, 2), X, rand(6, 4, 3, 3)),
    "grouped": (lambda x, w: nchw(x, w, 1, 2), X, rand(6, 2, 3, 3)),
    "two layers": (two_layers, X, rand(5, 4, 3, 3), rand(3, 5, 2, 2)),
    "single channels": (single_channels, rand(9, 11, 3), rand(1, 1, 5, 1)),
    "other numbers": (other_numbers, X, rand(6, 4, 3, 3)),
}


@pytest.mark.parametrize("name", CANCEL)
def test_transposes_cancel(name):
    f, *args = CANCEL[name]
    plan = check(f, *args)
    assert "transpose" not in {e.primitive.name for e in plan.jaxpr.eqns}, str(plan.jaxpr)


def test_transposes_that_are_results_stay():
    def f(x, w):
        y = x.transpose(0, 3, 1, 2)
        z = lax.conv_general_dilated(y, w, (1, 1), "SAME")
        return y, z, z + y.sum(), (z * z[:, ::-1]).transpose(1, 0, 2, 3)

    check(f, X, rand(6, 4, 3, 3))
