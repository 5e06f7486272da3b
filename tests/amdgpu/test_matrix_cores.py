"""Products by AMD's matrix cores: nests against float64, code, and the layouts of RDNA 3 run on simulated threads.

A warp of RDNA 3 has 32 threads, as those of the simulator: its instruction is written into PTX, with the meaning that the
ISA gives it. CDNA's warps have 64; of them nests are interpreted and code is read.
"""

import dataclasses
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pbkern
from pbkern.core.options import CompileOptions
from pbkern.lower.kernel_nests import kernel_nests
from pbkern.lower.nest.ir import For, Nest, every
from pbkern.lower.nest.tiles.tiling import Tiling
from pbkern.lower.passes.shared import SHARED_PASSES
from pbkern.simulate.instructions.table import MAKERS
from pbkern.simulate.launches import simulate_ptx
from pbkern.simulate.operands import names_of, operand
from pbkern.targets.amdgpu.backend import AmdgpuBackend
from pbkern.targets.amdgpu.devices import device_kind
from pbkern.targets.nvgpu import compile as codegen
from pbkern.targets.nvgpu.backend import NvgpuBackend
from pbkern.targets.nvgpu.devices import device_kind as nvidia_kind
from pbkern.targets.simt.device import Nvidia
from pbkern.targets.simt.emit.kernel import emit
from pbkern.targets.simt.passes import THREAD_PASSES
from pbkern.targets.simt.schedule.instructions import MATRIX_INSTRUCTIONS
from tests.nvgpu.test_attention import LOWEST, Attention
from tests.nvgpu.test_matrix_products import Product

from .test_amdgpu import needs_lld

ARCHITECTURES = ("gfx90a", "gfx942", "gfx1100")


def nests_of(kernel, architecture):
    backend = AmdgpuBackend(device_kind(architecture))
    options = backend.build_options(kernel, CompileOptions())
    return kernel_nests(kernel, options).after((*SHARED_PASSES, *THREAD_PASSES))


def instructions(nests) -> set[str]:
    found = [stmt for stmt in every(nests.cases[0].statements) if isinstance(stmt, Nest)]
    return {nest.by.instruction.name for nest in found if isinstance(nest.by, Tiling)}


@given(
    st.tuples(*[st.integers(1, 150)] * 3),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.booleans(),
    st.sampled_from(ARCHITECTURES),
)
@settings(max_examples=20, deadline=None)
def test_nests_of_any_shape(sizes, turned, dtype, pre, architecture):
    case = Product(*sizes, dtype, block=(64, 64), turned=turned, pre=pre)
    kernel = case.kernel()
    arrays = case.arrays(kernel)
    np.testing.assert_allclose(
        nests_of(kernel, architecture).interpret(*arrays)[0],
        case.wanted(*arrays),
        rtol=1e-5,
        atol=1e-4,
    )


CODE = {
    ("gfx90a", "float16"): "v_mfma_f32_16x16x16f16",
    ("gfx90a", "bfloat16"): "v_mfma_f32_16x16x16bf16_1k",
    ("gfx90a", "float32"): "v_mfma_f32_16x16x4f32",
    ("gfx942", "float16"): "v_mfma_f32_16x16x16_f16",
    ("gfx942", "bfloat16"): "v_mfma_f32_16x16x16_bf16",
    ("gfx942", "float32"): "v_mfma_f32_16x16x4_f32",
    ("gfx1100", "float16"): "v_wmma_f32_16x16x16_f16",
    ("gfx1100", "bfloat16"): "v_wmma_f32_16x16x16_bf16",
}


@needs_lld
@pytest.mark.parametrize(("architecture", "dtype"), CODE)
@pytest.mark.parametrize("turned", [False, True])
def test_code(architecture, dtype, turned):
    def f(a, b):
        return jnp.dot(a, b.T if turned else b, preferred_element_type=jnp.float32)

    options = {"target": "amdgpu", "device": architecture}
    if dtype == "float32":
        options["mm_conv_precision_mode"] = "fp32"
    type_ = jax.ShapeDtypeStruct((1024, 1024), dtype)
    text = pbkern.jit(f, compile_options=options).as_text(type_, type_, stage="asm")
    assert CODE[architecture, dtype] in text
    assert set(re.findall(r"vgpr_spill_count: +(\d+)", text)) == {"0"}
    plain = {**options, "polyblocks_gpu_no_tensor_core": True}
    text = pbkern.jit(f, compile_options=plain).as_text(type_, type_, stage="asm")
    assert not re.search("v_mfma|v_wmma", text)


def test_explanations_name_the_instruction():
    a = jnp.ones((128, 128), jnp.float16)
    f = pbkern.jit(
        lambda a: jnp.dot(a, a, preferred_element_type=jnp.float32),
        compile_options={"target": "amdgpu", "device": "gfx942"},
    )
    assert "products by mfma.f32.16x16x16.f16" in str(f.explain(a))


# ---------------------------------------------------------------- on simulated threads


def _wmma(program, instruction):
    """v_wmma_f32_16x16x16_f16. Source: RDNA 3 ISA, section 7.9.

    A[i][k]: lanes i and i + 16, half k. B[k][j]: lanes j and j + 16, half k. C[i][j]: lane j + 16 (i % 2), register i / 2.
    """
    targets, *inputs = (names_of(text) for text in instruction.operands)
    word, single = np.dtype(np.uint32), np.dtype(np.float32)
    readers = [
        [operand(program, name, dtype) for name in names]
        for names, dtype in zip(inputs, (word, word, single))
    ]

    def step(gang, mask):
        def by_warp(reader):
            return np.broadcast_to(reader(gang), gang.shape).reshape(gang.blocks, -1, 32)

        halves = []
        for part in readers[:2]:
            words = np.stack([by_warp(reader) for reader in part], -1)
            lanes = np.ascontiguousarray(words).view(np.float16)
            np.testing.assert_array_equal(lanes[:, :, :16], lanes[:, :, 16:])
            halves.append(lanes[:, :, :16].astype(np.float32))
        product = halves[0] @ halves[1].swapaxes(-1, -2)
        lane = np.arange(32)
        for number, (name, reader) in enumerate(zip(targets, readers[2])):
            part = product[:, :, 2 * number + lane // 16, lane % 16]
            gang.put(name, (by_warp(reader) + part).reshape(gang.shape), mask)

    return step


def _in_ptx(put, sums, first, second):
    """The instruction as inline assembly: results, words of both operands, sums."""
    struct = f"!llvm.struct<({', '.join(['f32'] * 8)})>"
    numbers = iter(range(32))
    lists = ["{" + ", ".join(f"${next(numbers)}" for _ in range(8)) + "}" for _ in range(4)]
    constraints = ",".join(["=f"] * 8 + ["r"] * 16 + ["f"] * 8)
    syntax = f' has_side_effects "wmma {", ".join(lists)};", "{constraints}" ' + ", ".join(
        ["%s"] * 24
    )
    types = f"({', '.join(['i32'] * 16 + ['f32'] * 8)}) -> {struct}"
    product = put("llvm.inline_asm", (*first, *second, *sums), types, syntax)
    return [put("llvm.extractvalue", (product,), struct, f" %s[{n}]") for n in range(8)]


SIMULATED = {
    "aligned": Product(64, 64, 64, "float16", block=(64, 64), warps=4),
    "edges": Product(70, 50, 41, "float16", block=(64, 64), warps=4),
    "first transposed": Product(64, 72, 40, "float16", block=(64, 64), warps=4, turned=(True, False)),
    "second transposed": Product(64, 72, 40, "float16", block=(64, 64), warps=4, turned=(False, True)),
    "both transposed": Product(33, 72, 40, "float16", block=(64, 64), warps=2, turned=(True, True)),
    "prologue": Product(70, 72, 40, "float16", block=(64, 64), warps=4, pre=True),
}  # fmt: skip


@pytest.mark.parametrize("name", SIMULATED)
def test_layouts_of_rdna(name):
    case = SIMULATED[name]
    kernel = case.kernel()
    row = dataclasses.replace(MATRIX_INSTRUCTIONS["wmma.f32.16x16x16.f16"], emit=_in_ptx)
    sm_80 = nvidia_kind("sm_80")
    options = dataclasses.replace(
        NvgpuBackend(sm_80).build_options(kernel, CompileOptions()),
        device=Nvidia(copies_tiles=False), tensor_cores=False, wmma=True, one_case=True,
    )  # fmt: skip
    with (
        mock.patch("pbkern.targets.simt.passes.products.WARP_INSTRUCTIONS", (row,)),
        mock.patch.dict(MAKERS, {"wmma": _wmma}),
    ):
        nests = kernel_nests(kernel, options).after((*SHARED_PASSES, *THREAD_PASSES))
        assert instructions(nests) == {row.name}
        function = emit(nests, "k")
        ptx = codegen.ptx(codegen.llvm_ir(function), sm_80)
        assert "ldmatrix" not in ptx
        arrays = case.arrays(kernel)
        result = np.zeros((case.m, case.n), np.float32)
        simulate_ptx(
            ptx, function.blocks, function.threads, [*arrays, result],
            shared_bytes=function.dynamic_shared_bytes,
        )  # fmt: skip
    np.testing.assert_allclose(result, case.wanted(*arrays), rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("hidden", [-np.inf, -1e30, LOWEST])
@pytest.mark.parametrize("architecture", ["gfx942", "gfx1100"])
def test_masked_chunks_are_left_out_for_every_fill(architecture, hidden):
    """Causal attention: loops end where the mask does, whose fill may be finite."""
    case = Attention(causal=True, dtype="float16", hidden=hidden)
    arrays, nests = case.arrays(), nests_of(case.kernel(), architecture)
    loops = [stmt for stmt in every(nests.cases[0].statements) if isinstance(stmt, For)]
    assert any(isinstance(loop.trips, str) for loop in loops)
    assert not any(loop.trips == case.tokens // case.keys for loop in loops)
    assert instructions(nests)
    result = nests.interpret(*arrays)[0].astype(np.float64)
    np.testing.assert_allclose(result, case.wanted(*arrays), atol=4 * 2.0**-11)
