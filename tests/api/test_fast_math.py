"""mlir_disable_fast_math: no contraction, and sums of floats in the order of their elements."""

import jax
import jax.numpy as jnp
import numpy as np

import pbkern

STRICT = {"mlir_disable_fast_math": True}
rng = np.random.default_rng(0)


def in_order(values):
    total = np.float32(0)
    for v in values:
        total = np.float32(total + v)
    return total


def test_sums_are_in_order():
    x = rng.standard_normal(300_000).astype(np.float32)
    f = pbkern.jit(lambda x: x.sum(), compile_options=STRICT)
    assert f(x) == in_order(x)
    rows = x[:1000].reshape(10, 100)
    np.testing.assert_array_equal(
        pbkern.jit(lambda x: x.sum(1), compile_options=STRICT)(rows), [in_order(r) for r in rows]
    )


def test_sums_in_loops_are_in_order():
    x = rng.standard_normal(300_000).astype(np.float32)

    def twice(x):
        return jax.lax.fori_loop(0, 2, lambda _, carry: (carry[0], carry[0].sum()), (x, x[0]))[1]

    assert pbkern.jit(twice, compile_options=STRICT)(x) == in_order(x)


def test_products_are_rounded_before_they_are_added():
    a, b = (rng.standard_normal((5, 7)).astype(np.float32) for _ in range(2))
    want = [[in_order(a[i] * b[j]) for j in range(5)] for i in range(5)]
    np.testing.assert_array_equal(
        pbkern.jit(lambda a, b: a @ b.T, compile_options=STRICT)(a, b), want
    )
    np.testing.assert_array_equal(
        pbkern.jit(lambda a, b: a * b + a, compile_options=STRICT)(a, b), a * b + a
    )


def test_nothing_in_the_code_is_marked_fast():
    f = pbkern.jit(lambda x: jnp.tanh(x * 2 + 1).sum(), compile_options=STRICT)
    assert "fastmath" not in f.as_text(np.ones(8, np.float32), stage="mlir")
