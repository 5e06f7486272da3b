"""Blocks of the next steps on their way while one computes: nests on NumPy arrays and PTX in the simulator, against float64."""

import contextlib
import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import pbkern
import pbkern.amdgpu
import pbkern.nvgpu
from pbkern import BlockSpec, Scratch
from pbkern.core.options import CompileOptions
from pbkern.errors import InternalError, KernelError, ScheduleError, SimulationError
from pbkern.lower.kernel_nests import KernelNests, kernel_nests
from pbkern.lower.nest import interpret
from pbkern.lower.nest.ir import AsyncCopy, AsyncProduct, For, Nest, Wait, every
from pbkern.lower.passes.shared import SHARED_PASSES
from pbkern.simulate import async_copies
from pbkern.simulate.launches import simulate_ptx
from pbkern.targets.amdgpu.backend import AmdgpuBackend
from pbkern.targets.amdgpu.devices import device_kind as amd_kind
from pbkern.targets.nvgpu import compile as codegen
from pbkern.targets.nvgpu import ptxas
from pbkern.targets.nvgpu.backend import NvgpuBackend
from pbkern.targets.nvgpu.devices import device_kind
from pbkern.targets.simt.emit.kernel import emit
from pbkern.targets.simt.schedule.barriers import Barriers

from .test_matrix_products import FAULTS, a_stage_too_far, changed, step_of

BF16 = ml_dtypes.bfloat16
STEPS = [(stages, delay) for stages in (1, 2, 3, 4) for delay in range(stages)]


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def normal(*sizes, dtype=np.float32):
    return np.random.default_rng(sum(sizes)).standard_normal(sizes).astype(dtype)


def ahead(stages, delay=0, *, vendor=pbkern.nvgpu, parallel=1, in_order=1, **params):
    semantics = ("parallel",) * parallel + ("sequential",) * in_order
    return vendor.CompilerParams(
        dimension_semantics=semantics,
        max_concurrent_steps=stages,
        delay_release=delay,
        **params,
    )


def blocks_of(size, block):
    return -(-size // block)


def nests_of(kernel, *arrays, backend=None) -> KernelNests:
    """The nests behind all passes, for a device of mma.sync by default."""
    backend = backend or NvgpuBackend(device_kind("sm_80"))
    traced = kernel.trace(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
    options = backend.build_options(traced, CompileOptions())
    return kernel_nests(traced, options).after((*SHARED_PASSES, *backend.passes))


def simulated(nests: KernelNests, arrays, architecture="sm_80") -> np.ndarray:
    function = emit(nests, "k")
    kind, output = device_kind(architecture), nests.kernel.outputs[0].array
    result = np.zeros(output.shape, output.dtype)
    simulate_ptx(
        codegen.ptx(codegen.llvm_ir(function), kind), function.blocks, function.threads, [*arrays, result],
        shared_bytes=function.dynamic_shared_bytes,
    )  # fmt: skip
    return result


def check(kernel, arrays, want, tolerance=1e-4, backend=None) -> KernelNests:
    """Nests that are interpreted, and PTX that is simulated, compute what is wanted."""
    nests = nests_of(kernel, *arrays, backend=backend)
    nests.verify()
    for result in (nests.interpret(*arrays)[0], simulated(nests, arrays)):
        np.testing.assert_allclose(
            np.asarray(result, np.float64), want, rtol=tolerance, atol=tolerance
        )
    return nests


@contextlib.contextmanager
def arriving(order: str):
    """In the block, copies store when they are waited for ("late"), when they begin ("early"), or at either time."""
    rng, begin, mark = np.random.default_rng(0), interpret._begin, async_copies._mark

    def is_early() -> bool:
        return order == "early" or (order == "random" and bool(rng.integers(2)))

    def begun(nest, memory, symbols):
        begin(nest, memory, symbols)
        copy = memory.copies.groups[-1][-1]
        if is_early():
            memory.flat(nest.stores[0].buf)[copy.places] = copy.values

    def marked(gang, copies, lanes):
        mark(gang, copies, lanes)
        if is_early():
            gang.shared.flat[copies.bytes_of(lanes)] = copies.data[lanes]

    with mock.patch.object(interpret, "_begin", begun), mock.patch.object(async_copies, "_mark", marked):  # fmt: skip
        yield


# ---------------------------------------------------------------- kernels


def row_sums(rows, columns, block, dtype=np.float32, params=None):
    """Sums of rows, a chunk of columns in each step, kept in scratch."""
    high, wide = block

    @pbkern.kernel(
        grid=(blocks_of(rows, high), blocks_of(columns, wide)),
        in_specs=[BlockSpec(block, lambda i, k: (i, k))],
        out_specs=BlockSpec((high,), lambda i, k: (i,)),
        out_shape=shape(rows), scratch_shapes=[Scratch((high,), jnp.float32)], compiler_params=params,
    )  # fmt: skip
    def kernel(x, o, total):
        @pbkern.when(pbkern.program_id(1) == 0)
        def _():
            total[...] = jnp.zeros((high,), jnp.float32)

        inside = pbkern.in_bounds(x, 1)[None]
        total[...] += jnp.where(inside, x[...].astype(jnp.float32), 0).sum(1)
        o[...] = total[...]

    x = normal(rows, columns, dtype=dtype)
    return kernel, [x], x.astype(np.float64).sum(1)


def product(m, n, k, block, dtype=np.float16, params=None):
    """relu(a @ b + bias) with an accumulator in scratch; the bias does not move."""
    high, wide, deep = block

    @pbkern.kernel(
        grid=(blocks_of(m, high), blocks_of(n, wide), blocks_of(k, deep)),
        in_specs=[
            BlockSpec((high, deep), lambda i, j, k: (i, k)),
            BlockSpec((deep, wide), lambda i, j, k: (k, j)),
            BlockSpec((wide,), lambda i, j, k: (j,)),
        ],
        out_specs=BlockSpec((high, wide), lambda i, j, k: (i, j)),
        out_shape=shape(m, n), scratch_shapes=[Scratch((high, wide), jnp.float32)], compiler_params=params,
    )  # fmt: skip
    def kernel(a, b, bias, o, total):
        @pbkern.when(pbkern.program_id(2) == 0)
        def _():
            total[...] = jnp.zeros((high, wide))

        x, y = a[...], b[...]
        if k % deep:
            x = jnp.where(pbkern.in_bounds(a, 1)[None], x, 0)
            y = jnp.where(pbkern.in_bounds(b, 0)[:, None], y, 0)
        total[...] += jnp.dot(x, y, preferred_element_type=jnp.float32)

        @pbkern.when(pbkern.program_id(2) == pbkern.num_programs(2) - 1)
        def _():
            o[...] = jnp.maximum(total[...] + bias[...], 0)

    arrays = [normal(m, k, dtype=dtype), normal(k, n, dtype=dtype), normal(n)]
    a, b, bias = (x.astype(np.float64) for x in arrays)
    return kernel, arrays, np.maximum(a @ b + bias, 0)


def weighted(length, block, params=None):
    """Blocks of one input, in which each step reads elements by an index, times factors that do not move."""

    @pbkern.kernel(
        grid=(1, blocks_of(length, block)),
        in_specs=[BlockSpec((block,), lambda i, k: (k,)), BlockSpec((block,), lambda i, k: (0,))],
        out_specs=BlockSpec((block,), lambda i, k: (k,)), out_shape=shape(length), compiler_params=params,
    )  # fmt: skip
    def kernel(x, factors, o):
        o[...] = x[(jnp.arange(block) * 5 + pbkern.program_id(1)) % block] * factors[...]

    x, factors = normal(length), normal(block + 1)[1:]
    padded = np.concatenate([x, np.zeros(-length % block)]).reshape(-1, block)
    places = [(np.arange(block) * 5 + step) % block for step in range(len(padded))]
    want = [row[at] * factors for row, at in zip(padded.astype(np.float64), places)]
    return kernel, [x, factors], np.concatenate(want)[:length]


# ---------------------------------------------------------------- what they compute


@pytest.mark.parametrize("order", ["late", "early", "random"])
@pytest.mark.parametrize(("stages", "delay"), STEPS)
def test_sums_of_rows(stages, delay, order):
    with arriving(order):
        check(*row_sums(9, 77, (4, 16), params=ahead(stages, delay)))


@pytest.mark.parametrize("order", ["late", "early", "random"])
@pytest.mark.parametrize(("stages", "delay"), STEPS)
def test_products_with_an_accumulator_in_scratch(stages, delay, order):
    with arriving(order):
        nests = check(*product(64, 64, 96, (32, 32, 16), params=ahead(stages, delay, parallel=2)))
    assert "mma.m16n8k16" in str(nests)


@pytest.mark.parametrize("order", ["late", "early", "random"])
@pytest.mark.parametrize(("stages", "delay"), [(2, 0), (3, 1), (4, 3)])
def test_an_input_that_does_not_move_is_copied_once(stages, delay, order):
    with arriving(order):
        nests = check(*weighted(7 * 24, 24, params=ahead(stages, delay)))
    assert isinstance(nests.cases[0].statements[0], AsyncCopy)


SHAPES = {
    "rows of odd length": (9, 300, (3, 33), np.float32),
    "halves in rows of odd length, which threads copy": (6, 75, (3, 25), np.float16),
    "bytes": (8, 96, (8, 12), np.int8),
    "doubles": (3, 20, (2, 8), np.float64),
    "one row": (1, 1000, (1, 96), np.float32),
    "one column at a time": (40, 5, (40, 1), np.float32),
    "one block": (3, 5, (3, 5), np.float32),
    "one element at a time": (2, 3, (1, 1), np.float16),
    "one step": (8, 16, (4, 16), np.float32),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_types(name):
    rows, columns, block, dtype = SHAPES[name]
    with jax.enable_x64(dtype == np.float64):
        check(*row_sums(rows, columns, block, dtype, params=ahead(3)), tolerance=1e-3)


PRODUCTS = [
    (200, 136, 200, (64, 64, 64), np.float16, 3, 1),
    (100, 100, 150, (50, 50, 24), np.float16, 3, 0),
    (64, 64, 64, (64, 64, 16), BF16, 2, 0),
    (130, 70, 90, (64, 32, 32), BF16, 4, 2),
    (48, 40, 33, (16, 8, 9), np.float32, 3, 0),
]


@pytest.mark.parametrize("case", PRODUCTS)
def test_products_of_ragged_blocks(case):
    *sizes, block, dtype, stages, delay = case
    check(*product(*sizes, block, dtype, ahead(stages, delay, parallel=2)))


@pytest.mark.slow
@settings(max_examples=8, deadline=None, phases=[Phase.generate])
@given(st.data())
def test_products_of_any_sizes(data):
    sizes = [data.draw(st.integers(1, 64)) for _ in range(3)]
    block = tuple(data.draw(st.integers(-(-size // 4), min(size, 40))) for size in sizes)
    stages = data.draw(st.integers(1, 4))
    delay = data.draw(st.integers(0, stages - 1))
    dtype = data.draw(st.sampled_from([np.float16, BF16, np.float32]))
    kernel, arrays, want = product(*sizes, block, dtype, ahead(stages, delay, parallel=2))
    check(kernel, arrays, want, tolerance=1e-3)


def test_two_dimensions_in_order_are_one_sequence_of_steps():
    """The block of the first input moves along both, that of the second along the first alone."""

    @pbkern.kernel(
        grid=(2, 3, 4),
        in_specs=[BlockSpec((1, 2, 8), lambda b, i, j: (b, i, j)), BlockSpec((2,), lambda b, i, j: (i,))],
        out_specs=BlockSpec((1, 2, 8), lambda b, i, j: (b, 0, 0)), out_shape=shape(2, 2, 8),
        scratch_shapes=[Scratch((1, 2, 8), jnp.float32)], compiler_params=ahead(3, in_order=2),
    )  # fmt: skip
    def kernel(x, w, o, total):
        @pbkern.when((pbkern.program_id(1) == 0) & (pbkern.program_id(2) == 0))
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += x[...] * w[...][None, :, None]
        o[...] = total[...]

    x, w = normal(2, 6, 32), normal(6)
    want = (x.astype(np.float64) * w[:, None]).reshape(2, 3, 2, 4, 8).sum((1, 3))
    check(kernel, [x, w], want)


def test_places_of_blocks_come_from_a_table():
    """Index maps read a table; its places behind the last step may be anything."""

    @pbkern.kernel(
        grid=(1, 5), num_scalar_prefetch=1,
        in_specs=[BlockSpec((16,), lambda i, k, table: (table[k],))],
        out_specs=BlockSpec((16,), lambda i, k, table: (k,)), out_shape=shape(80),
        compiler_params=ahead(3),
    )  # fmt: skip
    def kernel(table, x, o):
        o[...] = x[...] + table[pbkern.program_id(1)].astype(jnp.float32)

    x, table = normal(100), np.array([6, 0, 3, 3, 1], np.int32)
    padded = np.concatenate([x, np.zeros(12)]).reshape(-1, 16)
    want = padded[table] + table[:, None]
    nests = nests_of(kernel, table, x)
    inside = want.copy()
    for result in (nests.interpret(table, x)[0], simulated(nests, [table, x])):
        got = result.reshape(5, 16).astype(np.float64)
        np.testing.assert_allclose(got[1:], inside[1:], rtol=1e-6)
        np.testing.assert_allclose(got[0, :4], inside[0, :4], rtol=1e-6)


def test_programs_that_are_parallel_have_no_next_step():
    kernel, arrays, want = row_sums(8, 16, (8, 16), params=ahead(3, parallel=2, in_order=0))
    assert not any(
        isinstance(s, AsyncCopy) for s in every(check(kernel, arrays, want).cases[0].statements)
    )
    told = str(pbkern.jit(kernel, compile_options={"target": "nvgpu"}).explain(*arrays))
    assert "max_concurrent_steps=3: no grid dimension runs in order" in told


def test_steps_whose_number_an_operand_gives():
    line = BlockSpec((8,), lambda i: (i,))

    @pbkern.kernel(
        grid=(4,), dynamic_grid={0: 0}, in_specs=[BlockSpec(), line], out_specs=line,
        out_shape=shape(32), compiler_params=ahead(2, parallel=0),
    )  # fmt: skip
    def kernel(n, x, o):
        o[...] = x[...] + 1

    with pytest.raises(ScheduleError, match="an operand gives the size of its grid"):
        pbkern.simulate(kernel, np.array(3, np.int32), normal(32))


def pallas_product(a, b, **params):
    def body(a_ref, b_ref, o_ref, total):
        @pl.when(pl.program_id(2) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == 3)
        def _():
            o_ref[...] = total[...].astype(o_ref.dtype)

    return pl.pallas_call(
        body, grid=(2, 2, 4),
        in_specs=[pl.BlockSpec((32, 16), lambda i, j, k: (i, k)), pl.BlockSpec((16, 32), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((32, 32), lambda i, j, k: (i, j)), out_shape=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_shapes=[plgpu.SMEM((32, 32), jnp.float32)],
        compiler_params=plgpu.CompilerParams(dimension_semantics=("parallel", "parallel", "sequential"), **params),
    )(a, b)  # fmt: skip


@pytest.mark.parametrize("stages", [2, 3])
def test_pallas_calls_with_the_parameters_of_mosaic(stages):
    a, b = normal(64, 64, dtype=np.float16), normal(64, 65, dtype=np.float16)[:, 1:]

    def call(a, b):
        return pallas_product(a, b, max_concurrent_steps=stages)

    with pbkern.config.override(gpu_driver="simulator"), pbkern.pallas.installed("nvgpu"):
        got = jax.jit(call)(a, b)
        told = str(pbkern.jit(call, compile_options={"target": "nvgpu"}).explain(a, b))
    want = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
    assert f"are copied {stages - 1} steps ahead" in told
    assert f"({stages} stages of 1024 bytes)" in told


# ---------------------------------------------------------------- how they do it


def test_reports_name_stages():
    kernel, arrays, _ = product(64, 64, 96, (32, 32, 16), params=ahead(3, parallel=2))
    told = str(pbkern.jit(kernel, compile_options={"target": "nvgpu"}).explain(*arrays))
    assert (
        "blocks of input 0 (`a`) (3 stages of 1024 bytes), input 1 (`b`) (3 stages of 1024 bytes) are copied 2 steps ahead"
        in told
    )
    assert "blocks of input 2 (`bias`) do not move and are copied once" in told


def test_too_many_stages_for_shared_memory():
    kernel, arrays, _ = row_sums(256, 1024, (128, 128), params=ahead(4))
    with pytest.raises(KernelError) as e:
        pbkern.simulate(kernel, *arrays)
    told = str(e.value)
    assert "blocks of kernel `kernel` do not fit shared memory" in told
    assert "262144 bytes are needed, a block has 232448; 4 steps at a time of 65536 bytes each" in told  # fmt: skip
    assert "max_concurrent_steps=3, or smaller blocks" in told
    check(*row_sums(256, 256, (128, 128), params=ahead(3)), backend=NvgpuBackend(device_kind("sm_90a")))  # fmt: skip


FAULTY = (64, 64, 160, (32, 32, 16))


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_waits_are_found(name):
    kernel, arrays, _ = product(*FAULTY, params=ahead(3, parallel=2))
    nests = changed(nests_of(kernel, *arrays), FAULTS[name])
    with pytest.raises(InternalError, match="under way, which has not been waited for"):
        nests.interpret(*arrays)
    with pytest.raises(
        SimulationError, match="a copy to these bytes of shared memory is under way"
    ):
        simulated(nests, arrays)


def test_a_stage_that_is_overwritten_is_found():
    kernel, arrays, _ = product(*FAULTY, params=ahead(3, parallel=2))
    nests = changed(nests_of(kernel, *arrays), a_stage_too_far)
    with pytest.raises(InternalError, match="which overwrites it before it is read"):
        nests.interpret(*arrays)
    with pytest.raises(SimulationError, match=r"race|under way"):
        simulated(nests, arrays)


def test_authors_barriers_may_go_those_of_copies_stay():
    kernel, arrays, want = product(
        64, 64, 96, (32, 32, 16), params=ahead(3, parallel=2, unsafe_no_auto_barriers=True)
    )
    nests = check(kernel, arrays, want)
    nowhere = mock.patch.object(Barriers, "run", lambda _, stmts, pending: pending)
    with nowhere, pytest.raises(SimulationError, match="race"):
        simulated(nests, arrays)

    @pbkern.kernel(
        grid=(1, 4), in_specs=[BlockSpec((64,), lambda i, k: (k,))],
        out_specs=BlockSpec((64,), lambda i, k: (k,)), out_shape=shape(256),
        scratch_shapes=[Scratch((64,), jnp.float32)],
        compiler_params=ahead(3, unsafe_no_auto_barriers=True),
    )  # fmt: skip
    def turned(x, o, t):
        t[...] = jnp.exp(x[...])
        o[...] = t[...][::-1]

    with pytest.raises(SimulationError, match="race"):
        pbkern.simulate(turned, normal(256))


@pytest.mark.skipif(
    ptxas.find() is None or ptxas._find("nvdisasm") is None, reason="no ptxas or no nvdisasm"
)
@pytest.mark.parametrize(("stages", "most"), [(3, 105), (4, 85)])
def test_instructions_of_a_step(stages, most):
    """As many as a product takes whose steps the target chooses, and one barrier; nothing is spilled."""
    kernel, arrays, _ = product(256, 256, 4096, (128, 128, 32), BF16, ahead(stages, parallel=2))
    ir = codegen.llvm_ir(emit(nests_of(kernel, *arrays), "k"))
    made = ptxas.assemble(codegen.ptx(ir, device_kind("sm_80")), "sm_80")
    assert made.spill_bytes == 0
    step = step_of(ptxas.disassembled(made.cubin))
    assert sum("HMMA" in line for line in step) == 32
    assert sum("BAR.SYNC" in line for line in step) == 1
    assert len(step) <= most


# ---------------------------------------------------------------- groups of warps


HOPPER = NvgpuBackend(device_kind("sm_90a"))


@pytest.mark.parametrize(("stages", "delay"), [(2, 0), (3, 0), (3, 1), (4, 1), (3, 2)])
def test_products_by_groups_of_warps(stages, delay):
    params = ahead(stages, delay, parallel=2, lowering_semantics="Warpgroup")
    kernel, arrays, want = product(130, 72, 320, (64, 64, 64), BF16, params)
    nests = nests_of(kernel, *arrays, backend=HOPPER)
    statements = list(every(nests.cases[0].statements))
    assert any(isinstance(stmt, AsyncProduct) for stmt in statements)
    left = [stmt.groups for stmt in statements if isinstance(stmt, Wait) and stmt.products]
    assert left == ([1, 0] if delay else [0])
    function = HOPPER.emit(nests, "k")
    result = np.zeros((130, 72), np.float32)
    ptx = codegen.ptx(codegen.llvm_ir(function), device_kind("sm_90a"))
    simulate_ptx(
        ptx, function.blocks, function.threads, [*arrays, result],
        shared_bytes=function.dynamic_shared_bytes,
    )  # fmt: skip
    for got in (nests.interpret(*arrays)[0], result):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_what_groups_of_warps_cannot_do():
    def asked(block, dtype=BF16, **params):
        params = ahead(3, parallel=2, lowering_semantics="Warpgroup", **params)
        kernel, arrays, _ = product(64, 64, 96, block, dtype, params)
        return pbkern.simulate(kernel, *arrays)

    with pytest.raises(ScheduleError, match="a product cannot be computed by groups of four warps"):
        asked((16, 16, 16))
    with pytest.raises(ScheduleError, match="a group has 4 warps, a block 2"):
        asked((64, 64, 64), num_warps=2)
    params = ahead(3, parallel=2, lowering_semantics="Warpgroup")
    kernel, arrays, _ = product(64, 64, 96, (64, 64, 64), params=params)
    with pytest.raises(ScheduleError, match="sm_80 has no instructions of four warps"):
        nests_of(kernel, *arrays)


# ---------------------------------------------------------------- devices that copy nothing by themselves


@pytest.mark.parametrize("architecture", ["gfx942", "gfx1100"])
def test_amd_devices_copy_through_registers(architecture):
    backend = AmdgpuBackend(amd_kind(architecture))
    for kernel, arrays, want in (
        product(64, 64, 96, (32, 32, 16), params=ahead(3, parallel=2, vendor=pbkern.amdgpu)),
        row_sums(9, 77, (4, 16), params=ahead(3, 1, vendor=pbkern.amdgpu)),
    ):
        nests = nests_of(kernel, *arrays, backend=backend)
        statements = list(every(nests.cases[0].statements))
        assert not any(isinstance(stmt, AsyncCopy) for stmt in statements)
        held = [x.buf for stmt in statements if isinstance(stmt, Nest) for x in stmt.stores]
        assert any(buf.space == "registers" for buf in held)
        np.testing.assert_allclose(nests.interpret(*arrays)[0], want, rtol=1e-4, atol=1e-4)
        assert emit(nests, "k").shared_bytes > 0


def test_copies_through_registers_on_simulated_threads():
    """The way of AMD's devices, on threads that the simulator runs."""
    kind = device_kind("sm_80")
    backend = NvgpuBackend(
        dataclasses.replace(kind, device=dataclasses.replace(kind.device, copies_tiles=False))
    )
    for stages, delay in ((2, 0), (3, 1), (4, 3)):
        for kernel in (
            row_sums(9, 160, (4, 16), params=ahead(stages, delay)),
            product(64, 64, 96, (32, 32, 16), params=ahead(stages, delay, parallel=2)),
        ):
            nests = check(*kernel, backend=backend)
            assert not any(isinstance(s, AsyncCopy) for s in every(nests.cases[0].statements))


def test_a_loop_of_few_steps_copies_all_of_them_first():
    nests = check(*row_sums(9, 48, (4, 16), params=ahead(4)))
    first, wait, loop = (s for s in nests.cases[0].statements if isinstance(s, For | Wait))
    assert (first.trips, wait.groups, loop.trips) == (3, 0, 3)
