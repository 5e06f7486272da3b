"""`installed(like=...)`: what a library is told of the device, and what JAX itself goes on to see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import pbkern
from pbkern.core.errors import OptionError


def answers() -> dict:
    device = jax.devices()[0]
    names = ("platform", "device_kind", "core_count", "num_cores", "compute_capability")
    return {"backend": jax.default_backend()} | {
        name: getattr(device, name) for name in names if hasattr(device, name)
    }


def doubled(x):
    """A library's function: a kernel where it has one, else an error."""
    if jax.default_backend() != "tpu" or not pltpu.is_tpu_device():
        raise NotImplementedError(jax.devices()[0].device_kind)
    rows = 8 * pltpu.get_tpu_info().generation

    def body(x, o):
        o[...] = 2 * x[...]

    tile = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        body, grid=(pl.cdiv(len(x), rows),), in_specs=[tile], out_specs=tile, out_shape=x
    )(x)


def test_answers_of_a_tpu():
    truth = answers()
    with pbkern.pallas.installed(like="tpu v6e"):
        assert answers() == {
            "backend": "tpu", "platform": "tpu", "device_kind": "TPU v6e", "core_count": 1, "num_cores": 1,
        }  # fmt: skip
        assert pltpu.get_tpu_info().chip_version is pltpu.ChipVersion.TPU_V6E
        assert pltpu.is_tpu_device()
    assert answers() == truth
    assert not pltpu.is_tpu_device()


@pytest.mark.parametrize("version", list(pltpu.ChipVersion), ids=str)
def test_every_generation_of_pallas_has_answers(version):
    with pbkern.pallas.installed(like=f"tpu {version}"):
        assert pltpu.get_tpu_info().chip_version is version


def test_answers_of_a_gpu():
    truth = answers()
    with pbkern.pallas.installed(like="gpu sm_90"):
        assert answers() == {
            "backend": "gpu", "platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3", "core_count": 132,
            "compute_capability": "9.0",
        }  # fmt: skip
    assert answers() == truth


def test_a_library_that_asks_runs_its_kernel():
    x = np.arange(96 * 4, dtype=np.float32).reshape(96, 4)
    with pytest.raises(NotImplementedError, match="cpu"):
        doubled(jnp.asarray(x))
    with pbkern.pallas.installed(like="tpu v5e"):
        np.testing.assert_array_equal(doubled(jnp.asarray(x)), 2 * x)
        np.testing.assert_array_equal(jax.jit(doubled)(x), 2 * x)
        np.testing.assert_array_equal(jnp.sort(-jnp.asarray(x), 0), np.sort(-x, 0))


def test_answers_change_where_the_kernels_are_installed_already():
    """As they are for every test of this folder."""
    assert pbkern.pallas._installed == ["cpu"]
    with pbkern.pallas.installed(like="tpu v4"):
        assert jax.devices()[0].device_kind == "TPU v4"
        with pbkern.pallas.installed(like="gpu a100"):
            assert jax.devices()[0].compute_capability == "8.0"
        assert jax.devices()[0].device_kind == "TPU v4"
    assert jax.devices()[0].device_kind == "cpu"
    assert pbkern.pallas._installed == ["cpu"]


@pytest.mark.parametrize("like", ["tpu", "tpu v99", "gpu", "gpu sm_1", "npu x"])
def test_unknown_devices_are_refused(like):
    truth = answers()
    with pytest.raises(OptionError), pbkern.pallas.installed(like=like):
        pass
    assert answers() == truth
