"""Products by tensor cores: nests on NumPy arrays and PTX in the simulator, both against float64 and integers."""

import dataclasses
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern
import pbkern.nvgpu
from pbkern.core.options import CompileOptions
from pbkern.errors import InternalError, SimulationError
from pbkern.lower.kernel_nests import KernelNests, kernel_nests
from pbkern.lower.nest.async_copies import masked_load
from pbkern.lower.nest.ir import AsyncCopy, For, Nest, Wait, every
from pbkern.lower.nest.tiles.layout import Swizzle
from pbkern.lower.passes.shared import SHARED_PASSES
from pbkern.simulate.counts import Counts
from pbkern.simulate.launches import simulate_ptx
from pbkern.targets.nvgpu import compile as codegen
from pbkern.targets.nvgpu import ptxas
from pbkern.targets.nvgpu.backend import NvgpuBackend
from pbkern.targets.nvgpu.devices import device_kind
from pbkern.targets.simt.emit.kernel import emit
from pbkern.targets.simt.passes import THREAD_PASSES
from pbkern.targets.simt.schedule.barriers import Barriers

SM_80 = device_kind("sm_80")
GPU = {"target": "nvgpu"}


@dataclasses.dataclass(frozen=True)
class Product:
    """act(pre(a) @ b + bias) of m x k and k x n, each maybe stored transposed, in blocks of a hand-written kernel."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    out: str = "float32"
    block: tuple[int, int] = (128, 128)
    warps: int = 8
    batch: int = 0
    turned: tuple[bool, bool] = (False, False)
    act: str = "relu"
    pre: bool = False
    widened: bool = False
    rounded: bool = False

    def kernel(self):
        height, width = min(self.block[0], self.m), min(self.block[1], self.n)
        lead, none = ((self.batch,), (None,)) if self.batch else ((), ())
        exact = jnp.int32 if self.dtype == "int8" else jnp.float32
        first, second = (
            (k, m) if turned else (m, k)
            for turned, (m, k) in zip(self.turned, ((self.m, self.k), (self.k, self.n)))
        )

        def body(a, b, bias, o):
            dims = (((0 if self.turned[0] else 1,), (1 if self.turned[1] else 0,)), ((), ()))
            x, y = a[...], b[...]
            if self.rounded:
                x, y = x.astype(jnp.float16), y.astype(jnp.float16)
            x = jnp.maximum(x, 0) if self.pre else x
            if self.widened:
                x, y = x.astype(jnp.float32), y.astype(jnp.float32)
            total = lax.dot_general(x, y, dims, preferred_element_type=exact) + bias[...]
            total = {"relu": lambda x: jnp.maximum(x, 0), "tanh": jnp.tanh}[self.act](total)
            o[...] = total.astype(self.out)

        def blocks(shape, index):
            at = (lambda g, i, j: (g, *index(i, j))) if self.batch else index
            return pbkern.BlockSpec((*none, *shape), at)

        specs = [
            blocks((self.k, height) if self.turned[0] else (height, self.k),
                   lambda i, j: (0, i) if self.turned[0] else (i, 0)),
            blocks((width, self.k) if self.turned[1] else (self.k, width),
                   lambda i, j: (j, 0) if self.turned[1] else (0, j)),
            pbkern.BlockSpec((width,), (lambda g, i, j: (j,)) if self.batch else lambda i, j: (j,)),
        ]  # fmt: skip
        types = [jax.ShapeDtypeStruct((*lead, *shape), self.dtype) for shape in (first, second)]
        types.append(jax.ShapeDtypeStruct((self.n,), exact))
        grid = (*lead, -(-self.m // height), -(-self.n // width))
        params = pbkern.nvgpu.CompilerParams(
            dimension_semantics=("parallel",) * len(grid), num_warps=self.warps
        )
        made = pbkern.kernel(
            grid=grid, in_specs=specs, out_specs=[blocks((height, width), lambda i, j: (i, j))],
            in_types=types, out_shape=[jax.ShapeDtypeStruct((*lead, self.m, self.n), self.out)],
            compiler_params=params,
        )(body)  # fmt: skip
        return made.trace(*types)

    def arrays(self, kernel) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        arrays = []
        for mapping in kernel.inputs:
            shape, dtype = mapping.array.shape, mapping.array.dtype
            is_float = dtype.kind not in "iu"
            values = rng.standard_normal(shape) if is_float else rng.integers(-99, 99, shape)
            arrays.append(np.asarray(values).astype(dtype))
        return arrays

    def wanted(self, a, b, bias) -> np.ndarray:
        a, b = (x.astype(np.float16) if self.rounded else x for x in (a, b))
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        a = a.swapaxes(-1, -2) if self.turned[0] else a
        b = b.swapaxes(-1, -2) if self.turned[1] else b
        total = (np.maximum(a, 0) if self.pre else a) @ b + bias
        return np.maximum(total, 0) if self.act == "relu" else np.tanh(total)

    @property
    def tolerance(self) -> float:
        return {"float32": 3e-5, "int32": 0, "bfloat16": 2e-1}[self.out]


def nests_of(kernel, **options) -> KernelNests:
    backend = NvgpuBackend(SM_80)
    chosen = dataclasses.replace(backend.build_options(kernel, CompileOptions()), **options)
    return kernel_nests(kernel, chosen).after((*SHARED_PASSES, *THREAD_PASSES))


def simulated(nests: KernelNests, arrays) -> tuple[np.ndarray, Counts, str]:
    function = emit(nests, "k")
    ptx = codegen.ptx(codegen.llvm_ir(function), SM_80)
    output = nests.kernel.outputs[0].array
    result = np.zeros(output.shape, output.dtype)
    counts = simulate_ptx(
        ptx, function.blocks, function.threads, [*arrays, result],
        shared_bytes=function.dynamic_shared_bytes,
    )  # fmt: skip
    return result, counts, ptx


CASES = {
    "aligned": Product(128, 128, 64),
    "one step": Product(128, 128, 32),
    "less than a step": Product(128, 128, 8),
    "edges": Product(200, 264, 136),
    "small": Product(20, 40, 136, warps=2),
    "8 bytes at a time": Product(130, 132, 100),
    "4 bytes at a time": Product(77, 134, 102),
    "2 bytes at a time": Product(77, 131, 37),
    "float16": Product(150, 140, 72, "float16"),
    "bfloat16 results": Product(150, 140, 72, out="bfloat16"),
    "tanh": Product(100, 100, 104, act="tanh"),
    "first transposed": Product(136, 136, 72, turned=(True, False)),
    "second transposed": Product(136, 136, 72, turned=(False, True)),
    "both transposed": Product(130, 131, 70, turned=(True, True)),
    "batch": Product(130, 72, 72, batch=3),
    "prologue": Product(200, 264, 136, pre=True),
    "64 x 64": Product(200, 264, 136, block=(64, 64), warps=4),
    "32 x 256": Product(50, 300, 96, block=(32, 256), warps=4),
    "more sums than registers": Product(200, 300, 40, block=(200, 256), warps=4),
    "int8": Product(100, 72, 200, "int8", "int32", block=(64, 64), warps=4, turned=(False, True)),
    "int8 across rows": Product(64, 64, 40, "int8", "int32", block=(64, 64), warps=4),
    "rounded": Product(128, 136, 136, "float32", rounded=True),
    "rounded, edges": Product(200, 100, 37, "float32", turned=(False, True), rounded=True),
    "rounded, transposed": Product(136, 136, 72, "float32", turned=(True, True), rounded=True),
    "widened operands": Product(64, 64, 40, block=(64, 64), warps=4, widened=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_products(name):
    case = CASES[name]
    kernel = case.kernel()
    arrays, nests = case.arrays(kernel), nests_of(kernel)
    want = case.wanted(*arrays)
    np.testing.assert_allclose(
        nests.interpret(*arrays)[0].astype(np.float64), want, rtol=1e-5, atol=case.tolerance
    )
    result, counts, ptx = simulated(nests, arrays)
    assert "mma.sync" in ptx
    np.testing.assert_allclose(result.astype(np.float64), want, rtol=1e-5, atol=case.tolerance)
    if name != "int8 across rows":  # of which no matrix is transposed by ldmatrix
        assert counts.bank_conflicts == 0


@given(
    st.tuples(*[st.integers(1, 150)] * 3),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.booleans(),
    st.sampled_from([2, 4]),
)
@settings(max_examples=15, deadline=None)
def test_nests_of_any_shape(sizes, turned, dtype, pre, warps):
    """Late copies, masks at all edges, operands either way: the interpreter finds what reads too early, or outside."""
    m, n, k = sizes
    case = Product(
        m, n, k, dtype, block=(64, 64), warps=warps, turned=turned, pre=pre,
        rounded=dtype == "float32",
    )  # fmt: skip
    kernel = case.kernel()
    arrays = case.arrays(kernel)
    np.testing.assert_allclose(
        nests_of(kernel).interpret(*arrays)[0], case.wanted(*arrays), rtol=1e-5, atol=3e-5
    )


def test_a_step_has_one_barrier():
    case = Product(128, 128, 512)
    kernel = case.kernel()
    _, counts, ptx = simulated(nests_of(kernel), case.arrays(kernel))
    assert counts.barriers == 512 // 32
    assert (ptx.count("mma.sync"), ptx.count("ldmatrix"), ptx.count("bar.sync")) == (32, 12, 1)


@pytest.mark.skipif(ptxas.find() is None, reason="no ptxas")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_registers_suffice(architecture):
    function = emit(nests_of(Product(4096, 4096, 4096).kernel()), "k")
    kind = device_kind(architecture)
    made = ptxas.assemble(codegen.ptx(codegen.llvm_ir(function), kind), architecture)
    assert made.spill_bytes == 0
    assert made.registers <= 128


def staged(kind: str, turned: bool):
    """relu(a @ b + bias) of 4096 x 4096 x 4096, both float32, or b of bytes with a scale per column."""
    size, kinds = 4096, {"float32": ("float32", "float32"), "int8": ("bfloat16", "int8")}[kind]

    def body(a, b, scale, bias, o):
        x, y = a[...], b[...]
        if kind == "float32":
            x, y = x.astype(jnp.float16), y.astype(jnp.float16)
        else:
            by_column = scale[...][:, None] if turned else scale[...][None]
            y = (y.astype(jnp.float32) * by_column).astype(jnp.bfloat16)
        dims = (((1,), (1 if turned else 0,)), ((), ()))
        total = lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)
        o[...] = jnp.maximum(total + bias[...], 0)

    column = pbkern.BlockSpec((128,), lambda i, j: (j,))
    second = (
        pbkern.BlockSpec((128, size), lambda i, j: (j, 0))
        if turned
        else pbkern.BlockSpec((size, 128), lambda i, j: (0, j))
    )
    types = [jax.ShapeDtypeStruct((size, size), dtype) for dtype in kinds]
    types += [jax.ShapeDtypeStruct((size,), "float32")] * 2
    params = pbkern.nvgpu.CompilerParams(dimension_semantics=("parallel",) * 2, num_warps=8)
    made = pbkern.kernel(
        grid=(size // 128,) * 2, out_shape=[jax.ShapeDtypeStruct((size, size), "float32")],
        in_specs=[pbkern.BlockSpec((128, size), lambda i, j: (i, 0)), second, column, column],
        out_specs=[pbkern.BlockSpec((128, 128), lambda i, j: (i, j))],
        in_types=types, compiler_params=params,
    )(body)  # fmt: skip
    return made.trace(*types)


def step_of(listing: str) -> list[str]:
    """Instructions of the innermost loop that multiplies matrices."""
    instructions: list[str] = []
    starts: dict[str, int] = {}
    loops = []
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            starts[label[1]] = len(instructions)
        elif code := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(code[1])
            back = re.search(r"BRA.*\((\.L_x_\d+)\)", code[1])
            if back and back[1] in starts:
                loops.append(instructions[starts[back[1]] :])
    return min((loop for loop in loops if "HMMA" in " ".join(loop)), key=len)


STEPS = {
    "bfloat16": (lambda turned: Product(4096, 4096, 4096, turned=(False, turned)).kernel(), 95),
    "float32": (lambda turned: staged("float32", turned), 120),
    "bytes with scales": (lambda turned: staged("int8", turned), 150),
}


@pytest.mark.skipif(
    ptxas.find() is None or ptxas._find("nvdisasm") is None, reason="no ptxas or no nvdisasm"
)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_instructions_of_a_step(name, turned):
    """32 HMMA of 16 x 8 x 16 are a step of 32 along the depth for a warp of eight that has 64 x 32 of 128 x 128."""
    make, most = STEPS[name]
    function = emit(nests_of(make(turned)), "k")
    made = ptxas.assemble(codegen.ptx(codegen.llvm_ir(function), SM_80), "sm_80")
    assert made.spill_bytes == 0
    step = step_of(ptxas.disassembled(made.cubin))
    assert sum("HMMA" in line for line in step) == 32
    assert sum("BAR.SYNC" in line for line in step) == 1
    assert len(step) <= most


def test_tensor_cores_may_be_left_out():
    f = pbkern.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32),
                   compile_options={"target": "nvgpu", "polyblocks_gpu_no_tensor_core": True})  # fmt: skip
    a = jnp.ones((128, 128), jnp.bfloat16)
    assert "mma.sync" not in f.as_text(a, a, stage="ptx")
    assert "mma_async" not in f.as_text(a, a, stage="ptx")
    g = pbkern.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32),
                   compile_options={"target": "nvgpu"})  # fmt: skip
    assert "wgmma.mma_async" in g.as_text(a, a, stage="ptx")


def test_a_gradient_of_weights_contracts_two_dimensions_as_one():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((3, 50, width)).astype(jnp.bfloat16) for width in (70, 90))
    f = pbkern.jit(
        lambda a, b: jnp.einsum("bsk,bsn->kn", a, b, preferred_element_type=jnp.float32),
        compile_options={"target": "nvgpu"},
    )
    assert "products by wgmma" in str(f.explain(a, b))
    want = np.einsum("bsk,bsn->kn", a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(pbkern.simulate(f, a, b).results, want, rtol=1e-5, atol=5e-5)


def test_explanations_name_the_instruction_and_the_mode():
    def f(a, b):
        return jnp.matmul(a, b, preferred_element_type=jnp.float32)

    a, b = (jnp.ones((128, 128), dtype) for dtype in (jnp.bfloat16, jnp.float32))
    told = str(pbkern.jit(f, compile_options=GPU).explain(a, a))
    assert "    products by wgmma.m64n64k16.bf16" in told
    assert "mixed_fp16_fp32" not in told
    told = str(pbkern.jit(f, compile_options={**GPU, "device": "a100"}).explain(a, a))
    assert "    products by mma.m16n8k16.bf16" in told
    told = str(pbkern.jit(f, compile_options=GPU).explain(b, b))
    assert "    products by wgmma.m64n64k16.f16" in told
    assert "sums of float32: mixed_fp16_fp32, the default of this device" in told
    asked = {**GPU, "mm_conv_precision_mode": "mixed_fp16_fp32"}
    told = str(pbkern.jit(f, compile_options=asked).explain(b, b))
    assert "sums of float32: mixed_fp16_fp32, as asked" in told


def by_row(a, b):
    """Two products, of which the first has no tile: what a mode says of them is the same."""
    return jnp.tanh(a @ b[:, 0])[:, None] + jnp.tanh(a @ b)


EXACT_OPTIONS = {
    "no tensor cores": {"polyblocks_gpu_no_tensor_core": True},
    "fp32": {"mm_conv_precision_mode": "fp32"},
    "both": {"polyblocks_gpu_no_tensor_core": True, "mm_conv_precision_mode": "fp32"},
}
ROUNDED_OPTIONS = {
    "default": {},
    "asked": {"mm_conv_precision_mode": "mixed_fp16_fp32"},
    "asked without tensor cores": {
        "mm_conv_precision_mode": "mixed_fp16_fp32",
        "polyblocks_gpu_no_tensor_core": True,
    },
}


@pytest.mark.parametrize("name", [*EXACT_OPTIONS, *ROUNDED_OPTIONS])
def test_float32_operands_are_rounded_to_halves_unless_options_say_otherwise(name):
    """Products of numbers of 11 bits are exact in float32; sums of 70 of them are off by 70 units in the last place at most."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((100, 70), (70, 130)))
    rounds = name in ROUNDED_OPTIONS
    options = {**GPU, **(ROUNDED_OPTIONS | EXACT_OPTIONS)[name]}
    f = pbkern.jit(by_row, compile_options=options)
    ptx = f.as_text(a, b, stage="ptx")
    assert bool(re.search(r"mma\.sync|mma_async", ptx)) == (
        rounds and "polyblocks_gpu_no_tensor_core" not in options
    )
    x, y = (np.asarray(x, np.float16 if rounds else np.float32).astype(float) for x in (a, b))
    want = np.tanh(x @ y[:, 0])[:, None] + np.tanh(x @ y)
    np.testing.assert_allclose(pbkern.simulate(f, a, b).results, want, rtol=2e-5, atol=2e-5)
    exact = np.tanh(a.astype(float) @ b[:, 0])[:, None] + np.tanh(a.astype(float) @ b)
    # Half a unit in the last of 11 bits of either factor, of products whose magnitudes add up to this.
    bound = 2 * 2.0**-11 * (np.abs(a) @ np.abs(b)).max()
    assert np.abs(want - exact).max() < 2 * bound


@pytest.mark.parametrize("steps", [4, 63, 64, 65])
def test_loops_of_any_number_of_steps_convert_operands(steps):
    """Long ones load the last step once more where none follows, short ones do not."""
    case = Product(64, 64, 32 * steps - 7, "float32", block=(64, 64), warps=4, rounded=True)
    kernel = case.kernel()
    arrays, nests = case.arrays(kernel), nests_of(kernel)
    loops = [
        stmt
        for stmt in every(nests.cases[0].statements)
        if isinstance(stmt, For) and stmt.trips == steps
    ]
    assert len(loops) == 1
    assert ("= min(" in str(nests)) == (steps >= 64)
    want = case.wanted(*arrays)
    np.testing.assert_allclose(nests.interpret(*arrays)[0], want, rtol=1e-5, atol=1e-3)
    result, *_ = simulated(nests, arrays)
    np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_the_default_mode_leaves_other_types_alone(dtype):
    with jax.enable_x64(True):
        a = jnp.asarray(np.random.default_rng(0).standard_normal((70, 70)), dtype)
        f = pbkern.jit(lambda a: jnp.matmul(a, a), compile_options=GPU)
        jaxpr = f.as_text(a, stage="jaxpr")
        assert "convert_element_type" not in jaxpr
        wide = np.asarray(a, np.float64)
        step = {"float64": 2.0**-52, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
        got = np.asarray(pbkern.simulate(f, a).results, np.float64)
        np.testing.assert_allclose(
            got, wide @ wide, rtol=2 * step, atol=1e-13 if dtype == "float64" else 70 * 2.0**-20
        )


WIDENED = {
    "both were bfloat16": (("bfloat16", "bfloat16"), "bf16"),
    "both were float16": (("float16", "float16"), "f16"),
    "one is float32": (("float32", "bfloat16"), "bf16"),
    "one was float16": (("float16", "float32"), "f16"),
}


@pytest.mark.parametrize("name", WIDENED)
def test_operands_that_were_bfloat16_keep_its_range(name):
    """In float16, 1e6 is infinite, and 1e-9 is zero: sums of 70 products are 70 times as large as they are here."""
    types, multiplied = WIDENED[name]
    scales = (1e6, 1e-9) if multiplied == "bf16" else (1, 1)
    rng = np.random.default_rng(0)
    a, b = (
        (scale * rng.standard_normal((128, 128))).astype(jnp.dtype(dtype))
        for scale, dtype in zip(scales, types)
    )

    def f(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.matmul(a.T, b[::-1])  # conversions are seen through views

    compiled = pbkern.jit(f, compile_options={**GPU, "device": "a100"})
    ptx = compiled.as_text(a, b, stage="ptx")
    assert set(re.findall(r"mma\.sync\.aligned\.\S*f32\.(\w+)\.\w+\.f32", ptx)) == {multiplied}
    want = a.astype(np.float64).T @ b.astype(np.float64)[::-1]
    magnitude = np.abs(a.astype(np.float64)).T @ np.abs(b.astype(np.float64))[::-1]
    exact = "float32" not in types
    step = 128 * 2.0**-24 if exact else 2.0**-8 if multiplied == "bf16" else 2.0**-11
    assert (np.abs(pbkern.simulate(compiled, a, b).results - want) <= step * magnitude).all()


@pytest.mark.parametrize("precision", ["highest", "float32", lax.Precision.HIGH])
def test_contractions_that_ask_for_precision_keep_it(precision):
    a = jnp.asarray(np.random.default_rng(0).standard_normal((70, 70)), jnp.float32)
    f = pbkern.jit(lambda a: jnp.matmul(a, a, precision=precision), compile_options=GPU)
    assert "f16" not in f.as_text(a, stage="jaxpr")
    wide = np.asarray(a, np.float64)
    np.testing.assert_allclose(pbkern.simulate(f, a).results, wide @ wide, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("target", ["cpu", "amdgpu"])
def test_only_targets_with_matrix_instructions_have_a_default_mode(target):
    a = jnp.ones((70, 70), jnp.float32)
    f = pbkern.jit(lambda a: a @ a, compile_options={"target": target})
    assert ("f16" in f.as_text(a, stage="jaxpr")) == (target == "amdgpu")


# ---------------------------------------------------------------- faults that are planted are found


def changed(nests: KernelNests, change) -> KernelNests:
    """The nests with the body of their pipelined loop changed."""
    (case,) = nests.cases
    statements = tuple(
        dataclasses.replace(stmt, body=tuple(change(stmt.body)))
        if isinstance(stmt, For) and any(isinstance(inner, Wait) for inner in stmt.body)
        else stmt
        for stmt in case.statements
    )
    assert statements != case.statements
    return dataclasses.replace(nests, cases=(dataclasses.replace(case, statements=statements),))


def swizzled_otherwise(body: list) -> list:
    """The tile that the first copy stores to has other swizzles there than where products read it."""
    out: list = []
    for stmt in body:
        if isinstance(stmt, AsyncCopy):
            copy, *rest = stmt.body
            (store,) = copy.stores
            buf = dataclasses.replace(store.buf, layout=Swizzle(8, 4))
            copy = dataclasses.replace(copy, stores=(dataclasses.replace(store, buf=buf),))
            stmt = AsyncCopy((copy, *rest))
        out.append(stmt)
    return out


def a_stage_too_far(body: list) -> list:
    """Copies go to the stage that the step reads."""
    out: list = []
    for stmt in body:
        if isinstance(stmt, AsyncCopy):
            stores = [(nest, nest.stores[0]) for nest in stmt.body]
            stmt = AsyncCopy(tuple(
                dataclasses.replace(nest, stores=(
                    dataclasses.replace(store, index=(store.index[0] + 1, *store.index[1:])),))
                for nest, store in stores
            ))  # fmt: skip
        out.append(stmt)
    return out


def test_a_stage_that_is_overwritten_while_it_is_read():
    case = Product(200, 264, 136)
    kernel = case.kernel()
    arrays, nests = case.arrays(kernel), changed(nests_of(kernel), a_stage_too_far)
    with pytest.raises(InternalError, match="which overwrites it before it is read"):
        nests.interpret(*arrays)
    with pytest.raises(SimulationError, match=r"race|under way"):
        simulated(nests, arrays)


def test_a_swizzle_on_one_side():
    case = Product(200, 264, 136)
    kernel = case.kernel()
    nests = changed(nests_of(kernel), swizzled_otherwise)
    with pytest.raises(InternalError, match=r"one tile has two layouts, %t\d+: .* and %t\d+: .*"):
        nests.verify()


def test_a_mask_that_is_left_out():
    """Tiles reach behind the last row, and behind the last column to the next row's elements."""
    case = Product(200, 264, 136)
    kernel = case.kernel()
    nests = nests_of(kernel)
    (only,) = nests.cases
    *before, last = only.statements
    stores = tuple(dataclasses.replace(store, mask=None, guard=False) for store in last.stores)
    statements = (*before, dataclasses.replace(last, stores=stores))
    unmasked = dataclasses.replace(nests, cases=(dataclasses.replace(only, statements=statements),))
    with pytest.raises(SimulationError, match=r"race|outside of"):
        simulated(unmasked, case.arrays(kernel))


def test_zeros_that_are_left_out():
    """A copy behind the last element of the depth has to store zeros."""
    case = Product(128, 128, 136)
    kernel = case.kernel()

    def unfilled(body):
        out = []
        for stmt in body:
            if isinstance(stmt, AsyncCopy):
                nests = []
                for nest in stmt.body:
                    (store,) = nest.stores
                    load, _ = masked_load(store.value)
                    nests.append(
                        dataclasses.replace(nest, stores=(dataclasses.replace(store, value=load),))
                    )
                stmt = AsyncCopy(tuple(nests))
            out.append(stmt)
        return out

    nests = changed(nests_of(kernel), unfilled)
    with pytest.raises(InternalError, match="where it has to store zeros"):
        nests.interpret(*case.arrays(kernel))
    with pytest.raises(SimulationError, match="outside of"):
        simulated(nests, case.arrays(kernel))


BYTES = {"int8": "int8", "uint8": "uint8", "uint8 to int32": "int32", "int8 to int32": "int32"}


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("shape", [(70, 90, 50), (32, 3000, 32)])
def test_products_of_bytes(name, shape):
    """Sums of bytes wrap as their types say; a deep product of few results is cut into chunks, each of tiles."""
    rng, dtype = np.random.default_rng(0), name.split()[0]
    rows, depth, columns = shape
    low, high = (-128, 128) if dtype == "int8" else (0, 256)
    a, b = (rng.integers(low, high, s).astype(dtype) for s in ((rows, depth), (depth, columns)))

    def f(a, b):
        return jnp.matmul(a, b, preferred_element_type=BYTES[name])

    compiled = pbkern.jit(f, compile_options=GPU)
    assert "mma.sync" in compiled.as_text(a, b, stage="ptx")
    want = (a.astype(np.int64) @ b.astype(np.int64)).astype(BYTES[name])
    np.testing.assert_array_equal(pbkern.simulate(compiled, a, b).results, want)
    np.testing.assert_array_equal(pbkern.jit(f)(a, b), want)


FAULTS = {
    "no wait": lambda body: [s for s in body if not isinstance(s, Wait)],
    "a wait for a group too few": lambda body: [Wait(s.groups + 1) if isinstance(s, Wait) else s for s in body],
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_pipelines(name):
    case = Product(200, 264, 136)
    kernel = case.kernel()
    arrays, nests = case.arrays(kernel), changed(nests_of(kernel), FAULTS[name])
    with pytest.raises(InternalError, match="under way, which has not been waited for"):
        nests.interpret(*arrays)
    with pytest.raises(
        SimulationError, match="a copy to these bytes of shared memory is under way"
    ):
        simulated(nests, arrays)


def test_a_commit_that_is_left_out():
    case = Product(200, 264, 136)
    kernel = case.kernel()
    function = emit(nests_of(kernel), "k")
    ptx = codegen.ptx(codegen.llvm_ir(function), SM_80).replace("cp.async.commit_group;", "")
    arrays = [*case.arrays(kernel), np.zeros((200, 264), np.float32)]
    with pytest.raises(
        SimulationError, match="a copy to these bytes of shared memory is under way"
    ):
        simulate_ptx(ptx, function.blocks, function.threads, arrays)


def test_barriers_that_are_left_out():
    case = Product(200, 264, 136)
    kernel = case.kernel()
    simulated(nests_of(kernel, barriers=False), case.arrays(kernel))  # those of copies stay
    nowhere = mock.patch.object(Barriers, "run", lambda _, stmts, pending: pending)
    with nowhere, pytest.raises(SimulationError, match="race"):
        simulated(nests_of(kernel), case.arrays(kernel))


def test_a_copy_under_way_is_written_behind_its_wait():
    """Without what the wait tells barriers, threads read what others have copied with no barrier between."""
    case = Product(128, 128, 64)
    kernel = case.kernel()
    one = Barriers.one

    def deaf(self, stmt, pending):
        return pending if isinstance(stmt, Wait | AsyncCopy) else one(self, stmt, pending)

    with mock.patch.object(Barriers, "one", deaf), pytest.raises(SimulationError, match="race"):
        simulated(nests_of(kernel), case.arrays(kernel))


def test_without_swizzles_there_are_conflicts():
    case = Product(200, 264, 136)
    kernel = case.kernel()
    with mock.patch.object(Swizzle, "of_rows", staticmethod(lambda *_: None)):
        nests = nests_of(kernel)
    result, counts, _ = simulated(nests, case.arrays(kernel))
    np.testing.assert_allclose(result, case.wanted(*case.arrays(kernel)), rtol=1e-5, atol=3e-5)
    assert counts.bank_conflicts > counts.shared_accesses


LEFT = {
    "few rows of float32": Product(16, 64, 64, "float32", block=(16, 64), warps=4),
    "a tile below four warps": Product(16, 8, 64, block=(16, 8), warps=4),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_products_that_are_left_to_multiply_adds(name):
    case = LEFT[name]
    kernel = case.kernel()
    nests, arrays = nests_of(kernel), case.arrays(kernel)
    assert not any(isinstance(s, Nest) and s.by for s in every(nests.cases[0].statements))
    np.testing.assert_allclose(
        nests.interpret(*arrays)[0], case.wanted(*arrays), rtol=1e-5, atol=3e-5
    )


def test_nests_say_by_what_they_are_computed():
    nests = nests_of(Product(200, 264, 136).kernel())
    found = [
        stmt for stmt in every(nests.cases[0].statements) if isinstance(stmt, Nest) and stmt.by
    ]
    assert [str(nest.by) for nest in found] == ["mma.m16n8k16.bf16 2x4"] * 3
    assert "by mma.m16n8k16.bf16 2x4" in str(nests)


MASKED = {
    "rows": lambda a, b: (jnp.where(jnp.arange(64)[:, None] < 8, a, 0), b),
    "depth": lambda a, b: (jnp.where(jnp.arange(64) < 8, a, 0), b),
    "columns": lambda a, b: (a, jnp.where(jnp.arange(64) < 8, b, 0)),
    "window": lambda a, b: (jax.lax.dynamic_update_slice(a, b[:9, :11], (30, 7)), b),
    "beside": lambda a, b: (jnp.concatenate([a[:5], b[5:]]), b),
    "rolled": lambda a, b: (jnp.roll(a, 5, 1), b),
    "rotated": lambda a, b: (jnp.concatenate([-a[:, 32:], a[:, :32]], 1), b),
}


@pytest.mark.parametrize("masked", MASKED)
def test_operands_of_several_stores(masked):
    """What one of several nests stores of an operand is not taken for the whole of it."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((64, 64)), "bfloat16") for _ in range(2))

    def f(a, b):
        return jnp.matmul(*MASKED[masked](a, b), preferred_element_type=jnp.float32)

    want = np.matmul(*(np.asarray(operand, np.float64) for operand in MASKED[masked](a, b)))
    (got,) = jax.tree.leaves(pbkern.simulate(f, a, b).results)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=1e-4)


def test_rows_that_a_mask_hides_from_all_keys_of_a_chunk():
    """Probabilities are one constant there, of which the machine code leaves half a register undefined."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((n, 64)), "bfloat16") for n in (64, 128, 128))

    def attention(q, k, v):
        scores = jnp.matmul(q, k.T, preferred_element_type=jnp.float32)
        seen = jnp.arange(64)[:, None] >= jnp.arange(128)
        p = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1).astype(q.dtype)
        return jnp.matmul(p, v, preferred_element_type=jnp.float32)

    (got,) = jax.tree.leaves(pbkern.simulate(attention, q, k, v).results)
    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    scores = np.where(np.arange(64)[:, None] >= np.arange(128), wide[0] @ wide[1].T, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = p / p.sum(-1, keepdims=True) @ wide[2]
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=2e-2)
