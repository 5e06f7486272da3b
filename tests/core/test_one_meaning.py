"""Readers of ELEMENTWISE agree where tables of their own disagreed before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from tests.native.running import native


def kernel_of(function, *arrays):
    def body(*refs):
        refs[-1][...] = function(*(ref[...] for ref in refs[:-1]))

    return pbkern.kernel(body, out_shape=jax.eval_shape(function, *arrays)).trace(*arrays)


@pytest.mark.parametrize("function", [lax.max, lax.min], ids=["max", "min"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_zeros_are_ordered_in_the_interpreter(function, dtype):
    x = np.array([0.0, -0.0, 0.0, -0.0] * 9, dtype)
    y = np.array([-0.0, 0.0, 0.0, -0.0] * 9, dtype)
    with jax.enable_x64(True):
        want = np.asarray(jax.jit(function)(x, y))
        got = pbkern.interpret(kernel_of(function, x, y), x, y)[0]
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize("value", [0xFFFFFFFF, 0x80000001, 0x7FFFFFFF])
@pytest.mark.parametrize("count", [1, 31, 32, 40])
def test_arithmetic_shifts_of_known_numbers_without_sign_copy_the_highest_bit(value, count):
    """A scalar that is known while the body is built: no shift is left of it."""

    def body(x, out):
        out[...] = x[...] + lax.shift_right_arithmetic(jnp.uint32(value), jnp.uint32(count))

    x = np.arange(40, dtype=np.uint32)
    kernel = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)).trace(x)
    shifted = np.asarray(jax.jit(lax.shift_right_arithmetic)(np.uint32(value), np.uint32(count)))
    for run in (native, pbkern.interpret):
        np.testing.assert_array_equal(run(kernel, x)[0], x + shifted)


def test_choices_of_many_cases_are_interpreted():
    """NumPy's choose takes 32 cases, and no number outside."""
    which = np.array([-3, 0, 17, 39, 41], np.int32)
    cases = [np.full(5, k, np.float32) for k in range(40)]
    got = pbkern.interpret(kernel_of(lax.select_n, which, *cases), which, *cases)[0]
    np.testing.assert_array_equal(got, lax.select_n(which, *cases))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint8])
def test_upper_halves_of_products_are_fused(dtype):
    """mulhi had a lowering rule, but neither an access rule nor a spelling."""
    rng = np.random.default_rng(0)
    x, y = (rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, 70, dtype) for _ in range(2))
    f = pbkern.jit(lambda x, y: lax.mulhi(x, y) + x)
    np.testing.assert_array_equal(f(x, y), lax.mulhi(x, y) + x)
    assert "0 operation(s) left to XLA" in str(f.explain(x, y))
    assert "lax.mulhi(" in str(kernel_of(lax.mulhi, x, y))


@pytest.mark.parametrize("x", [-7, 0, 5, np.iinfo(np.int32).min])
def test_quotients_by_zero_of_constants_are_xlas(x):
    """Simplification computes them as the processor would."""
    f = pbkern.jit(
        lambda v: v + lax.div(np.int32(x), np.int32(0)) + lax.rem(np.int32(x), np.int32(0))
    )
    v = np.arange(5, dtype=np.int32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(f(v), v - 1 + np.int32(x))
