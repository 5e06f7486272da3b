"""Kernels as people write them for GPUs, simulated, against NumPy: state in scratch along sequential dimensions, ragged edges,
loops whose length depends on data, dynamic slices, atomics, narrow and wide types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern import BlockSpec, Scratch

RNG = np.random.default_rng(0)


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def normal(*sizes):
    return RNG.standard_normal(sizes).astype(np.float32)


def in_order(*semantics):
    return pbkern.nvgpu.CompilerParams(dimension_semantics=semantics)


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(
        np.asarray(got, "f8"), np.asarray(want, "f8"), rtol=tolerance, atol=tolerance
    )


def test_softmax_in_ragged_chunks():
    """At the end one row is left to a block: every thread, or the whole block, computes its numbers."""
    rows = BlockSpec((4,), lambda i, k: (i,))

    @pbkern.kernel(
        grid=(3, 3),
        in_specs=[BlockSpec((4, 32), lambda i, k: (i, k))],
        out_specs=[rows, rows],
        out_shape=[shape(9), shape(9)],
        scratch_shapes=[Scratch((4,), jnp.float32)] * 2,
        compiler_params=in_order("parallel", "sequential"),
    )
    def kernel(x, largest_out, total_out, largest, total):
        @pbkern.when(pbkern.program_id(1) == 0)
        def _():
            largest[...] = jnp.full((4,), -jnp.inf)
            total[...] = jnp.zeros((4,))

        v = jnp.where(pbkern.in_bounds(x, 1)[None], x[...], -jnp.inf)
        new = jnp.maximum(largest[...], v.max(1))
        total[...] = total[...] * jnp.exp(largest[...] - new) + jnp.exp(v - new[:, None]).sum(1)
        largest[...] = new
        largest_out[...], total_out[...] = largest[...], total[...]

    x = normal(9, 77)
    largest, total = pbkern.simulate(kernel, x).results
    close(largest, x.max(1))
    close(total, np.exp(x - x.max(1, keepdims=True)).sum(1))


def test_newton_until_it_converges():
    rows = BlockSpec((1, 33), lambda i: (i, 0))

    @pbkern.kernel(
        grid=(5,),
        in_specs=[rows],
        out_specs=[rows, BlockSpec((1,), lambda i: (i,))],
        out_shape=[shape(5, 33), shape(5, dtype=jnp.int32)],
    )
    def kernel(a, root, count):
        x = a[...]
        going = lambda s: (jnp.abs(s[0] * s[0] - x).max() > 1e-4 * x.max()) & (s[1] < 50)
        root[...], n = lax.while_loop(
            going, lambda s: (0.5 * (s[0] + x / s[0]), s[1] + 1), (jnp.ones_like(x), jnp.int32(0))
        )
        count[...] = n[None]

    a = (RNG.uniform(0.5, 4, (5, 33)) * 10.0 ** np.arange(5)[:, None]).astype("f4")
    root, count = pbkern.simulate(kernel, a).results
    close(root, np.sqrt(a), 1e-2)
    assert (np.diff(count) > 0).all()


def test_counts_by_atomics():
    @pbkern.kernel(
        grid=(4,),
        in_specs=[BlockSpec((100,), lambda i: (i,)), BlockSpec()],
        out_specs=BlockSpec(),
        out_shape=shape(10, dtype=jnp.int32),
        input_output_aliases={1: 0},
    )
    def kernel(x, zeros, o):
        pbkern.atomic_add(o, (x[...],), jnp.ones((100,), jnp.int32))

    x = RNG.integers(0, 10, 400).astype("i4")
    np.testing.assert_array_equal(
        pbkern.simulate(kernel, x, np.zeros(10, "i4")).results[0], np.bincount(x, minlength=10)
    )


def test_rows_from_computed_places():
    @pbkern.kernel(out_shape=shape(7, 8))
    def kernel(x, starts, o):
        def step(k, carry):
            o[pbkern.ds(k, 1), :] = x[pbkern.ds(starts[k], 1), pbkern.ds(starts[k] % 5, 8)]
            return carry

        lax.fori_loop(0, 7, step, 0)

    x, starts = normal(20, 16), RNG.integers(0, 20, 7).astype("i4")
    want = np.stack([x[k, k % 5 : k % 5 + 8] for k in starts])
    np.testing.assert_array_equal(pbkern.simulate(kernel, x, starts).results[0], want)


def test_positive_elements_are_compacted():
    """A counter that decides where the next element goes."""
    rows = BlockSpec((1, 50), lambda i: (i, 0))

    @pbkern.kernel(
        grid=(3,), in_specs=[rows], out_specs=rows, out_shape=shape(3, 50, dtype=jnp.int32)
    )
    def kernel(x, o):
        o[...] = jnp.full((1, 50), -1, jnp.int32)

        def step(k, n):
            keep = x[0, k] > 0

            @pbkern.when(keep)
            def _():
                o[0, n] = k

            return n + keep.astype(jnp.int32)

        lax.fori_loop(0, 50, step, 0)

    x = normal(3, 50)
    want = np.full((3, 50), -1)
    for row, places in zip(want, map(np.flatnonzero, x > 0)):
        row[: len(places)] = places
    np.testing.assert_array_equal(pbkern.simulate(kernel, x).results[0], want)


def test_scalars_are_read_anew_behind_a_store():
    @pbkern.kernel(out_shape=shape(5, dtype=jnp.int32), scratch_shapes=[Scratch((1,), jnp.int32)])
    def kernel(x, o, t):
        t[0] = x[0]
        o[0] = x[t[0]]
        t[0] = t[0] + 1
        o[1] = x[t[0]]
        t[0] = t[0] * 2
        o[2] = lax.fori_loop(0, t[0], lambda k, s: s + k, 0)
        t[0] = 1
        o[3] = lax.fori_loop(0, t[0] + 3, lambda k, s: s + k, 0)
        o[4] = t[0]

    x = np.array([1, 5, 7, 2, 11, 3], "i4")
    np.testing.assert_array_equal(pbkern.simulate(kernel, x).results[0], [5, 7, 6, 6, 1])


def test_a_carry_from_block_to_block():
    line = BlockSpec((64,), lambda i: (i,))

    @pbkern.kernel(
        grid=(4,),
        in_specs=[line],
        out_specs=line,
        out_shape=shape(230),
        scratch_shapes=[Scratch((1,), jnp.float32)],
        compiler_params=in_order("sequential"),
    )
    def kernel(x, o, carry):
        @pbkern.when(pbkern.program_id(0) == 0)
        def _():
            carry[...] = jnp.zeros((1,))

        v = jnp.where(pbkern.in_bounds(x, 0), x[...], 0)
        o[...] = jnp.cumsum(v) + carry[...]
        carry[...] += v.sum(keepdims=True)

    x = normal(230)
    close(pbkern.simulate(kernel, x).results[0], np.cumsum(x, dtype="f8"), 1e-4)


def test_compensated_sums_of_doubles():
    with jax.enable_x64(True):

        @pbkern.kernel(
            grid=(3,),
            in_specs=[BlockSpec((50,), lambda i: (i,))],
            out_specs=BlockSpec((1,), lambda i: (0,)),
            out_shape=shape(1, dtype=jnp.float64),
            scratch_shapes=[Scratch((2,), jnp.float64)],
            compiler_params=in_order("arbitrary"),
        )
        def kernel(x, o, t):
            @pbkern.when(pbkern.program_id(0) == 0)
            def _():
                t[...] = jnp.zeros((2,))

            y = x[...].sum() - t[1]
            z = t[0] + y
            t[1] = (z - t[0]) - y
            t[0] = z
            o[0] = z

        x = RNG.standard_normal(150)
        close(pbkern.simulate(kernel, x).results[0], [x.sum()], 1e-12)


def test_hashes_of_64_bits():
    with jax.enable_x64(True):
        line, factor = BlockSpec((37,), lambda i: (i,)), np.uint64(0xFF51AFD7ED558CCD)

        def mixed(h):
            for _ in range(3):
                h = (h ^ (h >> np.uint64(33))) * factor
            return h // np.uint64(7) + h % np.uint64(11)

        @pbkern.kernel(
            grid=(3,), in_specs=[line], out_specs=line, out_shape=shape(100, dtype=jnp.uint64)
        )
        def kernel(x, o):
            o[...] = mixed(x[...])

        x = RNG.integers(0, 2**63, 100).astype("u8")
        np.testing.assert_array_equal(pbkern.simulate(kernel, x).results[0], mixed(x))


def test_halves_at_ragged_ends():
    rows = BlockSpec((5, 17), lambda i: (i, 0))

    @pbkern.kernel(
        grid=(3,),
        in_specs=[rows, rows],
        out_specs=[rows, BlockSpec((5,), lambda i: (i,))],
        out_shape=[shape(13, 17, dtype=jnp.bfloat16), shape(13, dtype=jnp.float16)],
    )
    def kernel(x, y, product, total):
        product[...] = (x[...].astype(jnp.float32) * y[...]).astype(jnp.bfloat16)
        total[...] = x[...].sum(1).astype(jnp.float16)

    x, y = normal(13, 17).astype("f2"), normal(13, 17)
    product, total = pbkern.simulate(kernel, x, y).results
    close(product, x.astype("f8") * y, 1e-2)
    close(total, x.astype("f8").sum(1), 1e-2)


def test_one_buffer_turned_and_one_as_it_is():
    """Shared memory for what other threads read, registers for what they do not, in one kernel."""

    @pbkern.kernel(
        out_shape=[shape(24, 40), shape(40, 24)],
        scratch_shapes=[Scratch((40, 24), jnp.float32), Scratch((24, 40), jnp.float32)],
    )
    def kernel(x, plain, turned, t, u):
        t[...] = x[...].T
        u[...] = x[...] * 2
        plain[...] = u[...] + 1
        u[...] = u[...] * u[...]
        plain[...] += u[...]
        turned[...] = t[...] * 3

    x = normal(24, 40)
    plain, turned = pbkern.simulate(kernel, x).results
    close(plain, 2 * x + 1 + 4 * x * x)
    close(turned, 3 * x.T)


def test_two_sequential_dimensions_with_ragged_ends():
    block = BlockSpec((1, 4, 8), lambda b, i, j: (b, i, j))

    @pbkern.kernel(
        grid=(2, 3, 2),
        in_specs=[block],
        out_specs=BlockSpec((1, 4, 8), lambda b, i, j: (b, 0, 0)),
        out_shape=shape(2, 4, 8),
        scratch_shapes=[Scratch((1, 4, 8), jnp.float32)],
        compiler_params=in_order("parallel", "arbitrary", "arbitrary"),
    )
    def kernel(x, o, total):
        @pbkern.when((pbkern.program_id(1) == 0) & (pbkern.program_id(2) == 0))
        def _():
            total[...] = jnp.zeros_like(total)

        inside = pbkern.in_bounds(x, 1)[None, :, None] & pbkern.in_bounds(x, 2)[None, None]
        total[...] += jnp.where(inside, x[...], 0)
        o[...] = total[...]

    x = normal(2, 10, 13)
    whole = np.zeros((2, 12, 16))
    whole[:, :10, :13] = x
    close(pbkern.simulate(kernel, x).results[0], whole.reshape(2, 3, 4, 2, 8).sum((1, 3)))


@pytest.mark.parametrize("seed", [0, 1])
def test_branches_on_data_and_flags(seed):
    rows = BlockSpec((1, 19), lambda i: (i, 0))

    @pbkern.kernel(
        grid=(4,), in_specs=[rows, rows], out_specs=rows, out_shape=shape(4, 19, dtype=jnp.bool_)
    )
    def kernel(x, flags, o):
        o[...] = lax.cond(x[...].sum() > 0, lambda: flags[...] ^ (x[...] > 0), lambda: ~flags[...])

    rng = np.random.default_rng(seed)
    x, flags = rng.standard_normal((4, 19)).astype("f4"), rng.random((4, 19)) > 0.5
    want = np.where(x.sum(1, keepdims=True) > 0, (x > 0) ^ flags, ~flags)
    np.testing.assert_array_equal(pbkern.simulate(kernel, x, flags).results[0], want)


def test_products_of_bytes():
    @pbkern.kernel(
        grid=(2, 2),
        in_specs=[
            BlockSpec((20, 33), lambda i, j: (i, 0)),
            BlockSpec((19, 33), lambda i, j: (j, 0)),
        ],
        out_specs=BlockSpec((20, 19), lambda i, j: (i, j)),
        out_shape=shape(37, 30, dtype=jnp.int32),
    )
    def kernel(a, b, o):
        o[...] = lax.dot_general(
            a[...], b[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
        )

    a, b = (RNG.integers(-100, 100, (n, 33)).astype("i1") for n in (37, 30))
    np.testing.assert_array_equal(
        pbkern.simulate(kernel, a, b).results[0], a.astype("i4") @ b.T.astype("i4")
    )
