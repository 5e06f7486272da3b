"""Products over every small extent, of every dtype, with operands that are broadcast."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from tests.lowered import lowered

EXTENTS = (1, 2, 3, 16, 17)
DTYPES = ("float32", "bfloat16", "float16", "int8", "int32", "uint16")
SHAPES = list(itertools.product(EXTENTS, EXTENTS, EXTENTS))


def draw(shape, dtype):
    return (
        np.random.default_rng(sum(shape))
        .integers(-3, 4, shape)
        .astype("f4")
        .astype(jnp.dtype(dtype))
    )


def broadcast_rows(a, b):
    return jnp.broadcast_to(a[:1], a.shape) @ b


@pytest.mark.sampled(75)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("f", [jnp.matmul, broadcast_rows], ids=["matmul", "broadcast"])
def test_products(f, dtype, shape):
    m, n, k = shape
    a, b = (
        draw(s, "uint8" if dtype == "uint16" else dtype).astype(jnp.dtype(dtype))
        for s in ((m, k), (k, n))
    )
    np.testing.assert_array_equal(np.asarray(pbkern.jit(f)(a, b)), np.asarray(jax.jit(f)(a, b)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8"])
def test_products_lower_for_wide_vectors(dtype):
    for m, n, k in [(42, 2, 1), (16, 2, 1), (1, 1, 1), (17, 3, 2), (3, 17, 1), (64, 3, 1)]:
        assert "scf.for" in lowered(
            jnp.matmul, draw((m, k), dtype), draw((k, n), dtype), stage="mlir"
        )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("channels", "results", "size"), [(1, 1, 1), (1, 2, 3), (3, 1, 16), (2, 16, 5), (17, 3, 7)]
)
def test_convolutions_of_broadcast_operands(channels, results, size, dtype):
    x, w = draw((2, channels, size, size), dtype), draw((results, channels, 3, 3), dtype)

    def image(x, w):
        return lax.conv_general_dilated(
            jnp.broadcast_to(x[:1, :, :, :1], x.shape), w, (1, 1), "SAME"
        )

    def kernel(x, w):
        return lax.conv_general_dilated(
            x, jnp.broadcast_to(w[:, :1, :, :1], w.shape), (1, 1), "SAME"
        )

    for f in (image, kernel):
        np.testing.assert_array_equal(np.asarray(pbkern.jit(f)(x, w)), np.asarray(jax.jit(f)(x, w)))
        assert "scf.for" in lowered(f, x, w, stage="mlir")


BOOLEAN = {
    "matmul": (jnp.matmul, (5, 30), (30, 7)),
    "one_term": (jnp.matmul, (5, 1), (1, 7)),
    "no_terms": (jnp.matmul, (5, 0), (0, 7)),
    "many_terms": (jnp.matmul, (2, 70000), (70000, 3)),
    "vectors": (jnp.matmul, (40,), (40,)),
    "batch": (jax.vmap(jnp.matmul), (3, 4, 5), (3, 5, 6)),
    "outer": (lambda a, b: lax.dot_general(a, b, (((), ()), ((), ()))), (5,), (7,)),
    "counted": (lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.int32), (5, 30), (30, 7)),
    "convolution": (
        lambda a, b: lax.conv_general_dilated(a, b, (1, 1), "SAME"),
        (1, 2, 5, 5),
        (3, 2, 3, 3),
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BOOLEAN)
def test_products_of_booleans(name):
    """A sum of booleans is whether any is true; two true products do not cancel."""
    f, *shapes = BOOLEAN[name]
    for likely in (0.1, 0.5, 1.0):
        a, b = (np.random.default_rng(len(name)).random(s) < likely for s in shapes)
        got, want = pbkern.jit(f)(a, b), jax.jit(f)(a, b)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_kernels_with_products_of_booleans():
    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((5, 7), bool))
    def kernel(a, b, o):
        o[...] = a[...] @ b[...]

    a, b = np.ones((5, 4), bool), np.ones((4, 7), bool)
    assert np.asarray(kernel(a, b)).all()
    assert pbkern.interpret(kernel.trace(a, b), a, b)[0].all()
