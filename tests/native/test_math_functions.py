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


RARE = {
    "sin": (jnp.sin, np.sin),
    "cos": (jnp.cos, np.cos),
    "tan": (jnp.tan, np.tan),
    "fmod": (lambda x: jnp.fmod(x, jnp.asarray(0.7, x.dtype)), None),
}


@pytest.mark.parametrize("name", RARE)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 37, 2048, 20_000])
def test_rare_arguments_in_place_and_by_a_call(name, dtype, size):
    """Nests of few points call the function for arguments that few programs have; those of many hold its lines."""
    f, reference = RARE[name]
    with jax.enable_x64(dtype == "float64"):
        x = np.linspace(-3, 3, size).astype(dtype)
        x[:: max(size // 7, 1)] *= 1e9
        g = pbkern.jit(lambda x: f(x) + f(x * 2))
        text = g.as_text(x, stage="mlir")
        called = text.count("_rare0(%a0: ")
        assert called == (size < math_functions.MANY_POINTS)
        assert "_rare1" not in text, "both call one function"
        wide = x.astype("f8")
        if reference is None:
            step = float(np.asarray(0.7, dtype))
            want = np.fmod(wide, step) + np.fmod(wide * 2, step)
        else:
            want = reference(wide) + reference((x * 2).astype("f8"))
        tolerance = 3e-6 if dtype == "float32" else 1e-14
        np.testing.assert_allclose(g(x), want, rtol=tolerance, atol=tolerance)


def test_tiles_that_divide_a_product_have_no_text_for_edges():
    """64 rows are tiles of 8, which are as quick as five of 11 and one of 9, in one loop instead of two."""
    a = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    text = lowered(lambda a, b: a @ b, a, a, stage="mlir")
    assert text.count("iter_args") == 1


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_remainders_of_small_divisors(dtype):
    """Steps of the division may end a little below zero, with numbers that are flushed to zero beside small divisors."""
    with jax.enable_x64(dtype == "float64"):
        rng, limits = np.random.default_rng(0), jnp.finfo(dtype)
        tiny, high = np.log(float(limits.tiny)), np.log(float(limits.max)) * 0.99
        wide = lambda *bounds: np.exp(rng.uniform(*bounds, 20_000)) * rng.choice([-1, 1], 20_000)
        for highest, above in ((0, 10), (high, 10), (high, high - tiny)):
            x, y = (
                np.asarray(jnp.asarray(wide(*bounds), dtype))
                for bounds in ((tiny, highest), (tiny, tiny + above))
            )
            got = np.asarray(pbkern.jit(jax.lax.rem)(x, y)).astype("f8")
            want = np.fmod(x.astype("f8"), y.astype("f8"))
            is_normal = (np.abs(want) >= float(limits.tiny)) | (want == 0)
            np.testing.assert_array_equal(got[is_normal], want[is_normal])


def test_loops_of_rare_arguments_in_large_bodies():
    """A body of many lines is cut into functions; what the loop of a remainder counts belongs to one of them."""

    def body(x, y):
        parts = (jax.lax.rem(x, y), jax.scipy.special.digamma(x), jax.lax.lgamma(x), jnp.cos(x))
        return sum(jnp.tanh(part * 0.1) for part in parts).sum(0)

    with jax.enable_x64(True):
        x = np.random.default_rng(0).uniform(-9, 9, (33, 129))
        y = np.abs(x[::-1]) + 0.1
        np.testing.assert_allclose(pbkern.jit(body)(x, y), body(x, y), rtol=1e-12, atol=1e-12)
