"""The driver of CUDA on a library in the place of libcuda (tests/fake_drivers/cuda.c), where kernels are simulated."""

import ctypes
import pathlib
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.api.pipeline import build_kernel
from pbkern.core import config
from pbkern.core.options import CompileOptions
from pbkern.errors import TargetError
from pbkern.simulate.parse import parse
from pbkern.targets import get_target
from pbkern.targets.nvgpu import compile as codegen
from pbkern.targets.nvgpu import devices, driver, ptxas
from pbkern.targets.simt.launch import handler as handlers
from pbkern.targets.simt.launch import trace
from pbkern.targets.simt.launch.driver import DEVICES, RECENT_LAUNCHES
from pbkern.targets.simt.launch.handler import handler
from tests.fake_drivers import FakeDriver, built

from .test_kernels import turned
from .test_launch import GPU, frame

X = np.random.default_rng(0).normal(size=(2, 40)).astype("f4")
ADDRESS = "CUDA_ERROR_ILLEGAL_ADDRESS an illegal memory access was encountered"


class Cuda:
    """A fake libcuda, and pbkern's driver on it."""

    def __init__(self, folder: pathlib.Path, source: str = "cuda.c", kind=driver.CudaDriver):
        self.fake = built(source, folder)
        self.driver = type("Opened", (kind,), {"library_name": str(self.fake.path)})()
        self.fake.on_launch = self.launched
        self.fake.devices("9.0")
        self.fake.current(0)

    def launched(self, device, image, name, blocks, threads, shared, arguments) -> int:
        text = ctypes.string_at(image).decode()
        assert parse(text).name == name
        sizes = next(k.sizes for k in self.driver.kernels.values() if k.function.name == name)
        places = [ctypes.c_void_p.from_address(arguments[k]).value for k in range(len(sizes))]
        arrays = [
            np.ctypeslib.as_array((ctypes.c_uint8 * max(n, 1)).from_address(p))
            for p, n in zip(places, sizes)
        ]
        pbkern.simulate_ptx(text, blocks, threads, arrays, shared_bytes=shared)
        return 0

    def __getattr__(self, name):
        return getattr(self.fake, name)


@pytest.fixture
def cuda(tmp_path, monkeypatch):
    monkeypatch.setattr(ptxas, "find", lambda: None)
    return Cuda(tmp_path)


def compiled(f, x, **options):
    build, _ = pbkern.jit(f, compile_options=GPU).build((x,), {})
    return get_target("nvgpu").compile(
        build.plan.programs()[0], CompileOptions(target="nvgpu", **options)
    )


def entry(made, found) -> tuple:
    """(function of arrays and a stream, bytes of temporaries): the handler as XLA calls it, on the calling thread's device. It
    returns the text of an error, or None."""
    linked = handler(made, found)
    run = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(linked.image.address("pbk_handler"))

    def call(*arrays, stream=0xABC):
        arena = np.zeros(max(linked.temporaries, 1), "u1")
        given, kept = frame([*arrays, arena], stream)
        texts = []

        def create(query):
            texts.append(ctypes.c_char_p(query[2]).value.decode())
            return 0xE

        make = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64))(create)
        kept[1][handlers.ERROR_CREATE // 8] = ctypes.cast(make, ctypes.c_void_p).value
        assert (run(ctypes.addressof(given)) == 0xE) == bool(texts)
        return texts[0] if texts else None

    call.image = linked.image
    return call


def doubled(cuda, **options):
    return entry(compiled(lambda x: x * 2, X, **options), cuda.driver)


def by_hand(kernel, cuda):
    (program,) = build_kernel(kernel.trace(X)).programs
    return entry(get_target("nvgpu").compile(program, CompileOptions(target="nvgpu")), cuda.driver)


def test_kernels_run_that_the_library_assembles_from_their_text(cuda):
    """It needs more shared memory than a text may declare, which the device has to allow."""
    x = np.random.default_rng(0).normal(size=(2, 13000)).astype("f4")
    made = compiled(lambda x: turned(13000)(x), x)
    assert made.distinct()[0].function.dynamic_shared_bytes >= 52000
    call = entry(made, cuda.driver)
    assert cuda.calls() == []  # nothing is loaded before it is launched
    for _ in range(2):
        out = np.zeros_like(x)
        assert call(x, out) is None
        np.testing.assert_array_equal(out, 2 * x[:, ::-1])
    assert (
        len(cuda.calls("cuLibraryLoadData"))
        == len(cuda.calls("cuInit"))
        == len(cuda.calls("cuKernelSetAttribute"))
        == 1
    )
    assert [(d, s) for d, _, s in cuda.launches] == [(0, 0xABC)] * 2


def test_machine_code_that_the_driver_refuses_is_replaced_by_its_text(cuda, monkeypatch):
    monkeypatch.setattr(ptxas, "find", lambda: "ptxas")
    monkeypatch.setattr(
        ptxas,
        "assemble",
        lambda text, architecture: ptxas.Cubin(b"\x7fELF of " + text.encode(), 8, 0, 0),
    )
    cuda.library.fake_refuse_machine_code(1)
    call, out = entry(compiled(lambda x: x * 2.25, X), cuda.driver), np.zeros_like(X)
    assert call(X, out) is None
    assert call(X, out) is None
    np.testing.assert_array_equal(out, X * 2.25)
    assert (
        len(cuda.calls("cuLibraryLoadData")) == 2
    )  # machine code, the text; no more in the second call


def test_a_ptxas_that_does_not_know_the_text_leaves_it_to_the_driver(cuda, monkeypatch):
    def rejects(text, architecture):
        raise TargetError("ptxas rejects a kernel", why="unsupported .version 8.0")

    monkeypatch.setattr(ptxas, "find", lambda: "ptxas")
    monkeypatch.setattr(ptxas, "assemble", rejects)
    made, out = compiled(lambda x: x * 2.75, X), np.zeros_like(X)
    assert entry(made, cuda.driver)(X, out) is None
    np.testing.assert_array_equal(out, X * 2.75)
    cuda.fail("cuLibraryLoadData", 218)
    assert re.search(
        r"takes no code of kernel `k0_\w+`(?s:.*)ptxas rejects a kernel: unsupported .version 8.0; PTX for "
        "sm_90a: error 218",
        entry(made, cuda.driver)(X, out),
    )


def test_devices_of_several_kinds(cuda):
    """The code that was made is for the first; others get code of their own; one that there is no code for fails alone."""
    cuda.devices("9.0", "8.6", "12.1", "7.5", "9.0")
    call, errors = doubled(cuda, device="sm_90a"), {}
    for device in (3, 0, 1, 2, 4, 3, 1):
        cuda.current(device)
        out = np.zeros_like(X)
        errors[device] = call(X, out)
        if device != 3:
            np.testing.assert_array_equal(out, X * 2)
    assert [d for d in errors if errors[d]] == [3]
    assert [d for d, _, _ in cuda.launches] == [
        0,
        1,
        2,
        4,
        1,
    ]
    for words in (
        "device 3 takes no code of kernel `k0_",
        "PTX for sm_90a: CUDA_ERROR_NO_BINARY_FOR_GPU",
        "compute capability 7.5",
        "compile_options={'device': ...}",
    ):
        assert words in errors[3]
    texts = {d: next(k for k in cuda.driver.kernels.values()).handles[d] for d in range(5)}
    assert all(texts[d] for d in (0, 1, 2, 4))
    assert not texts[3]


def test_one_devices_refusal_of_shared_memory_does_not_stop_the_others(cuda):
    x = np.random.default_rng(1).normal(size=(2, 14000)).astype("f4")
    call, out = entry(compiled(lambda x: turned(14000)(x), x), cuda.driver), np.zeros_like(x)
    cuda.devices("9.0", "9.0")
    cuda.fail("cuKernelSetAttribute", 209, device=1)
    cuda.current(1)
    assert "device 1 takes no code" in call(x, out)
    cuda.current(0)
    assert call(x, out) is None
    np.testing.assert_array_equal(out, 2 * x[:, ::-1])


def test_threads_devices_and_streams(cuda):
    """Every device is given the kernel once, whichever thread comes first; a launch goes to its caller's device and stream."""
    cuda.devices(*["9.0"] * 3)
    call, failures = doubled(cuda), []

    def run(n: int) -> None:
        try:
            for k in range(6):
                cuda.current((n + k) % 3)
                x = np.full_like(X, n)
                out = np.zeros_like(X)
                assert call(x, out, stream=16 * n + 3) is None
                np.testing.assert_array_equal(out, 2 * n)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert len(cuda.calls("cuKernelGetFunction")) == 3
    expected = sorted(((n + k) % 3, 16 * n + 3) for n in range(1, 5) for k in range(6))
    assert sorted((device, stream) for device, _, stream in cuda.launches) == expected


def test_a_kernel_is_loaded_while_a_stream_is_recorded(cuda):
    cuda.library.fake_recording(1)
    out = np.zeros_like(X)
    assert doubled(cuda)(X, out) is None
    np.testing.assert_array_equal(out, X * 2)
    mode = ctypes.c_int(0)
    cuda.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == 1  # the thread's own again


def test_what_is_missing_is_said_by_the_call(cuda, tmp_path):
    """And what comes later is found: a driver may be started after the first call."""
    call, out = doubled(cuda), np.zeros_like(X)
    cuda.fail("cuInit", 100, times=1)
    assert "NVIDIA GPU fails when it is initialised\n  why  CUDA_ERROR_NO_DEVICE" in call(X, out)
    assert call(X, out) is None
    missing = Cuda(tmp_path)
    type(missing.driver).library_name = "libcuda_that_is_not_there.so"
    text = doubled(missing)(X, out)
    assert re.search(
        "no program can be launched on an NVIDIA GPU\n.*libcuda_that_is_not_there(?s:.*)nvidia-smi",
        text,
    )
    other = Cuda(tmp_path, "hip.c")
    other.driver.initialise = "hipInit"
    assert "the driver of the NVIDIA GPU has no function cuLaunchKernel" in doubled(other)(X, out)


def test_an_error_without_a_text_is_an_error(cuda, monkeypatch):
    """A driver may lack the functions which say what an error is."""
    monkeypatch.setattr(type(cuda.driver), "error_texts", ("cuGetErrorPoem",))
    call, out = doubled(cuda), np.zeros_like(X)
    cuda.fail("cuLaunchKernel", 321)
    assert "error 321 of the driver" in (text := call(X, out))
    assert "has no function cuGetErrorPoem" in text
    cuda.fail("cuLaunchKernel", 0)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cuda.driver, "loaded", interrupted)
    assert "KeyboardInterrupt" in entry(compiled(lambda x: x * 2 - 1, X), cuda.driver)(X, out)


def test_devices_beyond_those_that_have_a_place(cuda):
    cuda.devices(*["9.0"] * (DEVICES + 2))
    call, out = doubled(cuda), np.zeros_like(X)
    cuda.current(DEVICES)
    assert f"launches on {DEVICES} devices" in call(X, out)
    cuda.current(DEVICES - 1)
    assert call(X, out) is None
    cuda.current(-1)
    assert call(X, out) == "the program was not launched: CUDA_ERROR_INVALID_CONTEXT"


# ---------------------------------------------------------------- failures of kernels


@pytest.mark.parametrize(
    ("error", "text"),
    [(700, ADDRESS), (719, "CUDA_ERROR_LAUNCH_FAILED unspecified launch failure")],
)
def test_a_kernel_that_failed_is_named_once_and_the_process_goes_on(cuda, error, text):
    first, second = doubled(cuda), entry(compiled(lambda x: x + 3, X), cuda.driver)
    out = np.zeros_like(X)
    assert first(X, out) is None
    cuda.break_device(0, error)
    (name,) = {k.function.name for k in cuda.driver.kernels.values() if k.handles[0]}
    found = second(X, out)
    assert f"kernel `{name}` failed on device 0 while it ran: {text}" in found
    assert "pbkern.simulate" in found
    again = [second(X, out), first(X, out)]
    assert all(
        f"device 0 has failed before (kernel `{name}`): {text}" in t and "while it ran" not in t
        for t in again
    )
    cuda.devices("9.0", "9.0")
    cuda.current(1)
    assert first(X, out) is None  # another device
    np.testing.assert_array_equal(out, X * 2)
    cuda.current(0)
    cuda.break_device(0, 0)  # a driver that starts the device anew
    assert second(X, out) is None
    np.testing.assert_array_equal(out, X + 3)


def test_of_several_launches_all_that_may_have_failed_are_named(cuda):
    """Each is named once, the last one first."""
    calls = []
    for k, name in enumerate(("first", "second", "third", "fourth")):
        f = lambda x, k=k: x * k + 7
        f.__name__ = name
        calls.append(entry(compiled(f, X), cuda.driver))
    out = np.zeros_like(X)
    for k in (2, *[0, 1] * RECENT_LAUNCHES):
        assert calls[k](X, out) is None
    cuda.break_device(0, 700)
    assert re.match(
        r"one of kernels `k0_second_\w+`, `k0_first_\w+`, the last launches first failed on device 0 while it ran",
        calls[3](X, out),
    )


def counts(x):
    step = lambda c: (jnp.sort(c[0] * 1.5 + 1, -1), c[0].sum())
    return jax.lax.while_loop(lambda c: c[1] < 30, step, (x * 0, x[0, 0] * 0))[0]


def test_a_failure_that_a_read_of_a_condition_meets(cuda):
    call, out = entry(compiled(counts, X), cuda.driver), np.zeros_like(X)
    run = cuda.fake.on_launch

    def breaks(*arguments):
        cuda.break_device(0, 719)
        return run(*arguments)

    cuda.fake.on_launch = breaks
    assert re.search(r"kernel `k\d_\w+` failed on device 0 while it ran", call(X, out))
    cuda.fake.on_launch = run
    cuda.break_device(0, 0)
    assert call(X, out) is None
    np.testing.assert_allclose(out, jax.jit(counts)(X), rtol=1e-5)


@pytest.mark.parametrize(("symbol", "what"), [
    ("cuLaunchKernel", "kernel `k0_"), ("cuMemcpyDtoHAsync_v2", "a copy"), ("cuStreamSynchronize", "a copy"),
    ("cuKernelGetFunction", "device 0 takes no code"), ("cuLibraryGetKernel", "device 0 takes no code"),
    ("cuThreadExchangeStreamCaptureMode", "is about to be given a kernel"), ("cuCtxGetDevice", "the program was not launched"),
])  # fmt: skip
def test_what_the_library_refuses_is_an_error_of_the_call(cuda, symbol, what):
    call, out = entry(compiled(counts, X), cuda.driver), np.zeros_like(X)
    cuda.fail(symbol, 321)
    assert what in (text := call(X, out))
    assert "error 321" in text
    cuda.fail(symbol, 0)
    assert call(X, out) is None
    np.testing.assert_allclose(out, jax.jit(counts)(X), rtol=1e-5)


def test_copies_that_fail(cuda):
    """An aliased result that is another array starts as a copy."""

    @pbkern.kernel(
        grid=(2,),
        in_specs=[pbkern.BlockSpec((1, 40), lambda i: (i, 0))],
        out_shape=X,
        out_specs=pbkern.BlockSpec((1, 40), lambda i: (i, 0)),
        input_output_aliases={0: 0},
    )
    def adds(x, o):
        o[...] = x[...] + 1

    call, out = by_hand(adds, cuda), np.zeros_like(X)
    cuda.fail("cuMemcpyDtoDAsync_v2", 321)
    assert call(X, out) == "a copy was not launched: error 321"
    assert not cuda.launches
    cuda.fail("cuMemcpyDtoDAsync_v2", 0)
    assert call(X, out) is None
    np.testing.assert_array_equal(out, X + 1)


def test_reports_and_their_failures(cuda, capfd):
    @pbkern.kernel(
        grid=(2,),
        in_specs=[pbkern.BlockSpec((1, 40), lambda i: (i, 0))],
        out_shape=X,
        out_specs=pbkern.BlockSpec((1, 40), lambda i: (i, 0)),
    )
    def says(x, o):
        o[...] = x[...] * 3
        jax.debug.print("block {}", pbkern.program_id(0))

    call, out = by_hand(says, cuda), np.zeros_like(X)
    assert call(X, out) is None
    np.testing.assert_array_equal(out, X * 3)
    assert capfd.readouterr().out == "block 0\nblock 1\n"
    cuda.fail("cuMemsetD8Async", 321)
    assert call(X, out) == "a copy was not launched: error 321"
    cuda.fail("cuMemsetD8Async", 0)
    cuda.fail("cuMemcpyDtoHAsync_v2", 700, times=1)
    assert "kernel `k0_says` failed on device 0 while it ran" in call(X, out)


def test_traces_that_cannot_be_written(cuda, monkeypatch, tmp_path):
    params = pbkern.nvgpu.CompilerParams(profile_space=4, profile_dir=str(tmp_path / "traces"))
    body = pbkern.kernel(
        lambda x, o: o.__setitem__(..., x[...] - 1), out_shape=X, compiler_params=params
    )
    call, out = by_hand(body, cuda), np.zeros_like(X)
    assert call(X, out) is None
    assert len(list((tmp_path / "traces").iterdir())) == 1

    def full(function, records):
        raise OSError("disk full")

    monkeypatch.setattr(trace, "write", full)
    assert re.fullmatch(
        "what kernel `k0_.*` has recorded could not be written: disk full", call(X, out)
    )


# ---------------------------------------------------------------- devices


def test_the_device_that_is_there_is_compiled_for(cuda, monkeypatch):
    monkeypatch.setattr(driver, "present_capability", driver.present_capability.__wrapped__)
    monkeypatch.setattr(driver, "driver", lambda name: cuda.driver)
    with config.override(gpu_driver=None):
        for capability, kind in (
            ("12.0", "sm_120"),
            ("8.7", "sm_86"),
            ("10.3", "sm_100"),
            ("9.0", "sm_90a"),
        ):
            cuda.devices(capability)
            assert get_target("nvgpu").backend_of(None).kind.architecture == kind
        cuda.fail("cuDeviceGetAttribute", 100)
        assert (
            get_target("nvgpu").backend_of(None).kind.architecture == "sm_90a"
        )  # no device: the default


def test_capabilities_take_the_newest_code_of_their_major_version():
    names = {
        c: devices.of_capability(*c).architecture
        for c in ((8, 0), (8, 6), (8, 8), (8, 9), (10, 0), (10, 1), (12, 2))
    }
    assert list(names.values()) == [
        "sm_80",
        "sm_86",
        "sm_86",
        "sm_89",
        "sm_100",
        "sm_100",
        "sm_120",
    ]
    for capability in ((7, 5), (11, 0), (13, 0)):
        with pytest.raises(
            pbkern.errors.OptionError, match=f"compute capability {capability[0]}.{capability[1]}"
        ):
            devices.of_capability(*capability)


def test_every_device_that_was_used_is_waited_for_from_any_thread(cuda, monkeypatch):
    monkeypatch.setattr(driver, "driver", lambda name: cuda.driver)
    cuda.devices(*["9.0"] * 4)
    call, out = doubled(cuda), np.zeros_like(X)
    for device in (3, 1):
        cuda.current(device)
        assert call(X, out) is None
    errors: list = []

    def waits():
        try:
            errors.append(pbkern.device_helpers.cuda_synchronize())
        except TargetError as e:
            errors.append(str(e))

    def from_a_new_thread() -> object:
        t = threading.Thread(target=waits)
        t.start()
        t.join()
        return errors[-1]

    assert from_a_new_thread() is None
    assert cuda.calls("cuCtxSynchronize") == [
        "cuCtxSynchronize 1",
        "cuCtxSynchronize 3",
    ]
    cuda.current(1)
    assert call(X, out) is None
    cuda.break_device(1, 700)
    (name,) = {k.function.name for k in cuda.driver.kernels.values()}
    assert f"kernel `{name}` failed on device 1 while it ran" in from_a_new_thread()
    assert cuda.calls("cuCtxSynchronize")[2:] == [
        "cuCtxSynchronize 1",
        "cuCtxSynchronize 3",
    ]  # the others were waited for
    assert "device 1 has failed before" in from_a_new_thread()
    assert [cuda.library.fake_retained(n) for n in range(4)] == [0] * 4
    number = ctypes.c_int()
    assert not cuda.library.cuCtxGetDevice(ctypes.byref(number))
    assert number.value == 1


@pytest.mark.parametrize(
    "symbol",
    [
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDevicePrimaryCtxGetState",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuCtxSynchronize",
    ],
)
def test_waiting_that_fails(cuda, symbol):
    cuda.library.fake_active(0, 1)
    cuda.fail(symbol, 321)
    with pytest.raises(TargetError, match=r"NVIDIA GPU fails when it is .*\n  why  error 321"):
        cuda.driver.synchronize()
    assert cuda.library.fake_retained(0) == 0
    cuda.fail(symbol, 0)
    cuda.driver.synchronize()


def test_every_function_that_is_called_stands_in_the_fake_library_and_in_these_tests():
    """So that a new call gets tests, and failures."""
    root = pathlib.Path(driver.__file__).parents[1]
    sources = {"nvgpu": (r'"(cu[A-Z]\w+)"', "cuda.c"), "amdgpu": (r'"(hip[A-Z]\w+)"', "hip.c")}
    for vendor, (pattern, fake) in sources.items():
        called = set(re.findall(pattern, (root / vendor / "driver.py").read_text()))
        defined = (pathlib.Path(FakeDriver.__init__.__code__.co_filename).parent / fake).read_text()
        assert len(called) > 9
        assert not [f for f in called if f"int {f}(" not in defined]


# ---------------------------------------------------------------- the simulator as a driver


def test_what_the_simulator_cannot_run_is_an_exception_with_its_traceback(monkeypatch):
    plain = codegen.ptx
    monkeypatch.setattr(
        codegen,
        "ptx",
        lambda ir, kind: plain(ir, kind).replace("ret;", "frobnicate.b32 %r1, %r1;\nret;"),
    )
    with config.override(gpu_driver="simulator"):
        f = pbkern.jit(lambda x: x * 2.375, compile_options=GPU)
        with pytest.raises(Exception, match=r"kernel `k0_.*` failed: Traceback") as e:
            jax.block_until_ready(f(np.zeros((3, 40), "f4")))
    assert "`frobnicate.b32` is not simulated" in str(e.value)


def test_empty_operands_of_a_launch():
    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((40,), jnp.float32))
    def body(x, none, o):
        o[...] = x[...] + none[...].sum()

    x = np.arange(40, dtype="f4")
    with config.override(gpu_driver="simulator"):
        np.testing.assert_array_equal(
            pbkern.jit(lambda x, y: body(x, y), compile_options=GPU)(x, x[:0]), x
        )
