"""Gathers from stacks of a few values are selects (fuse/indexing/gather_to_select.py): every mode, also of places outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from tests.arrays import array

from .checking import planned

MODES = ("clip", "fill", "promise_in_bounds")


def pieces(count, *shape, dtype="float32"):
    rng = np.random.default_rng(count)
    return [jnp.asarray(rng.normal(size=shape) * 50 > 0 if dtype == "bool" else rng.normal(size=shape) * 50, dtype)
            for _ in range(count)]  # fmt: skip


def places(*shape, low, high, dtype="int32"):
    return array(np.random.default_rng(1).integers(low, high, shape), dtype)


def agree(f, *args):
    got, want = pbkern.jit(f)(*args), jax.jit(f)(*args)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    got, want = (
        np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x) for x in (got, want)
    )
    np.testing.assert_array_equal(got, want)


def stays(f, *args) -> bool:
    return "gather" in str(planned(f, *args).jaxpr)


def choose(mode):
    return lambda i, *a: jnp.choose(i, list(a), mode=mode)


def along(axis):
    return lambda i, *a: jnp.take_along_axis(jnp.stack(a, axis), jnp.expand_dims(i, axis), axis)


def beside(mode):
    return lambda i, *a: jnp.stack(a, 1).at[jnp.arange(a[0].shape[0]), i].get(mode=mode)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "shape", [(1,), (37,), (1003,), (5, 7), (3, 1, 129), (0,), (4, 0)], ids=str
)
@pytest.mark.parametrize("mode", ["clip", "wrap"])
@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_choose(shape, mode, count):
    i, a = places(*shape, low=-20, high=20), pieces(count, *shape)
    agree(choose(mode), i, *a)
    assert not i.size > 0 or not stays(choose(mode), i, *a)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "complex64"]
)
@pytest.mark.parametrize("where", [(0, 4), (-4, 4), (-30, 30)], ids=str)
def test_element_types(dtype, where):
    low, high = where
    i, a = places(77, low=low, high=high), pieces(4, 77, dtype=dtype)
    agree(along(0), i, *a)
    for mode in MODES:
        agree(beside(mode), i, *a)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
@pytest.mark.parametrize("mode", MODES)
def test_types_of_indices(dtype, mode):
    with jax.enable_x64(dtype == "int64"):
        i = places(41, low=0 if dtype[0] == "u" else -9, high=9, dtype=dtype)
        agree(beside(mode), i, *pieces(3, 41))


@pytest.mark.parametrize("mode", MODES)
def test_places_outside_are_not_moved_twice(mode):
    """Of negative places, those down to minus the size count from the end; the others are outside."""
    i = jnp.arange(-9, 9, dtype=jnp.int32)
    agree(beside(mode), i, *pieces(3, 18))
    low = lambda i, *a: lax.gather(
        jnp.stack(a, 1), i[:, None], lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,)), (1, 1), mode=mode)  # fmt: skip
    agree(low, i, *pieces(3, 18))
    assert not stays(low, i, *pieces(3, 18))


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_any_dimension(axis):
    i, a = places(13, 21, low=-3, high=3), pieces(3, 13, 21)
    agree(along(axis), i, *a)
    assert not stays(along(axis), i, *a)


def test_vectorized_lookups():
    for shape in ((), (5,), (5, 3)):
        f = jax.vmap(lambda i, *a: jnp.stack(a)[i])
        i, a = places(19, low=-9, high=9), pieces(4, 19, *shape)
        agree(f, i, *a)
        assert not stays(f, i, *a)


def test_turned_and_repeated_pieces():
    turned = lambda i, a, b: jnp.stack([a, b]).transpose(1, 2, 0)[
        jnp.arange(6)[:, None], jnp.arange(9), i
    ]
    crossed = lambda i, a, b: jnp.stack([a, b])[i, jnp.arange(9), jnp.arange(6)[:, None]]
    repeated = lambda i, a, b: jnp.take_along_axis(jnp.stack([a[0], b[0]]), i, 0)
    numbers = lambda i, a, b: jnp.stack([a[0, 0], b[1, 1], a[2, 2]])[i]
    for f, shape in ((turned, (6, 9)), (repeated, (6, 9)), (numbers, (6, 9)), (crossed, (6, 6))):
        i, a = places(6, 9, low=-2, high=2), pieces(2, *shape)
        agree(f, i, *a)
        assert stays(f, i, *a) == (f is crossed)  # of 6 columns, the last is read four times


def test_what_is_not_in_step_stays():
    x = pieces(3, 40)
    i = places(40, low=-40, high=40)
    backwards = lambda i, *a: jnp.stack(a)[i % 3, 39 - jnp.arange(40)]
    diagonal = lambda i, *a: jnp.stack([x[:9].reshape(3, 3) for x in a])[
        i[:3] % 3, jnp.arange(3), jnp.arange(3)
    ]
    looked_up = lambda i, *a: jnp.stack(a)[i % 3, i]
    pairs = lambda i, *a: jnp.concatenate([a[0].reshape(2, 20), a[1].reshape(2, 20)])[
        i[:20] % 4, jnp.arange(20)
    ]
    rows = lambda i, *a: jnp.stack(a)[i % 3]
    for f in (backwards, diagonal, looked_up, pairs, rows):
        agree(f, i, *x)
        assert stays(f, i, *x), f
    assert stays(choose("clip"), i, *pieces(13, 40))


def test_one_of_a_few_arrays():
    f = lambda i, *a: jnp.stack(a, 1)[:, i] * 2
    for i in (-7, -3, -1, 0, 1, 2, 3, 9):
        agree(f, jnp.int32(i), *pieces(3, 5, 17))
    assert "concatenate" not in str(planned(f, jnp.int32(0), *pieces(3, 5, 17)).jaxpr)
    stored = lambda i, *a: (x := jnp.stack(a), x[i])
    assert "dynamic_slice" in str(planned(stored, jnp.int32(0), *pieces(3, 17)).jaxpr)


def test_inside_of_loops():
    def f(i, a, b):
        step = lambda k, c: jnp.choose(i, [c + k, c * b, a], mode="clip")
        return lax.fori_loop(0, 5, step, a)

    agree(f, places(45, low=-1, high=4), *pieces(2, 45, dtype="int32"))


def test_nothing_is_stored_in_between():
    pbkern.testing.assert_kernels(
        choose("clip"), (places(500_000, low=0, high=3), *pieces(3, 500_000)), 1
    )
