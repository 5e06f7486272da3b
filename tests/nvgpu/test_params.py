"""CompilerParams of NVIDIA GPUs: checks, printing, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt

import pbkern
import pbkern.cpu
from pbkern.errors import OptionError, ScheduleError, TargetError
from pbkern.frontends.pallas.params import thread_params
from pbkern.targets import get_target
from pbkern.targets.nvgpu import driver

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


def test_members_of_pallas_enumerations_stand_for_their_names():
    given = pbkern.nvgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        dimension_semantics=[pltpu.PARALLEL, pltpu.ARBITRARY, "sequential"],
    )
    assert given == pbkern.nvgpu.CompilerParams(
        lowering_semantics="Warpgroup",
        dimension_semantics=("parallel", "arbitrary", "sequential"),
    )
    on_cpu = pbkern.cpu.CompilerParams(dimension_semantics=(pltpu.PARALLEL,))
    assert on_cpu.dimension_semantics == ("parallel",)
    for field in ("lowering_semantics", "dimension_semantics"):
        with pytest.raises(OptionError, match=f"field `{field}` has a bad value"):
            pbkern.nvgpu.CompilerParams(**{field: pltpu.CORE_PARALLEL})


def kernel(**params):
    @pbkern.kernel(
        out_shape=jax.ShapeDtypeStruct((8,), jnp.float32),
        compiler_params=pbkern.nvgpu.CompilerParams(**params),
    )
    def plus_one(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    return plus_one


def test_what_is_not_done_is_refused():
    with pytest.raises(ScheduleError, match="asks for lowering_semantics"):
        pbkern.simulate(
            kernel(lowering_semantics="Warpgroup"), np.zeros(8, np.float32), device="a100"
        )


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
    for name in ("gfx942", "MI300X"):
        with pytest.raises(OptionError, match="code for AMD GPUs cannot be simulated"):
            pbkern.simulate(kernel(), x, device=name)


def test_code_and_prices_are_for_the_device_that_is_named_or_there(monkeypatch):
    target, x = get_target("nvgpu"), np.zeros(8, np.float32)
    assert target.costs("a100").cores == 4 * 108
    assert target.costs().cores == 4 * 132
    f = pbkern.jit(lambda x: x + 1, compile_options={"target": "nvgpu", "device": "a100"})
    assert ".target sm_80" in f.as_text(x, stage="ptx")
    monkeypatch.setattr(driver, "present_capability", lambda: (8, 9))
    assert target.backend.kind.architecture == "sm_89"
    assert target.backend_of("b200").kind.architecture == "sm_100"
    with pbkern.config.override(gpu_driver="simulator"):
        assert target.backend.kind.architecture == "sm_90a"
    monkeypatch.setattr(driver, "present_capability", lambda: (7, 5))
    with pytest.raises(OptionError, match=r"no code for devices of compute capability 7.5"):
        _ = target.backend


def test_simulations_take_the_device_of_the_function(monkeypatch):
    monkeypatch.setattr(driver, "present_capability", lambda: (8, 9))
    x = np.zeros(8, np.float32)
    f = pbkern.jit(lambda x: x + 1, compile_options={"target": "nvgpu", "device": "a100"})
    for found, text in (
        (pbkern.simulate(f, x), "sm_80"),
        (pbkern.simulate(f, x, device="b200"), "sm_100"),
        (pbkern.simulate(lambda x: x + 1, x), "sm_90a"),
    ):
        assert f".target {text}" in found.ptx[0]


def test_kernels_are_loaded_once():
    f = pbkern.jit(
        lambda x: x + 1, compile_options={"target": "nvgpu", "device_one_time_load": False}
    )
    with pytest.raises(OptionError, match="loads a kernel once"):
        f.as_text(np.zeros(8, np.float32), stage="ptx")
    f = pbkern.jit(
        lambda x: x + 1, compile_options={"target": "nvgpu", "polyblocks_gpu_no_tensor_core": True}
    )
    assert "mma" not in f.as_text(np.zeros(8, np.float32), stage="ptx")


def test_params_of_another_class_are_refused():
    class Other:
        target_name = "nvgpu"

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    made = pbkern.kernel(
        body, out_shape=jax.ShapeDtypeStruct((8,), jnp.float32), compiler_params=Other()
    )
    with pytest.raises(OptionError, match="of another class"):
        pbkern.simulate(made, np.zeros(8, np.float32))


def test_calls_say_what_is_missing():
    f = pbkern.jit(lambda x: x + 1, compile_options={"target": "nvgpu"})
    with pytest.raises(TargetError):
        f(jnp.zeros(8))


def test_semantics_for_another_target_hold():
    """Programs that add to one element in order stay in order where only the CPU's parameters say so."""

    def body(x_ref, o_ref):
        @pbkern.when(pbkern.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...]

    kernel = pbkern.kernel(
        body, grid=(4,), in_specs=[pbkern.BlockSpec((1, 8), lambda i: (i, 0))],
        out_specs=pbkern.BlockSpec((1, 8), lambda i: (0, 0)), out_shape=jax.ShapeDtypeStruct((1, 8), jnp.float32),
        compiler_params=pbkern.cpu.CompilerParams(dimension_semantics=("arbitrary",)),
    )  # fmt: skip
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    np.testing.assert_array_equal(pbkern.simulate(kernel, x).results[0], x.sum(0, keepdims=True))


def pallas_matmul(a, b, **params):
    def body(a_ref, b_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += a_ref[...] @ b_ref[...]

    specs = [
        pl.BlockSpec((16, 16), lambda i, j, k: (i, k)),
        pl.BlockSpec((16, 16), lambda i, j, k: (k, j)),
    ]
    return pl.pallas_call(
        body, grid=(2, 2, 2), in_specs=specs,
        out_specs=pl.BlockSpec((16, 16), lambda i, j, k: (i, j)), out_shape=jax.ShapeDtypeStruct((32, 32), jnp.float32),
        compiler_params=plgpu.CompilerParams(dimension_semantics=("parallel", "parallel", "sequential"), **params),
    )(a, b)  # fmt: skip


def test_pallas_kernels_run_with_their_params():
    a, b = np.random.default_rng(0).normal(size=(2, 32, 32)).astype("f4")
    with pbkern.config.override(gpu_driver="simulator"), pbkern.pallas.installed("nvgpu"):
        np.testing.assert_allclose(jax.jit(pallas_matmul)(a, b), a @ b, rtol=1e-4, atol=1e-5)
        ahead = jax.jit(lambda a, b: pallas_matmul(a, b, max_concurrent_steps=3))
        np.testing.assert_allclose(ahead(a, b), a @ b, rtol=1e-4, atol=1e-5)


def test_fields_of_pallas_become_those_of_the_same_name():
    given = {
        "approx_math": True,
        "max_concurrent_steps": 4,
        "unsafe_no_auto_barriers": True,
        "profile_space": 7,
        "profile_dir": "x",
        "lowering_semantics": plgpu.LoweringSemantics.Warpgroup,
    }
    is_default = (
        plgpu.CompilerParams().lowering_semantics is plgpu.LoweringSemantics.Warpgroup
    )  # of jax 0.11: asks for nothing
    made = thread_params(plgpu.CompilerParams(**given), ("parallel",))["nvgpu"]
    assert made == pbkern.nvgpu.CompilerParams(
        **given | {"lowering_semantics": "Lane" if is_default else "Warpgroup"}
    )
    assert thread_params(plt.CompilerParams(num_warps=8), None)["nvgpu"].num_warps == 8
    assert thread_params(plgpu.CompilerParams(), None) == {}
    steps = thread_params(
        plgpu.CompilerParams(max_concurrent_steps=3, reduction_scratch_bytes=1), None
    )
    assert steps["amdgpu"] == pbkern.amdgpu.CompilerParams(max_concurrent_steps=3)
    own = pbkern.nvgpu.CompilerParams(num_warps=2)
    assert thread_params(own, None) == {"nvgpu": own}


APPROXIMATE = {
    "exp": (jnp.exp, "ex2.approx.ftz.f32", 6e-6),
    "exp2": (jnp.exp2, "ex2.approx.ftz.f32", 6e-6),
    "tanh": (jnp.tanh, "tanh.approx.f32", 2.0**-10.9),
    "sigmoid": (jax.nn.sigmoid, "ex2.approx.ftz.f32", 6e-6),
}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_functions_are_one_instruction_where_that_is_allowed(name):
    """Infinities and NaN are as they are without it; results below 2**-125 may be zero."""
    function, instruction, bound = APPROXIMATE[name]
    special = [np.inf, -np.inf, np.nan, 0.0, -100.0, 100.0]
    x = np.concatenate([np.linspace(-85, 85, 250), special]).astype(np.float32)
    block = pbkern.BlockSpec((64,), lambda i: (i,))

    def body(x, y):
        y[...] = function(x[...])

    for approx in (False, True):
        params = pbkern.nvgpu.CompilerParams(dimension_semantics=("parallel",), approx_math=approx)
        kernel = pbkern.kernel(
            body, grid=(4,), in_specs=[block], out_specs=[block], compiler_params=params,
            out_shape=[jax.ShapeDtypeStruct((256,), jnp.float32)],
        )  # fmt: skip
        found = pbkern.simulate(kernel, x)
        assert (f"\t{instruction}" in found.ptx[0]) == approx
        with jax.enable_x64(True), np.errstate(over="ignore"):
            want = np.asarray(function(jnp.asarray(x, jnp.float64))).astype(np.float32)
        np.testing.assert_allclose(found.results[0], want, rtol=bound, atol=2.0**-125)
