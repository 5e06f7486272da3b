"""Operations beside hand-written kernels are computed on their blocks, chains of kernels are one kernel; results stay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.extend import core as jex

import pbkern
import pbkern.pallas
from pbkern.core.passes import with_settings
from pbkern.fuse.emit.written_kernels.same_shapes import in_shapes_of_kernels

RNG = np.random.default_rng(0)


def array(shape, dtype="float32"):
    if np.dtype(dtype).kind in "iu":
        return jnp.asarray(RNG.integers(-100, 100, shape), dtype)
    return jnp.asarray(RNG.normal(size=shape), dtype)


def rows_kernel(body, shape, block=8, dtype="float32", door="pbkern", **options):
    """A kernel over blocks of rows, by pbkern.kernel or by pl.pallas_call."""
    spec = pl.BlockSpec if door == "pallas" else pbkern.BlockSpec
    block = min(block, shape[0])
    rows = spec((block, *shape[1:]), lambda i: (i, *(0,) * (len(shape) - 1)))
    arguments = {
        "grid": (pl.cdiv(shape[0], block),),
        "in_specs": [rows],
        "out_specs": rows,
        "out_shape": jax.ShapeDtypeStruct(shape, dtype),
    } | options
    return (pl.pallas_call if door == "pallas" else pbkern.kernel)(body, **arguments)


def doubled(x, o):
    o[...] = x[...] * 2


def check(function, reference, *args, kernels=1, rtol=1e-5, atol=1e-5):
    f = pbkern.jit(function)
    np.testing.assert_allclose(
        np.asarray(f(*args), "float64"), np.asarray(reference(*args), "float64"), rtol, atol
    )
    assert len(f.kernels(*args)) == kernels, str(f.explain(*args, verbose=True))
    return f


def reasons(f, *args):
    return [edge.why for edge in f.explain(*args).edges if not edge.fused]


@pytest.fixture(autouse=True)
def installed():
    with pbkern.pallas.installed():
        yield


# --- producers


DOORS = pytest.mark.parametrize("door", ["pbkern", "pallas"])


@DOORS
@pytest.mark.parametrize("shape", [(64, 16), (61, 13), (5, 3), (8, 1)])
def test_both_sides_of_a_kernel(shape, door):
    kernel = rows_kernel(doubled, shape, door=door)
    check(
        lambda x, s, b: jax.nn.relu(kernel(x * s + b)),
        lambda x, s, b: jax.nn.relu((x * s + b) * 2),
        array(shape), array(shape[1:]), array(shape[1:]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("producer", "operands"),
    [
        (lambda x: x.T, [array((12, 20))]),
        (lambda x: x.reshape(20, 12), [array((4, 5, 12))]),
        (lambda x: x[:, 3:15] + 1, [array((20, 20))]),
        (lambda x: x[::-1], [array((20, 12))]),
        (lambda x: jnp.where(x > 0, x, jnp.nan), [array((20, 12))]),
        (lambda x, s: x.astype("float32") * s[:, None], [array((20, 12), "int8"), array(20)]),
        (lambda x: x + jnp.arange(20.0)[:, None] + jnp.arange(12.0), [array((20, 12))]),
        (lambda x: jnp.broadcast_to(x, (20, 12)) / 3, [array(())]),
        (lambda x: x.astype("bfloat16").astype("float32"), [array((20, 12))]),
    ],
)
def test_producers(producer, operands):
    kernel = rows_kernel(doubled, (20, 12))
    check(lambda *xs: kernel(producer(*xs)), lambda *xs: producer(*xs) * 2, *operands)


def in_loop(x, o):
    def step(i, total):
        return total + x[i] * (i + 1)

    o[...] = jnp.broadcast_to(
        jax.lax.fori_loop(0, x.shape[0], step, jnp.zeros(x.shape[1])), o.shape
    )


def in_slices(x, o):
    o[pl.ds(0, 4)] = x[pl.ds(4, 4)]
    o[pl.ds(4, 4)] = x[pl.ds(0, 4)] * x[7]


def masked(x, o):
    places = jnp.arange(8)[:, None] < 5
    o[...] = pbkern.load(x, ..., mask=jnp.broadcast_to(places, x.shape), other=7.0)


def twice(x, o):
    @pbkern.when(pbkern.program_id(0) == 1)
    def _():
        o[...] = x[...] * 3

    @pbkern.when(pbkern.program_id(0) != 1)
    def _():
        o[...] = x[...] - x[0]


def stepwise(x, o):
    o[...] = jnp.zeros_like(o)
    o[...] += x[...]
    o[0] = o[0] * o[1]


@pytest.mark.parametrize("body", [in_loop, in_slices, masked, twice, stepwise])
def test_bodies(body):
    kernel = rows_kernel(body, (24, 5))
    before, behind = lambda x, s: x * s - 1, lambda y, s: jnp.tanh(y) + s
    x, s = array((24, 5)), array(5)
    want = behind(jnp.asarray(kernel(before(x, s))), s)
    check(lambda x, s: behind(kernel(before(x, s)), s), lambda *_: want, x, s)


def test_bounds_are_those_of_the_operand_that_is_no_longer_read():
    def sums(x, o):
        o[...] = jnp.where(pbkern.in_bounds(x, 0)[:, None], x[...], 0).sum(0, keepdims=True)

    kernel = pbkern.kernel(
        sums, grid=(3,), in_specs=[pbkern.BlockSpec((8, 4), lambda i: (i, 0))],
        out_specs=pbkern.BlockSpec((1, 4), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((3, 4), "float32"),
    )  # fmt: skip
    padded = lambda x: jnp.pad(jnp.exp(x), ((0, 5), (0, 0))).reshape(3, 8, 4).sum(1)
    check(lambda x: kernel(jnp.exp(x)), padded, array((19, 4)))


def test_masks_by_value_see_nothing_of_a_producer_outside():
    def sums(x, o):
        places = 8 * pbkern.program_id(0) + jnp.arange(8)[:, None] < 19
        o[...] = jnp.where(places, x[...], 0).sum(0, keepdims=True)

    kernel = pbkern.kernel(
        sums, grid=(3,), in_specs=[pbkern.BlockSpec((8, 4), lambda i: (i, 0))],
        out_specs=pbkern.BlockSpec((1, 4), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((3, 4), "float32"),
    )  # fmt: skip
    padded = lambda x: jnp.pad(1 / x, ((0, 5), (0, 0))).reshape(3, 8, 4).sum(1)
    check(lambda x: kernel(1 / x), padded, array((19, 4)))


def test_squeezed_and_overlapping_blocks():
    def body(x, row, o):
        o[...] = x[0:4] + x[1:5] * row[...]

    kernel = pbkern.kernel(
        body, grid=(2, 4),
        in_specs=[
            pbkern.BlockSpec((None, pbkern.Element(6), 3), lambda b, i: (b, 4 * i, 0)),
            pbkern.BlockSpec((None, 3), lambda b, i: (b, 0)),
        ],
        out_specs=pbkern.BlockSpec((None, 4, 3), lambda b, i: (b, i, 0)),
        out_shape=jax.ShapeDtypeStruct((2, 16, 3), "float32"),
    )  # fmt: skip

    def reference(x, row):
        x, row = jnp.sin(x), row.T + 1
        return jax.nn.relu(x[:, :16] + x[:, 1:17] * row[:, None])

    check(
        lambda x, row: jax.nn.relu(kernel(jnp.sin(x), row.T + 1)),
        reference, array((2, 18, 3)), array((3, 2)),
    )  # fmt: skip


def test_blocks_that_operands_choose():
    spec = pbkern.GridSpec(
        grid=(3,),
        in_specs=[pbkern.BlockSpec((4, 5), lambda i, rows: (rows[i], 0))],
        out_specs=pbkern.BlockSpec((4, 5), lambda i, rows: (i, 0)),
        num_scalar_prefetch=1,
    )

    @pbkern.kernel(grid_spec=spec, out_shape=jax.ShapeDtypeStruct((12, 5), "float32"))
    def pick(rows, x, o):
        o[...] = x[...]

    check(
        lambda rows, x, s: pick(rows, x * s) + 1,
        lambda rows, x, s: (x * s).reshape(5, 4, 5)[rows].reshape(12, 5) + 1,
        jnp.array([4, 0, 2], "int32"), array((20, 5)), array((20, 1)),
    )  # fmt: skip


@DOORS
@pytest.mark.parametrize(("allowed", "kernels"), [(None, 1), ((True,), 1), ((False,), 2)])
def test_allow_input_fusion_is_obeyed(allowed, kernels, door):
    params = pbkern.cpu.CompilerParams(allow_input_fusion=allowed)
    kernel = rows_kernel(doubled, (20, 12), door=door, compiler_params=params)
    f = check(lambda x: kernel(x + 1) * 3, lambda x: (x + 1) * 6, array((20, 12)), kernels=kernels)
    assert any("allow_input_fusion forbids it" in why for why in reasons(f, array((20, 12)))) == (
        kernels == 2
    )


def test_allow_input_fusion_forbids_chains_and_has_an_entry_per_operand():
    params = pbkern.cpu.CompilerParams(allow_input_fusion=(True, False))

    def added(x, y, o):
        o[...] = x[...] + y[...]

    rows = pbkern.BlockSpec((8, 12), lambda i: (i, 0))
    kernel = rows_kernel(added, (20, 12), in_specs=[rows, rows], compiler_params=params)
    first = rows_kernel(doubled, (20, 12), compiler_params=pbkern.cpu.CompilerParams())
    x, y = array((20, 12)), array((20, 12))
    check(lambda x, y: kernel(x + 1, y), lambda x, y: x + 1 + y, x, y)
    check(lambda x, y: kernel(x, y + 1), lambda x, y: x + 1 + y, x, y, kernels=2)
    check(lambda x, y: kernel(first(x), y), lambda x, y: x * 2 + y, x, y)
    check(lambda x, y: kernel(x, first(y)), lambda x, y: x + y * 2, x, y, kernels=2)
    # What is computed in the kernel forbids nothing that it did not forbid before.
    check(lambda x, y: kernel(first(x) - 1, y), lambda x, y: x * 2 - 1 + y, x, y)


def test_allow_input_fusion_fits_the_operands():
    params = pbkern.cpu.CompilerParams(allow_input_fusion=(True, False))
    kernel = rows_kernel(doubled, (20, 12), compiler_params=params)
    with pytest.raises(pbkern.errors.KernelError, match="does not fit the operands"):
        kernel(array((20, 12)))


# --- consumers


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "consumer",
    [
        lambda y, r: y.astype("bfloat16"),
        lambda y, r: y + r,
        lambda y, r: (y + r).T,
        lambda y, r: jax.nn.softmax(y + r),
        lambda y, r: y.reshape(6, 4, 12) * r.reshape(6, 4, 12),
        lambda y, r: jnp.exp(y.reshape(24, 3, 4) + r.reshape(24, 3, 4)).sum(2),
        lambda y, r: (y * r).sum(1),
        lambda y, r: (y * r).max(1, keepdims=True) - r,
        lambda y, r: jnp.where(jnp.isnan(y), r, y),
    ],
)
@pytest.mark.parametrize("body", [doubled, in_slices])
def test_consumers(consumer, body):
    kernel = rows_kernel(body, (24, 12))
    x, r = array((24, 12)).at[3, 4].set(jnp.nan), array((24, 12))
    want = consumer(jnp.asarray(kernel(x)), r)
    check(lambda x, r: consumer(kernel(x), r), lambda *_: want, x, r, rtol=1e-2)


def test_a_result_that_others_read_is_stored_as_well():
    kernel = rows_kernel(doubled, (20, 12))
    f = pbkern.jit(lambda x: (kernel(x), jnp.exp(kernel(x))))
    x = array((20, 12))
    for have, want in zip(f(x), (x * 2, jnp.exp(x * 2))):
        np.testing.assert_allclose(have, want, rtol=1e-5)


def product(
    accumulate, shape=(40, 24, 32), blocks=(16, 8, 8), out="float32", door="pbkern", **options
):
    """A product of matrices, over a grid whose last dimension is summed."""
    (m, n, k), (bm, bn, bk) = shape, map(min, shape, blocks)
    spec = pl.BlockSpec if door == "pallas" else pbkern.BlockSpec
    arguments = {
        "grid": (pl.cdiv(m, bm), pl.cdiv(n, bn), k // bk),
        "in_specs": [
            spec((bm, bk), lambda i, j, k: (i, k)),
            spec((bk, bn), lambda i, j, k: (k, j)),
        ],
        "out_specs": spec((bm, bn), lambda i, j, k: (i, j)),
        "out_shape": jax.ShapeDtypeStruct((m, n), out),
    } | options
    return (pl.pallas_call if door == "pallas" else pbkern.kernel)(accumulate, **arguments)


def in_scratch(x, y, o, total, grid=pbkern):
    @grid.when(grid.program_id(2) == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    total[...] += jnp.dot(x[...], y[...])

    @grid.when(grid.program_id(2) == grid.num_programs(2) - 1)
    def _():
        o[...] = total[...].astype(o.dtype)


def in_result(x, y, o):
    @pbkern.when(pbkern.program_id(2) == 0)
    def _():
        o[...] = jnp.zeros_like(o)

    o[...] += jnp.dot(x[...], y[...])


def dequantised(w, scale):
    return w.astype("float32") * scale


@pytest.mark.parametrize("shape", [(40, 24, 32), (33, 9, 24), (3, 5, 8)])
@pytest.mark.parametrize("body", [in_scratch, in_result])
def test_products_with_dequantised_operand_and_residual(body, shape):
    m, n, k = shape
    memory = pbkern.Scratch((min(m, 16), min(n, 8)), np.dtype("float32"))
    options = {"scratch_shapes": [memory]} if body is in_scratch else {}
    kernel = product(body, shape, **options)
    check(
        lambda r, a, w, s: r + kernel(a, dequantised(w, s)),
        lambda r, a, w, s: r + np.asarray(a, "float64") @ np.asarray(dequantised(w, s), "float64"),
        array((m, n)), array((m, k)), array((k, n), "int8"), array(n), rtol=1e-4, atol=1e-3,
    )  # fmt: skip


def test_products_of_pallas():
    from jax.experimental.pallas import tpu as pltpu

    memory = {"scratch_shapes": [pltpu.VMEM((16, 8), jnp.float32)]}
    body = functools.partial(in_scratch, grid=pl)
    kernel = product(body, (33, 9, 24), door="pallas", **memory)
    check(
        lambda r, a, w, s: r + kernel(a, dequantised(w, s)),
        lambda r, a, w, s: r + np.asarray(a, "float64") @ np.asarray(dequantised(w, s), "float64"),
        array((33, 9)), array((33, 24)), array((24, 9), "int8"), array(9), rtol=1e-4, atol=1e-3,
    )  # fmt: skip


def test_a_block_in_progress_cannot_wait_in_a_result_of_another_type():
    a, b = array((40, 32)), array((32, 24))
    f = check(
        lambda a, b: product(in_result)(a, b).astype("float16"), lambda a, b: a @ b, a, b,
        kernels=2, rtol=1e-2, atol=1e-2,
    )  # fmt: skip
    assert any("no result of its type can hold it" in why for why in reasons(f, a, b))


# --- chains


@DOORS
@pytest.mark.parametrize("shape", [(64, 16), (61, 13), (5, 3)])
def test_chains(shape, door):
    kernel = rows_kernel(doubled, shape, door=door)
    check(lambda x: kernel(kernel(kernel(x))), lambda x: x * 8, array(shape))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("second", [doubled, in_loop, in_slices, masked, twice, stepwise])
@pytest.mark.parametrize("first", [in_slices, twice, stepwise])
def test_chains_of_bodies(first, second):
    one, two = rows_kernel(first, (24, 5)), rows_kernel(second, (24, 5))
    x = array((24, 5))
    want = two(one(x))
    check(lambda x: two(one(x)), lambda *_: want, x)
    check(
        lambda x: two(one(x)) + one(x).sum(), lambda x: want + one(x).sum(), x, kernels=2, atol=1e-3
    )


def test_numbers_in_another_shape():
    kernel = rows_kernel(doubled, (36, 16))
    f = lambda x: kernel(x) + jax.lax.reshape(np.float32(5), (1, 1))
    closed = in_shapes_of_kernels(jax.make_jaxpr(f)(array((36, 16))))
    x = array((36, 16))
    np.testing.assert_allclose(jex.jaxpr_as_fun(closed)(x)[0], 2 * x + 5, rtol=1e-6)


@pytest.mark.parametrize("door", ["pbkern", "pallas"])
def test_operations_in_another_shape(door):
    """Blocks of 8 rows are parts of 12."""
    kernel = rows_kernel(doubled, (36, 16), door=door)

    def around(call):
        def f(x, s, t, r):
            y = call(((x * s + t) / 3).reshape(36, 16)).reshape(3, 12, 16)
            return jax.nn.relu(y * s - jnp.exp(r)) + t

        return f

    shapes = [(3, 12, 16), (16,), (1, 1, 16), (3, 12, 16)]
    operands = [array(shape) for shape in shapes]
    check(around(kernel), around(lambda y: y * 2), *operands)
    per_batch = [array((3, 12, 16)), array(16), array((3, 1, 16)), array((3, 12, 16))]
    f = pbkern.jit(around(kernel))
    np.testing.assert_allclose(f(*per_batch), around(lambda y: y * 2)(*per_batch), 1e-5, 1e-5)


def test_long_bodies_stay_apart():
    kernel = rows_kernel(doubled, (24, 5))
    x = array((24, 5))
    with with_settings("fuse neighbours", {"longest": 5}):
        f = check(lambda x: kernel(kernel(x)), lambda x: x * 4, x)
        assert len(f.explain(x).written) == 2
        assert any("their bodies have 6 equations" in why for why in reasons(f, x))


def test_chains_with_operations_between_and_around():
    kernel = rows_kernel(doubled, (61, 13))
    check(
        lambda x, r: r + kernel(jnp.tanh(kernel(x - r))),
        lambda x, r: r + 2 * jnp.tanh(2 * (x - r)), array((61, 13)), array((61, 13)),
    )  # fmt: skip


# --- refusals


def test_refusals_say_why():
    x = array((24, 5))
    other = rows_kernel(doubled, (24, 5), block=6)
    kernel = rows_kernel(doubled, (24, 5))
    f = check(lambda x: other(kernel(x)), lambda x: x * 4, x, kernels=2)
    assert any("their grids are (3,) and (4,)" in why for why in reasons(f, x))

    aliased = rows_kernel(doubled, (24, 5), input_output_aliases={0: 0})
    f = check(lambda x: aliased(x + 1) * 2, lambda x: (x + 1) * 4, x, kernels=3)
    why = reasons(f, x)
    assert any("it shares its array with a result" in reason for reason in why)
    assert any("it shares its array with an operand" in reason for reason in why)

    def conditional(x, o):
        @pbkern.when(x[0, 0] > 0)
        def _():
            o[...] = x[...]

    kernel = rows_kernel(conditional, (24, 5))
    zeros = lambda x: jnp.where((x[::8, :1] > 0).repeat(8, 0), x, 0) + 1
    f = check(lambda x: kernel(x) + 1, zeros, x, kernels=2)
    assert any("the rest is zero" in reason for reason in reasons(f, x))

    def checked(x, o):
        pbkern.check((x[...] < 1e6).all(), "large")
        o[...] = x[...]

    kernel = rows_kernel(checked, (24, 5))
    f = check(lambda x: kernel(x + 1), lambda x: x + 1, x, kernels=2)
    assert any("has checks, prints or breakpoints" in reason for reason in reasons(f, x))


def test_operations_that_need_more_than_a_block_are_named():
    x = array((24, 24))
    kernel = rows_kernel(doubled, (24, 24))
    f = check(lambda x: kernel(x @ x) @ x, lambda x: 2 * x @ x @ x, x, kernels=3, rtol=1e-4)
    lines = [line for line in str(f.explain(x)).splitlines() if "not fused: dot_general" in line]
    assert len(lines) == 2
    assert "not computed for input 0 (`x`) of kernel `doubled`" in lines[1]
    assert "not applied to output 0 (`o`) of kernel `doubled`" in lines[0]


def test_what_costs_more_for_each_block_is_not_computed_there():
    """Each of 64 programs reads all of y."""

    def body(y, o):
        o[...] = jnp.broadcast_to(y[...].sum(0), o.shape)

    kernel = pbkern.kernel(
        body, grid=(64,), in_specs=[pbkern.BlockSpec()],
        out_specs=pbkern.BlockSpec((1, 64), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((64, 64), "float32"),
    )  # fmt: skip
    x = array((4096, 64))
    f = pbkern.jit(lambda x: kernel(jnp.tanh(x)))
    (edge,) = [edge for edge in f.explain(x).edges if "costs more" in edge.why]
    assert edge.after > edge.before > 0
    assert "test_written_kernels.py" in str(f.explain(x))
    np.testing.assert_allclose(
        np.asarray(f(x))[7], np.tanh(np.asarray(x, "float64")).sum(0), rtol=1e-4, atol=1e-3
    )


def test_explain_lists_edges_with_line_and_price():
    kernel = rows_kernel(doubled, (64, 16))
    f = pbkern.jit(lambda x, s: jax.nn.relu(kernel(kernel(x * s))))
    text = str(f.explain(array((64, 16)), array(16)))
    assert "fused: 3 operation(s)" in text
    text = pbkern.jit(lambda x, s: jax.nn.relu(kernel(kernel(x * s)))).explain(
        array((64, 16)), array(16), verbose=True
    )
    lines = [line for line in str(text).splitlines() if "test_written_kernels.py" in line]
    for words in (
        "fused: mul at",
        "computed for input 0 (`x`) of kernel",
        "fused: max at",
        "applied to output 0 (`o`) of kernel",
        "fused: kernel `doubled` at",
        "one kernel with input 0 (`x`) of kernel",
    ):
        assert any(words in line and "us apart" in line for line in lines), words


def test_fusion_may_be_turned_off():
    kernel = rows_kernel(doubled, (64, 16))
    f = pbkern.jit(
        lambda x: jnp.exp(kernel(kernel(x + 1))),
        compile_options={"polyblocks_disable_affine_fusion": True},
    )
    assert len(f.kernels(array((64, 16)))) == 3  # of four launches; a kernel is listed once


# --- transformations


@DOORS
def test_derivatives_and_vmap(door):
    kernel = rows_kernel(doubled, (20, 12), door=door)
    f = pbkern.jit(lambda x, s: jnp.tanh(kernel(x * s)).sum())
    reference = lambda x, s: jnp.tanh(x * s * 2).sum()
    x, s = array((20, 12)), array(12)
    for have, want in zip(jax.grad(f, (0, 1))(x, s), jax.grad(reference, (0, 1))(x, s)):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)
    xs = array((3, 20, 12))
    np.testing.assert_allclose(
        jax.vmap(f, (0, None))(xs, s), jax.vmap(reference, (0, None))(xs, s), rtol=1e-4
    )


def test_bodies_of_loops():
    kernel = rows_kernel(doubled, (20, 12))

    @pbkern.jit
    def f(x, s):
        return jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(kernel(c * s)) + i, x)

    x, s = array((20, 12)), array(12)
    want = x
    for i in range(3):
        want = jnp.tanh(want * s * 2) + i
    np.testing.assert_allclose(f(x, s), want, rtol=1e-4, atol=1e-5)
    assert len(f.kernels(x, s)) == 1


# --- random ones

UNARY = [
    jnp.tanh,
    lambda v: v * v,
    lambda v: jnp.where(v > 0, v, jnp.nan),
    lambda v: -v + 1,
    jnp.sqrt,
]
BINARY = [jnp.add, jnp.multiply, jnp.maximum, lambda u, v: jnp.where(jnp.isnan(u), v, u)]


@st.composite
def functions(draw):
    rows, columns = draw(st.integers(1, 23)), draw(st.integers(1, 9))
    block, door = draw(st.integers(1, 9)), draw(st.sampled_from(["pbkern", "pallas"]))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    body = draw(st.sampled_from([doubled, stepwise])) if min(rows, block) > 1 else doubled
    sides = [
        [
            (draw(st.sampled_from(UNARY)), draw(st.sampled_from(BINARY)), draw(st.integers(0, 3)))
            for _ in range(draw(st.integers(0, 3)))
        ]
        for _ in range(3)
    ]
    return rows, columns, block, door, dtype, body, sides


@settings(max_examples=25, deadline=None)
@given(functions())
def test_random_functions(drawn):
    rows, columns, block, door, dtype, body, (before, between, behind) = drawn
    kernel = rows_kernel(body, (rows, columns), block, dtype, door)
    x, row, column, full = (
        array(shape, dtype) for shape in [(rows, columns), (columns,), (rows, 1), (rows, columns)]
    )

    def apply(steps, value):
        for unary, binary, number in steps:
            operand = (row, column, full, jnp.asarray(2, dtype))[number]
            value = binary(unary(value), operand).astype(dtype)
        return value

    def f(x):
        return apply(behind, kernel(apply(between, kernel(apply(before, x)))))

    def reference(x):
        def ran(value):
            return jnp.asarray(kernel(jnp.asarray(value)))

        return apply(behind, ran(apply(between, ran(apply(before, x)))))

    precise = dtype == "float32"
    np.testing.assert_allclose(
        np.asarray(pbkern.jit(f)(x), "float64"), np.asarray(reference(x), "float64"),
        rtol=2e-4 if precise else 6e-2, atol=1e-4 if precise else 6e-2,
    )  # fmt: skip


def test_pallas_calls_that_update_operands_stay_xlas():
    rows = pl.BlockSpec((8, 5), lambda i: (i, 0))
    kernel = rows_kernel(
        doubled, (24, 5), door="pallas", input_output_aliases={0: 0}, in_specs=[rows]
    )
    f = pbkern.jit(lambda x: kernel(x + 1) * 3)
    x = array((24, 5))
    np.testing.assert_allclose(f(x), (x + 1) * 6, rtol=1e-5)
    assert [left.op for left in f.explain(x).left] == ["pallas_call"]


def row_doubled(at, x, o):
    o[...] = x[...]
    o[pbkern.ds(at[...], 1), :] = 2 * x[pbkern.ds(at[...], 1), :]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("place", ["outside", "branch", "loop"])
def test_operands_may_be_literals(place, times):
    x = array((9, 5))
    kernel = pbkern.kernel(row_doubled, out_shape=jax.ShapeDtypeStruct((9, 5), "float32"))

    def step(double):
        def f(x):
            for at in (jnp.int32(3), jnp.int32(7))[:times]:
                x = double(at, x)
            return x

        match place:
            case "branch":
                return lambda x: jax.lax.cond(x[0, 0] < 1e9, f, jnp.sin, x)
            case "loop":
                return lambda x: jax.lax.fori_loop(0, 3, lambda _, x: f(x), x)
        return f

    want = step(lambda at, x: x.at[at].multiply(2))(x)
    np.testing.assert_allclose(pbkern.jit(step(kernel))(x), want, rtol=1e-6)
