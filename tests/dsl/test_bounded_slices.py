"""BoundedSlice: blocks whose start and size come from the index map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core.errors import KernelError

PARTS = np.array([[11, 16], [8, 11], [3, 8], [0, 3], [5, 5]], "i4")
X = np.random.default_rng(0).standard_normal((16, 4)).astype("f4")


def part(i, parts):
    return pbkern.ds(parts[i, 0], parts[i, 1] - parts[i, 0]), 0


SPEC = pbkern.BlockSpec((pbkern.BoundedSlice(8), 4), part)


def make(body, specs=(SPEC,), out_specs=SPEC, out_shape=(16, 4), **options):
    return pbkern.kernel(
        body, grid=(len(PARTS),), in_specs=list(specs), out_specs=out_specs, num_scalar_prefetch=1,
        out_shape=jax.ShapeDtypeStruct(out_shape, "f4"), **options,
    )  # fmt: skip


def both(kernel, *args):
    traced = kernel.trace(*args)
    got = np.asarray(kernel(*args))
    for other in (
        pbkern.interpret(traced, *args),
        pbkern.call_kernel(pbkern.rebuild(traced.source()), *args),
    ):
        np.testing.assert_allclose(got, other[0], rtol=1e-6)
    return got


def test_each_program_writes_its_slice_and_no_more():
    def body(parts, x, o):
        o[...] = x[...] + pbkern.program_id(0)

    want = X.copy()
    for i, (low, high) in enumerate(PARTS):
        want[low:high] += i
    np.testing.assert_array_equal(both(make(body), PARTS, X), want)


def test_reductions_know_where_the_slice_ends():
    def body(parts, x, o):
        o[...] = jnp.where(pbkern.in_bounds(x, 0)[:, None], x[...], 0).sum(0)

    got = both(
        make(
            body, out_specs=pbkern.BlockSpec((None, 4), lambda i, parts: (i, 0)), out_shape=(5, 4)
        ),
        PARTS,
        X,
    )
    np.testing.assert_allclose(got, [X[low:high].sum(0) for low, high in PARTS], rtol=1e-5)


def test_every_kind_of_store_stays_inside():
    def body(parts, x, o):
        o[...] = x[...]
        o[1:4] += 10.0
        pbkern.store(o, (slice(None), 2), 7.0, mask=jnp.arange(8) % 2 == 0)
        o[jnp.arange(2) * 2 + 2, 3] = jnp.arange(2) + 1.0

        @pbkern.when(pbkern.program_id(0) == 1)
        def _():
            o[2] = jnp.zeros(4)

        before = jax.ref.swap(o, (0, 0), 5.0)
        o[1, 0] = before

    want = X.copy()
    for i, (low, high) in enumerate(PARTS):
        block = np.full((8, 4), np.nan)
        block[: high - low] = X[low:high]
        block[1:4] += 10
        block[::2, 2] = 7
        block[[2, 4], 3] = 1, 2
        if i == 1:
            block[2] = 0
        block[1, 0], block[0, 0] = block[0, 0], 5
        want[low:high] = block[: high - low]
    np.testing.assert_allclose(both(make(body), PARTS, X), want, rtol=1e-6)


def test_static_slices_and_squeezed_dimensions():
    spec = pbkern.BlockSpec((None, pbkern.BoundedSlice(6)), lambda i: (i, pbkern.ds(2 * i, 3)))

    def body(x, start, o):
        o[...] = -x[...]

    kernel = pbkern.kernel(
        body, grid=(4,), in_specs=[spec, spec], out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((4, 8), "f4"), input_output_aliases={1: 0},
    )  # fmt: skip
    x, want = np.random.default_rng(1).standard_normal((4, 8)).astype("f4"), np.zeros((4, 8), "f4")
    for i in range(4):
        want[i, 2 * i : 2 * i + 3] = -x[i, 2 * i : 2 * i + 3]
    np.testing.assert_array_equal(both(kernel, x, np.zeros((4, 8), "f4")), want)


def test_index_maps_that_do_not_fit_are_refused():
    def body(parts, x, o):
        o[...] = x[...]

    wrong = pbkern.BlockSpec((pbkern.BoundedSlice(8), 4), lambda i, parts: (parts[i, 0], 0))
    text = r"index map of input 1 \(`x`\) does not fit dimension 0[\s\S]*test_bounded_slices.py"
    with pytest.raises(KernelError, match=text):
        make(body, [wrong]).trace(PARTS, X)
    wrong = pbkern.BlockSpec((8, 4), lambda i, parts: (pbkern.ds(0, 3), 0))
    with pytest.raises(KernelError, match=r"only a dimension that is pbkern.BoundedSlice"):
        make(body, [wrong]).trace(PARTS, X)
    wrong = pbkern.BlockSpec((pbkern.BoundedSlice(8), 4))
    with pytest.raises(
        KernelError,
        match=r"input 1 \(`x`\) has a BoundedSlice but no index map[\s\S]*test_bounded_slices.py",
    ):
        make(body, [wrong]).trace(PARTS, X)


def test_adding_through_array_indices_stays_inside():
    """Elements that are named twice are added to twice, those beyond the slice not at all."""

    def body(parts, x, o):
        o[...] = x[...]
        jax.ref.addupdate(o, (jnp.arange(12) // 2, 0), jnp.ones(12))

    want = X.copy()
    for low, high in PARTS:
        want[low : min(high, low + 6), 0] += 2
    np.testing.assert_array_equal(both(make(body), PARTS, X), want)
