"""The CPU's tests on simulated GPUs: in a `with` block, what they compile for the CPU becomes PTX, which is simulated.

Plans and kernels are those that the CPU gets: blocks of many sizes, chains of nests, every statement. Only code differs.
With TESTS_ON_DEVICE=1 they run where the driver that is configured runs them, on a device (`make gpu-check`).
"""

import contextlib
import ctypes
import dataclasses
import os
import types
from unittest import mock

import jax
import numpy as np

from pbkern.api import plan_store
from pbkern.core.options import CompileOptions
from pbkern.targets import get_target
from pbkern.targets.cpu.target import CpuTarget
from pbkern.targets.nvgpu.driver import CudaDriver, driver
from pbkern.targets.simt.launch.call import launched_call

GPU = CompileOptions(target="nvgpu")
ON_DEVICE = os.environ.get("TESTS_ON_DEVICE") == "1"


def compiled(program, *_, options=GPU, **__):
    """A program for the GPU; it is called with NumPy arrays."""
    return _Called(
        get_target("nvgpu").compile(program, dataclasses.replace(options, target="nvgpu"))
    )


class _Called:
    """A compiled program as the CPU's are called."""

    def __init__(self, made):
        self.made, self.program, self.times = made, made.program, made.times

    def __call__(self, *arrays):
        """Results on NumPy arrays, by the device that is configured or the simulator."""
        values = [np.asarray(a) for a in arrays]
        if not ON_DEVICE:
            return self.made.simulated(values)[0]
        device = jax.devices(get_target("nvgpu").platform)[0]
        launch = jax.jit(
            lambda *operands: launched_call(
                self.made, self.program.label, operands, get_target("nvgpu").driver()
            )
        )
        return [np.asarray(x) for x in launch(*jax.device_put(values, device))]


def call(self, made, label, operands):
    """The program as a JAX operation on the CPU, where the references of the tests run as well."""
    if not ON_DEVICE:
        return launched_call(made.made, label, operands, driver("simulator"))
    if get_target("nvgpu").platform == "cpu":
        return launched_call(made.made, label, operands, get_target("nvgpu").driver())
    wide = jax.config.jax_enable_x64

    def on_device(*values):
        # The callback has a thread of its own, which does not know the caller's context.
        with jax.enable_x64(wide):
            return made(*values)

    results = [
        jax.ShapeDtypeStruct(output.type.shape, output.type.dtype)
        for output in made.program.outputs
    ]
    return jax.pure_callback(on_device, results, *operands)


@contextlib.contextmanager
def gpu():
    """What is compiled in the block runs in the simulator."""
    jax.clear_caches()
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(
                CpuTarget, "compile", lambda _, p, options: compiled(p, options=options)
            )
        )
        stack.enter_context(mock.patch.object(CpuTarget, "call", call))
        stack.enter_context(mock.patch.object(CpuTarget, "POOLED_BYTES", 1 << 62))
        stack.enter_context(mock.patch.object(plan_store, "key", return_value=None))
        if ON_DEVICE:
            stack.enter_context(jax.default_device(jax.devices("cpu")[0]))
        stack.enter_context(mock.patch("tests.native.running.compile_program", compiled))
        yield
    jax.clear_caches()


def reading(code, error: int) -> tuple[CudaDriver, int, list]:
    """A driver that reads memory of the CPU in the place of a device's; the row of a kernel; its calls."""
    calls: list = []

    def read(to, source, size, stream):
        calls.append(stream.value)
        ctypes.memmove(to, source, size.value)
        return error

    cuda = CudaDriver()
    cuda._library = types.SimpleNamespace(  # type: ignore[assignment]
        cuMemcpyDtoHAsync_v2=read,
        cuStreamSynchronize=lambda s: calls.append("waits") or 0,
        cuGetErrorName=lambda error, text: 1,
        cuGetErrorString=lambda error, text: 1,
    )
    return cuda, cuda.load(code, ()), calls
