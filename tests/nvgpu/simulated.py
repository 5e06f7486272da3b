"""The CPU's tests on simulated GPUs: in a `with` block, what they compile for the CPU becomes PTX, which is simulated.

Plans and kernels are those that the CPU gets: blocks of many sizes, chains of nests, every statement. Only code differs.
"""

import contextlib
import dataclasses
from unittest import mock

import jax
import numpy as np

from pbkern.core.options import CompileOptions
from pbkern.targets import get_target
from pbkern.targets.cpu.target import CpuTarget
from pbkern.targets.nvgpu.driver import driver
from pbkern.targets.simt.launch.call import launched_call

GPU = CompileOptions(target="nvgpu")


def compiled(program, *_, options=GPU, **__):
    """A program for the GPU; it is called with NumPy arrays."""
    return _Called(get_target("nvgpu").compile(program, dataclasses.replace(options, target="nvgpu")))


class _Called:
    """A compiled program as the CPU's are called."""

    def __init__(self, made):
        self.made, self.program, self.times = made, made.program, made.times

    def __call__(self, *arrays):
        return self.made.simulated([np.asarray(a) for a in arrays])[0]


def call(self, made, *operands):
    """The program as a JAX operation."""
    return launched_call(made.made, operands, driver("simulator"))


@contextlib.contextmanager
def gpu():
    """What is compiled in the block runs in the simulator."""
    jax.clear_caches()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(CpuTarget, "compile", lambda _, p, options: compiled(p, options=options)))
        stack.enter_context(mock.patch.object(CpuTarget, "call", call))
        stack.enter_context(mock.patch.object(CpuTarget, "POOLED_BYTES", 1 << 62))
        stack.enter_context(mock.patch("tests.native.running.compile_program", compiled))
        yield
    jax.clear_caches()
