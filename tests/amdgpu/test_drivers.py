"""The driver of HIP on a library in the place of libamdhip64 (tests/fake_drivers/hip.c): code objects are loaded, not run."""

import threading

import numpy as np
import pytest

import pbkern
from pbkern.core.options import CompileOptions
from pbkern.errors import OptionError, TargetError
from pbkern.targets import get_target
from pbkern.targets.amdgpu import compile as codegen
from pbkern.targets.amdgpu import driver, target
from tests.fake_drivers import built
from tests.nvgpu.test_drivers import entry

from .test_amdgpu import GPU, needs_lld

X = np.random.default_rng(2).normal(size=(3, 50)).astype("f4")
pytestmark = needs_lld


class Hip:
    """A fake libamdhip64, and pbkern's driver on it."""

    def __init__(self, folder, *flags):
        self.fake = built("hip.c", folder, *flags)
        self.driver = type("Opened", (driver.HipDriver,), {"library_name": str(self.fake.path)})()
        self.fake.devices("gfx942:sramecc+:xnack-")

    def __getattr__(self, name):
        return getattr(self.fake, name)


@pytest.fixture(params=[(), ("-DOLD",)], ids=["ROCm 6.3", "ROCm 5"])
def hip(tmp_path, request):
    return Hip(tmp_path, *request.param)


def compiled(device, factor=3.0):
    build, _ = pbkern.jit(lambda x: x * factor, compile_options=GPU | {"device": device}).build(
        (X,), {}
    )
    return get_target("amdgpu").compile(
        build.plan.programs()[0], CompileOptions(target="amdgpu", device=device)
    )


def test_a_module_is_loaded_on_every_device(hip):
    """The first launch there loads it, of whichever thread; code objects are of the version that old runtimes load."""
    hip.devices(*["gfx942:xnack-"] * 3)
    call, out = entry(compiled("gfx942"), hip.driver), np.zeros_like(X)
    assert hip.calls() == []
    failures = []

    def run(n):
        for k in range(6):
            hip.current((n + k) % 3)
            failures.append(call(X, out, stream=n))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == [None] * 24
    assert sorted(hip.calls("hipModuleLoadData")) == [f"hipModuleLoadData {d}" for d in range(3)]
    assert sorted((d, s) for d, _, s in hip.launches) == sorted(
        ((n + k) % 3, n) for n in range(1, 5) for k in range(6)
    )


def test_code_objects_have_version_5():
    (code,) = compiled("gfx90a").distinct()
    assert code.image[8] == 3  # of the ELF header: 3 is version 5


def test_devices_of_several_architectures(hip):
    """One with wavefronts of the same size is given code of its own; another one fails alone."""
    hip.devices("gfx942:sramecc+", "gfx90a:sramecc+:xnack-", "gfx1100", "gfx803")
    call, out = entry(compiled("gfx942"), hip.driver), np.zeros_like(X)
    found = {}
    for device in (2, 1, 3, 0, 1):
        hip.current(device)
        found[device] = call(X, out)
    assert found[0] is None
    assert found[1] is None
    assert [d for d, _, _ in hip.launches] == [1, 0, 1]
    for device in (2, 3):
        assert f"device {device} takes no code of kernel `k0_" in found[device]
        assert (
            "code object for gfx942: hipErrorNoBinaryForGpu no kernel image is available"
            in found[device]
        )
    assert "there is no code for AMD devices of architecture gfx803" in found[3]


def test_the_device_that_is_there_is_compiled_for(hip, monkeypatch):
    monkeypatch.setattr(driver, "driver", lambda: hip.driver)
    monkeypatch.setattr(target, "present_architecture", driver.present_architecture.__wrapped__)
    amd = get_target("amdgpu")
    for name in ("gfx90a:sramecc+:xnack-", "gfx1100", "gfx942"):
        hip.devices("gfx942", name)
        hip.current(1)
        assert amd.backend_of(None).kind.architecture == name.partition(":")[0]
        assert amd.backend_of("mi210").kind.architecture == "gfx90a"
    hip.devices("gfx942", "gfx906")
    with pytest.raises(OptionError, match="no code for AMD devices of architecture gfx906"):
        amd.backend_of(None)
    hip.fail("hipGetDevice", 100)
    assert amd.backend_of(None).kind.architecture == "gfx942"  # no device: the default


def test_a_device_that_does_not_say_what_it_is(tmp_path):
    hip = Hip(tmp_path, "-DOLD")
    hip.devices("Radeon")
    with pytest.raises(TargetError, match="AMD device 0 does not say which instructions it has"):
        hip.driver.architecture(0)
    hip.fail("hipGetDeviceProperties", 321)
    with pytest.raises(TargetError, match="asked for device 0\n  why  error 321"):
        hip.driver.architecture(0)


@pytest.mark.parametrize(("symbol", "what"), [
    ("hipInit", "AMD GPU fails when it is initialised"), ("hipModuleLoadData", "device 0 takes no code"),
    ("hipModuleGetFunction", "device 0 takes no code"), ("hipModuleLaunchKernel", "kernel `k0_"),
    ("hipThreadExchangeStreamCaptureMode", "about to be given a kernel"), ("hipGetDevice", "the program was not launched"),
])  # fmt: skip
def test_what_the_library_refuses_is_an_error_of_the_call(hip, symbol, what):
    call, out = entry(compiled("gfx942"), hip.driver), np.zeros_like(X)
    hip.fail(symbol, 321)
    assert what in (text := call(X, out))
    assert "error 321" in text
    hip.fail(symbol, 0)
    assert call(X, out) is None


def test_a_kernel_that_failed_is_named_once_and_the_process_goes_on(hip):
    calls = [entry(compiled("gfx942", factor), hip.driver) for factor in (5.0, 7.0)]
    out = np.zeros_like(X)
    assert calls[0](X, out) is None
    hip.break_device(0, 719)
    assert "failed on device 0 while it ran: hipErrorLaunchFailure" in calls[1](X, out)
    assert "device 0 has failed before" in calls[0](X, out)
    hip.break_device(0, 0)
    assert calls[1](X, out) is None


def test_a_module_is_loaded_while_a_stream_is_recorded(hip):
    hip.library.fake_recording(1)
    assert entry(compiled("gfx942"), hip.driver)(X, np.zeros_like(X)) is None


def test_what_a_handler_reads_and_copies(hip):
    """The driver's reading half, which reports and traces use."""
    x = np.arange(40, dtype="u1")
    np.testing.assert_array_equal(hip.driver.bytes_at(x.ctypes.data, 40, 5), x)
    for symbol, error in (("hipMemcpyDtoHAsync", 321), ("hipStreamSynchronize", 322)):
        hip.fail(symbol, error)
        with pytest.raises(TargetError, match=f"error {error}"):
            hip.driver.bytes_at(x.ctypes.data, 40, 5)
        hip.fail(symbol, 0)


def test_fences_are_empty_instructions():
    text = codegen._without_fences(
        "%2 = call <2 x float> @llvm.arithmetic.fence.v2f32(<2 x float> %1)"
    )
    assert text == '%2 = call <2 x float> asm "", "=v,0"(<2 x float> %1)'
