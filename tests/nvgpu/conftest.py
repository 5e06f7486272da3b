"""With TESTS_ON_DEVICE=1, tests of this folder that simulate a function run it on the device instead."""

import types

import jax
import numpy as np
import pytest

import pbkern
from pbkern.dsl.trace import KernelFunction
from pbkern.targets import get_target

from .simulated import ON_DEVICE


def on_device(function, *args, **options) -> types.SimpleNamespace:
    """The results of a function or a hand-written kernel on the device, where a test reads no more than them."""
    if options:
        pytest.skip("it asks the simulator for more than results")
    held = jax.device_put(args, jax.devices(get_target("nvgpu").platform)[0])
    if isinstance(function, pbkern.Kernel):
        results = pbkern.call_kernel(function, *held)
    elif isinstance(function, KernelFunction):
        results = function(*held)
    else:
        results = pbkern.jit(function, compile_options={"target": "nvgpu"})(*held)
    return types.SimpleNamespace(results=jax.tree.map(np.asarray, results), ptx=[""])


@pytest.fixture(autouse=True)
def device_instead_of_simulator(monkeypatch):
    """Tests of the folder call `pbkern.simulate`."""
    if ON_DEVICE:
        monkeypatch.setattr(pbkern, "simulate", on_device)
        with jax.default_device(jax.devices("cpu")[0]):
            yield
    else:
        yield
