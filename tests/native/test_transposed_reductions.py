"""Reductions of arrays of which one lies across the other: squares are loaded by rows and turned in registers."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

pytestmark = pytest.mark.usefixtures("wide_types")
SHAPES = (
    (1, 1),
    (4, 5),
    (16, 16),
    (17, 40),
    (40, 17),
    (33, 100),
    (128, 3),
    (3, 128),
    (70, 70),
    (300, 513),
)
CASES = {
    "trace of a product": (
        lambda a, b: jnp.einsum("ij,ji->", a, b),
        lambda a, b: np.einsum("ij,ji->", a, b),
    ),
    "diagonal of a product": (
        lambda a, b: jnp.einsum("ij,ji->i", a, b),
        lambda a, b: np.einsum("ij,ji->i", a, b),
    ),
    "of the other product": (
        lambda a, b: jnp.einsum("ij,ji->j", a, b),
        lambda a, b: np.einsum("ij,ji->j", a, b),
    ),
    "distance": (lambda a, b: jnp.abs(a - b.T).sum(), lambda a, b: np.abs(a - b.T).sum()),
    "rows": (lambda a, b: (a - b.T).max(1), lambda a, b: (a - b.T).max(1)),
    "columns": (
        lambda a, b: jnp.sqrt(((a + b.T) ** 2).sum(0)),
        lambda a, b: np.sqrt(((a + b.T) ** 2).sum(0)),
    ),
    "places": (lambda a, b: (a * b.T).argmin(1), lambda a, b: (a * b.T).argmin(1)),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_each_element_meets_its_own(case, shape, rng):
    f, of = CASES[case]
    a, b = rng.standard_normal(shape), rng.standard_normal(shape[::-1])
    np.testing.assert_allclose(pbkern.jit(f)(a, b), of(a, b), rtol=1e-12, atol=1e-12)
    a, b = (
        np.round(a * 20).astype(np.float32),
        np.round(b * 20).astype(np.float32),
    )  # exact in floats of either size
    np.testing.assert_allclose(
        pbkern.jit(f)(a, b), of(a.astype(np.float64), b.astype(np.float64)), rtol=1e-6
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "int64", "uint8", "int16"])
def test_types(dtype, rng):
    a, b = (rng.integers(0, 7, s).astype(jnp.dtype(dtype)) for s in ((50, 90), (90, 50)))
    for f in (lambda a, b: (a + b.T).sum(1), lambda a, b: (a + b.T).max()):
        got, want = pbkern.jit(f)(a, b), f(a.astype(np.int64), b.astype(np.int64))
        np.testing.assert_allclose(
            np.asarray(got, np.float64), want, rtol=0.01 if "float" in dtype else 0
        )


def test_every_second_element_and_batches(rng):
    a, b = rng.standard_normal((5, 40, 66)), rng.standard_normal((5, 66, 80))
    f = lambda a, b: (a * jnp.swapaxes(b, 1, 2)[:, ::2]).sum((1, 2))
    np.testing.assert_allclose(
        pbkern.jit(f)(a, b), (a * b.swapaxes(1, 2)[:, ::2]).sum((1, 2)), rtol=1e-12
    )


def test_no_element_is_loaded_by_itself(rng):
    a, b = (
        rng.standard_normal((160, 320)).astype(np.float32),
        rng.standard_normal((320, 160)).astype(np.float32),
    )
    text = pbkern.jit(lambda a, b: jnp.abs(a - b.T).sum()).as_text(a, b, stage="mlir")
    assert "vector.shuffle" in text
    assert "memref.load" not in text
    assert "vector.gather" not in text


ORDERS = ((0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
REVERSED = {
    "all": lambda x: x,
    "reversed": lambda x: x[:, ::-1],
    "every second": lambda x: x[:, ::2],
}


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.example(shape=(16, 2, 2), order=(2, 0, 1), view="reversed", axes=(0, 1, 2))
@hypothesis.example(shape=(32, 4, 4), order=(2, 0, 1), view="reversed", axes=(0, 1, 2))
@hypothesis.example(shape=(16, 16, 4), order=(2, 0, 1), view="every second", axes=(0, 1, 2))
@hypothesis.given(
    shape=st.tuples(*[st.sampled_from((1, 2, 3, 4, 7, 16, 17))] * 3),
    order=st.sampled_from(ORDERS),
    view=st.sampled_from(sorted(REVERSED)),
    axes=st.sampled_from(((0, 1, 2), (0, 1), (0, 2), (1, 2))),
)
def test_several_reduced_dimensions_beside_the_values_themselves(shape, order, view, axes):
    """Squares are turned along one reduced dimension while loops run over others inside of it."""
    rng = np.random.default_rng(len(axes))
    a = rng.integers(-99, 99, shape).astype(np.float32)  # sums are exact
    read = REVERSED[view](a)
    across = rng.integers(-99, 99, [read.shape[dim] for dim in np.argsort(order)])
    across = across.astype(np.float32)

    def f(a, b):
        z = jnp.transpose(b, order) + REVERSED[view](a)
        return z, z.max(axes), z.sum(axes)

    z = across.transpose(order) + read
    for got, want in zip(pbkern.jit(f)(a, across), (z, z.max(axes), z.sum(axes))):
        np.testing.assert_array_equal(got, want)
