"""Products of float32 by multiply-adds of lanes, in the form of matrix instructions: nests and PTX against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pbkern
from pbkern.lower.nest.ir import Nest, every
from pbkern.targets.nvgpu import compile as codegen
from pbkern.targets.nvgpu import ptxas
from pbkern.targets.nvgpu.devices import device_kind
from pbkern.targets.simt.emit.kernel import emit
from pbkern.targets.simt.schedule.lane_products import EACH, LANE_PRODUCTS, LANES, oriented

from .test_matrix_products import Product, nests_of, simulated

EXACT = {"target": "nvgpu", "mm_conv_precision_mode": "fp32"}
WAYS = [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.parametrize("row", LANE_PRODUCTS, ids=lambda row: row.name)
def test_lanes_share_operands_and_have_sums_of_their_own(row):
    first, second, sums = row.layouts
    assert [layout.copies for layout in (first, second, sums)] == [LANES[1], LANES[0], 1]
    assert [layout.shape for layout in row.layouts] == [(16, EACH), (EACH, 32), (16, 32)]


def test_rows_for_the_four_orders_of_operands():
    rows = {oriented(LANE_PRODUCTS[0], way).name for way in WAYS}
    assert len(rows) == len(LANE_PRODUCTS)
    assert oriented(LANE_PRODUCTS[0], (True, False)).name.endswith("row.row"), "a @ b"
    assert oriented(LANE_PRODUCTS[0], (True, True)).name.endswith("row.col"), "a @ b.T"


CASES = {
    "aligned": Product(128, 128, 64, "float32"),
    "less than a step": Product(64, 64, 8, "float32", block=(64, 64), warps=4),
    "edges": Product(200, 264, 136, "float32", warps=4),
    "4 bytes at a time": Product(77, 131, 37, "float32", block=(64, 64), warps=4),
    "first transposed": Product(136, 136, 72, "float32", turned=(True, False)),
    "second transposed": Product(136, 136, 72, "float32", turned=(False, True)),
    "both transposed": Product(130, 131, 70, "float32", turned=(True, True)),
    "batch": Product(130, 72, 72, "float32", batch=2),
    "prologue": Product(200, 264, 40, "float32", pre=True),
    "more sums than registers": Product(200, 300, 40, "float32", block=(200, 256), warps=4),
}


@pytest.mark.parametrize("name", CASES)
def test_products(name):
    case = CASES[name]
    kernel = case.kernel()
    arrays, nests = case.arrays(kernel), nests_of(kernel)
    want = case.wanted(*arrays)
    np.testing.assert_allclose(nests.interpret(*arrays)[0], want, rtol=1e-5, atol=3e-5)
    result, counts, ptx = simulated(nests, arrays)
    np.testing.assert_allclose(result, want, rtol=1e-5, atol=3e-5)
    assert "fma.rn.f32" in ptx
    assert "mma.sync" not in ptx
    assert counts.bank_conflicts == 0
    by = {str(stmt.by) for stmt in every(nests.cases[0].statements) if isinstance(stmt, Nest)}
    assert any(text.startswith("fma.m16n32k4.f32") for text in by)


@given(
    st.tuples(st.integers(32, 150), st.integers(64, 150), st.integers(8, 70)),
    st.sampled_from(WAYS),
    st.booleans(),
    st.sampled_from([2, 4]),
)
@settings(max_examples=10, deadline=None)
def test_nests_of_any_shape(sizes, turned, pre, warps):
    case = Product(*sizes, "float32", block=(64, 64), warps=warps, turned=turned, pre=pre)
    kernel = case.kernel()
    arrays = case.arrays(kernel)
    np.testing.assert_allclose(
        nests_of(kernel).interpret(*arrays)[0], case.wanted(*arrays), rtol=1e-5, atol=3e-5
    )


@pytest.mark.parametrize("turned", WAYS)
def test_a_multiply_add_takes_few_instructions(turned):
    """A lane loads 32 words for 64 multiply-adds of a step; copies, places and results are shared by all steps."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((256, 256)).astype(np.float32) for _ in range(2))

    def f(a, b):
        return (a.T if turned[0] else a) @ (b.T if turned[1] else b)

    found = pbkern.simulate(pbkern.jit(f, compile_options=EXACT), a, b, check=False)
    np.testing.assert_allclose(
        found.results, f(a.astype(np.float64), b.astype(np.float64)), atol=1e-4
    )
    assert found.counts.instructions * 32 <= 1.6 * 256**3
    assert found.counts.bank_conflicts == 0


def test_a_convolution_of_float32():
    """Pixels of a line are the rows of a tile."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 40, 40, 32)).astype(np.float32)
    w = rng.standard_normal((3, 3, 32, 64)).astype(np.float32)

    def f(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    compiled = pbkern.jit(f, compile_options=EXACT)
    assert "by fma.m16n32k4.f32.row.row" in compiled.as_text(x, w, stage="nests")
    found = pbkern.simulate(compiled, x, w)
    padded = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = [padded[:, i : i + 40, j : j + 40] @ w[i, j] for i in range(3) for j in range(3)]
    np.testing.assert_allclose(found.results, sum(windows), atol=2e-4)


def test_orders_of_sums_that_must_stay_are_left_alone():
    types = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 2
    options = {**EXACT, "mlir_disable_fast_math": True}
    text = pbkern.jit(jnp.matmul, compile_options=options).as_text(*types, stage="nests")
    assert "fma.m16n32k4" not in text


@pytest.mark.skipif(ptxas.find() is None, reason="no ptxas")
@pytest.mark.parametrize("block", [(64, 64), (128, 64), (128, 128)])
@pytest.mark.parametrize("turned", WAYS)
def test_registers_suffice(block, turned):
    warps = 8 if block == (128, 128) else 4
    kernel = Product(4096, 4096, 4096, "float32", block=block, warps=warps, turned=turned).kernel()
    text = codegen.ptx(codegen.llvm_ir(emit(nests_of(kernel), "k")), device_kind("sm_80"))
    assert ptxas.assemble(text, "sm_80").spill_bytes == 0
