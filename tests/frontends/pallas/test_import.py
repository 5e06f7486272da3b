"""pl.pallas_call kernels on CPU: blocks, grids, scratch, aliases, control flow and Refs mean what they mean in Pallas."""

import bisect
import functools
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt

import pbkern
from pbkern.core.errors import KernelError, UnsupportedOp
from pbkern.dsl.printer import rebuild, same_kernel
from pbkern.frontends.pallas.call import import_call

F32 = jnp.float32


def struct(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def imported(f, *args):
    """The dsl.Kernel of the pallas_call in f."""
    eqn = next(e for e in jax.make_jaxpr(f)(*args).jaxpr.eqns if e.primitive.name == "pallas_call")
    return import_call(**{k: v for k, v in eqn.params.items() if k != "interpret"}).kernel


def add_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def add(x, y, **options):
    spec = pl.BlockSpec((8,), lambda i: (i,))
    return pl.pallas_call(
        add_kernel, out_shape=x, grid=(4,), in_specs=[spec, spec], out_specs=spec, **options
    )(x, y)


X, Y = np.arange(32, dtype="f4"), np.ones(32, "f4")


def matmul(x, y, semantics=None):
    def kernel(x_ref, y_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=F32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...]

    return pl.pallas_call(
        kernel,
        out_shape=struct(64, 64),
        grid=(2, 2, 4),
        in_specs=[
            pl.BlockSpec((32, 16), lambda i, j, k: (i, k)),
            pl.BlockSpec((16, 32), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((32, 32), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((32, 32), F32)],
        compiler_params=None
        if semantics is None
        else pltpu.CompilerParams(dimension_semantics=semantics),
    )(x, y)


# --- transformations -----------------------------------------------------------------------------------------------


def test_works_under_jit_vmap_jvp_and_scan():
    np.testing.assert_array_equal(jax.jit(add)(X, Y), X + 1)
    batch = np.stack([X, 2 * X])
    np.testing.assert_array_equal(jax.vmap(add, (0, None))(batch, Y), batch + 1)
    np.testing.assert_array_equal(jax.jvp(add, (X, Y), (X, Y))[1], X + 1)
    three = jax.jit(lambda x: jax.lax.scan(lambda c, _: (add(c, Y), None), x, None, length=3)[0])
    np.testing.assert_array_equal(three(X), X + 3)


def test_exports_as_the_interpreters_program():
    exported = jax.export.export(jax.jit(add), platforms=["cpu"])(X, Y)
    assert "pbkern" not in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(X, Y), X + 1)


def test_interpret_mode_reaches_jax():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    for interpret in (True, pltpu.InterpretParams()):
        f = jax.jit(pl.pallas_call(kernel, out_shape=struct(8, 128), interpret=interpret))
        assert "pbkern" not in f.lower(np.ones((8, 128), "f4")).as_text()
        np.testing.assert_array_equal(f(np.ones((8, 128), "f4")), 2)


def test_uninstalled_lowering_is_jax_s():
    pbkern.pallas.uninstall()
    try:
        with pytest.raises(Exception, match="interpret mode"):
            jax.jit(add)(X, Y)
    finally:
        pbkern.pallas.install()
    np.testing.assert_array_equal(jax.jit(add)(X, Y), X + 1)


# --- grids and blocks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "semantics", [None, ("parallel", "parallel", "arbitrary"), ("arbitrary",) * 3]
)
def test_scratch_accumulates_over_steps_in_order(semantics):
    x, y = np.random.default_rng(0).standard_normal((2, 64, 64)).astype("f4")
    np.testing.assert_allclose(
        jax.jit(functools.partial(matmul, semantics=semantics))(x, y), x @ y, rtol=1e-4, atol=1e-4
    )


def test_revisited_outputs_accumulate():
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...]

    f = pl.pallas_call(
        kernel, out_shape=struct(1, 8), grid=(4,), in_specs=[pl.BlockSpec((1, 8), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((1, 8), lambda i: (0, 0)),
    )  # fmt: skip
    np.testing.assert_array_equal(f(X.reshape(4, 8)), X.reshape(4, 8).sum(0, keepdims=True))


def test_an_output_used_as_scratch_is_private_to_a_thread():
    def kernel(x_ref, o_ref, total_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            total_ref[...] = jnp.zeros_like(total_ref)

        total_ref[...] += x_ref[...]
        o_ref[...] = total_ref[...]

    x = np.random.default_rng(3).integers(0, 9, (64, 8, 512)).astype("f4")
    block = pl.BlockSpec((None, None, 512), lambda i, j: (i, j, 0))
    f = pl.pallas_call(
        kernel, out_shape=(struct(64, 8, 512), struct(512)), grid=(64, 8), in_specs=[block],
        out_specs=(block, pl.BlockSpec((512,), lambda i, j: (0,))),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )  # fmt: skip
    for _ in range(5):
        sums, last = f(x)
        np.testing.assert_array_equal(sums, np.cumsum(x, 1))
        np.testing.assert_array_equal(last, x[-1].sum(0))


def test_dynamic_grid():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * pl.num_programs(0)

    @jax.jit
    def f(n, x):
        spec = pl.BlockSpec((8,), lambda i: (i,))
        return pl.pallas_call(
            kernel,
            out_shape=x,
            grid=(n,),
            in_specs=[spec],
            out_specs=spec,
            input_output_aliases={0: 0},
        )(x)

    want = np.where(np.arange(32) < 16, X * 2, X)
    np.testing.assert_array_equal(f(2, X), want)


def test_scalar_prefetch_chooses_blocks():
    def kernel(table_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] + table_ref[pl.program_id(0)].astype(F32)

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(4,), in_specs=[pl.BlockSpec((8,), lambda i, table: (table[i],))],
        out_specs=pl.BlockSpec((8,), lambda i, table: (i,)),
    )  # fmt: skip
    table = np.array([3, 1, 1, 0], np.int32)
    got = pl.pallas_call(kernel, out_shape=struct(32), grid_spec=spec)(table, X)
    np.testing.assert_array_equal(got, (X.reshape(4, 8)[table] + table[:, None]).ravel())


def test_squeezed_element_and_ragged_blocks():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[1:] - x_ref[:-1]

    f = pl.pallas_call(
        kernel, out_shape=struct(3, 29), grid=(3, 4),
        in_specs=[pl.BlockSpec((None, pl.Element(9, (0, 4))), lambda i, j: (i, j * 8))],
        out_specs=pl.BlockSpec((None, 8), lambda i, j: (i, j)),
    )  # fmt: skip
    x = np.random.default_rng(1).standard_normal((3, 30)).astype("f4")
    np.testing.assert_array_equal(f(x), np.diff(x))


def test_named_grid():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + jax.lax.axis_index("row") * pl.num_programs(0)

    spec = pl.BlockSpec((8,), lambda i: (i,))
    f = pl.pallas_call(
        kernel, out_shape=struct(32), grid=(("row", 4),), in_specs=[spec], out_specs=spec
    )
    np.testing.assert_array_equal(f(X), X + np.repeat(np.arange(4), 8) * 4)


def test_blocks_that_are_not_written_keep_the_aliased_operand():
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) % 2 == 0)
        def _():
            o_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((8,), lambda i: (i,))
    f = pl.pallas_call(
        kernel,
        out_shape=struct(32),
        grid=(4,),
        in_specs=[spec],
        out_specs=spec,
        input_output_aliases={0: 0},
    )
    want = X * np.repeat([2, 1, 2, 1], 8)
    x = jnp.asarray(X)
    np.testing.assert_array_equal(jax.jit(f)(x), want)
    np.testing.assert_array_equal(x, X)  # not donated, so not overwritten
    donating = jax.jit(f, donate_argnums=0)
    address = x.unsafe_buffer_pointer()
    got = donating(x)
    np.testing.assert_array_equal(got, want)
    assert got.unsafe_buffer_pointer() == address


# --- Refs ----------------------------------------------------------------------------------------------------------


def one_program(kernel, out, *args, **options):
    return pl.pallas_call(kernel, out_shape=out, **options)(*args)


A = np.arange(48, dtype="f4").reshape(6, 8)


READS = [
    (lambda r: r[1:5:2, pl.ds(2, 3)], A[1:5:2, 2:5]),
    (lambda r: r.at[2:5].at[1][3:], A[3, 3:]),
    (lambda r: r[jnp.arange(3) * 2], A[:6:2]),
    (lambda r: r[-jnp.arange(3) - 1, jnp.arange(3)], A[[-1, -2, -3], [0, 1, 2]]),
    (lambda r: r.reshape(8, 6)[2:4], A.reshape(8, 6)[2:4]),
    (lambda r: r.reshape(2, 3, 8).at[1][1:, 2], A.reshape(2, 3, 8)[1, 1:, 2]),
    (lambda r: r.T[3:5], A.T[3:5]),
    (lambda r: r.T.at[3:5].at[1][2:], A.T[4, 2:]),
    (lambda r: r.bitcast(jnp.int32)[1], A.view("i4")[1]),
    (lambda r: r[jnp.int32(2) + jnp.arange(2)[0]], A[2]),
]


@pytest.mark.parametrize(("read", "want"), READS)
def test_reads_through_indices_and_transforms(read, want):
    def kernel(x_ref, o_ref):
        o_ref[...] = read(x_ref)

    np.testing.assert_array_equal(
        one_program(kernel, jax.ShapeDtypeStruct(want.shape, want.dtype), A), want
    )


def changed(subscript, value, view=lambda a: a):
    """A after view(A)[subscript] = value."""
    out = A.copy()
    view(out)[subscript] = value
    return out


CHOSEN = np.array([3, 0, 5])


def chosen():
    """CHOSEN as an array that a body computes."""
    return (3 - 3 * (jnp.arange(3) % 2) + 2 * (jnp.arange(3) // 2)).astype(jnp.int32)


WRITES = [
    (lambda r: r.at[1:5:2, pl.ds(2, 3)].set(-jnp.ones((2, 3))), changed(np.s_[1:5:2, 2:5], -1)),
    (lambda r: r.at[2:5].at[1].set(-jnp.ones(8)), changed(3, -1)),
    (
        lambda r: r.reshape(8, 6).at[2:4].set(-jnp.ones((2, 6))),
        changed(np.s_[2:4], -1, lambda a: a.reshape(8, 6)),
    ),
    (lambda r: r.T.at[3].set(jnp.arange(6.0)), changed(3, np.arange(6), lambda a: a.T)),
    (
        lambda r: r.bitcast(jnp.int32).at[1].set(jnp.ones(8, jnp.int32)),
        changed(1, 1, lambda a: a.view("i4")),
    ),
    (
        lambda r: r.reshape(8, 6).at[chosen()].set(-jnp.ones((3, 6))),
        changed(CHOSEN, -1, lambda a: a.reshape(8, 6)),
    ),
    (
        lambda r: r.reshape(8, 6).at[1:3, chosen()].set(jnp.arange(6.0).reshape(2, 3)),
        changed(np.s_[1:3, CHOSEN], np.arange(6.0).reshape(2, 3), lambda a: a.reshape(8, 6)),
    ),
    (lambda r: r.T.at[chosen()].set(-jnp.ones((3, 6))), changed(CHOSEN, -1, lambda a: a.T)),
    (
        lambda r: r.at[2:6].reshape(2, 16).at[:, chosen()].set(-jnp.ones((2, 3))),
        changed(np.s_[:, CHOSEN], -1, lambda a: a[2:6].reshape(2, 16)),
    ),
]


@pytest.mark.parametrize(("write", "want"), WRITES)
def test_writes_through_indices_and_transforms(write, want):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        write(o_ref)

    np.testing.assert_array_equal(one_program(kernel, struct(6, 8), A), want)


def test_masked_loads_and_stores():
    def kernel(x_ref, o_ref):
        at = pl.program_id(0) * 16 + jnp.arange(16)
        value = plt.load(x_ref.at[at], mask=at < 20, other=7.0)
        plt.store(o_ref.at[at], value + 1, mask=at < 30)

    got = pl.pallas_call(kernel, out_shape=struct(30), grid=(2,))(np.arange(20, dtype="f4"))
    np.testing.assert_array_equal(got, np.concatenate([np.arange(20) + 1, np.full(10, 8)]))


def test_masks_that_always_hold_cost_nothing():
    def f(x, width):
        def kernel(x_ref, o_ref):
            inside = (jnp.arange(8) < width)[None, :]
            value = plt.load(x_ref.at[:, :], mask=inside, other=5.0)
            plt.store(
                o_ref.at[:, :],
                jnp.where(jnp.arange(8) >= 0, value, 9.0),
                mask=inside | (jnp.arange(8) >= 0),
            )

        return pl.pallas_call(kernel, out_shape=x)(x)

    for width, masked in ((8, 0), (6, 1)):
        np.testing.assert_array_equal(f(A, width), np.where(np.arange(8) < width, A, 5))
        source = imported(functools.partial(f, width=width), A).source()
        assert source.count("mask=") == masked
        assert "where" not in source
        assert "select" not in source


def test_run_scoped_gives_private_memory_and_stays_parallel():
    def f(x):
        def kernel(x_ref, o_ref):
            def scoped(a, b):
                a[...] = x_ref[...] * 2
                b[...] = a[...] + 1
                o_ref[...] = a[...] + b[...]

            pl.run_scoped(scoped, pltpu.VMEM((8,), F32), b=pltpu.VMEM((8,), F32))

        spec = pl.BlockSpec((8,), lambda i: (i,))
        return pl.pallas_call(kernel, out_shape=x, grid=(4,), in_specs=[spec], out_specs=spec)(x)

    np.testing.assert_array_equal(f(X), X * 4 + 1)
    assert all(s.scoped for s in imported(f, X).scratch)


ATOMICS = {
    plt.atomic_add: np.add,
    plt.atomic_max: np.maximum,
    plt.atomic_min: np.minimum,
    plt.atomic_and: np.bitwise_and,
    plt.atomic_or: np.bitwise_or,
    plt.atomic_xor: np.bitwise_xor,
}


@pytest.mark.parametrize("atomic", ATOMICS)
def test_atomics_reach_every_element_in_turn(atomic):
    rng = np.random.default_rng(2)
    at, values = rng.integers(0, 8, 64).astype("i4"), rng.integers(0, 255, 64).astype("i4")

    def kernel(at_ref, x_ref, start_ref, o_ref):
        atomic(o_ref, (at_ref[...],), x_ref[...])

    spec = pl.BlockSpec((16,), lambda i: (i,))
    whole = pl.BlockSpec((8,), lambda i: (0,))
    f = pl.pallas_call(
        kernel, out_shape=struct(8, dtype=jnp.int32), grid=(4,), in_specs=[spec, spec, whole], out_specs=whole,
        input_output_aliases={2: 0}, compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )  # fmt: skip
    want = np.full(8, 99, np.int32)
    ATOMICS[atomic].at(want, at, values)
    np.testing.assert_array_equal(f(at, values, np.full(8, 99, np.int32)), want)


def test_atomics_take_slices_beside_array_indices():
    def kernel(at_ref, start_ref, o_ref):
        plt.atomic_add(o_ref, (slice(0, 2), at_ref[...]), jnp.ones((2, 3)))

    at, start = np.array([1, 1, 3], np.int32), np.zeros((4, 5), "f4")
    got = pl.pallas_call(kernel, out_shape=struct(4, 5), input_output_aliases={1: 0})(at, start)
    want = start.copy()
    np.add.at(want[:2], (slice(None), at), 1)
    np.testing.assert_array_equal(got, want)


def test_negative_elements_of_array_indices_count_from_the_end():
    """In updates as in loads and stores, as in JAX's interpreter."""
    at, x = np.array([-1, 2, -3, 0], np.int32), np.arange(1, 5, dtype="f4")

    def kernel(at_ref, x_ref, loaded_ref, stored_ref, added_ref):
        stored_ref[...] = jnp.zeros(8)
        added_ref[...] = jnp.ones(8)
        stored_ref[at_ref[...]] = x_ref[...]
        loaded_ref[...] = stored_ref[at_ref[...]]
        plt.atomic_add(added_ref, (at_ref[...],), x_ref[...])

    call = functools.partial(pl.pallas_call, kernel, out_shape=(struct(4), struct(8), struct(8)))
    for got, want in zip(call()(at, x), call(interpret=True)(at, x)):
        np.testing.assert_array_equal(got, want)


def test_bounded_slices():
    parts = np.array([[11, 16], [8, 11], [3, 8], [0, 3]], "i4")

    def part(i, parts_ref):
        return pl.ds(parts_ref[i, 0], parts_ref[i, 1] - parts_ref[i, 0]), 0

    def kernel(parts_ref, x_ref, size_ref, o_ref):
        o_ref[...] = x_ref[...] * (pl.program_id(0) + 1) + size_ref[...]

    block, whole = (
        pl.BlockSpec((pl.BoundedSlice(8), 4), part),
        pl.BlockSpec((1, 4), lambda i, parts_ref: (0, 0)),
    )
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(4,), in_specs=[block, whole], out_specs=block
    )
    x = np.random.default_rng(0).standard_normal((16, 4)).astype("f4")
    got = pl.pallas_call(kernel, out_shape=struct(16, 4), grid_spec=spec)(
        parts, x, np.full((1, 4), 2, "f4")
    )
    want = np.empty_like(x)
    for i, (low, high) in enumerate(parts):
        want[low:high] = x[low:high] * (i + 1) + 2
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_compare_and_swap():
    def kernel(lock_ref, o_ref, old_ref):
        old_ref[0] = plt.atomic_cas(o_ref, 1, 5)
        old_ref[1] = plt.atomic_cas(o_ref, 1, 6)

    out = (struct(dtype=jnp.int32), struct(2, dtype=jnp.int32))
    value, old = pl.pallas_call(kernel, out_shape=out, input_output_aliases={0: 0})(np.int32(1))
    assert value == 5
    assert list(old) == [1, 5]


def test_scan_with_inputs_and_outputs():
    def kernel(x_ref, o_ref):
        def step(total, row):
            return total + row, total * 2

        o_ref[...] = jax.lax.scan(step, jnp.zeros(8), x_ref[...])[1]

    want = jax.lax.scan(lambda t, r: (t + r, t * 2), jnp.zeros(8), A)[1]
    np.testing.assert_allclose(one_program(kernel, struct(6, 8), A), want)


def test_int4_blocks():
    def kernel(x_ref, o_ref):
        o_ref[...] = (x_ref[...].astype(jnp.int32) + 3).astype(jnp.int4)

    x = jnp.arange(-8, 8).astype(jnp.int4)
    got = one_program(kernel, jax.ShapeDtypeStruct((16,), jnp.int4), x)
    np.testing.assert_array_equal(got.astype(int), ((np.arange(-8, 8) + 3 + 8) % 16) - 8)


NARROW = [jnp.float8_e5m2, jnp.float8_e4m3fn, jnp.float8_e8m0fnu, jnp.float4_e2m1fn]


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_floats(dtype):
    bits = jnp.uint4 if dtype == jnp.float4_e2m1fn else jnp.uint8
    x = jax.lax.bitcast_convert_type(
        (jnp.arange(256) % (jnp.iinfo(bits).max + 1)).astype(bits), dtype
    )

    def kernel(x_ref, wide_ref, narrow_ref):
        wide_ref[...] = x_ref[...].astype(F32)
        narrow_ref[...] = (x_ref[...].astype(F32) * 0.37).astype(dtype)

    wide, narrow = one_program(kernel, (struct(256), jax.ShapeDtypeStruct((256,), dtype)), x)
    np.testing.assert_array_equal(wide, x.astype(F32))
    np.testing.assert_array_equal(
        narrow.astype(F32), (x.astype(F32) * 0.37).astype(dtype).astype(F32)
    )


@pytest.mark.parametrize("source", [F32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_to_narrow_floats(dtype, source):
    high = np.arange(1 << 16, dtype=np.uint32) << 16  # every exponent, and what lies between them
    bits = np.concatenate([high, high | 0xFFFF, high | 1])
    x = bits.view(np.float32) if source == F32 else np.arange(1 << 16, dtype=np.uint16).view(source)

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].astype(dtype)

    got = one_program(kernel, jax.ShapeDtypeStruct(x.shape, dtype), x)
    with np.errstate(all="ignore"):
        want = x.astype(dtype)
    np.testing.assert_array_equal(np.asarray(got).astype(np.float32), want.astype(np.float32))


def test_a_slice_longer_than_its_ref_is_an_error():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(16)]

    with pytest.raises(
        KernelError,
        match=r"longer than its Ref\n  at   .*test_import.py[\s\S]*16 elements of 8 along axis 0",
    ):
        one_program(kernel, struct(16), jnp.zeros(8))


def rounded_once(x, dtype):
    """float64 or integers -> the nearest of `dtype` by Python's exact comparisons; of two at one distance the even one, and
    the larger power of two."""
    name = np.dtype(dtype).name
    if name == "float8_e8m0fnu":
        values, beyond = [2.0**k for k in range(-127, 129)], np.nan
    else:
        count, beyond = {
            "float8_e5m2": (124, np.inf),
            "float8_e4m3fn": (127, np.nan),
            "float4_e2m1fn": (8, 6.0),
        }[name]
        values = [float(v) for v in np.arange(count, dtype=np.uint8).view(dtype).astype(np.float64)]
        values.append(2 * values[-1] - values[-2])  # what is nearer to this is too large
    middles = [Fraction(a) / 2 + Fraction(b) / 2 for a, b in itertools.pairwise(values)]

    def one(v):
        size = abs(Fraction(v))
        n = bisect.bisect_left(middles, size)
        if n < len(middles) and middles[n] == size and (name == "float8_e8m0fnu" or n % 2 == 1):
            n += 1
        return math.copysign(values[n] if n < len(values) - 1 else beyond, v)

    return np.array([np.nan if name == "float8_e8m0fnu" and v <= 0 else one(v) for v in x.tolist()])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source", [np.float64, np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("dtype", NARROW)
def test_wide_numbers_are_rounded_to_narrow_floats_once(dtype, source):
    """What lies a little beside the middle of two must not become that middle on the way."""
    if source == np.float64:
        near = (
            np.arange(1 << 11, dtype=np.uint64) + (999 << 10)
        ) << 42  # mantissas of 10 bits, 2**-24 and up
        middles = np.concatenate(
            [near.view("f8"), [448.0, 464.0, 480.0, 57344.0, 61440.0, 1.5 * 2.0**100, 1e39]]
        )
        x = [s * np.nextafter(middles, m) for s in (1, -1) for m in (0, np.inf)] + [
            middles,
            [0.0, -0.0, 1e-50, 3e38],
        ]
        x = np.concatenate(x)
    else:
        middles = [m << k for k in range(64) for m in (1, 3, 5)] + [464, 61440]
        near = [s * (m + e) for m in middles for e in (-1, 0, 1) for s in (1, -1)]
        x = np.array([v for v in near if np.iinfo(source).min <= v <= np.iinfo(source).max], source)

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].astype(dtype)

    with jax.enable_x64(True):
        got = one_program(kernel, jax.ShapeDtypeStruct(x.shape, dtype), jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), rounded_once(x, dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_literals_as_operands_of_control_flow(dtype):
    two = np.asarray(2, dtype)

    def kernel(x_ref, o_ref):
        x = x_ref[...]
        one = jax.lax.cond(x_ref[0] == x_ref[0], lambda v: v, lambda v: v * v, two)
        carried, _ = jax.lax.scan(lambda c, _: (c * two, None), two, None, length=2)
        left = jax.lax.while_loop(lambda c: c < np.asarray(16, dtype), lambda c: c * two, two)
        o_ref[...] = x * one * carried * left

    x = jnp.asarray([0.25, 1, 0.5], dtype)
    got = one_program(kernel, jax.ShapeDtypeStruct((3,), dtype), x)
    np.testing.assert_array_equal(got.astype(F32), (x.astype(F32) * 256).astype(dtype).astype(F32))


CALCULATIONS = {
    "sum": lambda x: x + x,
    "product": lambda x: x * x * x,
    "negation": lambda x: -x,
    "literal": lambda x: x * x.dtype.type(0.5),
    "comparison": lambda x: jnp.where(x > x.dtype.type(1), x, x.dtype.type(2)),
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, v: v + x, x),
    "to integer": lambda x: (
        jnp.where(x < x.dtype.type(100), x, x.dtype.type(1)).astype(jnp.int32).astype(x.dtype)
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", CALCULATIONS)
def test_calculations_with_8_bit_floats_round_each_time(name, dtype):
    def kernel(x_ref, o_ref):
        o_ref[...] = CALCULATIONS[name](x_ref[...])

    x = np.arange(256, dtype=np.uint8).view(dtype)
    got = one_program(kernel, jax.ShapeDtypeStruct((256,), dtype), x)
    want = CALCULATIONS[name](jnp.asarray(x))
    np.testing.assert_array_equal(
        np.asarray(got).astype(np.float32), np.asarray(want).astype(np.float32)
    )


@pytest.mark.parametrize("dtype", NARROW[:3])
def test_8_bit_floats_that_are_only_moved(dtype):
    def kernel(x_ref, o_ref, byte_ref, float_ref):
        o_ref[...] = jnp.where(jax.lax.iota(jnp.int32, 256) < 300, x_ref[...], x_ref[...][::-1])
        byte_ref[...] = jax.lax.bitcast_convert_type(x_ref[...], jnp.uint8)
        float_ref[...] = jax.lax.bitcast_convert_type(byte_ref[...], dtype)

    byte = np.arange(256, dtype=np.uint8)
    value = jax.ShapeDtypeStruct((256,), dtype)
    nan = np.isnan(byte.view(dtype).astype(np.float32))
    for got in one_program(
        kernel, (value, struct(256, dtype=jnp.uint8), value), jnp.asarray(byte.view(dtype))
    ):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8)[~nan], byte[~nan])
        assert np.isnan(np.asarray(got).view(dtype).astype(np.float32)).tolist() == nan.tolist()


def test_debug_print(capfd):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        jax.debug.print("x = {}", x_ref)

        @pl.when(pl.program_id(0) == 1)
        def _():
            jax.debug.print("last: {a} of {b}", a=x_ref[1] + 1, b=pl.program_id(0))

    spec = pl.BlockSpec((2,), lambda i: (i,))
    f = pl.pallas_call(kernel, out_shape=struct(4), grid=(2,), in_specs=[spec], out_specs=spec)
    jax.block_until_ready(f(np.array([4.2, 2.4, 1, 2], "f4")))
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "last: 3.0 of 1",
        "x = [1. 2.]",
        "x = [4.2 2.4]",
    ]


def test_kernels_of_one_program_print_each_in_its_way(capfd):
    def copied(text):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...]
            jax.debug.print(text, x_ref)

        return pl.pallas_call(kernel, out_shape=struct(2))

    f = pbkern.jit(lambda x: copied("second {}")(copied("first {}")(x)))
    jax.block_until_ready(f(np.array([1, 2], "f4")))
    assert capfd.readouterr().out.splitlines() == ["first [1. 2.]", "second [1. 2.]"]


# --- imported kernels are kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("f", "args"), [(add, (X, Y)), (matmul, (np.ones((64, 64), "f4"),) * 2)])
def test_imported_kernels_print_as_source_that_rebuilds_them(f, args):
    k = imported(f, *args)
    assert same_kernel(rebuild(str(k)), k)
    np.testing.assert_allclose(pbkern.interpret(k, *args)[0], f(*args), rtol=1e-5)


# --- refusals ------------------------------------------------------------------------------------------------------


def test_what_needs_hardware_is_refused_at_the_user_s_line():
    def kernel(x_ref, o_ref, sem):
        o_ref[0] = x_ref[0] + pl.semaphore_read(sem).astype(F32)

    f = pl.pallas_call(kernel, out_shape=struct(8), scratch_shapes=[pltpu.SemaphoreType.REGULAR])
    with pytest.raises(UnsupportedOp, match=r"semaphore_read[\s\S]*test_import.py"):
        f(np.ones(8, "f4"))


def test_copies_and_signals_to_other_devices_are_refused():
    def copies(x_ref, o_ref, send, receive):
        pltpu.make_async_remote_copy(
            x_ref, o_ref, send, receive, device_id=1, device_id_type=pl.DeviceIdType.LOGICAL
        ).start()

    def signals(x_ref, o_ref, send, receive):
        pl.semaphore_signal(receive, device_id=1, device_id_type=pl.DeviceIdType.LOGICAL)

    for body, what in (
        (copies, "a copy to another device"),
        (signals, "a signal to another device"),
    ):
        f = pl.pallas_call(
            body, out_shape=struct(8, 128), in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY), scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR],
        )  # fmt: skip
        with pytest.raises(UnsupportedOp, match=what):
            f(np.ones((8, 128), "f4"))


def test_a_primitive_without_rule_is_named_with_its_line():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.linalg.svd(x_ref[...])[0]

    with pytest.raises(UnsupportedOp, match=r"svd[^`]*`[\s\S]*test_import.py"):
        one_program(kernel, struct(4, 4), np.eye(4, dtype="f4"))


@pytest.mark.parametrize(
    "params",
    [pltpu.CompilerParams(collective_id=1), plgpu.CompilerParams(profile_space=3, profile_dir="x")],
)
def test_compiler_params_without_counterpart_are_refused(params):
    with pytest.raises(UnsupportedOp, match=r"collective_id|profile_space"):
        add(X, Y, compiler_params=params)


# --- checks --------------------------------------------------------------------------------------------------------


def checked(check):
    def kernel(x_ref, o_ref):
        check(jnp.all(x_ref[...] < 20), "a block of x reaches 20")
        o_ref[...] = x_ref[...]

    spec = pl.BlockSpec((8,), lambda i: (i,))
    return lambda x: pl.pallas_call(
        kernel, out_shape=x, grid=(4,), in_specs=[spec], out_specs=spec
    )(x)


def test_a_checkify_check_fails_the_call():
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError),
        match=r"a block of x reaches 20[\s\S]*test_import.py",
    ):
        jax.block_until_ready(jax.jit(checked(checkify.check))(X))
    np.testing.assert_array_equal(jax.jit(checked(checkify.check))(X - 20), X - 20)


def test_debug_checks_fail_the_call_where_they_are_enabled():
    np.testing.assert_array_equal(jax.jit(checked(pl.debug_check))(X), X)
    with pl.enable_debug_checks(True):
        with pytest.raises(
            (jax.errors.JaxRuntimeError, ValueError), match="a block of x reaches 20"
        ):
            jax.block_until_ready(jax.jit(checked(pl.debug_check))(X))
        np.testing.assert_array_equal(jax.jit(checked(pl.debug_check))(X - 20), X - 20)


# --- bitcasts ------------------------------------------------------------------------------------------------------

WIDTHS = [
    jnp.int32,
    jnp.float32,
    jnp.int16,
    jnp.bfloat16,
    jnp.int8,
    jnp.uint8,
    jnp.float8_e5m2,
    jnp.float8_e8m0fnu,
]


@pytest.mark.sampled(15)
@pytest.mark.parametrize("new", WIDTHS)
@pytest.mark.parametrize("old", WIDTHS)
def test_bitcasts_between_all_widths(old, new):
    raw = np.random.default_rng(0).integers(
        0, 120, (32, 16 * np.dtype(old).itemsize), np.uint8
    )  # no NaN in any type
    x = jnp.asarray(raw.view(old).reshape(8, -1)[:, :16])

    def kernel(x_ref, o_ref, view_ref, last_ref):
        o_ref[...] = pltpu.bitcast(x_ref[...], new)
        view_ref[...] = x_ref.bitcast(new)[...]
        last_ref[...] = jax.lax.bitcast_convert_type(x_ref[...].reshape(last_in), new).reshape(
            last_out
        )

    def interpreted(*shapes):
        return pl.pallas_call(kernel, out_shape=shapes, interpret=True)(x)

    rows = 8 * np.dtype(old).itemsize // np.dtype(new).itemsize
    k = max(np.dtype(new).itemsize // np.dtype(old).itemsize, 1)
    last_in = (8, 16) if k == 1 else (8, 16 // k, k)
    last_out = (8, 16 * np.dtype(old).itemsize // np.dtype(new).itemsize)
    shapes = [jax.ShapeDtypeStruct(s, new) for s in ((rows, 16), (rows, 16), last_out)]
    got = pl.pallas_call(kernel, out_shape=shapes)(x)
    for a, b in zip(got, interpreted(*shapes)):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


# --- copies and state of TPU kernels -------------------------------------------------------------------------------


@pytest.mark.parametrize("semantics", ["parallel", "arbitrary"])
def test_local_copies_with_two_buffers(semantics):
    def kernel(x_ref, o_ref, buffers, results, arrive, leave):
        i, n = pl.program_id(0), 4

        def load(k):
            return pltpu.make_async_copy(
                x_ref.at[i, pl.ds(k * 8, 8)], buffers.at[k % 2], arrive.at[k % 2]
            )

        load(0).start()
        for k in range(n):
            if k + 1 < n:
                load(k + 1).start()
            load(k).wait()
            results[...] = buffers[k % 2] * 2 + k
            store = pltpu.make_async_copy(results, o_ref.at[i, pl.ds(k * 8, 8)], leave)
            store.start()
            store.wait()

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    f = pl.pallas_call(
        kernel, grid=(3,), out_shape=struct(3, 32, 128), in_specs=[anywhere], out_specs=anywhere,
        scratch_shapes=[pltpu.VMEM((2, 8, 128), F32), pltpu.VMEM((8, 128), F32), pltpu.SemaphoreType.DMA((2,)),
                        pltpu.SemaphoreType.DMA],
        compiler_params=pltpu.CompilerParams(dimension_semantics=(semantics,)),
    )  # fmt: skip
    x = np.random.default_rng(0).standard_normal((3, 32, 128)).astype("f4")
    want = x * 2 + np.repeat(np.arange(4, dtype="f4"), 8)[None, :, None]
    np.testing.assert_allclose(f(x), want, rtol=1e-6, atol=1e-6)


def test_signals_and_waits_of_one_device():
    def kernel(x_ref, o_ref, sem):
        pl.semaphore_signal(sem, 2)
        pl.semaphore_wait(sem, 2)
        o_ref[...] = x_ref[...] + 1

    f = pl.pallas_call(kernel, out_shape=struct(8), scratch_shapes=[pltpu.SemaphoreType.REGULAR])
    np.testing.assert_array_equal(f(np.ones(8, "f4")), 2)


def test_prefetched_operands_keep_what_programs_write():
    def kernel(count_ref, x_ref, o_ref):
        count_ref[0] += 1
        o_ref[...] = x_ref[...] * count_ref[0]

    block = pl.BlockSpec((8,), lambda i, count_ref: (i,))
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(4,), in_specs=[block], out_specs=block
    )
    count = jnp.array([10], jnp.int32)
    got = pl.pallas_call(kernel, out_shape=struct(32), grid_spec=spec)(count, X)
    np.testing.assert_array_equal(got, X * np.repeat(np.arange(11, 15), 8))
    assert count[0] == 10


def test_blocks_wider_than_their_output_keep_what_lies_outside():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.broadcast_to(x_ref[...].sum(1, keepdims=True), (4, 128))
        o_ref[:, 0:1] = o_ref[:, 127:128] + 1

    f = pl.pallas_call(
        kernel, grid=(2,), out_shape=struct(8, 1), in_specs=[pl.BlockSpec((4, 16), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((4, 128), lambda i: (i, 0)),
    )  # fmt: skip
    x = np.arange(128, dtype="f4").reshape(8, 16)
    np.testing.assert_allclose(f(x), x.sum(1, keepdims=True) + 1)


def test_index_maps_know_the_size_of_the_grid():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    f = pl.pallas_call(
        kernel, grid=(4,), out_shape=struct(32), in_specs=[pl.BlockSpec((8,), lambda i: (pl.num_programs(0) - 1 - i,))],
        out_specs=pl.BlockSpec((8,), lambda i: (i,)),
    )  # fmt: skip
    np.testing.assert_array_equal(f(X), X.reshape(4, 8)[::-1].ravel())


@pytest.mark.parametrize(
    "padding", [((0, 0), (0, 0)), ((1, 0), (2, 0)), ((0, 1), (0, 2)), ((2, 3), (1, 1))]
)
def test_elements_are_counted_from_the_padding_on(padding):
    """As JAX's interpreter does; what lies in the padding is not specified."""
    (top, bottom), (left, right) = padding
    shape = (8 - top - bottom, 9 - left - right)

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def f(interpret):
        block = pl.BlockSpec(
            (pl.Element(2, padding[0]), pl.Element(3, padding[1])), lambda i, j: (2 * i, 3 * j)
        )
        return pl.pallas_call(
            kernel, grid=(4, 3), out_shape=struct(*shape), in_specs=[block], out_specs=block, interpret=interpret
        )(x)  # fmt: skip

    x = np.random.default_rng(0).standard_normal(shape).astype("f4")
    np.testing.assert_array_equal(f(False), x * 2)
    np.testing.assert_array_equal(f(True), x * 2)


@pytest.mark.parametrize(("dtype", "k"), [("float32", 3), ("bfloat16", 1), ("int8", 19)])
def test_largest_elements(dtype, k):
    """lax.top_k: equal elements in order of their places, NaN first."""
    x = np.random.default_rng(0).integers(-5, 5, (5, 19)).astype(dtype)
    x[1] = np.array([np.nan, -0.0, 0.0] + [1.0] * 16).astype(dtype) if x.dtype.kind != "i" else 1

    def kernel(x_ref, o_ref, i_ref):
        o_ref[...], i_ref[...] = jax.lax.top_k(x_ref[...], k)

    with pbkern.pallas.installed():
        found = pl.pallas_call(
            kernel, out_shape=[struct(5, k, dtype=dtype), struct(5, k, dtype=jnp.int32)]
        )(x)
    for got, want in zip(found, jax.lax.top_k(x, k)):
        np.testing.assert_array_equal(np.asarray(got, "f4"), np.asarray(want, "f4"))


@pytest.mark.parametrize("known", [False, True])
def test_loads_and_stores_over_the_end_do_not_move(known):
    """Of a slice that starts at 5 of 8 the first three elements are there, as without bounds on a GPU; the rest is anything."""

    def kernel(start_ref, x_ref, o_ref, y_ref):
        mask = {"mask": jnp.arange(4) < 4} if known else {}
        o_ref[...] = plt.load(x_ref.at[pl.ds(start_ref[0], 4)], **mask)
        y_ref[...] = jnp.zeros_like(y_ref)
        plt.store(y_ref.at[pl.ds(start_ref[0], 4)], x_ref[pl.ds(0, 4)] + 1, **mask)

    f = pl.pallas_call(kernel, out_shape=(struct(4), struct(8)))
    for start in (5, 0, 4):
        loaded, stored = f(jnp.array([start], jnp.int32), X[:8])
        np.testing.assert_array_equal(loaded[: 8 - start], X[start:8][:4])
        want = np.zeros(12, "f4")
        want[start : start + 4] = X[:4] + 1
        np.testing.assert_array_equal(stored, want[:8])


def test_run_scoped_that_closes_over_a_ref_inside_a_decorated_function():
    def body(x, o):
        def scoped(y):
            y[...] = x[...] * 3
            o[...] = y[...] + 1

        pl.run_scoped(scoped, pltpu.VMEM((5,), F32))

    call = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((5,), F32))
    x = jnp.arange(5, dtype=F32)
    np.testing.assert_array_equal(pbkern.jit(lambda x: call(x - 1) * 2)(x), ((x - 1) * 3 + 1) * 2)


def test_floats_of_4_bits_are_moved_and_their_bits_read():
    f4 = jnp.float4_e2m1fn
    codes = (np.arange(48) * 7 % 16).astype(np.uint8)
    x = jax.lax.bitcast_convert_type(jnp.asarray(codes).astype(jnp.uint4), f4)

    def kernel(x_ref, o_ref, bits_ref, pairs_ref, back_ref):
        o_ref[...] = x_ref[...][::-1]
        bits_ref[...] = jax.lax.bitcast_convert_type(x_ref[...], jnp.uint4).astype(jnp.uint8)
        pairs_ref[...] = jax.lax.bitcast_convert_type(x_ref[...].reshape(24, 2), jnp.uint8)
        back_ref[...] = jax.lax.bitcast_convert_type(bits_ref[...].astype(jnp.uint4), f4)

    u8 = np.uint8
    out = [jax.ShapeDtypeStruct(*t) for t in [((48,), f4), ((48,), u8), ((24,), u8), ((48,), f4)]]
    moved, bits, pairs, back = one_program(kernel, out, x)
    np.testing.assert_array_equal(moved.astype(F32), x[::-1].astype(F32))
    np.testing.assert_array_equal(bits, codes)
    np.testing.assert_array_equal(pairs, codes[::2] | codes[1::2] << 4)
    np.testing.assert_array_equal(back.astype(F32), x.astype(F32))
