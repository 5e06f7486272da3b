"""Masked accesses and copies of dynamic size through reshaped Refs: slices are not moved, what lies outside is left out."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt

X = np.random.default_rng(0).normal(size=(5, 8)).astype("f")
# name -> (shape through which the array is seen, slices of program i: (start, size, stride) or a point)
PLACES = {
    "end of all": ((40,), lambda i: [(16 * i, 16, 1)]),
    "both ends": ((40,), lambda i: [(16 * i - 3, 16, 1)]),
    "far outside": ((40,), lambda i: [(60 * i - 60, 16, 1)]),
    "every other": ((40,), lambda i: [(16 * i, 10, 2)]),
    "shorter rows": ((10, 4), lambda i: [(4 * i, 4, 1), (0, 4, 1)]),
    "rows cut in two": ((5, 2, 4), lambda i: [(2 * i, 2, 1), (0, 2, 1), (0, 4, 1)]),
    "longer rows": ((2, 20), lambda i: [(0, 2, 1), (8 * i, 8, 1)]),
    "of one row": ((2, 20), lambda i: [1, (8 * i, 8, 1)]),
    "of the middle": ((5, 2, 4), lambda i: [(2 * i, 2, 1), 1, (0, 4, 1)]),
    "of two dimensions": ((4, 10), lambda i: [(2 * i - 1, 3, 1), (4 * i, 4, 1)]),
}


def slices(places):
    return tuple(pl.ds(*p) if isinstance(p, tuple) else p for p in places)


def elements(places, shape):
    """Per element of the access: its place, whether it lies inside."""
    axes = [
        [s + k * step for k in range(n)]
        for s, n, step in (p if isinstance(p, tuple) else (p, 1, 1) for p in places)
    ]
    return [(at, all(0 <= q < n for q, n in zip(at, shape))) for at in itertools.product(*axes)]


def sizes(places):
    return tuple(p[1] for p in places if isinstance(p, tuple))


@pytest.mark.parametrize("name", PLACES)
def test_loads(name):
    shape, places = PLACES[name]
    size = sizes(places(0))
    odd = np.arange(np.prod(size)).reshape(size) % 3 != 1

    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        mask = jnp.arange(odd.size).reshape(size) % 3 != 1
        o_ref[i] = plt.load(x_ref.reshape(*shape).at[slices(places(i))], mask=mask, other=-1.0)

    got = np.asarray(
        pl.pallas_call(kernel, grid=(3,), out_shape=jax.ShapeDtypeStruct((3, *size), "float32"))(X)
    )
    for i in range(3):
        for (at, inside), value, chosen in zip(
            elements(places(i), shape), got[i].ravel(), odd.ravel()
        ):
            if inside or not chosen:
                assert value == (X.reshape(shape)[at] if chosen else -1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", PLACES)
def test_stores(name, masked):
    shape, places = PLACES[name]
    size = sizes(places(0))
    count = int(np.prod(size))

    def kernel(x_ref, o_ref):
        i = pl.program_id(0)

        @pl.when(i == 0)
        def _():
            o_ref[...] = x_ref[...]

        value = (jnp.arange(count, dtype=jnp.float32) + 100 * (i + 1)).reshape(size)
        mask = jnp.arange(count).reshape(size) % 3 != 1 if masked else None
        plt.store(o_ref.reshape(*shape).at[slices(places(i))], value, mask=mask)

    got = pl.pallas_call(kernel, grid=(3,), out_shape=jax.ShapeDtypeStruct(X.shape, "float32"))(X)
    want = X.copy().reshape(shape)
    for i in range(3):
        for n, (at, inside) in enumerate(elements(places(i), shape)):
            if inside and (n % 3 != 1 or not masked):
                want[at] = n + 100 * (i + 1)
    np.testing.assert_array_equal(got, want.reshape(X.shape))


def test_index_arrays_behind_a_reshape():
    """Of what the slice beside them takes, only what lies inside is stored."""
    rows = np.array([2, 0], np.int32)

    def kernel(rows_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...]
        at = o_ref.reshape(4, 10).at[rows_ref[...], pl.ds(8 + pl.program_id(0), 4)]
        plt.store(at, jnp.full((2, 4), 7, jnp.float32), mask=jnp.ones((2, 4), bool))

    got = pl.pallas_call(kernel, grid=(1,), out_shape=jax.ShapeDtypeStruct(X.shape, "float32"))(
        rows, X
    )
    want = X.copy().reshape(4, 10)
    want[[0, 2], 8:] = 7
    np.testing.assert_array_equal(got, want.reshape(X.shape))


@pytest.mark.parametrize(("start", "size"), [(32, 8), (25, 3), (0, 40), (7, 0)])
def test_copies_of_dynamic_size(start, size):
    def kernel(n_ref, x_ref, o_ref, semaphore):
        o_ref[...] = jnp.zeros_like(o_ref)
        span = pl.ds(n_ref[0], n_ref[1])
        copy = pltpu.make_async_copy(
            x_ref.reshape(40).at[span], o_ref.reshape(40).at[span], semaphore
        )
        copy.start()
        copy.wait()

    call = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(X.shape, "float32"), scratch_shapes=[pltpu.SemaphoreType.DMA],
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec()],
    )  # fmt: skip
    place = np.arange(40).reshape(X.shape)
    want = np.where((place >= start) & (place < start + size), X, 0)
    np.testing.assert_array_equal(call(np.array([start, size], np.int32), X), want)
