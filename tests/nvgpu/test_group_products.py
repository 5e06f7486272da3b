"""Products by groups of four warps, which read tiles by themselves: nests and PTX against float64 and integers, and faults."""

import dataclasses
import re
import subprocess
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pbkern
from pbkern.core.options import CompileOptions
from pbkern.errors import InternalError, SimulationError
from pbkern.lower.kernel_nests import KernelNests, kernel_nests
from pbkern.lower.nest.ir import For, Nest, Wait, every
from pbkern.lower.nest.tiles.layout import Panels, Swizzle
from pbkern.lower.nest.tiles.tiling import Tiling
from pbkern.lower.passes.shared import SHARED_PASSES
from pbkern.simulate.counts import Counts
from pbkern.simulate.launches import simulate_ptx
from pbkern.targets.nvgpu import compile as codegen
from pbkern.targets.nvgpu import ptxas
from pbkern.targets.nvgpu.backend import NvgpuBackend
from pbkern.targets.nvgpu.devices import device_kind
from pbkern.targets.simt.emit.kernel import emit
from pbkern.targets.simt.passes import THREAD_PASSES
from pbkern.targets.simt.passes.contract import ContractTiles
from pbkern.targets.simt.schedule.barriers import Barriers

from .test_matrix_products import Product, changed

SM_90A = device_kind("sm_90a")


def nests_of(kernel, **options) -> KernelNests:
    chosen = dataclasses.replace(
        NvgpuBackend(SM_90A).build_options(kernel, CompileOptions()), **options
    )
    return kernel_nests(kernel, chosen).after((*SHARED_PASSES, *THREAD_PASSES))


def ptx_of(nests: KernelNests):
    function = emit(nests, "k")
    return function, codegen.ptx(codegen.llvm_ir(function), SM_90A)


def simulated(nests: KernelNests, arrays, change=lambda ptx: ptx) -> tuple[np.ndarray, Counts]:
    function, ptx = ptx_of(nests)
    output = nests.kernel.outputs[0].array
    result = np.zeros(output.shape, output.dtype)
    counts = simulate_ptx(
        change(ptx), function.blocks, function.threads, [*arrays, result],
        shared_bytes=function.dynamic_shared_bytes,
    )  # fmt: skip
    return result, counts


def instructions(nests: KernelNests) -> set[str]:
    found = [stmt for stmt in every(nests.cases[0].statements) if isinstance(stmt, Nest)]
    return {nest.by.instruction.name for nest in found if isinstance(nest.by, Tiling)}


CASES = {
    "aligned": (Product(128, 128, 64), "m64n128k16.bf16"),
    "edges": (Product(200, 264, 136), "m64n128k16.bf16"),
    "8 bytes at a time": (Product(130, 132, 100), "m64n128k16.bf16"),
    "4 bytes at a time": (Product(77, 134, 102), "m64n128k16.bf16"),
    "float16": (Product(150, 140, 72, "float16"), "m64n128k16.f16"),
    "bfloat16 results": (Product(150, 140, 72, out="bfloat16"), "m64n128k16.bf16"),
    "first transposed": (Product(136, 136, 72, turned=(True, False)), "m64n128k16.bf16"),
    "second transposed": (Product(136, 136, 72, turned=(False, True)), "m64n128k16.bf16"),
    "both transposed": (Product(130, 132, 72, turned=(True, True)), "m64n128k16.bf16"),
    "batch": (Product(130, 72, 72, batch=3), "m64n128k16.bf16"),
    "prologue": (Product(200, 264, 136, pre=True), "m64n128k16.bf16"),
    "one group": (Product(72, 72, 72, block=(64, 64), warps=4), "m64n64k16.bf16"),
    "one block on a multiprocessor": (
        Product(140, 264, 600, block=(128, 256)), "m64n256k16.bf16",
    ),
    "four groups": (Product(140, 264, 136, block=(128, 256), warps=16), "m64n128k16.bf16"),
    "int8": (Product(100, 80, 200, "int8", "int32", turned=(False, True)), "m64n128k32.s8"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_products(name):
    case, instruction = CASES[name]
    kernel = case.kernel()
    arrays, nests = case.arrays(kernel), nests_of(kernel)
    want = case.wanted(*arrays)
    assert instructions(nests) == {f"wgmma.{instruction}"}
    np.testing.assert_allclose(
        nests.interpret(*arrays)[0].astype(np.float64), want, rtol=1e-5, atol=case.tolerance
    )
    result, counts = simulated(nests, arrays)
    np.testing.assert_allclose(result.astype(np.float64), want, rtol=1e-5, atol=case.tolerance)
    assert counts.bank_conflicts == 0


@given(
    st.tuples(*[st.integers(1, 150)] * 3),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from(["float16", "bfloat16", "int8"]),
    st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_nests_of_any_shape(sizes, turned, dtype, pre):
    m, n, k = sizes
    out = "int32" if dtype == "int8" else "float32"
    case = Product(m, n, k, dtype, out, block=(64, 64), warps=4, turned=turned, pre=pre)
    kernel = case.kernel()
    arrays = case.arrays(kernel)
    np.testing.assert_allclose(
        nests_of(kernel).interpret(*arrays)[0], case.wanted(*arrays), rtol=1e-5, atol=3e-5
    )


LEFT = {
    "few rows": Product(20, 128, 64),
    "few columns": Product(128, 24, 64),
    "a short depth": Product(128, 128, 32),
    "elements that threads copy one by one": Product(77, 131, 69),
    "bytes across rows": Product(128, 128, 64, "int8", "int32"),
    "two warps": Product(64, 64, 64, block=(64, 64), warps=2),
}


@pytest.mark.parametrize("name", LEFT)
def test_products_that_single_warps_compute(name):
    assert {name.partition(".")[0] for name in instructions(nests_of(LEFT[name].kernel()))} == {
        "mma"
    }


@pytest.mark.skipif(ptxas.find() is None, reason="no ptxas")
@pytest.mark.parametrize(("block", "most"), [((128, 128), 128), ((128, 256), 255)])
@pytest.mark.parametrize("turned", [(False, False), (True, True)])
def test_registers_suffice(block, most, turned, tmp_path):
    """Without spills, and without a word of ptxas that it waits for each product."""
    _, ptx = ptx_of(nests_of(Product(4096, 4096, 4096, block=block, turned=turned).kernel()))
    (tmp_path / "kernel.ptx").write_text(ptx)
    command = [ptxas.find(), "-arch=sm_90a", "-v", "kernel.ptx", "-o", "kernel.cubin"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr
    assert " 0 bytes spill stores" in said
    assert int(re.search(r"Used (\d+) registers", said)[1]) <= most
    assert "serialized" not in said


def test_a_step_has_one_barrier():
    case = Product(128, 256, 512, block=(128, 256))
    kernel = case.kernel()
    _, counts = simulated(nests_of(kernel), case.arrays(kernel))
    assert counts.barriers == 512 // 64


def test_panels_are_linear_over_bits():
    panels = Panels(64, 256, 64)
    places = np.arange(64 * 256)
    np.testing.assert_array_equal(np.sort(panels(places)), places)
    rng = np.random.default_rng(0)
    for first, second in rng.integers(0, 64 * 256, (50, 2)).tolist():
        assert panels(first ^ second) == panels(first) ^ panels(second)
    assert panels(1 * 256 + 65) == 64 * 64 + 1 * 64 + 1


# ---------------------------------------------------------------- faults that are planted are found

DEEP = Product(128, 256, 600, block=(128, 256))


def without(kind):
    return lambda body: [stmt for stmt in body if not kind(stmt)]


def later(products: bool):
    """A wait that lets one group more be under way."""
    return lambda body: [
        dataclasses.replace(stmt, groups=stmt.groups + 1)
        if isinstance(stmt, Wait) and stmt.products == products
        else stmt
        for stmt in body
    ]


FAULTS = {
    "no wait for products": (
        without(lambda stmt: isinstance(stmt, Wait) and stmt.products),
        "while a product reads it",
    ),
    "a wait for a product too few": (later(True), "while a product reads it"),
    "a wait for copies too few": (later(False), "has not been waited for"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_that_nests_show(name):
    change, message = FAULTS[name]
    kernel = DEEP.kernel()
    nests = changed(nests_of(kernel), change)
    with pytest.raises(InternalError, match=message):
        nests.interpret(*DEEP.arrays(kernel))


def test_sums_that_are_read_before_their_wait():
    kernel = DEEP.kernel()
    nests = nests_of(kernel)
    (case,) = nests.cases
    *statements, wait, last = case.statements
    assert isinstance(wait, Wait)
    assert wait.products
    case = dataclasses.replace(case, statements=(*statements, last))
    with pytest.raises(InternalError, match="while a product adds to it"):
        dataclasses.replace(nests, cases=(case,)).interpret(*DEEP.arrays(kernel))


def test_a_wait_for_products_that_ptx_lacks():
    kernel = DEEP.kernel()
    with pytest.raises(SimulationError, match="a product that is under way reads these bytes"):
        simulated(
            nests_of(kernel),
            DEEP.arrays(kernel),
            lambda ptx: ptx.replace("wgmma.wait_group.sync.aligned \t1", "wgmma.wait_group.sync.aligned \t2"),
        )  # fmt: skip


def test_a_fence_that_is_left_out():
    kernel = DEEP.kernel()
    with pytest.raises(SimulationError, match="whose store no fence has followed"):
        simulated(
            nests_of(kernel),
            DEEP.arrays(kernel),
            lambda ptx: ptx.replace("fence.proxy.async.shared::cta;", ""),
        )


def test_barriers_that_are_left_out():
    kernel = DEEP.kernel()
    nowhere = mock.patch.object(Barriers, "run", lambda _, stmts, pending: pending)
    with nowhere, pytest.raises(SimulationError, match="race"):
        simulated(nests_of(kernel), DEEP.arrays(kernel))


def test_tiles_without_panels():
    """Rows of 256 columns are no layout that the instruction reads."""
    kernel = DEEP.kernel()
    with mock.patch("pbkern.targets.simt.passes.products.Panels", return_value=None):
        nests = nests_of(kernel)
    arrays = DEEP.arrays(kernel)
    assert np.abs(simulated(nests, arrays)[0] - DEEP.wanted(*arrays)).max() > 1


def test_tiles_without_swizzles():
    kernel = DEEP.kernel()
    of_rows = Swizzle.of_rows

    def plain(*sizes):
        return dataclasses.replace(of_rows(*sizes), mask=0)

    with mock.patch.object(Swizzle, "of_rows", staticmethod(plain)):
        nests = nests_of(kernel)
    arrays = DEEP.arrays(kernel)
    assert np.abs(simulated(nests, arrays)[0] - DEEP.wanted(*arrays)).max() > 1


def test_products_wait_at_once_where_two_blocks_share_a_multiprocessor():
    def waits(block):
        nests = nests_of(Product(256, 256, 1024, block=block).kernel())
        (loop,) = (
            stmt
            for stmt in nests.cases[0].statements
            if isinstance(stmt, For) and any(isinstance(inner, Wait) for inner in stmt.body)
        )
        return [(stmt.groups, stmt.products) for stmt in loop.body if isinstance(stmt, Wait)]

    assert waits((128, 128)) == [(1, False), (0, True)]
    assert waits((128, 256)) == [(1, False), (1, True)]
    assert ContractTiles().group_stages == 4


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_bytes_are_converted_while_they_are_copied(dtype):
    """They fit bfloat16, but no instruction multiplies the one by the other."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((128, 256)).astype(jnp.bfloat16)
    b = rng.integers(0, 100, (256, 128)).astype(dtype)
    f = pbkern.jit(
        lambda a, b: jnp.dot(a, b.astype(a.dtype), preferred_element_type=jnp.float32),
        compile_options={"target": "nvgpu"},
    )
    (kernel,) = f.kernels(a, b)
    nests = nests_of(kernel)
    assert {name.partition(".")[0] for name in instructions(nests)} == {"wgmma"}
    assert emit(nests, "k").global_bytes == 0
    want = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(pbkern.simulate(f, a, b).results, want, rtol=1e-5, atol=1e-2)


def test_operands_of_a_single_product_are_converted_while_they_are_copied():
    """Rows of 768 that are converted first fit the registers of threads, and would be held there for one product alone."""

    def f(x, w, b):
        y = x @ w + b
        return jnp.tanh(y), y

    types = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 768), (768, 1024), (1024,))
    ]
    kernels = pbkern.jit(f, compile_options={"target": "nvgpu"}).kernels(*types)
    for nests in map(nests_of, kernels):
        assert emit(nests, "k").global_bytes == 0
        found = [stmt for stmt in every(nests.cases[0].statements) if isinstance(stmt, Nest)]
        held = {
            store.buf for nest in found for store in nest.stores if store.buf.space == "registers"
        }
        assert all(buf.size <= 256 * 128 for buf in held)
