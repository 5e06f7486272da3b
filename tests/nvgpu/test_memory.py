"""Copies in shared memory: what blocks ask memory for, that passes change no result, and one kernel where it should be one."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks.gpu
import pbkern
from benchmarks.workloads import WORKLOADS
from pbkern.core.options import CompileOptions
from pbkern.lower.kernel_nests import kernel_nests
from pbkern.lower.nest.ir import For, Nest, Op, every
from pbkern.lower.passes.shared import SHARED_PASSES
from pbkern.targets import get_target
from pbkern.targets.simt.passes import THREAD_PASSES
from pbkern.testing import assert_kernels

GPU = {"target": "nvgpu"}
# For results that are compared with those of float32.
EXACT_GPU = {**GPU, "mm_conv_precision_mode": "fp32"}


def arrays(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


SMALLER = {
    "elementwise": ((128, 512),) * 2, "softmax": ((256, 256),), "layer_norm": ((8192, 64), (64,), (64,)),
    "rms_norm": ((4096, 64), (64,)), "cross_entropy": ((128, 500),) * 2, "sum": ((512, 512),), "transpose": ((2048, 2048),),
    "blur": ((1, 260, 516),), "unsharp": ((128, 192, 3),),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("softmax", "transpose", "unsharp") else pytest.param(n, marks=pytest.mark.slow)
        for n in SMALLER
    ],
)
def test_blocks_ask_memory_for_little_more_than_they_need(name):
    counted = benchmarks.gpu.COUNTED[name]
    args = arrays(SMALLER[name])
    found = pbkern.simulate(counted.function, *args)
    for got, want in zip(
        jax.tree.leaves(found.results), jax.tree.leaves(counted.function(*map(jnp.asarray, args)))
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    c, needed = (
        found.counts,
        sum(np.asarray(a).nbytes for a in (*args, *jax.tree.leaves(found.results))),
    )
    assert c.sectors <= 1.1 * c.fewest_sectors
    if name not in ("blur", "unsharp"):  # small images have small blocks with large halos
        assert c.sectors * 32 <= counted.most_bytes * needed
    assert c.bank_conflicts <= 0.05 * c.shared_accesses
    assert ("v4" in found.ptx[0]) is (name != "transpose")  # padded rows are not whole vectors


@pytest.mark.parametrize(
    "name",
    [
        "rows_of_ten",
        "rows_of_1023",
        "column_sum",
        "narrow_sum",
        "turned_add",
        "turned_odd",
        "turned_700",
        "turned_pixels",
        "to_nchw",
        "blur",
        "long_softmax",
    ],
)
def test_sums_and_transposes_ask_for_what_they_need(name):
    assert benchmarks.gpu.count([name]) == 0


@pytest.mark.slow
def test_the_table_of_counts():
    assert benchmarks.gpu.count(list(benchmarks.gpu.COUNTED)) == 0


FUNCTIONS = {
    "rows again": (lambda x: x / x.sum(-1, keepdims=True), [(37, 70)]),
    "long rows": (lambda x: jax.nn.softmax(x, -1), [(3, 17000)]),
    "rows beyond shared memory": (lambda x: jax.nn.logsumexp(x, -1), [(2, 20000)]),
    "exponentials again": (
        lambda x, g: jax.vjp(lambda x: jax.nn.softmax(x, -1), x)[1](g)[0],
        [(30, 100), (30, 100)],
    ),
    "short rows": (lambda x: x.sum(1), [(300, 10)]),
    "squares of short sums": (lambda x: (x.sum(1) ** 2).sum(), [(300, 10)]),
    "masked keys": (
        lambda q, k, v: benchmarks.gpu.causal_attention(q, k, v),
        [(256, 16), (256, 16), (256, 8)],
    ),
    "many rows": (
        lambda x: (x - x.mean(-1, keepdims=True)) * x.max(-1, keepdims=True),
        [(2000, 129)],
    ),
    "turned": (lambda x: x.T * 2, [(130, 67)]),
    "turned thrice": (lambda x: jnp.transpose(x, (2, 0, 1)) + 1, [(5, 33, 40)]),
    "turned halves": (lambda x: x.astype(jnp.bfloat16).T, [(65, 70)]),
    "window": (
        lambda x: sum(x[k : k + 60, j : j + 30] for k in range(3) for j in range(3)),
        [(62, 32)],
    ),
    "columns": (lambda x: (x - x.mean(0)) / (x.std(0) + 1), [(150, 33)]),
    "itself turned": (lambda x: x + x.T, [(70, 70)]),
    "chosen": (lambda f, x, y: jnp.where(f > 0, x.T, y * 2), [(), (70, 80), (80, 70)]),
}


def kernels(f, shapes):
    return pbkern.jit(f, compile_options=GPU).kernels(
        *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_passes_change_no_result(name):
    """The nests of each kernel, interpreted after all passes, against those without the threads' own."""
    f, shapes = FUNCTIONS[name]
    backend = get_target("nvgpu").backend
    for k in kernels(f, shapes):
        if k.finish is not None:
            continue
        nests = kernel_nests(k, backend.build_options(k, CompileOptions(target="nvgpu")))
        rng = np.random.default_rng(1)
        ins = [rng.standard_normal(t.shape).astype(t.dtype) for t in k.in_types]
        plain, ours = nests.after(SHARED_PASSES), nests.after([*SHARED_PASSES, *THREAD_PASSES])
        ours.verify()
        for a, b in zip(plain.interpret(*ins), ours.interpret(*ins)):
            np.testing.assert_allclose(
                np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-6, atol=1e-7
            )


@pytest.mark.parametrize("flag", [0, 1])
def test_of_two_arrays_the_chosen_one_is_read(flag):
    x, y = arrays([(300, 700)] * 2)
    found = pbkern.simulate(lambda f, x, y: jnp.where(f > 0, x, y), np.int32(flag), x, y)
    np.testing.assert_array_equal(found.results, x if flag else y)
    assert 32 * found.counts.sectors < 2.5 * x.nbytes, "one array is read and one is written"


@pytest.mark.parametrize(
    "name",
    ["long rows", "turned", "window", "exponentials again", "short rows", "masked keys"],
)
def test_copies_equal_float64_in_the_simulator(name):
    f, shapes = FUNCTIONS[name]
    args = arrays(shapes)
    found = pbkern.simulate(pbkern.jit(f, compile_options=EXACT_GPU), *args)
    with jax.enable_x64(True):
        want = f(*(jnp.asarray(a, jnp.float64) for a in args))
    np.testing.assert_allclose(found.results, want, rtol=1e-5, atol=1e-6)
    assert found.counts.shared_accesses > 0


def computed_exponentials(f, shapes) -> int:
    """Number of exponentials in the nests of a function's one kernel."""
    (kernel,) = kernels(f, shapes)
    nests = kernel_nests(
        kernel, get_target("nvgpu").backend.build_options(kernel, CompileOptions(target="nvgpu"))
    ).after([*SHARED_PASSES, *THREAD_PASSES])
    return sum(
        sum(isinstance(node, Op) and node.info.primitive == "exp" for node in stmt.nodes())
        for stmt in every(list(nests.cases[0].statements))
        if isinstance(stmt, Nest)
    )


@pytest.mark.parametrize("name", ["long rows", "exponentials again"])
def test_each_exponential_is_computed_once(name):
    f, shapes = FUNCTIONS[name]
    assert computed_exponentials(f, [(2048, 1024)] * len(shapes)) == 1


def test_blocks_of_a_transpose_are_turned_whole():
    """Parts of rows are whole sectors, of the operand and of the result."""
    (kernel,) = kernels(lambda x, y: x.T + y, [(1024, 1024)] * 2)
    assert kernel.grid == (16, 16)
    (kernel,) = kernels(lambda x: x.T + 1, [(300, 700)])  # rows begin in the middle of sectors
    assert kernel.grid == (11, 5)


def test_places_behind_the_ends_of_rows_load_nothing():
    """Rows of 130 begin amid sectors: threads count more places than there are, and a copy ends behind its last row."""

    def weights(x):
        row, key = (jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (1, 2))
        scores = jnp.where(row >= key, 0.125 * x, -jnp.inf)
        return jnp.exp(scores - scores.max(-1, keepdims=True)), row >= key

    (x,) = arrays([(1, 130, 130)])
    found = pbkern.simulate(pbkern.jit(weights, compile_options=GPU), x)
    for got, want in zip(found.results, weights(x.astype(np.float64))):
        np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize(("rows", "programs"), [(64, 512), (528, 528)])
def test_rows_are_cut_into_chunks_worth_a_program(rows, programs):
    """Rows that fill the device are not cut; others are, but not into a chunk for each program of the device."""
    made = kernels(lambda x: jax.nn.logsumexp(x, -1), [(rows, 32768)])
    assert max(math.prod(kernel.grid) for kernel in made) == programs


def by_hand(rows, columns):
    spec = pbkern.BlockSpec((rows, columns), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct((2 * rows, columns), jnp.float32)

    @pbkern.kernel(grid=(2,), in_specs=[spec], out_specs=spec, out_shape=shape)
    def normalised(x, o):
        o[...] = x[...] / jnp.sqrt((x[...] * x[...]).sum(-1, keepdims=True))

    return normalised


@pytest.mark.parametrize(
    ("rows", "columns", "passes"), [(50, 600, 2), (2, 15000, 2), (2, 40000, 3)]
)
def test_blocks_that_shared_memory_does_not_hold_are_cut_into_strips_of_rows(rows, columns, passes):
    """A row that is longer than what blocks usually take is a strip by itself.

    One that fits half of shared memory is read once, a longer one twice.
    """
    x = arrays([(2 * rows, columns)])[0]
    kernel = by_hand(rows, columns).trace(x)
    options = get_target("nvgpu").backend.build_options(kernel, CompileOptions(target="nvgpu"))
    nests = kernel_nests(kernel, options).after([*SHARED_PASSES, *THREAD_PASSES])
    loops = [s for s in every(list(nests.cases[0].statements)) if isinstance(s, For)]
    assert loops, str(nests)
    found = pbkern.simulate(kernel, x)
    np.testing.assert_allclose(
        found.results[0], x / np.linalg.norm(x.astype("f8"), axis=1, keepdims=True), rtol=1e-5
    )
    assert found.counts.sectors * 32 == passes * x.nbytes


ONE_KERNEL = ["blur", "blur_slices", "unsharp", "softmax", "layer_norm", "rms_norm", "matmul_bias_gelu", "attention_1024",
              "conv_bias_relu", "cross_entropy"]  # fmt: skip


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel(name):
    w = WORKLOADS[name]
    types = [jax.ShapeDtypeStruct(s.shape, s.dtype if not s.high else jnp.int32) for s in w.full]
    assert_kernels(pbkern.jit(w.function, compile_options=GPU), types, 1)


def test_bias_and_gelu_are_one_kernel():
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 768), (768,))]
    assert_kernels(pbkern.jit(lambda x, b: jax.nn.gelu(x + b), compile_options=GPU), types, 1)


@pytest.mark.parametrize(
    "f", [jnp.exp, jnp.cos, jax.nn.sigmoid, lambda x: jnp.exp(jnp.cumsum(x, 1))]
)
@pytest.mark.parametrize(
    ("shape", "start", "stop"),
    [((15, 15), 0, 14), ((26, 7), 16, 26), ((33, 5), 1, 32), ((90, 3), 2, 77)],
)
def test_places_outside_rows_that_begin_amid_a_sector_read_nothing(f, shape, start, stop):
    """The simulator refuses reads of what is outside of arrays, or not written yet."""
    (x,) = arrays([shape])
    found = pbkern.simulate(lambda x: f(x)[start:stop], x)
    want = np.asarray(f(x.astype("f8")))[start:stop]
    np.testing.assert_allclose(found.results, want, rtol=1e-5, atol=1e-6)


def test_places_outside_ragged_blocks_read_nothing():
    spec = pbkern.BlockSpec((16, 7), lambda i, j: (i, j))

    @pbkern.kernel(
        grid=(2, 1),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((26, 7), "float32"),
    )
    def cosines(a, o):
        o[...] = jnp.cos(a[...])

    (x,) = arrays([(26, 7)])
    (result,) = pbkern.simulate(cosines, x).results
    np.testing.assert_allclose(result, np.cos(x), rtol=1e-5, atol=1e-6)
