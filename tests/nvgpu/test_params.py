"""CompilerParams of NVIDIA GPUs: checks, printing, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.errors import OptionError, ScheduleError, TargetError

BAD = {
    "approx_math": "yes", "unsafe_no_auto_barriers": 1, "max_concurrent_steps": 0, "delay_release": 1, "profile_space": -1,
    "profile_dir": 3, "lowering_semantics": "Block", "num_warps": 3, "dimension_semantics": ("sideways",),
}  # fmt: skip


@pytest.mark.parametrize("field", BAD)
def test_bad_values_are_named(field):
    with pytest.raises(OptionError, match=f"field `{field}` has a bad value"):
        pbkern.nvgpu.CompilerParams(**{field: BAD[field]})


def test_unknown_fields_are_named():
    with pytest.raises(OptionError, match="did you mean `num_warps`"):
        pbkern.nvgpu.CompilerParams(num_warp=4)


def kernel(**params):
    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((8,), jnp.float32), compiler_params=pbkern.nvgpu.CompilerParams(**params))
    def plus_one(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    return plus_one


@pytest.mark.parametrize("params", [{"max_concurrent_steps": 2}, {"profile_space": 4}, {"lowering_semantics": "Warpgroup"}])
def test_what_is_not_done_is_refused(params):
    with pytest.raises(ScheduleError, match=f"asks for {next(iter(params))}"):
        pbkern.simulate(kernel(**params), np.zeros(8, np.float32))


def test_kernels_print_their_params():
    source = kernel(num_warps=2).trace(np.zeros(8, np.float32)).source()
    assert "pbkern.nvgpu.CompilerParams(num_warps=2)" in source


def test_warps_are_threads():
    found = pbkern.simulate(kernel(num_warps=2), np.arange(8, dtype=np.float32))
    assert ".reqntid 64" in found.ptx[0]
    np.testing.assert_array_equal(found.results[0], np.arange(8) + 1)


def test_devices_by_name():
    x = np.zeros(8, np.float32)
    assert ".target sm_89" in pbkern.simulate(kernel(), x, device="rtx4090").ptx[0]
    with pytest.raises(OptionError, match="there is no device `h1000`"):
        pbkern.simulate(kernel(), x, device="h1000")


def test_params_of_another_class_are_refused():
    class Other:
        target_name = "nvgpu"

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    made = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct((8,), jnp.float32), compiler_params=Other())
    with pytest.raises(OptionError, match="of another class"):
        pbkern.simulate(made, np.zeros(8, np.float32))


def test_calls_say_what_is_missing():
    f = pbkern.jit(lambda x: x + 1, compile_options={"target": "nvgpu"})
    with pytest.raises(TargetError):
        f(jnp.zeros(8))
