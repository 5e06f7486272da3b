"""Gathers and sums at places that are known while compiling (fuse/indexing/places_as_views.py, known_numbers.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.fuse.indexing.places_as_views import loops_of
from tests.arrays import array

from .checking import planned

X = array(np.random.default_rng(0).normal(size=(6, 12, 5)), "float32")


def places(*numbers):
    return np.asarray(numbers, np.int32)


def nearest(*shape):
    return lambda x: jax.image.resize(x, shape, "nearest")


# Gathers that become views, as functions of NumPy's or JAX's arrays; X is of 6 x 12 x 5 elements.
VIEWS = {
    "reversed": lambda x: x[places(5, 4, 3, 2, 1, 0)],
    "strided": lambda x: x[:, places(1, 4, 7, 10)],
    "strided down": lambda x: x[:, places(10, 8, 6)],
    "blocks": lambda x: x[:, places(0, 2, 3, 5, 6, 8)],
    "blocks at the end": lambda x: x[:, places(4, 5, 7, 8, 10, 11)],
    "blocks reversed inside": lambda x: x[:, places(6, 5, 4, 9, 8, 7)],
    "tiled": lambda x: x[:, places(0, 1, 2, 0, 1, 2)],
    "shuffled": lambda x: x[:, np.arange(12) % 4 * 3 + np.arange(12) // 4],
    "one repeated": lambda x: x[places(3, 3, 3)],
    "one": lambda x: x[places(4)],
    "from the end": lambda x: x[places(-1, -3)],
    "grid": lambda x: x[np.arange(6)[:, None] // 2, np.arange(8)[None] + 2],
    "grid turned": lambda x: x[np.arange(12)[None] // 2, np.arange(8)[:, None] + 2],
    "apart": lambda x: x[np.arange(3)[None], :, np.arange(2)[:, None] + 2],
    "matrix": lambda x: x[:, places(0, 1, 2, 3, 4, 5).reshape(3, 2)],
    "matrix of one": lambda x: x[:, np.zeros((3, 2), np.int32)],
    "one after the other": lambda x: x[places(0, 0, 1, 1)][:, places(0, 2, 3, 5)],
}
# Gathers that stay.
OTHERS = {
    "diagonal": lambda x: x[np.arange(5), np.arange(5)],
    "windows": lambda x: x[:, np.arange(10)[:, None] + np.arange(3)],
    "overlapping": lambda x: x[:, places(0, 1, 2, 2, 3, 4)],
    "irregular": lambda x: x[:, places(0, 3, 4, 9)],
}


def primitives(f, *args, **options):
    return str(planned(f, *args, **options).jaxpr)


@pytest.mark.parametrize("name", VIEWS)
def test_results_are_views(name):
    f = VIEWS[name]
    np.testing.assert_array_equal(pbkern.jit(f)(X), f(np.asarray(X)))
    assert "gather" not in primitives(f, X)


@pytest.mark.parametrize("name", OTHERS)
def test_other_gathers_stay(name):
    f = OTHERS[name]
    np.testing.assert_array_equal(pbkern.jit(f)(X), f(np.asarray(X)))
    assert "gather" in primitives(f, X)


@pytest.mark.parametrize("name", VIEWS)
def test_values_with_arithmetic(name):
    """Joined dimensions are not stored for arithmetic: such gathers stay, strided ones do not."""

    def f(x):
        return jnp.sin(VIEWS[name](x)) + 1

    want = np.sin(VIEWS[name](np.asarray(X, np.float64))) + 1
    np.testing.assert_allclose(pbkern.jit(f)(X), want, rtol=1e-6, atol=1e-6)
    if name in ("reversed", "strided", "strided down"):
        assert "gather" not in primitives(f, X)
    if name == "blocks":
        assert "gather" in primitives(f, X)


@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_places_outside(mode):
    def f(x):
        return x.at[places(4, 5, 6, 7)].get(mode=mode)

    np.testing.assert_array_equal(pbkern.jit(f)(X), f(X))
    assert "gather" in primitives(f, X)


@pytest.mark.parametrize(("old", "new"), [(82, 41), (246, 41), (330, 55), (7, 21), (6, 9), (10, 7)])
@pytest.mark.parametrize("through", ["result", "sum"])
def test_nearest_takes_the_exact_places(old, new, through):
    """A quotient that is a whole number is no less, whatever becomes of divisions: XLA takes other rows of 82."""
    x = array(np.random.default_rng(1).normal(size=(old, 3)), "float32")
    resize = nearest(new, 3)
    f = resize if through == "result" else (lambda x: resize(x) * 2 + 1)
    rows = np.asarray(x)[(2 * np.arange(new) + 1) * old // (2 * new)]
    np.testing.assert_allclose(
        pbkern.jit(f)(x), rows if through == "result" else rows * 2 + 1, rtol=1e-6
    )


def test_places_that_are_made_of_floats_are_constants():
    """Also what is added to negative ones."""
    f = nearest(5, 7, 3)
    names = {eqn.primitive.name for eqn in planned(f, X).jaxpr.eqns}
    assert "gather" in names
    assert names.isdisjoint(("iota", "floor", "lt", "add", "select_n"))


def test_images_that_grow_are_joined_last():
    f = nearest(12, 48, 5)
    np.testing.assert_array_equal(pbkern.jit(f)(X), np.repeat(np.repeat(np.asarray(X), 2, 0), 4, 1))
    *repeats, joined = (eqn.primitive.name for eqn in planned(f, X).jaxpr.eqns)
    assert {*repeats} == {"broadcast_in_dim"}
    assert joined == "reshape"


SUMS = {
    "every other": (np.arange(3) * 2, 0),
    "pairs": (np.arange(6) // 2, 0),
    "reversed": (places(5, 4, 3, 2, 1, 0), 0),
    "blocks": (np.arange(12) // 3 * 3, 1),
    "tiled": (np.arange(12) % 4, 1),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SUMS)
def test_sums_are_transposes_of_views(name, dtype):
    where, axis = SUMS[name]

    def f(x, y):
        return x.at[where].add(y * 2) if axis == 0 else x.at[:, where].add(y * 2)

    x = array(X, dtype)
    shape = [*X.shape]
    shape[axis] = len(where)
    y = array(np.random.default_rng(2).normal(size=shape), dtype)
    want = np.asarray(x, np.float64)
    np.add.at(want, where if axis == 0 else (slice(None), where), 2 * np.asarray(y, np.float64))
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    got = np.asarray(pbkern.jit(f)(x, y), np.float64)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    assert "scatter" not in primitives(f, x, y)
    assert "scatter" in primitives(f, x, y, disable_unsafe_math_canonicalizations=True)


def test_gradients_of_images_that_grow():
    def f(x, y):
        return jnp.vdot(nearest(12, 36, 5)(x), y)

    y = array(np.random.default_rng(3).normal(size=(12, 36, 5)), "float32")
    want = np.asarray(y, np.float64).reshape(6, 2, 12, 3, 5).sum((1, 3))
    np.testing.assert_allclose(pbkern.jit(jax.grad(f))(X, y), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.grad(pbkern.jit(f))(X, y), want, rtol=1e-5, atol=1e-5)
    assert "scatter" not in primitives(jax.grad(f), X, y)


def test_places_in_loops():
    def f(x):
        def step(carry, row):
            return carry + row[places(0, 0, 1, 1)], jax.image.resize(row, (24, 5), "nearest")

        return jax.lax.scan(step, jnp.zeros((4, 5)), x)

    x = np.asarray(X)
    total, rows = pbkern.jit(f)(X)
    np.testing.assert_allclose(total, x[:, [0, 0, 1, 1]].sum(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(rows, np.repeat(x, 2, 1))


@pytest.mark.parametrize(
    ("numbers", "loops"),
    [
        ([4, 5, 6, 7], (4, [(4, 1)])),
        ([0, 0, 3, 3], (0, [(2, 3), (2, 0)])),
        ([0, 2, 3, 5, 6, 8], (0, [(3, 3), (2, 2)])),
        ([7], (7, [])),
        ([2, 2], (2, [(2, 0)])),
        ([0, 1, 3, 4, 9, 10, 12, 13], (0, [(2, 9), (2, 3), (2, 1)])),
        ([0, 1, 1], None),
        ([0, 1, 3, 5], None),
    ],
)
def test_loops_of_places(numbers, loops):
    assert loops_of(np.asarray(numbers)) == loops
