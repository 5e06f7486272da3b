"""Long functions that a kernel repeats become functions that it calls: short texts, the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.targets.cpu.emit import math_functions
from tests.lowered import lowered

FUNCTIONS = {"sin": jnp.sin, "tan": jnp.tan, "lgamma": jax.scipy.special.gammaln, "atan2": lambda x: jnp.atan2(x, x + 1),
             "power": lambda x: jnp.abs(x) ** 2.3 - 1}  # fmt: skip


def repeated(f, count):
    def chain(x):
        for _ in range(count):
            x = f(x) * 3
        return x

    return chain


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["sin", "tan", "atan2", "power"])
def test_text_does_not_grow_with_the_function(name):
    x = jax.ShapeDtypeStruct((100,), jnp.float32)
    sizes = [len(lowered(repeated(FUNCTIONS[name], n), x, stage="mlir")) for n in (60, 120)]
    assert sizes[1] - sizes[0] < 60 * 2000


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["sin", "lgamma", "power"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_calls_give_the_same_numbers(name, dtype, monkeypatch):
    """Each link is a result of its own, so that errors do not grow along the chain."""
    monkeypatch.setattr(math_functions, "MOST_IN_PLACE", 1)
    x = np.linspace(0.1, 40, 213).astype(jnp.dtype(dtype))
    scales = [2.0 ** (k - 3) for k in range(6)]
    many, alone = (
        pbkern.jit(lambda x: [FUNCTIONS[name](x * s) for s in scales]),
        pbkern.jit(FUNCTIONS[name]),
    )
    assert "func.call @k0_" in many.as_text(x, stage="mlir").split("func.func @pbk_main")[0]
    for s, got in zip(scales, many(x)):
        np.testing.assert_array_equal(got, alone(x * np.asarray(s, x.dtype)))


def test_special_values():
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, 1e-30], "f4")
    got = pbkern.jit(lambda x: [jnp.sin(x * (k % 2 + 1)) for k in range(40)])(x)
    with np.errstate(invalid="ignore"):
        want = [np.sin((x * np.float32(k % 2 + 1)).astype("f8")) for k in range(40)]
    np.testing.assert_allclose(got, want, rtol=1e-6)
