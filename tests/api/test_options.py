"""Compile options and CompilerParams: what they do, and how wrong ones are refused."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core import config
from pbkern.core.errors import OptionError, UnsupportedOp
from pbkern.core.option_uses import AOT_ONLY, GPU_ONLY, TORCH_ONLY
from pbkern.core.options import CompileOptions

pj = pbkern.polyblocks_jit_jax
RNG = np.random.default_rng(0)
A, B = (jnp.asarray(RNG.normal(size=(8, 8)).astype("f")) for _ in range(2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"targt": "cpu"}, "did you mean `target`?"),
        ({"mm-conv-precision-mode": "fp16"}, "did you mean `mm_conv_precision_mode`?"),
        ({"zzz": 1}, "unknown compile option `zzz`"),
        ({"target": "gpu"}, "did you mean `nvgpu`?"),
        ({"mm_conv_precision_mode": "f16"}, "did you mean `fp16`?"),
        ({"num_iters": 0}, "at least 1"),
        ({"num_iters": True}, "at least 1"),
        ({"debug": 1}, "True or False"),
        ({"static_argnums": "x"}, "an integer or a sequence"),
        ({"aot_name": "1 2"}, "an identifier"),
        ([1], "not a dictionary"),
    ],
)
def test_wrong_options_are_explained(given, message):
    with pytest.raises(OptionError, match="option") as e:
        pj(lambda x: x, compile_options=given)
    assert message in str(e.value)


OTHERS = {
    "aot": True, "aot_name": "library", "device": "sm_90", "openmp": False, "num_threads": 3,
    "on_gpu_tensors": True, "user_device_memory": True, "weights": "embed", "weights_argnums": (0,), "weights_argnames": ("x",),
    "torch_polyblocks_select_graphs": (1,), "torch_polyblocks_filter_graphs": (1,), "polyblocks_gpu_no_tensor_core": True,
    "device_one_time_load": False, "execution_backend": "xla",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_options_without_effect_here_are_refused(name):
    assert {*AOT_ONLY, *TORCH_ONLY, *GPU_ONLY} < set(OTHERS)
    with pytest.raises(OptionError, match=f"`{name}` concerns"):
        pj(lambda x: x, compile_options={name: OTHERS[name]})


@pytest.mark.parametrize("make", [pj, pbkern.polymage_jit_jax], ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["std", "xla", "polyblocks"])
def test_every_option_may_be_given_at_its_default(make, backend):
    defaults = dataclasses.asdict(CompileOptions()) | (
        {"execution_backend": backend} if make is not pj else {}
    )
    np.testing.assert_array_equal(make(lambda x: x * 2, compile_options=defaults)(A), A * 2)
    assert (
        pj(lambda x, n: x * n, static_argnums=1, compile_options={"static_argnums": ()})(A, 2)
        is not None
    )


@pytest.mark.parametrize(
    "given",
    [{"target": "nvgpu"}, {"aot": True}, {"strict_target": True}, {"num_iters": 3}, {"mm_conv_precision_mode": "fp32"},
     {"mlir_disable_fast_math": True}, {"debug": True}, {"polyblocks_disable_affine_fusion": True}, {"donate_argnums": 0}],
    ids=lambda d: next(iter(d)),
)  # fmt: skip
def test_other_backends_refuse_what_they_cannot_do(given):
    (name,) = given
    for backend in ("std", "xla"):
        if backend == "xla" and name == "donate_argnums":
            continue
        with pytest.raises(
            OptionError, match=f"`{name}` cannot act with execution_backend '{backend}'"
        ) as e:
            pbkern.polymage_jit_jax(
                lambda x: x, compile_options={"execution_backend": backend} | given
            )
        assert f"{name}=" in e.value.why
        assert "leave it out" in e.value.hint
    with pytest.raises(OptionError, match="`inline` cannot act with execution_backend 'std'"):
        pbkern.polymage_jit_jax(
            lambda x: x, compile_options={"execution_backend": "std"}, inline=True
        )


@pytest.mark.parametrize("make", [pj, pbkern.polymage_jit_jax], ids=lambda f: f.__name__)
def test_runtime_args_is_an_older_name(make):
    f = make(runtime_args={"mlir_disable_fast_math": True})(lambda x, y: x * y + y)
    assert "math.fma" not in f.as_text(A, B, stage="mlir")
    with pytest.raises(OptionError, match="given twice"):
        make(lambda x: x, runtime_args={}, compile_options={"num_iters": 2})
    with pytest.raises(OptionError, match="unknown compile option `zzz`"):
        make(lambda x: x, runtime_args={"zzz": 1})


@pytest.mark.parametrize(
    "mode",
    ["bf16", "bfloat16", "fp64", "int8", "int16", "mixed_bf16_fp32", "mixed_int4_int32", "fp8"],
)
def test_no_other_dtype_is_proposed(mode):
    with pytest.raises(OptionError) as e:
        pj(lambda x: x, compile_options={"mm_conv_precision_mode": mode})
    assert "did you mean" not in str(e.value)
    assert "mixed_fp16_fp32" in e.value.hint


SAME_TYPES = {"float16": "fp16", "f32": "fp32", "i32": "int32", "mixed_f16_f32": "mixed_fp16_fp32",
              "mixed-int8-int32": "mixed_int8_int32", "mixed_fp16fp32": "mixed_fp16_fp32"}  # fmt: skip


@pytest.mark.parametrize(("mode", "meant"), SAME_TYPES.items())
def test_the_same_dtype_in_other_words_is_proposed(mode, meant):
    with pytest.raises(OptionError, match=f"did you mean `{meant}`"):
        pj(lambda x: x, compile_options={"mm_conv_precision_mode": mode})


def test_every_documented_option_is_known():
    for name in CompileOptions.__dataclass_fields__:
        assert name in CompileOptions.__doc__


def test_the_fastmath_option_reaches_the_code():
    f = lambda x, y: x * y + y
    options = {"mlir_disable_fast_math": True}
    assert "math.fma" in pj(f).as_text(A, B, stage="mlir")
    plain = pj(f, compile_options=options).as_text(A, B, stage="mlir")
    assert "math.fma" not in plain
    assert "contract" not in plain


def matmul(a, b):
    return a @ b


@pytest.mark.parametrize(
    ("mode", "multiply"), [("fp16", "float16"), ("mixed_fp16_fp32", "float16"), ("fp32", "float32")]
)
def test_float_precision_modes(mode, multiply):
    f = pj(matmul, compile_options={"mm_conv_precision_mode": mode})
    got = f(A, B)
    want = np.asarray(A, multiply).astype(float) @ np.asarray(B, multiply).astype(float)
    assert got.dtype == np.float32
    np.testing.assert_allclose(
        got, want, rtol=1e-2 if mode == "fp16" else 1e-5, atol=2e-2 if mode == "fp16" else 1e-5
    )


def test_sums_of_the_mode_fp16_have_its_range_and_are_no_less_exact():
    fp16, mixed = (
        pj(matmul, compile_options={"mm_conv_precision_mode": m})
        for m in ("fp16", "mixed_fp16_fp32")
    )
    a, b = jnp.full((4, 4096), 4.0), jnp.full((4096, 4), 4.0)
    assert np.isinf(fp16(a, b)).all()
    assert (mixed(a, b) == 65536).all()
    a, b = (RNG.normal(size=s).astype("f2").astype("f4") for s in ((8, 512), (512, 8)))
    np.testing.assert_array_equal(fp16(a, b), np.asarray(mixed(a, b)).astype("f2"))  # rounded once
    np.testing.assert_allclose(mixed(a, b), a.astype(float) @ b.astype(float), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["int32", "mixed_int8_int32"])
def test_integer_precision_modes(mode):
    f = pj(matmul, compile_options={"mm_conv_precision_mode": mode})
    a = jnp.arange(64, dtype=jnp.int32).reshape(8, 8)
    np.testing.assert_array_equal(f(a, a), np.asarray(a) @ np.asarray(a))
    with pytest.raises(OptionError, match="integer operands") as e:
        f(A, B)
    assert "test_options.py" in str(e.value)


def test_affine_fusion_can_be_disabled():
    f = lambda x: (x * 2 + 1).sum(0)
    assert len(pj(f).kernels(A)) == 1
    assert len(pj(f, compile_options={"polyblocks_disable_affine_fusion": True}).kernels(A)) == 3


def test_unsafe_canonicalizations_can_be_disabled():
    f = lambda x: x / 3.0
    assert "/ 3" not in pj(f).kernels(A)[0].source()
    exact = pj(f, compile_options={"polyblocks_disable_unsafe_math_canonicalizations": True})
    assert "/ 3" in exact.kernels(A)[0].source()


def test_strict_target_forbids_leftovers():
    f = lambda x: jnp.fft.fft(x).real
    assert pj(f).explain(A).left
    with pytest.raises(UnsupportedOp, match="strict_target"):
        pj(f, compile_options={"strict_target": True})(A)


def test_num_iters_repeats_the_kernels_and_not_their_effect():
    f = pj(lambda x: x + 1, compile_options={"num_iters": 5})
    np.testing.assert_array_equal(f(A), A + 1)
    big = jnp.ones((512, 512))
    g = lambda x: (x @ x).sum()
    once, often = pj(g), pj(g, compile_options={"num_iters": 20})
    np.testing.assert_allclose(once(big), often(big))
    assert seconds(often, big) > 4 * seconds(once, big)


def seconds(f, *args):
    import time

    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - start)
    return min(times)


def test_debug_reports_plan_and_times(capfd):
    pj(lambda x: x * 5 + 2, compile_options={"debug": True})(A)
    err = capfd.readouterr().err
    assert "1 kernel(s)" in err
    assert "ms  plan" in err
    with config.override(debug=True):  # as PBKERN_DEBUG=1 says for every decorator
        pj(lambda x: x * 6 + 2)(A)
        pj(lambda x: x * 7 + 2, compile_options={"debug": False})(A)
    assert capfd.readouterr().err.count("1 kernel(s)") == 1


@pytest.mark.parametrize("backend", ["std", "xla", "polyblocks"])
def test_execution_backends(backend):
    f = pbkern.polymage_jit_jax(compile_options={"execution_backend": backend})(lambda x: x * 2)
    np.testing.assert_array_equal(f(A), A * 2)
    assert hasattr(f, "explain") == (backend == "polyblocks")


def test_unknown_execution_backend():
    with pytest.raises(OptionError, match="execution_backend"):
        pbkern.polymage_jit_jax(lambda x: x, compile_options={"execution_backend": "tpu"})


# --- CompilerParams


@pytest.mark.parametrize(
    "field",
    [{"approx_math": 1}, {"num_threads": 0}, {"vector_width": 64}, {"max_concurrent_steps": 0},
     {"dimension_semantics": "parallel"}, {"dimension_semantics": ("serial",)}, {"allow_input_fusion": (1,)}],
)  # fmt: skip
def test_wrong_compiler_params_are_explained(field):
    (name,) = field
    with pytest.raises(OptionError, match=f"field `{name}`"):
        pbkern.cpu.CompilerParams(**field)


def test_compiler_params_replace():
    params = pbkern.cpu.CompilerParams(dimension_semantics=["parallel"]).replace(num_threads=1)
    assert params.dimension_semantics == ("parallel",)
    assert params.num_threads == 1
    with pytest.raises(OptionError):
        params.replace(vector_width=3)


def test_machine_says_where_its_numbers_come_from():
    machine = pbkern.cpu.machine()
    assert machine.cores >= 1
    assert machine.vector_bits in (128, 256, 512)
    assert "cores:" in machine.source


# --- environment


def test_environment_variables_are_typed():
    assert config.read({"PBKERN_NUM_THREADS": "3", "HOME": "/"}).num_threads == 3
    assert config.read({}) == config.read({v.name: "" for v in config.VARIABLES}) == config.Config()
    found = config.read({"PBKERN_POOL_MEGABYTES": "0", "PBKERN_TARGET": "nvgpu", "PBKERN_GPU_DRIVER": "simulator",
                         "PBKERN_PROGRESS": "0.5", "PBKERN_CACHE": "0"})  # fmt: skip
    assert found == config.Config(
        pool_megabytes=0, target="nvgpu", gpu_driver="simulator", progress=0.5, cache=False
    )


@pytest.mark.parametrize(("name", "text", "message"), [
    ("PBKERN_DUMMP", "x", "did you mean PBKERN_DUMP?"),
    ("PBKERN_NUM_THREADS", "0", "at least 1"),
    ("PBKERN_TARGET", "tpu", "cpu, nvgpu, amdgpu"),
    ("PBKERN_DEBUG", "yes", "0 or 1"),
    ("PBKERN_POOL_MEGABYTES", "-1", "an integer, 0 for no pool"),
    ("PBKERN_GPU_DRIVER", "cuda", "simulator: what launches kernels for GPUs"),
    ("PBKERN_PROGRESS", "inf", "seconds, 0 for never"),
    ("PBKERN_PROGRESS", "soon", "seconds, 0 for never"),
])  # fmt: skip
def test_wrong_environment_variables_are_explained(name, text, message):
    with pytest.raises(OptionError) as e:
        config.read({name: text})
    assert message in str(e.value)


def test_override_is_scoped():
    with config.override(num_threads=7):
        assert config.num_threads() == 7
    assert config.num_threads() != 7


@pytest.mark.parametrize(("settings", "message"), [
    ({"num_thread": 2}, "did you mean num_threads?"),
    ({"num_threads": 0}, "at least 1"),
    ({"cache": "maybe"}, "0 or 1"),
    ({"target": "tpu"}, "cpu, nvgpu, amdgpu"),
    ({"target": None}, "cpu, nvgpu, amdgpu"),
])  # fmt: skip
def test_wrong_settings_are_explained(settings, message):
    before = config.current()
    with pytest.raises(OptionError, match=re.escape(message)), config.override(**settings):
        pass
    assert config.current() is before


def test_settings_are_given_as_python_writes_them(tmp_path):
    with config.override(
        cache=False,
        cache_shared=(tmp_path, tmp_path / "b"),
        cache_dir=str(tmp_path),
        num_threads=None,
    ) as made:
        assert made.cache is False
        assert made.num_threads is None
        assert made.cache_shared == (tmp_path, tmp_path / "b")
        assert made.cache_dir == tmp_path


def test_a_file_is_no_folder_for_stages(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        config.override(dump=tmp_path / "file"),
        pytest.raises(OptionError, match="PBKERN_DUMP names a folder"),
    ):
        pj(lambda x: x * 3)(A)


def test_the_environments_target_is_the_default():
    with config.override(target="nvgpu"):
        f = pj(lambda x: x)
    with pytest.raises(pbkern.errors.TargetError):
        f(A)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_sums_of_sixteen_bits_overflow_whatever_the_operands_are(dtype):
    """4 * 800 * 800 is beyond the largest float16, also where what follows is computed in float32."""
    x = jnp.full((4, 4), 800, dtype)
    scaled = pbkern.jit(
        lambda a: (a @ a) * 0.01, compile_options={"mm_conv_precision_mode": "fp16"}
    )
    assert np.isinf(np.asarray(scaled(x), np.float32)).all()
    small = pbkern.jit(
        lambda a: (a @ a) * 0.01, compile_options={"mm_conv_precision_mode": "fp16"}
    )(jnp.full((4, 4), 3, dtype))
    np.testing.assert_allclose(np.asarray(small, np.float32), 0.36, rtol=1e-2)


def test_target_tpu_says_where_its_kernels_run():
    with pytest.raises(OptionError, match="'cpu', 'nvgpu', 'amdgpu'") as e:
        pbkern.CompileOptions(target="tpu")
    assert (
        e.value.hint
        == "Pallas kernels written for TPUs run with target 'cpu', after pbkern.pallas.install()"
    )


@pytest.mark.parametrize("option", ["static_argnums", "donate_argnums"])
@pytest.mark.parametrize("number", [-4, -7, 3])
def test_numbers_of_arguments_that_a_function_lacks(option, number):
    with pytest.raises(
        OptionError,
        match=rf"{option} of `f` names an argument that it lacks\n.*3 positional arguments",
    ):

        @pbkern.jit(**{option: number})
        def f(x, y, n):
            return x * n + y


def test_numbers_of_arguments_of_functions_that_take_any():
    f = pbkern.jit(lambda *args: args[0] * args[1], static_argnums=1)
    assert f(jnp.ones(2), 3).tolist() == [3, 3]
