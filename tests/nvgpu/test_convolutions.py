"""Convolutions by tensor cores: tiles of pixels and channels, in the simulator and against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern
from pbkern.core.options import CompileOptions
from pbkern.lower.kernel_nests import kernel_nests
from pbkern.lower.passes.shared import SHARED_PASSES
from pbkern.targets.nvgpu import compile as codegen
from pbkern.targets.nvgpu import ptxas
from pbkern.targets.nvgpu.backend import NvgpuBackend
from pbkern.targets.nvgpu.devices import device_kind
from pbkern.targets.simt.emit.kernel import emit
from pbkern.targets.simt.passes import THREAD_PASSES

GPU = {"target": "nvgpu"}
LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
PLANES = {1: ("NCW", "OIW", "NCW"), 2: ("NCHW", "OIHW", "NCHW"), 3: ("NCDHW", "OIDHW", "NCDHW")}


@dataclasses.dataclass(frozen=True)
class Convolution:
    """Images of some channels, and filters; numbers are small integers, so that any order of sums gives the same."""

    size: tuple[int, ...]
    window: tuple[int, ...]
    channels: tuple[int, int] = (16, 32)
    images: int = 2
    dtype: str = "bfloat16"
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    padding: str | tuple = "SAME"
    planes: bool = False
    spread: int = 1
    act: bool = False

    def __call__(self, x, w):
        rank = len(self.size)
        result = jnp.int32 if x.dtype == "int8" else jnp.promote_types(x.dtype, jnp.float32)
        y = lax.conv_general_dilated(
            jnp.maximum(x, 0) if self.act else x, w, (self.stride,) * rank, self.padding,
            lhs_dilation=(self.spread,) * rank, rhs_dilation=(self.dilation,) * rank,
            dimension_numbers=(PLANES if self.planes else LAYOUTS)[rank],
            feature_group_count=self.groups, preferred_element_type=result,
        )  # fmt: skip
        return jnp.maximum(y, 1) if self.act else y

    def arrays(self):
        rng = np.random.default_rng(0)
        into, out = self.channels
        shapes = (self.images, *self.size, into), (*self.window, into // self.groups, out)
        if self.planes:
            shapes = (self.images, into, *self.size), (out, into // self.groups, *self.window)
        return [rng.integers(-3, 4, shape).astype(self.dtype) for shape in shapes]

    def wanted(self, x, w):
        with jax.enable_x64(True):
            return np.asarray(self(*(jnp.asarray(np.asarray(a, np.float64)) for a in (x, w))))


CASES = {
    "3 x 3": Convolution((12, 20), (3, 3)),
    "float32": Convolution((9, 13), (3, 3), dtype="float32"),
    "float16": Convolution((9, 13), (3, 3), (24, 40), dtype="float16"),
    "bytes": Convolution((9, 13), (3, 3), (32, 16), dtype="int8"),
    "strided": Convolution((13, 18), (3, 3), stride=2),
    "dilated": Convolution((13, 18), (3, 3), dilation=2, padding="VALID"),
    "grouped": Convolution((10, 10), (3, 3), (32, 64), groups=2),
    "1 x 1": Convolution((7, 9), (1, 1), (20, 24)),
    "7 x 7 of three channels": Convolution((24, 24), (7, 7), (3, 32), 1, stride=2),
    "one dimension": Convolution((70,), (5,)),
    "three dimensions": Convolution((5, 6, 7), (2, 3, 3), images=1),
    "planes": Convolution((10, 18), (3, 3), planes=True),
    "planes, strided groups": Convolution((11, 11), (3, 3), (32, 32), stride=2, groups=2, planes=True),
    "short lines": Convolution((5, 3), (3, 3), (40, 72), 3),
    "between zeros": Convolution((6, 7), (3, 3), spread=2, padding=((1, 1), (2, 0))),
    "prologue and epilogue": Convolution((8, 17), (3, 3), act=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_convolutions(name):
    case = CASES[name]
    x, w = case.arrays()
    f = pbkern.jit(case.__call__, compile_options=GPU)
    assert "mma.sync" in f.as_text(x, w, stage="ptx")
    got = np.asarray(pbkern.simulate(f, x, w).results, np.float64)
    np.testing.assert_array_equal(got, case.wanted(x, w))


@given(
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 40)),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from(["bfloat16", "float32"]),
    st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_nests_of_any_convolution(size, window, channels, stride, dilation, dtype, planes):
    """Whatever the tiles: late copies, windows beyond all edges, any number of channels."""
    case = Convolution(
        size, window, (8 * channels[0], channels[1]), dtype=dtype, stride=stride,
        dilation=dilation, planes=planes,
    )  # fmt: skip
    x, w = case.arrays()
    f = pbkern.jit(case.__call__, compile_options=GPU)
    (kernel,) = [k for k in f.kernels(x, w) if "conv" in k.name] or f.kernels(x, w)[-1:]
    if len(f.kernels(x, w)) > 1:
        return
    backend = NvgpuBackend(device_kind("sm_80"))
    options = backend.build_options(kernel, CompileOptions())
    nests = kernel_nests(kernel, options).after((*SHARED_PASSES, *THREAD_PASSES))
    np.testing.assert_array_equal(nests.interpret(x, w)[0], case.wanted(x, w))


def test_no_array_of_windows_is_stored():
    """Nine copies of the pixels would be nine times the bytes of the images."""
    case = Convolution((56, 56), (3, 3), (64, 128), 8)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in case.arrays()]
    f = pbkern.jit(case.__call__, compile_options=GPU)
    (kernel,) = f.kernels(*types)
    backend = NvgpuBackend(device_kind("sm_80"))
    options = backend.build_options(kernel, CompileOptions())
    nests = kernel_nests(kernel, options).after((*SHARED_PASSES, *THREAD_PASSES))
    function = emit(nests, "k")
    assert function.global_bytes == 0
    assert function.shared_bytes <= 64 << 10


@pytest.mark.skipif(ptxas.find() is None, reason="no ptxas")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_registers_suffice(architecture, dtype):
    case = Convolution((56, 56), (3, 3), (64, 128), 8, dtype)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in case.arrays()]
    f = pbkern.jit(case.__call__, compile_options={**GPU, "device": architecture})
    for kernel in f.kernels(*types):
        kind = device_kind(architecture)
        options = NvgpuBackend(kind).build_options(kernel, CompileOptions())
        nests = kernel_nests(kernel, options).after((*SHARED_PASSES, *THREAD_PASSES))
        text = codegen.ptx(codegen.llvm_ir(emit(nests, "k")), kind)
        assert ptxas.assemble(text, architecture).spill_bytes == 0


GRADIENTS = {"images": 0, "filters": 1}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name):
    case = Convolution((8, 9), (3, 3), (16, 24), dtype="float32")
    x, w = case.arrays()

    def gradient(x, w):
        return jax.grad(lambda *both: (case(*both) * 2).sum(), GRADIENTS[name])(x, w)

    with jax.enable_x64(True):
        want = gradient(*(jnp.asarray(a, jnp.float64) for a in (x, w)))
    got = pbkern.simulate(pbkern.jit(gradient, compile_options=GPU), x, w).results
    np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(want))


@pytest.mark.parametrize("images", [4, 6])
def test_groups_of_images(images):
    """A line behind the last of one image, which is masked, has the flat index of the first line of the next image."""
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (images, 12, 13, 8)).astype(np.float32)
    w = rng.integers(-4, 5, (3, 3, 8, 6)).astype(np.float32)

    def f(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", batch_group_count=2, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    compiled = pbkern.jit(f, compile_options=GPU)
    assert "products by" in str(compiled.explain(x, w))
    np.testing.assert_array_equal(pbkern.simulate(compiled, x, w).results, f(x, w))
