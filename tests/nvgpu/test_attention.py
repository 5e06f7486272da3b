"""Attention by tensor cores, with scores, weights and sums in registers: nests and PTX against float64."""

import math
import re
from dataclasses import dataclass, replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex

import pbkern
import pbkern.nvgpu
from pbkern.core.jaxprs.walks import equations
from pbkern.core.options import CompileOptions
from pbkern.lower.kernel_nests import kernel_nests
from pbkern.lower.nest.ir import For, Nest, every
from pbkern.lower.passes.shared import SHARED_PASSES
from pbkern.simulate.launches import simulate_ptx
from pbkern.targets.nvgpu import compile as codegen
from pbkern.targets.nvgpu import program, ptxas
from pbkern.targets.nvgpu.backend import NvgpuBackend
from pbkern.targets.nvgpu.devices import device_kind
from pbkern.targets.simt.emit.kernel import emit
from pbkern.targets.simt.passes import THREAD_PASSES

from .test_matrix_products import SM_80, nests_of, simulated


@dataclass(frozen=True)
class Attention:
    """Online softmax over blocks of keys, as one writes it by hand."""

    tokens: int = 256
    width: int = 64
    heads: int = 1
    rows: int = 64
    keys: int = 64
    warps: int = 4
    causal: bool = False
    dtype: str = "bfloat16"
    hidden: float = -1e30

    def kernel(self):
        rows, keys = self.rows, self.keys

        def body(q, k, v, o):
            x = q[...]
            row = pbkern.program_id(1) * rows + lax.broadcasted_iota(jnp.int32, (rows, keys), 0)

            def step(n, state):
                top, total, out = state
                block = pbkern.ds(n * keys, keys)
                s = lax.dot_general(
                    x, k[block, :], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
                )
                s = s * self.width**-0.5
                if self.causal:
                    key = n * keys + lax.broadcasted_iota(jnp.int32, (rows, keys), 1)
                    s = jnp.where(key <= row, s, self.hidden)
                new = jnp.maximum(top, s.max(1))
                p, scale = jnp.exp(s - new[:, None]), jnp.exp(top - new)
                product = lax.dot_general(
                    p.astype(self.dtype), v[block, :], (((1,), (0,)), ((), ())),
                    preferred_element_type=jnp.float32,
                )  # fmt: skip
                return new, total * scale + p.sum(1), out * scale[:, None] + product

            start = jnp.full((rows,), -1e30), jnp.zeros((rows,)), jnp.zeros((rows, self.width))
            _, total, out = lax.fori_loop(0, self.tokens // keys, step, start)
            o[...] = (out / total[:, None]).astype(self.dtype)

        types = [jax.ShapeDtypeStruct((self.heads, self.tokens, self.width), self.dtype)] * 3
        whole = pbkern.BlockSpec((None, self.tokens, self.width), lambda h, i: (h, 0, 0))
        part = pbkern.BlockSpec((None, rows, self.width), lambda h, i: (h, i, 0))
        params = pbkern.nvgpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), num_warps=self.warps
        )
        made = pbkern.kernel(
            grid=(self.heads, self.tokens // rows), in_specs=[part, whole, whole], out_specs=[part],
            in_types=types, out_shape=types[:1], compiler_params=params,
        )(body)  # fmt: skip
        return made.trace(*types)

    def arrays(self) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        shape = self.heads, self.tokens, self.width
        return [
            np.asarray(rng.standard_normal(shape)).astype(jnp.dtype(self.dtype)) for _ in range(3)
        ]

    def wanted(self, *arrays: np.ndarray) -> np.ndarray:
        q, k, v = (x.astype(np.float64) for x in arrays)
        s = q @ k.swapaxes(-1, -2) * self.width**-0.5
        if self.causal:
            s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        return p @ v / p.sum(-1, keepdims=True)


CASES = {
    "plain": Attention(),
    "causal": Attention(causal=True),
    "eight warps": Attention(rows=128, warps=8, heads=2),
    "fewer keys at a time": Attention(keys=32),
    "wide heads": Attention(tokens=128, width=128),
    "float16": Attention(tokens=128, dtype="float16"),
    "one step": Attention(tokens=64),
}


@pytest.mark.parametrize("name", CASES)
def test_attention(name):
    case = CASES[name]
    arrays, nests = case.arrays(), nests_of(case.kernel())
    want = case.wanted(*arrays)
    np.testing.assert_allclose(nests.interpret(*arrays)[0].astype(np.float64), want, atol=1e-2)
    result, counts, ptx = simulated(nests, arrays)
    np.testing.assert_allclose(result.astype(np.float64), want, atol=1e-2)
    assert "mma.sync" in ptx
    assert counts.bank_conflicts == 0
    blocks, steps = case.heads * case.tokens // case.rows, case.tokens // case.keys
    if not case.causal:
        assert counts.barriers == blocks * steps, "one per step"


def test_all_scratch_between_products_is_in_registers():
    nests = nests_of(Attention().kernel())
    found = [stmt for stmt in every(nests.cases[0].statements) if isinstance(stmt, Nest)]
    touched = {access.buf for nest in found for access in (*nest.loads(), *nest.stores)}
    spaces = {buf.space for buf in touched if buf.arena}
    assert spaces == {"registers", "shared"}
    assert {buf.dtype.name for buf in touched if buf.space == "shared"} == {"bfloat16"}, (
        "operands alone"
    )


@pytest.mark.skipif(ptxas.find() is None, reason="no ptxas")
@pytest.mark.parametrize("case", [Attention(1024), Attention(1024, width=128)], ids=["64", "128"])
def test_attention_spills_nothing(case):
    function = emit(nests_of(case.kernel()), "k")
    made = ptxas.assemble(codegen.ptx(codegen.llvm_ir(function), SM_80), "sm_80")
    assert made.spill_bytes == 0
    assert function.shared_bytes <= 100 << 10


def test_scratch_that_goes_across_rows_stays_in_memory():
    """Weights that are read as columns are no operand of registers: the products are computed one by one."""

    def body(a, b, o):
        s = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32).astype(jnp.bfloat16)
        o[...] = lax.dot_general(
            s, b[...], (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )

    types = [jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * 2
    kernel = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct((64, 64), jnp.float32)).trace(
        *types
    )
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((64, 64)).astype(jnp.bfloat16) for _ in range(2))
    nests = nests_of(kernel)
    s = (a.astype(np.float64) @ b.astype(np.float64)).astype(jnp.bfloat16).astype(np.float64)
    for found in (nests.interpret(a, b)[0], simulated(nests, [a, b])[0]):
        np.testing.assert_allclose(found, s.T @ b.astype(np.float64), atol=0.5, rtol=1e-2)


def test_attention_that_is_fused_is_one_kernel_without_scratch_in_memory():
    """Scratch that each program overwrites before it reads it is in registers as well."""

    def attend(q, k, v):
        s = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=jnp.float32) * 0.125
        p = jax.nn.softmax(s, -1).astype(q.dtype)
        return jnp.einsum("hqk,hkd->hqd", p, v, preferred_element_type=jnp.float32).astype(q.dtype)

    types = [jax.ShapeDtypeStruct((16, 1024, 64), jnp.bfloat16)] * 3
    (kernel,) = pbkern.jit(attend, compile_options={"target": "nvgpu"}).kernels(*types)
    nests = nests_of(kernel)
    found = [stmt for stmt in every(nests.cases[0].statements) if isinstance(stmt, Nest)]
    touched = {access.buf for nest in found for access in (*nest.loads(), *nest.stores)}
    in_memory = {buf for buf in touched if buf.arena and buf.space != "registers"}
    assert {(buf.space, buf.dtype.name) for buf in in_memory} == {("shared", "bfloat16")}, (
        "operands alone"
    )
    function = emit(nests, "k")
    assert function.shared_bytes == (64 * 64 + 2 * 2 * 64 * 64) * 2
    assert codegen.ptx(codegen.llvm_ir(function), SM_80).count("bar.sync") == 1


# The first rows see no key, the others those that lie so many places before them. Fills make a mean of the first rows.
LATER = 70
LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Fused:
    """Attention as a function: `groups` heads of queries share one of keys, which may be hidden or dropped."""

    queries: int = 128
    keys: int = 128
    groups: int = 1
    dtype: str = "bfloat16"
    seen: str = "all"
    hidden: float = -np.inf
    dropped: float = 0.0

    def kept(self, seed):
        shape = self.groups, 2, self.queries, self.keys
        return jax.random.bernoulli(jax.random.wrap_key_data(seed), 1 - self.dropped, shape)

    def __call__(self, q, k, v, seed):
        return self.attended(q, k, v, self.kept(seed) if self.dropped else None)

    def attended(self, q, k, v, kept):
        kind = jnp.promote_types(q.dtype, jnp.float32)
        s = jnp.einsum("ghqd,hkd->ghqk", q, k, preferred_element_type=kind) * 0.125
        row, key = (lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (2, 3))
        if self.seen != "all":
            s = jnp.where(row - (self.seen == "later") * LATER >= key, s, self.hidden)
        if self.seen == "window":
            s = jnp.where(row - key < 70, s, self.hidden)
        p = jax.nn.softmax(s, -1)
        if kept is not None:
            p = jnp.where(kept, p / (1 - self.dropped), 0)
        return jnp.einsum("ghqk,hkd->ghqd", p.astype(q.dtype), v, preferred_element_type=kind)

    def arrays(self):
        rng = np.random.default_rng(0)
        shapes = (self.groups, 2, self.queries, 64), *((2, self.keys, 64),) * 2
        drawn = [rng.standard_normal(shape).astype(jnp.dtype(self.dtype)) for shape in shapes]
        return [*drawn, np.array([1, 2], np.uint32)]

    def wanted(self, q, k, v, seed):
        kept = np.asarray(self.kept(seed)) if self.dropped else None
        with jax.enable_x64(True):
            wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v)]
            return np.asarray(self.attended(*wide, kept))


FUSED = {
    "keys that 64 does not divide": Fused(64, 200),
    "fewer keys than a tile": Fused(100, 50),
    "one key more": Fused(128, 129, dtype="float16"),
    "float32": Fused(128, 256, dtype="float32"),
    "float32, ragged": Fused(64, 230, dtype="float32"),
    "grouped heads": Fused(groups=3),
    "causal, ragged": Fused(150, 150, seen="causal"),
    "window": Fused(192, 192, seen="window"),
    "causal, a finite fill": Fused(150, 150, seen="causal", hidden=-1e30),
    "window, the lowest number": Fused(192, 192, seen="window", hidden=LOWEST),
    "rows that see no key": Fused(192, 192, seen="later", hidden=-1e9),
    "a fill that matters": Fused(192, 192, seen="causal", hidden=-5.0),
    "dropout": Fused(64, 192, dropped=0.25),
}


@pytest.mark.parametrize("name", FUSED)
def test_attention_as_a_function(name):
    """Weights are rounded to 8 bits of bfloat16, or 11 of float16, and multiply values whose magnitudes add up to 4."""
    case = FUSED[name]
    arrays = case.arrays()
    f = pbkern.jit(case.__call__, compile_options={"target": "nvgpu"})
    assert len(re.findall(r"mma\.sync|mma_async", f.as_text(*arrays, stage="ptx"))) >= 4
    got = np.asarray(pbkern.simulate(f, *arrays).results, np.float64)
    step = 2.0**-8 if case.dtype == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(got, case.wanted(*arrays), rtol=0, atol=4 * step)


@pytest.mark.parametrize("keys", [200, 1000, 1024])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_any_length_are_in_registers(keys, dtype):
    types = [jax.ShapeDtypeStruct((16, 1024, 64), dtype)]
    types += [jax.ShapeDtypeStruct((16, keys, 64), dtype)] * 2

    def attend(q, k, v):
        s = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=jnp.float32) * 0.125
        p = jax.nn.softmax(s, -1).astype(q.dtype)
        return jnp.einsum("hqk,hkd->hqd", p, v, preferred_element_type=jnp.float32)

    (kernel,) = pbkern.jit(attend, compile_options={"target": "nvgpu"}).kernels(*types)
    nests = nests_of(kernel)
    leaves = [stmt for stmt in every(nests.cases[0].statements) if isinstance(stmt, Nest)]
    touched = {access.buf for nest in leaves for access in (*nest.loads(), *nest.stores)}
    in_memory = {buf for buf in touched if buf.arena and buf.space != "registers"}
    operand = "float16" if dtype == "float32" else dtype
    assert {buf.dtype.name for buf in in_memory} == {operand}, "operands alone"
    function = emit(nests, "k")
    assert function.global_bytes == 0
    assert function.shared_bytes <= 100 << 10
    if ptxas.find() is not None:
        for architecture in ("sm_80", "sm_90a"):
            text = codegen.ptx(codegen.llvm_ir(function), device_kind(architecture))
            assert ptxas.assemble(text, architecture).spill_bytes == 0


# ---------------------------------------------------------------- gradients


@dataclass(frozen=True)
class Gradients:
    """Attention and its gradients by queries, keys and values, given that of the result."""

    tokens: int
    dtype: str = "bfloat16"
    seen: str = "all"
    heads: int = 1
    hidden: float = -np.inf
    width: int = 64

    def attended(self, q, k, v):
        s = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=jnp.float32) * 0.125
        row, key = (lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (1, 2))
        if self.seen != "all":
            s = jnp.where(row - (self.seen == "later") * LATER >= key, s, self.hidden)
        if self.seen == "window":
            s = jnp.where(row - key < 70, s, self.hidden)
        p = jax.nn.softmax(s, -1).astype(q.dtype)
        out = jnp.einsum("hqk,hkd->hqd", p, v, preferred_element_type=jnp.float32)
        return out.astype(q.dtype)

    def __call__(self, q, k, v, d_out):
        out, back = jax.vjp(self.attended, q, k, v)
        return out, *back(d_out)

    @property
    def types(self):
        return [jax.ShapeDtypeStruct((self.heads, self.tokens, self.width), self.dtype)] * 4

    def arrays(self):
        rng = np.random.default_rng(0)
        dtype = jnp.dtype(self.dtype)
        return [rng.standard_normal(x.shape).astype(dtype) for x in self.types]

    def wanted(self, *arrays):
        q, k, v, d_out = (np.asarray(x, np.float64) for x in arrays)
        row, key = np.indices((self.tokens, self.tokens))
        visible = {
            "all": row >= 0,
            "causal": row >= key,
            "window": (row >= key) & (row - key < 70),
            "later": row - LATER >= key,
        }[self.seen]
        s = np.where(visible, np.einsum("hqd,hkd->hqk", q, k) * 0.125, self.hidden)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        d_p = np.einsum("hqd,hkd->hqk", d_out, v)
        d_s = np.where(visible, p * (d_p - (p * d_p).sum(-1, keepdims=True)), 0) * 0.125
        return (
            np.einsum("hqk,hkd->hqd", p, v),
            np.einsum("hqk,hkd->hqd", d_s, k),
            np.einsum("hqk,hqd->hkd", d_s, q),
            np.einsum("hqk,hqd->hkd", p, d_out),
        )

    def kernels(self):
        """Kernels with products: the result, gradients by keys and values, by queries."""
        made = pbkern.jit(self.__call__, compile_options={"target": "nvgpu"}).kernels(*self.types)
        return [(kernel, nests_of(kernel)) for kernel in made if "dot" in kernel.name]


GRADIENTS = {
    "plain": Gradients(128, heads=2),
    "float16": Gradients(192, "float16"),
    "causal": Gradients(192, seen="causal"),
    "causal, ragged": Gradients(200, seen="causal"),
    "window": Gradients(256, "float16", "window"),
    "rows that see no key": Gradients(192, seen="later", hidden=-1e30),
    "heads of 96": Gradients(130, seen="causal", width=96),
    "heads of 80": Gradients(128, "float16", width=80),
    "heads of 256": Gradients(100, width=256),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name):
    case = GRADIENTS[name]
    arrays = case.arrays()
    f = pbkern.jit(case.__call__, compile_options={"target": "nvgpu"})
    step = 2.0**-8 if case.dtype == "bfloat16" else 2.0**-11
    for got, want in zip(pbkern.simulate(f, *arrays).results, case.wanted(*arrays)):
        error = np.abs(np.asarray(got, np.float64) - want).max()
        assert error < 2 * step * np.abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Gradients(1024, seen="causal", heads=16),
        Gradients(1024, heads=16),
        Gradients(1024, "float16", "window", 16),
        Gradients(1024, seen="causal", heads=16, hidden=-1e30),
        Gradients(1024, seen="later", heads=16, hidden=-1e30),
    ],
    ids=["causal", "all", "window", "a finite fill", "rows that see no key"],
)
def test_gradients_of_many_heads(case):
    """Scores of so many heads are not stored. The blocks of the first head are simulated."""
    arrays = case.arrays()
    f = pbkern.jit(case.__call__, compile_options={"target": "nvgpu"})

    def of_one_head(ptx, grid, *args, **options):
        return simulate_ptx(ptx, grid // case.heads, *args, **options)

    with mock.patch.object(program, "simulate_ptx", of_one_head):
        found = pbkern.simulate(f, *arrays).results
    step = 2.0**-8 if case.dtype == "bfloat16" else 2.0**-11
    one = replace(case, heads=1)
    for got, want in zip(found, one.wanted(*(x[:1] for x in arrays))):
        error = np.abs(np.asarray(got[:1], np.float64) - want).max()
        assert error < 2 * step * np.abs(want).max()


def stored_before_the_last_loop(kernel) -> int:
    """Results that a kernel's body stores before its last loop."""
    jaxpr = kernel.body.jaxpr
    results = jaxpr.invars[len(kernel.inputs) :][: len(kernel.outputs)]
    last = max(n for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name in ("while", "scan"))
    stores = [eqn for eqn in jaxpr.eqns[:last] if eqn.primitive.name == "swap"]
    return len({eqn.invars[0] for eqn in stores} & set(results))


@pytest.mark.parametrize(
    "seen", ["all", *(pytest.param(x, marks=pytest.mark.slow) for x in ("causal", "window"))]
)
def test_results_and_gradients_are_two_kernels_without_scratch_in_memory(seen):
    """The result with the gradient by queries, and those by keys and values, whose scores have rows of keys.

    Row sums of gradients are those of the result: no product is computed for them. What has been stored of the result takes no
    registers while the gradient is computed.
    """
    made = Gradients(1024, seen=seen, heads=16).kernels()
    assert sorted(len(kernel.outputs) for kernel, _ in made) == [2, 5]
    for kernel, nests in made:
        products = [e for e in equations(kernel.body.jaxpr) if e.primitive.name == "dot_general"]
        assert len(products) == (2 + 3 if len(kernel.outputs) == 5 else 4)
        if len(kernel.outputs) == 5:
            assert stored_before_the_last_loop(kernel) == 4, "all but the gradient"
        leaves = [stmt for stmt in every(nests.cases[0].statements) if isinstance(stmt, Nest)]
        touched = {access.buf for nest in leaves for access in (*nest.loads(), *nest.stores)}
        in_memory = {buf for buf in touched if buf.arena and buf.space != "registers"}
        assert {buf.space for buf in in_memory} == {"shared"}
        assert {buf.dtype.name for buf in in_memory} == {"bfloat16"}, "operands as they are"
        tiles = {buf for buf in in_memory if buf.space == "shared"}
        # Queries, and what is given of the result's derivative; keys and values of either pass.
        assert len(tiles) == (6 if len(kernel.outputs) == 5 else 4), (
            "one for all of an operand's products"
        )
        assert all(nest.by for nest in leaves if any(x.is_product for x in nest.reductions))
        function = emit(nests, "k")
        assert function.global_bytes == 0
        assert function.shared_bytes <= 100 << 10
        if ptxas.find() is not None:
            text = codegen.ptx(codegen.llvm_ir(function), SM_80)
            assert ptxas.assemble(text, "sm_80").spill_bytes == 0


@pytest.mark.parametrize(
    ("seen", "hidden"),
    [("causal", -np.inf), ("window", -np.inf), ("causal", -1e30), ("window", LOWEST)],
)
def test_loops_leave_out_chunks_that_a_mask_hides(seen, hidden):
    """Of the result and of gradients: queries see the keys before them, keys are seen by the queries behind them."""
    for _, nests in Gradients(1024, seen=seen, heads=16, hidden=hidden).kernels():
        loops = [stmt for stmt in every(nests.cases[0].statements) if isinstance(stmt, For)]
        assert any(isinstance(loop.trips, str) for loop in loops)
        assert not any(loop.trips == 16 for loop in loops)


@pytest.mark.parametrize(("hidden", "of_tests"), [(-np.inf, 0), (-1e30, 4)])
def test_half_of_a_causal_attention_is_not_computed(hidden, of_tests):
    """4 blocks of 64 rows need 1, 2, 3 and 4 chunks of 64 keys; of_tests: barriers of a block whose fill is tested."""
    case = Attention(causal=True, hidden=hidden)
    arrays, nests = case.arrays(), nests_of(case.kernel())
    want = case.wanted(*arrays)
    np.testing.assert_allclose(nests.interpret(*arrays)[0].astype(np.float64), want, atol=1e-2)
    result, counts, _ = simulated(nests, arrays)
    np.testing.assert_allclose(result.astype(np.float64), want, atol=1e-2)
    assert counts.barriers == 1 + 2 + 3 + 4 + 4 * of_tests, "one per step"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_80", "sm_89", "sm_90a", "sm_100"])
@pytest.mark.parametrize(
    ("tokens", "width", "dtype"),
    [(2048, 64, "bfloat16"), (2048, 128, "float16"), (4096, 128, "float16")],
)
def test_no_architecture_stores_scores(device, tokens, width, dtype):
    """Of long rows, whose operands outgrow near memory as a whole, and of large results beside the scores."""
    shape = jax.ShapeDtypeStruct((16, tokens, width), dtype)
    f = pbkern.jit(
        Gradients(tokens, dtype).__call__, compile_options={"target": "nvgpu", "device": device}
    )
    kernels = [kernel for kernel in f.kernels(*[shape] * 4) if "dot" in kernel.name]
    assert len(kernels) <= 4, "row sums of gradients may be one by themselves"
    assert all(kernel.scratch for kernel in kernels), "in chunks"
    stored = [math.prod(out.ref_shape) for kernel in kernels for out in kernel.outputs]
    assert max(stored) <= 128 * width


def halves(case):
    """The calls that JAX makes for a compiled function and its gradients: the forward half, the backward one."""
    attended = pbkern.jit(case.attended, compile_options={"target": "nvgpu"})

    def both(q, k, v, d_out):
        out, back = jax.vjp(attended, q, k, v)
        return out, *back(d_out)

    return jax.make_jaxpr(both)(*case.types).jaxpr


def compiled_call(eqn):
    function = jex.jaxpr_as_fun(eqn.params["jaxpr"])
    return pbkern.jit(lambda *args: function(*args), compile_options={"target": "nvgpu"})


@pytest.mark.parametrize("seen", ["all", "causal"])
def test_the_gradient_of_a_compiled_function_is_two_kernels(seen):
    """Its row sums are those of the result, which the forward half saves: no product is computed for them."""
    case = Gradients(1024, seen=seen, heads=16)
    _, backward = halves(case).eqns
    types = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in backward.invars]
    made = [kernel for kernel in compiled_call(backward).kernels(*types) if "dot" in kernel.name]
    assert sorted(len(kernel.outputs) for kernel in made) == [1, 2]
    for kernel in made:
        products = [e for e in equations(kernel.body.jaxpr) if e.primitive.name == "dot_general"]
        assert len(products) == 2 + len(kernel.outputs)
        function = emit(nests_of(kernel), "k")
        assert function.global_bytes == 0
        assert function.shared_bytes <= 100 << 10
        if ptxas.find() is not None:
            text = codegen.ptx(codegen.llvm_ir(function), SM_80)
            assert ptxas.assemble(text, "sm_80").spill_bytes == 0


def by_halves(case):
    """Results and gradients of a compiled function in the simulator."""
    jaxpr = halves(case)
    values = dict(zip(jaxpr.invars, case.arrays()))
    for eqn in jaxpr.eqns:
        found = pbkern.simulate(compiled_call(eqn), *(values[var] for var in eqn.invars))
        values.update(zip(eqn.outvars, map(np.asarray, found.results)))
    return [np.asarray(values[var], np.float64) for var in jaxpr.outvars]


@pytest.mark.slow
def test_gradients_of_a_compiled_function():
    """The blocks of the first head are simulated."""
    case = Gradients(1024, seen="causal", heads=16)

    def of_one_head(ptx, grid, *args, **options):
        return simulate_ptx(ptx, grid // case.heads, *args, **options)

    with mock.patch.object(program, "simulate_ptx", of_one_head):
        found = by_halves(case)
    exact = replace(case, heads=1).wanted(*(x[:1] for x in case.arrays()))
    for got, want in zip(found, exact):
        assert np.abs(got[:1] - want).max() < 2 * 2.0**-8 * np.abs(want).max()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Gradients(100), id="100"),
        *(
            pytest.param(case, id=name, marks=pytest.mark.slow)
            for name, case in {
                "130": Gradients(130, "float16", "causal", 2),
                "257": Gradients(257, seen="window"),
                "rows that see no key": Gradients(192, seen="later", hidden=-1e30),
                "float32": Gradients(130, "float32", "causal"),
            }.items()
        ),
    ],
)
def test_gradients_of_compiled_functions_of_any_length(case):
    step = 2.0**-8 if case.dtype == "bfloat16" else 2.0**-11
    for got, want in zip(by_halves(case), case.wanted(*case.arrays())):
        assert np.abs(got - want).max() < 2 * step * np.abs(want).max()


# Device, tokens and type; heads of 16, or 4 of keys that share 4 of queries each.
SHAPES = [
    ("sm_80", 1024, "bfloat16"),
    ("sm_90a", 1024, "bfloat16"),
    ("sm_100", 4096, "bfloat16"),
    ("sm_120", 4096, "float16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("device", "tokens", "dtype"), [*SHAPES, ("sm_89", 2048, "bfloat16")])
@pytest.mark.parametrize("width", [64, 96, 128])
@pytest.mark.parametrize("seen", ["all", "causal", "window", "grouped"])
def test_no_device_needs_more_than_three_kernels(device, tokens, dtype, width, seen):
    """One forward, two backward at most, of 100 KB of shared memory, and none in global memory; nothing is spilled."""
    heads = (4, 4) if seen == "grouped" else (16,)
    shapes = [(*heads, tokens, width), *[(heads[0], tokens, width)] * 2, (*heads, tokens, width)]
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    f = grouped_gradients if seen == "grouped" else Gradients(tokens, dtype, seen)
    compiled = pbkern.jit(f, compile_options={"target": "nvgpu", "device": device})
    products = [kernel for kernel in compiled.kernels(*types) if "dot" in kernel.name]
    assert len(products) <= 3
    backend = NvgpuBackend(device_kind(device))
    for kernel in products:
        options = backend.build_options(kernel, CompileOptions(target="nvgpu", device=device))
        nests = kernel_nests(kernel, options).after((*SHARED_PASSES, *THREAD_PASSES))
        function = emit(nests, "k")
        assert function.global_bytes == 0
        assert function.shared_bytes <= 100 << 10
        if ptxas.find() is not None:
            text = codegen.ptx(codegen.llvm_ir(function), device_kind(device))
            assert ptxas.assemble(text, device).spill_bytes == 0


def grouped_gradients(q, k, v, d_out):
    """Causal attention of heads of queries that share keys, and its gradients."""

    def attended(q, k, v):
        s = jnp.einsum("hgqd,hkd->hgqk", q, k, preferred_element_type=jnp.float32) * 0.125
        row, key = (lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (2, 3))
        p = jax.nn.softmax(jnp.where(row >= key, s, -jnp.inf), -1).astype(q.dtype)
        out = jnp.einsum("hgqk,hkd->hgqd", p, v, preferred_element_type=jnp.float32)
        return out.astype(q.dtype)

    out, back = jax.vjp(attended, q, k, v)
    return out, *back(d_out)


GROUPED = [(4, 4, 1024, 64), (4, 1024, 64), (4, 1024, 64), (4, 4, 1024, 64)]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_80", "sm_89", "sm_90a"])
def test_gradients_of_grouped_heads_stay_in_registers(device):
    """Those by keys and values sum over heads of queries one by one, each in chunks."""
    types = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in GROUPED]
    f = pbkern.jit(grouped_gradients, compile_options={"target": "nvgpu", "device": device})
    made = [kernel for kernel in f.kernels(*types) if "dot" in kernel.name]
    assert len(made) == 2
    for kernel in made:
        function = emit(nests_of(kernel), "k")
        assert function.global_bytes == 0
        assert function.shared_bytes <= 100 << 10
        if ptxas.find() is not None:
            text = codegen.ptx(codegen.llvm_ir(function), device_kind(device))
            assert ptxas.assemble(text, device).spill_bytes == 0


@pytest.mark.slow
def test_gradients_of_grouped_heads():
    """The blocks of the first head of keys are simulated."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(jnp.bfloat16) for shape in GROUPED]
    f = pbkern.jit(grouped_gradients, compile_options={"target": "nvgpu"})

    def of_one_head(ptx, grid, *args, **options):
        return simulate_ptx(ptx, grid // 4, *args, **options)

    with mock.patch.object(program, "simulate_ptx", of_one_head):
        found = pbkern.simulate(f, *arrays).results
    with jax.enable_x64(True):
        want = jax.jit(grouped_gradients)(*(jnp.asarray(x[:1], np.float64) for x in arrays))
    for got, exact in zip(found, want):
        error = np.abs(np.asarray(got[:1], np.float64) - np.asarray(exact)).max()
        assert error < 2 * 2.0**-8 * np.abs(np.asarray(exact)).max()


@pytest.mark.slow
def test_operands_that_registers_leave_no_room_for_in_shared_memory():
    """Gradients whose tiles, with all sums in registers, are more than a block of sm_120 has: scratch takes their place."""
    shape = jax.ShapeDtypeStruct((16, 4096, 128), "float16")
    f = pbkern.jit(
        Gradients(4096, "float16", "causal").__call__,
        compile_options={"target": "nvgpu", "device": "sm_120"},
    )
    products = [kernel for kernel in f.kernels(*[shape] * 4) if "dot" in kernel.name]
    assert products
    for kernel in products:
        nests = nests_of(kernel, shared_bytes=99 << 10)
        assert emit(nests, "k").shared_bytes <= 99 << 10
