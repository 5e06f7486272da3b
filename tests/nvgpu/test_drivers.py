"""The drivers of CUDA and HIP on a library in the place of the vendor's, which simulates the PTX that it is given."""

import ctypes
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core import config
from pbkern.core.options import CompileOptions
from pbkern.errors import TargetError
from pbkern.simulate.parse import parse
from pbkern.targets import get_target
from pbkern.targets.amdgpu import driver as amd
from pbkern.targets.nvgpu import compile as codegen
from pbkern.targets.nvgpu import driver, ptxas
from pbkern.targets.simt.launch import trace
from pbkern.targets.simt.launch.driver import Describe, Record
from pbkern.targets.simt.launch.handler import handler

from .test_kernels import turned
from .test_launch import GPU, frame

TEXTS = {100: ("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device"), 700: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal address")}


def put(place, value) -> int:
    """What a function stores behind a pointer that it is given."""
    place._obj.value = value
    return 0


class Library:
    """libcuda of two devices on memory of the CPU. Kernels reach the arrays it holds, by address; `fails`: errors by symbol."""

    def __init__(self, arrays=(), **fails):
        self.arrays, self.fails = {a.ctypes.data: a for a in arrays}, fails
        self.images, self.kernels, self.allowed, self.capability = [], {}, [], (12, 0)
        pointer, word = ctypes.c_void_p, ctypes.c_uint
        functions = {
            "cuLaunchKernel": (self.launch, pointer, *[word] * 7, pointer, ctypes.POINTER(pointer), pointer),
            "cuStreamSynchronize": (lambda stream: 0, pointer),
            "cuMemsetD8Async": (lambda *_: 0, pointer, ctypes.c_ubyte, ctypes.c_size_t, pointer),
            "cuMemcpyDtoDAsync_v2": (lambda *_: 0, pointer, pointer, ctypes.c_size_t, pointer),
            "cuMemcpyDtoHAsync_v2": (lambda *_: 0, pointer, pointer, ctypes.c_size_t, pointer),
        }  # fmt: skip
        for name, (f, *kinds) in functions.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(f))

    def __getattr__(self, symbol):
        f = vars(type(self))[f"_{symbol}"]
        return lambda *args: self.fails.get(symbol) or f(self, *args)

    def _cuInit(self, flags):
        return 0

    def _cuCtxSynchronize(self):
        return 0

    def _cuGetErrorName(self, error, text):
        return put(text, TEXTS.get(error, (None,))[0] and TEXTS[error][0].encode())

    def _cuGetErrorString(self, error, text):
        return put(text, TEXTS.get(error, (None,))[0] and TEXTS[error][1].encode())

    def _cuDeviceGetCount(self, count):
        return put(count, 2)

    def _cuDeviceGet(self, device, n):
        return put(device, 10 + n)

    def _cuDeviceGetAttribute(self, value, attribute, device):
        return put(value, self.capability[attribute - 75])

    def _cuLibraryLoadData(self, library, image, *_):
        self.images.append(image)
        return put(library, len(self.images))

    def _cuLibraryGetKernel(self, kernel, library, name):
        text = self.images[library.value - 1].rstrip(b"\0").decode()
        assert name.decode() == parse(text).name
        self.kernels[0x70 + library.value] = text
        return put(kernel, 0x70 + library.value)

    def _cuKernelSetAttribute(self, attribute, value, kernel, device):
        self.allowed.append((attribute, value, kernel.value, device.value))
        return 0

    def launch(self, kernel, blocks, _y, _z, threads, _ty, _tz, shared, stream, arguments, extra):
        text = self.kernels[kernel]
        places = [ctypes.c_void_p.from_address(arguments[k]).value for k in range(len(parse(text).parameters))]
        if not all(p in self.arrays for p in places):
            return 700
        assert not shared or (8, shared, kernel, 11) in self.allowed
        pbkern.simulate_ptx(text, blocks, threads, [self.arrays[p] for p in places], shared_bytes=shared)
        return 0


def opened(library, kind=driver.CudaDriver):
    with mock.patch.object(ctypes, "CDLL", lambda name: library):
        return kind()


@pytest.fixture
def without_ptxas(monkeypatch):
    monkeypatch.setattr(ptxas, "find", lambda: None)


def compiled(f, x):
    build, _ = pbkern.jit(f, compile_options=GPU).build((x,), {})
    return get_target("nvgpu").compile(build.plan.programs()[0], CompileOptions(target="nvgpu"))


def called(compiled, cuda, arrays):
    """(what the handler returns, texts of errors that it makes), with a stream of XLA's."""
    image, _ = handler(compiled, cuda)
    made, kept = frame(arrays, 0xABC)
    texts = []

    def create(query):
        texts.append(ctypes.c_char_p(query[2]).value.decode())
        return 0xE

    make = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64))(create)
    kept[1][6] = ctypes.cast(make, ctypes.c_void_p).value
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(image.address("pbk_handler"))(ctypes.addressof(made)), texts


def test_kernels_run_that_the_library_assembles_from_their_text(without_ptxas):
    """It needs more shared memory than a text may declare, which every device has to allow."""
    x = np.random.default_rng(0).normal(size=(2, 13000)).astype("f4")
    out, unknown, arena = np.zeros_like(x), np.zeros_like(x), np.zeros(1, "u1")
    made = compiled(lambda x: turned(13000)(x), x)
    (code,) = made.distinct()
    library = Library([x, out])
    assert called(made, opened(library), [x, out, arena]) == (None, [])
    np.testing.assert_array_equal(out, 2 * x[:, ::-1])
    assert library.images == [code.ptx.encode() + b"\0"]
    size = code.function.dynamic_shared_bytes
    assert size >= 52000 and library.allowed == [(8, size, 0x71, device) for device in (10, 11)]
    error = f"kernel `{code.function.name}` was not launched: CUDA_ERROR_ILLEGAL_ADDRESS an illegal address"
    assert called(made, opened(library), [x, unknown, arena]) == (0xE, [error])


@pytest.mark.parametrize("symbol, error, why", [
    ("cuInit", 100, "initialised.*\n?.*CUDA_ERROR_NO_DEVICE no CUDA-capable device"),
    ("cuLibraryLoadData", 218, "given kernel `k0_.*\n?.*error 218"), ("cuLibraryGetKernel", 500, "asked for `k0_"),
])  # fmt: skip
def test_what_the_library_refuses_is_an_error(symbol, error, why, without_ptxas):
    x = np.zeros((2, 40), "f4")
    made = compiled(lambda x: x * 2, x)
    with pytest.raises(TargetError, match=f"the driver of the NVIDIA GPU fails when it is {why}"):
        handler(made, opened(Library(**{symbol: error})))


def test_errors_of_copies_and_of_traces(monkeypatch):
    """What the handler calls by address."""
    cuda = opened(Library())
    text = lambda kernel, error: ctypes.c_char_p(Describe(cuda.functions["describe"])(kernel, error)).value.decode()  # noqa: E731
    assert text(None, 700) == "a copy was not launched: CUDA_ERROR_ILLEGAL_ADDRESS an illegal address"
    assert text(None, 3) == "a copy was not launched: error 3"

    def full(function, records):
        raise OSError("disk full")

    monkeypatch.setattr(trace, "write", full)
    cuda.functions_of[0x71] = types.SimpleNamespace(name="k0_x", record_bytes=0)
    error = Record(cuda.functions["record"])(0x71, None, None)
    assert error == -1 and text(0x71, error) == "what kernel `k0_x` has recorded could not be written: disk full"


def test_the_device_that_is_there_is_compiled_for(monkeypatch):
    monkeypatch.setattr(driver, "present_capability", driver.present_capability.__wrapped__)
    with config.override(gpu_driver=None):
        for found, kind in ((lambda: opened(Library()), "sm_120"), (lambda: opened(Library(cuInit=100)), "sm_90a")):
            monkeypatch.setattr(driver, "driver", lambda name, found=found: found())
            assert get_target("nvgpu").backend_of(None).kind.architecture == kind


def test_all_devices_are_waited_for(monkeypatch):
    from pbkern.device_helpers import cuda_synchronize

    for library in (Library(), Library(cuCtxSynchronize=700)):
        monkeypatch.setattr(driver, "driver", lambda name, library=library: opened(library))
        if not library.fails:
            assert cuda_synchronize() is None
    with pytest.raises(TargetError, match="fails when it is waited for.*\n?.*CUDA_ERROR_ILLEGAL_ADDRESS"):
        cuda_synchronize()


def test_code_objects_are_loaded_by_hip():
    """Of AMD's driver what differs from NVIDIA's."""
    given, fails = [], {}

    def load(module, image):
        given.append(image)
        return fails.get("load") or put(module, 0x55)

    def function(kernel, module, name):
        given.append((module.value, name))
        return put(kernel, 0x66)

    symbols = {name: ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0) for name in amd.HipDriver.symbols.values()}
    library = types.SimpleNamespace(
        hipInit=lambda flags: 0, hipModuleLoadData=load, hipModuleGetFunction=function,
        hipDrvGetErrorName=lambda error, text: put(text, b"hipErrorInvalidImage"),
        hipDrvGetErrorString=lambda error, text: put(text, b"device kernel image is invalid"), **symbols)
    hip = opened(library, amd.driver.__wrapped__)
    code = types.SimpleNamespace(image=b"\x7fELF", function=types.SimpleNamespace(name="k0_x"))
    assert hip.load(code, ()) == 0x66 and given == [b"\x7fELF", (0x55, b"k0_x")]
    assert hip.functions_of == {0x66: code.function} and hip.functions.keys() >= hip.symbols.keys()
    fails["load"] = 200
    with pytest.raises(TargetError, match="AMD GPU fails when it is given kernel `k0_x`.*\n?.*hipErrorInvalidImage"):
        hip.load(code, ())


def test_what_the_simulator_cannot_run_is_an_exception_with_its_traceback(monkeypatch):
    plain = codegen.ptx
    monkeypatch.setattr(codegen, "ptx", lambda ir, kind: plain(ir, kind).replace("ret;", "frobnicate.b32 %r1, %r1;\nret;"))
    with config.override(gpu_driver="simulator"):
        f = pbkern.jit(lambda x: x * 2.375, compile_options=GPU)
        with pytest.raises(Exception, match="kernel `k0_.*` failed: Traceback") as e:
            jax.block_until_ready(f(np.zeros((3, 40), "f4")))
    assert "`frobnicate.b32` is not simulated" in str(e.value)


def test_empty_operands_of_a_launch():
    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((40,), jnp.float32))
    def body(x, none, o):
        o[...] = x[...] + none[...].sum()

    x = np.arange(40, dtype="f4")
    with config.override(gpu_driver="simulator"):
        np.testing.assert_array_equal(pbkern.jit(lambda x, y: body(x, y), compile_options=GPU)(x, x[:0]), x)
