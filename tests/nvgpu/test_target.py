"""What the target says of its code, and what it does where a stage of the compiler fails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.api.pipeline import build_kernel
from pbkern.core import config
from pbkern.core.errors import FallbackWarning
from pbkern.core.options import CompileOptions
from pbkern.core.process import fallback
from pbkern.errors import InternalError, TargetError
from pbkern.targets import get_target
from pbkern.targets.llvm import process
from pbkern.targets.nvgpu import compile as codegen
from pbkern.targets.simt import kept_code, llvm
from pbkern.targets.simt.passes import THREAD_PASSES

from .test_kernels import turned

GPU = {"target": "nvgpu"}
UNSELECTABLE = """declare i64 @llvm.x86.rdtsc()
define ptx_kernel void @other(ptr %p) {
  %x = call i64 @llvm.x86.rdtsc()
  store i64 %x, ptr %p
  ret void
}
"""
X = np.random.default_rng(0).standard_normal((70, 33)).astype("f4")


def test_memory_of_a_call():
    """Of both blocks of a kernel the scratch that shared memory does not hold, and the kernel's text."""
    f = pbkern.jit(lambda x: turned(60000)(x), compile_options=GPU)
    x = jax.ShapeDtypeStruct((2, 60000), jnp.float32)
    with config.override(gpu_driver="simulator"):
        found = f.memory_analysis(x)
    assert found.arena_size_in_bytes == 2 * 4 * 60000
    assert found.generated_code_size_in_bytes == len(f.as_text(x, stage="ptx"))


def test_nests_after_each_pass():
    f = pbkern.jit(lambda x: x.T * 2, compile_options=GPU)
    names = [p.name for p in THREAD_PASSES]
    staged = names.index("stage in shared memory")
    before, after = (f.as_text(X, stage=f"nests:{name}") for name in names[staged - 1 : staged + 1])
    assert before.count("nest [") == 1
    assert after.count("nest [") == 2


@pytest.mark.parametrize("warps", dict(get_target("nvgpu").variations())["num_warps"])
def test_what_tuning_varies(warps):
    target = get_target("nvgpu")
    params = target.fused_params(("parallel",), CompileOptions(target="nvgpu"), num_warps=warps)
    rows = pbkern.BlockSpec((7, 33), lambda i: (i, 0))

    @pbkern.kernel(grid=(10,), in_specs=[rows], out_specs=rows, out_shape=X, compiler_params=params)
    def body(x, o):
        o[...] = x[...] - x[...].max(1, keepdims=True)

    (program,) = build_kernel(body.trace(X)).programs
    made = target.compile(program, CompileOptions(target="nvgpu"))
    assert [c.function.threads for c in made.distinct()] == [32 * warps]
    np.testing.assert_array_equal(made.simulated([X])[0][0], X - X.max(1, keepdims=True))


@pytest.mark.parametrize("stage", [*(p.name for p in THREAD_PASSES), "emission"])
def test_results_stay_right_where_a_stage_fails(stage):
    f = pbkern.jit(lambda x: (x - x.mean(0)).T, compile_options=GPU)
    with (
        config.override(fallback=True, cache=False, gpu_driver="simulator"),
        fallback.failing(stage),
        pytest.warns(FallbackWarning, match=stage),
    ):
        found = f(X)
    np.testing.assert_allclose(found, (X - X.mean(0, dtype="f8")).T, atol=1e-6)


def test_errors_of_the_back_end_come_with_a_file_of_the_kernel(tmp_path, monkeypatch):
    def fails(ir, kind):
        raise InternalError("no code")

    monkeypatch.setattr(codegen, "ptx", fails)
    with (
        config.override(dump=tmp_path, cache=False),
        pytest.raises(InternalError, match=r"no code\n.*\n  file ") as e,
    ):
        pbkern.simulate(lambda x: x * 1.625, X)
    (path,) = tmp_path.glob("pbkern_repro_*.py")
    assert str(path) in str(e.value)
    assert "1.625" in path.read_text()


def test_without_llvmlite_the_error_says_what_to_install(monkeypatch):
    """Whatever makes code first says so: the simulator, for one."""
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: None)
    kept_code.environment.cache_clear()
    missing = "llvmlite is not installed.*\n?.*\n?.*pip install 'pbkern\\[cuda\\]'"
    with pytest.raises(TargetError, match=missing):
        llvm.code("", codegen.TRIPLE, ["asm"])
    with pytest.raises(TargetError, match=missing):
        pbkern.simulate(lambda x: x * 1.125, X)
    kept_code.environment.cache_clear()


def test_text_that_llvm_does_not_read_is_an_error():
    with pytest.raises(
        InternalError,
        match=r"made no code of a text for nvptx64.*\n.*does not parse: .*\n.*expected top-level",
    ):
        llvm.code("nonsense", codegen.TRIPLE, ["asm"], cpu="sm_80")


def test_where_llvm_ends_its_process_the_error_names_the_kernel(monkeypatch):
    """A kernel of the user's; what fusion makes is left to XLA."""
    plain = llvm.ir_of
    monkeypatch.setattr(llvm, "ir_of", lambda *args: plain(*args) + "\n" + UNSELECTABLE)

    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((8,), jnp.float32))
    def thirds(x_ref, o_ref):
        o_ref[...] = x_ref[...] / 3

    with (
        config.override(cache=False),
        pytest.raises(InternalError, match="made no code of kernel `k0_thirds` for nvp") as e,
    ):
        pbkern.simulate(thirds, np.ones(8, "f4"))
    assert e.match("(?s)its process ended with .*Cannot select")
    monkeypatch.undo()
    np.testing.assert_allclose(pbkern.simulate(thirds, np.full(8, 6, "f4")).results[0], 2)
