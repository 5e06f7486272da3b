"""Indices after reshapes, transposes and bitcasts of a Ref take the elements that NumPy takes, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pbkern.frontends.pallas.refs import reorder_transforms
from pbkern.frontends.pallas.refs.reorder_transforms import StridedRun

from .test_import import imported

ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)


@st.composite
def reshapes(draw):
    """(shape, another shape of the same elements, a Run of each dimension of the latter)."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))

    def grouped():
        shape = [1]
        for f in factors:
            if draw(st.booleans()):
                shape.append(f)
            else:
                shape[-1] *= f
        return tuple(shape)

    old, new = grouped(), grouped()
    taken = []
    for n in new:
        kind = draw(st.sampled_from(["whole", "whole", "point", "run"]))
        start = draw(st.integers(0, n - 1))
        size = draw(st.integers(1, n - start))
        taken.append(
            {
                "whole": StridedRun(0, n),
                "point": StridedRun(start, 1, point=True),
                "run": StridedRun(start, size),
            }[kind]
        )
    return old, new, taken


def numpy_index(taken):
    def entry(r):
        start = int(r.start)
        return start if r.point else slice(start, start + (r.size - 1) * r.stride + 1, r.stride)

    return tuple(map(entry, taken))


@given(reshapes(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_runs_before_a_reshape(case, traced):
    old, new, taken = case
    x = np.arange(np.prod(old)).reshape(old)
    asked = taken
    if traced:
        asked = [
            r if r.is_whole(n) else StridedRun(jnp.int32(r.start), r.size, r.stride, r.point)
            for r, n in zip(taken, new)
        ]
    found = reorder_transforms.before(
        reorder_transforms._jax.ReshapeTransform(new), old, x.dtype, asked
    )
    if found is not None:
        before, t = found
        np.testing.assert_array_equal(
            x[numpy_index(before)].reshape(t.shape), x.reshape(new)[numpy_index(taken)]
        )


def test_common_reshapes_are_exchanged():
    def exchanged(old, new, *taken):
        return (
            reorder_transforms.before(
                reorder_transforms._jax.ReshapeTransform(new), old, np.dtype("f4"), taken
            )
            is not None
        )

    page = jnp.int32(3)
    assert exchanged((6, 8, 4), (48, 4), StridedRun(page, 1), StridedRun(0, 4))  # a row of a page
    assert exchanged(
        (48, 4), (6, 8, 4), StridedRun(page, 1, point=True), StridedRun(0, 8), StridedRun(0, 4)
    )  # a page of rows
    assert exchanged(
        (6, 8, 4),
        (6, 2, 4, 4),
        StridedRun(page, 1, point=True),
        StridedRun(page, 1, point=True),
        StridedRun(0, 4),
        StridedRun(0, 4),
    )
    assert not exchanged((6, 8), (48,), StridedRun(page, 5))  # may lie in two rows


@pytest.mark.parametrize(
    ("old", "new", "at"),
    [("f4", "i4", 3), ("bfloat16", "i4", 3), ("i1", "i4", 1), ("bfloat16", "u2", 5)],
)
def test_stores_through_bitcasts_of_shared_memory(old, new, at):
    """Programs that run at once store rows of one array through a bitcast."""
    old, new = jnp.dtype(old), jnp.dtype(new)
    rows = 16 * old.itemsize // new.itemsize

    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref.bitcast(new)[pl.ds(i, 1)] = x_ref.bitcast(new)[pl.ds(i, 1)]

    x = np.random.default_rng(0).integers(-100, 100, (16, 128)).astype(old)
    f = pl.pallas_call(
        kernel, grid=(rows,), out_shape=jax.ShapeDtypeStruct(x.shape, old), in_specs=[ANYWHERE], out_specs=ANYWHERE,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )  # fmt: skip
    assert imported(f, x).compiler_params["cpu"].dimension_semantics == ("parallel",)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(f(x)).view(np.uint8), x.view(np.uint8))


def test_programs_take_turns_where_a_store_writes_back_its_neighbours():
    def kernel(x_ref, o_ref):
        o_ref.reshape(64)[pl.ds(pl.program_id(0) * 4, 4)] = x_ref[pl.program_id(0)]

    x = np.arange(64, dtype="f4").reshape(16, 4)
    f = pl.pallas_call(
        kernel, grid=(16,), out_shape=jax.ShapeDtypeStruct((4, 16), jnp.float32), in_specs=[ANYWHERE], out_specs=ANYWHERE,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )  # fmt: skip
    assert imported(f, x).compiler_params["cpu"].dimension_semantics == ("arbitrary",)
    np.testing.assert_array_equal(f(x), x.reshape(4, 16))


def test_rows_named_by_an_array_and_a_window_after_a_bitcast():
    def kernel(at_ref, x_ref, o_ref):
        o_ref[...] = x_ref.bitcast(jnp.int32)[at_ref[:3], pl.ds(at_ref[3], 5)]

    x = np.arange(96, dtype="f4").reshape(8, 12)
    f = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((3, 5), jnp.int32), in_specs=[ANYWHERE, ANYWHERE]
    )
    np.testing.assert_array_equal(f(np.array([7, 0, 3, 6], "i4"), x), x.view("i4")[[7, 0, 3], 6:11])
