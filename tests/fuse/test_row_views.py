"""Rows of stacked arrays are views, so that equal layers run equal kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pbkern
from pbkern.core.jaxprs.walks import equations
from pbkern.core.passes import with_settings
from pbkern.fuse.indexing.row_views import ViewRows


def viewed(f, *shapes, least_bytes=4):
    args = [jax.ShapeDtypeStruct(s, "float32") for s in shapes]
    return ViewRows(least_bytes)(jax.make_jaxpr(f)(*args), None)


def starts(closed) -> list[int]:
    return [e.params["start"] for e in equations(closed.jaxpr) if e.primitive.name == "row_view"]


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda w: w[1] + w[3], [20, 60]),
        (lambda w: w[1, 2] * w[0, 3], [30, 15]),
        (lambda w: w[1:2, 3:4], [35]),
        (lambda w: (w[1] * 2, 1.0), [20]),
        (lambda w: w[1, :, 2], []),  # elements lie apart
        (lambda w: w[1:3], []),  # several rows
        (lambda w: w[0, ::2], []),
        (lambda w: w[0] + w.sum(0), []),  # the whole is read too
        (lambda w: (w[0], w), []),  # the whole is a result
        (lambda w: (w * 2)[1], []),  # no operand
    ],
)
def test_rows_that_are_views(f, expected):
    assert starts(viewed(f, (4, 4, 5))) == expected


def test_small_rows_stay_elements_of_a_table():
    assert starts(viewed(lambda w: w[0] + w[1], (2, 15), least_bytes=64)) == []
    assert starts(viewed(lambda w: w[0] + w[1], (2, 16), least_bytes=64)) == [0, 16]


def test_loops_view_what_they_do_not_carry():
    def f(table, xs, carry):
        def step(c, x):
            return c.at[0].set(c[1] + x[1] + table[1]), x[0]

        return jax.lax.scan(step, carry, xs)

    assert sorted(starts(viewed(f, (2, 5), (3, 2, 5), (2, 5)))) == [0, 5, 5]


def layers(x, w, b):
    for n in range(w.shape[0]):
        x = jnp.tanh(x @ w[n] + b[n])
    return x


def test_layers_run_one_kernel():
    rng = np.random.default_rng(0)
    x, w, b = (
        rng.standard_normal(shape, np.float32) for shape in ((64, 512), (6, 512, 512), (6, 512))
    )
    f, w = pbkern.jit(layers), w / 30
    np.testing.assert_allclose(f(x, w, b), jax.jit(layers)(x, w, b), atol=1e-5)
    kernels = f.kernels(x, w, b)
    assert len(kernels) == 6
    assert len({kernel.content for kernel in kernels}) == 1
    assert "def layers_dot0(x, w, b, out0):" in kernels[0].source()
    assert "in1[1310720]" in f.as_text(x, w, b, stage="plan")


@settings(max_examples=15, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    dtype=st.sampled_from(["float32", "int8", "bool", "complex64", "bfloat16"]),
    data=st.data(),
)
def test_numbers_are_the_same(shape, dtype, data):
    x = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    places = [
        tuple(data.draw(st.integers(-size, size - 1)) for size in shape[: data.draw(depths)])
        for depths in [st.integers(1, len(shape) - 1)] * 3
    ]

    def f(x):
        rows = [x[place] for place in places]
        return [*rows, *(row + row for row in rows), rows[0].ravel()[:1] + rows[1].ravel()[:1]]

    with with_settings("view rows", {"least_bytes": 1}):
        for ours, plain in zip(pbkern.jit(f)(x), f(x)):
            np.testing.assert_array_equal(ours, plain)


def test_gradients_donation_and_operations_left_to_xla():
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(shape, np.float32) for shape in ((8, 16), (3, 16, 16), (3, 16)))

    def loss(w, x, b):
        return (layers(x, w, b) ** 2).sum()

    np.testing.assert_allclose(
        pbkern.jit(jax.grad(loss))(w, x, b), jax.grad(loss)(w, x, b), rtol=2e-4, atol=1e-5
    )

    def update(w, x):  # the result may take the operand's memory, whose rows are read
        return jnp.stack([w[2] + x, w[0] * 2, w[1] @ x])

    square = x[:1] * np.ones((16, 1), np.float32)
    expected = update(w, square)
    donated = pbkern.jit(update, donate_argnums=0)(jnp.asarray(w), square)
    np.testing.assert_allclose(donated, expected, rtol=1e-4, atol=1e-5)

    def eigenvalues(w):  # LAPACK's, by way of XLA
        return jnp.linalg.eigvals(w[1]).real.sum() + w[0].sum()

    np.testing.assert_allclose(pbkern.jit(eigenvalues)(w), eigenvalues(w), rtol=1e-4)
