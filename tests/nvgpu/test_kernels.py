"""Functions as kernels for NVIDIA GPUs, simulated, compared with NumPy in float64; their MLIR, PTX and machine code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core.options import CompileOptions
from pbkern.errors import InternalError, SimulationError
from pbkern.targets.nvgpu import compile as codegen
from pbkern.targets.nvgpu import ptxas
from pbkern.targets.nvgpu.devices import KINDS

# By default, tensor cores multiply operands that are rounded to 11 bits: tests/nvgpu/test_matrix_products.py.
EXACT = {"target": "nvgpu", "mm_conv_precision_mode": "fp32"}


def blur(x, w):
    rows, columns = x.shape[1] - 4, x.shape[2] - 4
    y = sum(w[k] * x[:, k : k + rows, :] for k in range(5))
    return sum(w[k] * y[:, :, k : k + columns] for k in range(5))


def layer_norm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    return (
        centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * scale + bias
    )


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T / 8, -1) @ v


FUNCTIONS = {
    "elementwise": (lambda x, y: jnp.tanh(x) * jnp.exp(-y * y) + x, [(33, 70)] * 2),
    "vectors": (lambda x, y: x * y + 1, [(64, 128)] * 2),
    "blur": (blur, [(2, 21, 77), (5,)]),
    "softmax": (lambda x: jax.nn.softmax(x, -1), [(17, 300)]),
    "matmul": (lambda a, b, c: jax.nn.gelu(a @ b + c), [(65, 40), (40, 48), (48,)]),
    "layer_norm": (layer_norm, [(20, 129), (129,), (129,)]),
    "attention": (attention, [(32, 64)] * 3),
    "sum": (lambda x: x.sum(), [(100, 100)]),
    "columns": (lambda x: x.max(0), [(100, 37)]),
    "argmax": (lambda x: x.argmax(-1), [(9, 300)]),
    "cumsum": (lambda x: jnp.cumsum(x, 1), [(5, 33)]),
    "sort": (lambda x: jnp.sort(x, -1), [(3, 50)]),
    "short_sort": (lambda x: jnp.sort(x, -1), [(40, 20)]),
    "top_k": (lambda x: jax.lax.top_k(x, 3)[0], [(5, 40)]),
    "transpose": (lambda x: x.T + 1, [(33, 50)]),
    "convolution": (
        lambda x, w: jax.nn.relu(jax.lax.conv(x, w, (1, 1), "SAME")),
        [(1, 3, 9, 10), (4, 3, 3, 3)],
    ),
    "gather": (lambda x, i: x[jnp.abs(i * 3).astype(int)], [(20, 8), (11,)]),
    "scatter": (lambda x, i: x.at[jnp.abs(i * 3).astype(int)].add(1.0), [(20, 8), (11,)]),
    "scan": (
        lambda x: jax.lax.scan(lambda c, r: (c * 0.5 + r, c.sum()), jnp.zeros(8), x),
        [(6, 8)],
    ),
}


def arrays(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_equals_float64(name):
    f, shapes = FUNCTIONS[name]
    args = arrays(shapes)
    found = pbkern.simulate(pbkern.jit(f, compile_options=EXACT), *args)
    with jax.enable_x64(True):
        want = f(*(jnp.asarray(a, jnp.float64) for a in args))
    for got, w in zip(jax.tree.leaves(found.results), jax.tree.leaves(want)):
        np.testing.assert_allclose(got, w, rtol=2e-5, atol=2e-5)
    assert found.counts.instructions > 0
    assert len(found.kernels) == len(found.ptx)


def test_arrays_that_a_function_closes_over_are_operands():
    held, x = jnp.arange(5.0), np.ones(5, np.float32)
    found = pbkern.simulate(lambda x: (x + held, 3, x), x).results
    np.testing.assert_array_equal(found[0], np.arange(1.0, 6))
    assert found[1] == 3
    assert (found[2] == x).all()


def turned(n):
    spec = pbkern.BlockSpec((1, n), lambda i: (i, 0))

    @pbkern.kernel(
        grid=(2,),
        out_shape=jax.ShapeDtypeStruct((2, n), jnp.float32),
        in_specs=[spec],
        out_specs=spec,
        scratch_shapes=[pbkern.Scratch((1, n), jnp.float32)],
    )
    def body(x_ref, o_ref, t_ref):
        t_ref[...] = x_ref[...] * 2
        o_ref[...] = t_ref[...][:, ::-1]

    return body


@pytest.mark.parametrize(
    ("n", "memory"), [(10000, "shared"), (20000, "dynamic"), (60000, "global")]
)
def test_scratch_lies_in_shared_memory_as_far_as_that_reaches(n, memory):
    x = arrays([(2, n)])[0]
    found = pbkern.simulate(turned(n), x)
    np.testing.assert_array_equal(found.results[0], 2 * x[:, ::-1])
    assert (found.counts.shared_accesses == 0) is (memory == "global")
    assert (".extern .shared" in found.ptx[0]) is (
        memory == "dynamic"
    )  # its size is asked for at the launch
    if memory != "shared":
        with pbkern.config.override(gpu_driver="simulator"):
            f = pbkern.jit(lambda x: turned(n)(x), compile_options={"target": "nvgpu"})
            np.testing.assert_array_equal(f(x), 2 * x[:, ::-1])


DTYPES = [
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "bool",
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype):
    with jax.enable_x64(True):
        x = (np.arange(7 * 40).reshape(7, 40) % 11).astype(jnp.dtype(dtype))

        def f(x):
            y = x ^ x[::-1] if dtype == "bool" else x * x + x[::-1]
            return y, y.max(1), jnp.where(y > x, x, y), y.sum(1)

        for got, want in zip(pbkern.simulate(f, x).results, f(jnp.asarray(x))):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(
                np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=1e-2
            )


def test_aligned_rows_are_whole_vectors_and_every_sector_is_needed():
    x = arrays([(64, 256)])[0]
    found = pbkern.simulate(lambda x: x * 2 + 1, x)
    assert "ld.global.nc.v4" in found.ptx[0]
    assert "st.global.v4" in found.ptx[0]
    assert found.counts.sectors == found.counts.fewest_sectors == 2 * x.nbytes // 32
    assert found.counts.global_bytes == 2 * x.nbytes


def test_a_removed_barrier_is_found_at_the_users_line():
    @pbkern.kernel(
        out_shape=jax.ShapeDtypeStruct((300,), jnp.float32),
        scratch_shapes=[pbkern.Scratch((300,), jnp.float32)],
        compiler_params=pbkern.nvgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    def reversed_twice(x_ref, o_ref, t_ref):
        t_ref[...] = jnp.exp(x_ref[...])
        o_ref[...] = t_ref[...][::-1] + t_ref[...]

    with pytest.raises(SimulationError) as e:
        pbkern.simulate(reversed_twice, arrays([(300,)])[0])
    assert e.value.kind == "race"
    assert "test_kernels.py" in e.value.at


def test_handwritten_kernel_in_blocks():
    spec = pbkern.BlockSpec((8, 16), lambda i, j: (i, j))

    @pbkern.kernel(
        grid=(3, 2),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((20, 30), jnp.float32),
    )
    def doubled(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    x = arrays([(20, 30)])[0]
    found = pbkern.simulate(doubled, x)
    np.testing.assert_array_equal(found.results[0], 2 * x)


@pytest.mark.skipif(ptxas.find() is None, reason="ptxas is not installed")
@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("name", ["elementwise", "softmax", "matmul", "sort", "scatter"])
def test_ptxas_accepts(name, architecture):
    f, shapes = FUNCTIONS[name]
    for text in pbkern.simulate(f, *arrays(shapes), device=architecture, check=False).ptx:
        assert ptxas.assemble(text, architecture).spill_bytes == 0


def test_calls_of_functions_that_no_device_has_are_errors():
    ir = "declare float @sinf(float)\ndefine float @k(float %x) {\n%y = call float @sinf(float %x)\nret float %y\n}"
    with pytest.raises(InternalError, match="calls `sinf`"):
        codegen.ptx(ir, KINDS["sm_90a"])


def test_a_launch_that_fails_is_an_exception_with_the_reason(monkeypatch):
    plain = codegen.ptx
    monkeypatch.setattr(
        codegen, "ptx", lambda ir, kind: plain(ir, kind).replace("bar.sync", "membar.cta; //")
    )
    with pbkern.config.override(gpu_driver="simulator"):
        f = pbkern.jit(lambda x: jax.nn.softmax(x * 3, -1), compile_options={"target": "nvgpu"})
        with pytest.raises(Exception, match="threads race"):
            jax.block_until_ready(f(arrays([(3, 257)])[0]))


def test_stages_of_text():
    f = pbkern.jit(lambda x: x + 1, compile_options={"target": "nvgpu"})
    x = arrays([(10,)])[0]
    for stage, words in {
        "nests": "nest [",
        "mlir": "nvvm.read.ptx.sreg.tid.x",
        "llvm": "ptx_kernel",
        "ptx": ".visible .entry",
    }.items():
        assert words in f.as_text(x, stage=stage)
    assert CompileOptions(target="nvgpu").target == "nvgpu"


def test_loops_and_branches_of_the_host():
    """Their conditions are read back between launches."""

    def f(x, n):
        grown, count = jax.lax.while_loop(
            lambda c: c[0].sum() < 500, lambda c: (c[0] @ c[0].T * 0.1 + 1, c[1] + 1), (x, 0)
        )
        return (
            grown,
            count,
            jax.lax.switch(n, [lambda: jnp.sort(x), lambda: x @ x, lambda: x.T[::-1] @ x]),
        )

    x = np.abs(arrays([(9, 9)])[0])
    compiled = pbkern.jit(f, compile_options=EXACT)
    for n in (-1, 1, 7):
        found = pbkern.simulate(compiled, x, np.int32(n)).results
        for got, want in zip(found, f(jnp.asarray(x), n)):
            np.testing.assert_allclose(got, want, rtol=1e-4)
    assert found[1] > 1
