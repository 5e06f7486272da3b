"""The handler that launches kernels: under JAX with the simulator's driver, and called by hand as XLA calls it for CUDA."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core import config
from pbkern.core.errors import TargetError
from pbkern.core.options import CompileOptions
from pbkern.targets import get_target
from pbkern.targets.nvgpu import compile as codegen
from pbkern.targets.nvgpu import driver
from pbkern.targets.simt.launch.handler import handler

X = np.random.default_rng(0).normal(size=(24, 24)).astype("f4")
# Results are compared with those of float32.
GPU = {"target": "nvgpu", "mm_conv_precision_mode": "fp32"}


@pytest.fixture(autouse=True)
def simulator():
    with config.override(gpu_driver="simulator"):
        yield


def three_kernels_and_a_loop(x):
    y = jax.lax.fori_loop(0, 3, lambda k, y: jax.nn.softmax(y @ y.T, -1) * (k + 1.0), x)
    return jnp.sort(y, -1), y.sum(), jnp.cumsum(y, 0)


def both(f, *args, **options):
    """Results on the GPU, and of jax.jit."""
    return jax.tree.leaves(pbkern.jit(f, compile_options=GPU, **options)(*args)), jax.tree.leaves(
        jax.jit(f)(*args)
    )


@pytest.mark.parametrize("f", [
    three_kernels_and_a_loop,
    lambda x: jax.lax.while_loop(lambda c: c[1] < 50, lambda c: (c[0] * 1.5 + 1, c[0].sum()), (x * 0, x[0, 0] * 0))[0],
    lambda x: jax.lax.cond(x.sum() > 0, lambda: jnp.sort(x), lambda: x @ x),
    lambda x: jax.lax.scan(lambda c, r: (c * 0.5 + r, c.sum()), x[0], x),
    lambda x: (x[:0] + 1, x[:1, :1] * 2, x.T[::2] + 0),
    lambda x: jnp.zeros(7).at[jnp.clip(x * 3, 0, 6).astype(int)].add(x),
], ids=["loop", "while", "cond", "scan", "small", "scatter"])  # fmt: skip
def test_programs(f):
    for got, want in zip(*both(f, X)):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool"])
def test_types(dtype):
    x = (X > 0 if dtype == "bool" else (X * 3).astype("i4")).astype(jnp.dtype(dtype))
    for got, want in zip(
        *both(lambda x: (jnp.where(x > 0, x, ~x if dtype == "bool" else -x), x[::-1]), x)
    ):
        np.testing.assert_array_equal(np.asarray(got, "f4"), np.asarray(want, "f4"))


def test_64_bits():
    with jax.enable_x64(True):
        for got, want in zip(
            *both(lambda x: (x * 2 + 1, (x * 1e6).astype("int64").sum()), X.astype("f8"))
        ):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=1e-12)


def test_transformations():
    f = pbkern.jit(lambda x: (jnp.tanh(x @ x) ** 2).sum(), compile_options=GPU)
    plain = lambda x: (jnp.tanh(x @ x) ** 2).sum()
    np.testing.assert_allclose(jax.grad(f)(X), jax.grad(plain)(X), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        jax.vmap(f)(X[None] * [[[1]], [[2]]]), jax.vmap(plain)(X[None] * [[[1]], [[2]]]), rtol=1e-3
    )


def test_donated_arrays():
    f = pbkern.jit(lambda x: x.at[3].set(x[4] * 2), compile_options=GPU | {"donate_argnums": (0,)})
    want = X.copy()
    want[3] = X[4] * 2
    np.testing.assert_allclose(f(jnp.asarray(X)), want, rtol=1e-6)


def test_kernels_by_hand():
    block = pbkern.BlockSpec((8, 24), lambda i: (i, 0))

    @pbkern.kernel(
        grid=(3,),
        in_specs=[block],
        out_specs=[block],
        out_shape=jax.ShapeDtypeStruct(X.shape, "float32"),
    )
    def centred(x, o):
        o[...] = x[...] - x[...].mean(1, keepdims=True)

    f = pbkern.jit(lambda x: centred(x * 2) + 1, compile_options=GPU)
    np.testing.assert_allclose(
        f(X), X * 2 - (X * 2).mean(1, keepdims=True) + 1, rtol=1e-4, atol=1e-5
    )


def test_a_failed_launch_is_an_exception_with_kernel_kind_and_line(monkeypatch):
    plain = codegen.ptx
    monkeypatch.setattr(
        codegen, "ptx", lambda ir, kind: plain(ir, kind).replace("bar.sync", "membar.cta; //")
    )
    f = pbkern.jit(lambda x: jax.nn.softmax(x * 7, -1) @ x, compile_options=GPU)
    with pytest.raises(Exception, match=r"kernel `k0_.*` failed: .*\n?.*test_launch.py:") as e:
        jax.block_until_ready(f(X))
    assert "race" in str(e.value)
    monkeypatch.undo()
    np.testing.assert_allclose(
        pbkern.jit(lambda x: x + 3, compile_options=GPU)(X), X + 3
    )  # the process goes on


class WithStreams(driver.SimulatorDriver):
    """The simulator under CUDA's platform; notes the stream of each launch."""

    platform = "CUDA"

    def __init__(self):
        self.streams = []
        super().__init__()

    def _launch(self, kernel, x, y, z, threads, _y, _z, shared, stream, arguments, extra):
        self.streams.append(stream)
        super()._launch(kernel, x, y, z, threads, _y, _z, shared, stream, arguments, extra)


def frame(arrays, stream):
    """A call frame of XLA FFI API 0.3 whose table gives this stream; and what keeps it alive."""
    get = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64))(
        lambda a: a.__setitem__(3, stream)
    )
    api = (ctypes.c_uint64 * 40)()
    api[10] = ctypes.cast(get, ctypes.c_void_p).value
    buffers = [(ctypes.c_uint64 * 8)(*[0] * 3, a.ctypes.data) for a in arrays]
    ins = (ctypes.c_void_p * 1)(ctypes.addressof(buffers[0]))
    outs = (ctypes.c_void_p * 2)(*map(ctypes.addressof, buffers[1:]))
    made = (ctypes.c_uint64 * 20)()
    made[2], made[9], made[14] = map(ctypes.addressof, (api, ins, outs))
    return made, (get, api, buffers, ins, outs)


def test_the_handler_for_cuda_takes_its_stream_from_xla():
    target = get_target("nvgpu")
    build, _ = pbkern.jit(lambda x: x * 2 + 1, compile_options=GPU).build((X,), {})
    compiled = target.compile(build.plan.programs()[0], CompileOptions(target="nvgpu"))
    streams = WithStreams()
    linked = handler(compiled, streams)
    result = np.zeros_like(X)
    made, kept = frame([X, result, np.zeros(max(linked.temporaries, 1), np.uint8)], 0xABC)
    assert (
        ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(linked.image.address("pbk_handler"))(
            ctypes.addressof(made)
        )
        is None
    )
    np.testing.assert_allclose(result, X * 2 + 1, rtol=1e-6)
    assert streams.streams == [0xABC]
    assert kept


def test_functions_are_lowered_for_cuda_without_a_driver(monkeypatch):
    """The custom call stands in the text, as a machine with a GPU would run it, and nothing is loaded."""
    absent = type(
        "Absent", (driver.CudaDriver,), {"library_name": "libcuda_that_is_not_there.so"}
    )()
    monkeypatch.setattr(driver, "driver", lambda name: absent)
    monkeypatch.setattr(driver, "present_capability", lambda: None)
    with config.override(gpu_driver=None):
        f = pbkern.jit(lambda x: jax.nn.softmax(x + 5, -1), compile_options=GPU)
        text = jax.jit(lambda x: f(x)).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @pbkern_gpu_" in text
    assert absent._library is None


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_kernels_by_hand_outside_of_decorated_functions(platform):
    """They run where their arrays are, as on CPUs."""
    from pbkern.targets.amdgpu import compile as amd

    if platform == "rocm":
        try:
            amd.lld()
        except TargetError as e:
            pytest.skip(str(e))
    block = pbkern.BlockSpec((8, 24), lambda i: (i, 0))

    @pbkern.kernel(
        grid=(3,),
        in_specs=[block],
        out_specs=[block],
        out_shape=jax.ShapeDtypeStruct(X.shape, "float32"),
    )
    def thirds(x, o):
        o[...] = x[...] / 3

    traced = jax.jit(lambda x: thirds(x)).trace(jax.ShapeDtypeStruct(X.shape, "float32"))
    with config.override(gpu_driver=None):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "custom_call @pbkern_gpu_" in text


def test_without_a_gpu_the_error_names_the_simulator():
    with (
        config.override(gpu_driver=None),
        pytest.raises(TargetError, match="`three_kernels_and_a_loop` is compiled for") as e,
    ):
        pbkern.jit(three_kernels_and_a_loop, compile_options=GPU)(X)
    assert "its arguments are on cpu" in str(e.value)
    assert "device_put" not in str(e.value)
    assert "pbkern.simulate(f, *args)" in e.value.hint
    assert "PBKERN_GPU_DRIVER=simulator" in e.value.hint


def test_where_there_is_a_gpu_the_error_says_how_arrays_get_there(monkeypatch):
    monkeypatch.setattr("pbkern._jax.has_devices", lambda platform: True)
    with (
        config.override(gpu_driver=None),
        pytest.raises(TargetError, match=r"jax.device_put\(x, jax.devices\('cuda'\)\[0\]\)"),
    ):
        pbkern.jit(lambda x: x * 3 + 1, compile_options=GPU)(X)
