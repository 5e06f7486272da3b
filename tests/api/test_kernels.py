"""Kernels seen from the front end: hand-written ones under JAX, fused ones printed, dumped and rebuilt."""

import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pbkern
import pbkern.pallas
from pbkern.cli.main import main
from pbkern.core import config
from pbkern.core.errors import OptionError

X = jnp.asarray(np.random.default_rng(0).normal(size=(64, 128)).astype("f"))
ROWS = pbkern.BlockSpec((8, 128), lambda i: (i, 0))


def make(body, **kw):
    shape = jax.ShapeDtypeStruct((64, 128), "float32")
    return pbkern.kernel(body, out_shape=shape, grid=(8,), in_specs=[ROWS], out_specs=ROWS, **kw)


def twice(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


PARALLEL = pbkern.cpu.CompilerParams(dimension_semantics=("parallel",), num_threads=2)
SEQUENTIAL = pbkern.cpu.CompilerParams(dimension_semantics=("sequential",), vector_width=256)


@pytest.mark.parametrize("params", [None, PARALLEL, SEQUENTIAL])
def test_a_hand_written_kernel_runs_eagerly_and_under_jit(params):
    kernel = make(twice, compiler_params=params)
    for f in (kernel, jax.jit(kernel), pbkern.jit(kernel)):
        np.testing.assert_array_equal(f(X), X * 2)
    np.testing.assert_array_equal(
        jax.vmap(kernel)(jnp.stack([X, X + 1])), jnp.stack([X, X + 1]) * 2
    )
    with jax.disable_jit():
        np.testing.assert_array_equal(kernel(X), X * 2)


def test_a_hand_written_kernel_is_a_launch_in_a_decorated_function():
    kernel = make(twice)
    f = pbkern.jit(lambda x: kernel(x + 1) * 3)
    np.testing.assert_allclose(f(X), (X + 1) * 6, rtol=1e-6)
    assert [k.name for k in f.kernels(X)].count("twice") == 1
    assert f.as_text(X, stage="plan").count("program ") == 1


def test_an_aliased_kernel_leaves_a_live_operand_alone():
    def bump(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    kernel = make(bump, input_output_aliases={0: 0})
    f = pbkern.jit(lambda x: (kernel(x), x * 2))
    for got, want in zip(f(X), (X + 1, X * 2)):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    before = np.array(X)
    np.testing.assert_allclose(kernel(X), X + 1, rtol=1e-6)
    np.testing.assert_array_equal(X, before)


def normalise(x):
    return (x - x.mean(1, keepdims=True)) * 3


def test_printed_kernels_rebuild():
    kernels = pbkern.jit(normalise).kernels(X)
    for k in kernels:
        assert pbkern.source(k) == k.source() == pbkern.rebuild(k.source()).source()
        assert "pbkern.cpu.CompilerParams" in k.source()


@pytest.mark.parametrize(("stage", "text"), [
    ("jaxpr", "lambda"), ("plan", "1 kernel(s)"), ("kernels", "@pbkern.kernel"), ("nests", "nest"), ("schedule", "programs"),
    ("mlir", "func.func"), ("llvm", "llvm.func"),
])  # fmt: skip
def test_every_stage_can_be_read(stage, text):
    assert text in pbkern.jit(normalise).as_text(X, stage=stage)


def test_each_pass_can_be_read():
    f = pbkern.jit(normalise)
    assert (
        f.as_text(X, stage="nests:decide schedules").partition("\n")[2]
        == f.as_text(X, stage="nests").partition("\n")[2]
    )
    first = f.as_text(
        X, stage="nests:unroll small dimensions"
    )  # of the whole block; the machine's caches come later
    assert "nest [d0<64, d1<128*]" in first
    assert f.as_text(X, stage="jaxpr:operands as equations").endswith(f.as_text(X, stage="jaxpr"))


def test_an_unknown_stage_is_explained():
    f = pbkern.jit(normalise)
    with pytest.raises(OptionError, match=r"no stage `hlo`(.|\n)*nests, schedule, mlir"):
        f.as_text(X, stage="hlo")
    with pytest.raises(
        OptionError, match=r"no pass `pak` ran in stage `nests`(.|\n)*merge nests, (.|\n)*pack"
    ):
        f.as_text(X, stage="nests:pak")
    with pytest.raises(OptionError, match="no stage `plan:pack`"):
        f.as_text(X, stage="plan:pack")


def test_dumped_kernels_rebuild_and_agree(tmp_path):
    with config.override(dump=tmp_path):
        pbkern.jit(normalise)(X)
    (folder,) = tmp_path.iterdir()
    names = {
        "1_jaxpr.txt",
        "2_plan.txt",
        "3_kernels.py",
        "4_nests.txt",
        "5_schedule.txt",
        "6_mlir.mlir",
        "7_llvm.mlir",
        "times.txt",
    }
    assert {p.name for p in folder.iterdir()} >= names
    passes = {p.name: p.read_text() for p in (folder / "passes").iterdir()}
    assert any(n.startswith("jaxpr_") for n in passes)
    assert any(n.startswith("nests_") for n in passes)
    assert all(
        "--- " in text and " ms)" in text and "unchanged" in text for text in passes.values()
    )
    assert "nests: merge nests" in (folder / "times.txt").read_text()
    run = subprocess.run([sys.executable, folder / "repro.py"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout.split()[-1]) < 1e-4


def test_hand_written_kernels_are_dumped_too(tmp_path):
    def thrice(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 3

    with config.override(dump=tmp_path), pbkern.pallas.installed():
        make(thrice)(X)
        pl.pallas_call(thrice, out_shape=X)(X)
    folders = list(tmp_path.iterdir())
    assert len(folders) == 2
    (texts,) = zip(*[list(folder.glob("*_kernels.py")) for folder in folders])
    assert all("thrice" in text.read_text() for text in texts)


SCRIPT = """
import jax.numpy as jnp, pbkern
@pbkern.jit
def f(x): return x * 2 + 1
def plain(x): return x.sum()
def example_args(): return (jnp.ones((4, 4)),)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "model_file.py"
    path.write_text(SCRIPT)
    return path


def test_explain_command(script, capsys):
    assert main(["explain", f"{script}:f"]) == 0
    assert "1 kernel(s)" in capsys.readouterr().out
    assert main(["explain", f"{script}:plain", "--args", "f32[8,8]"]) == 0


def test_dump_command(script, tmp_path, capsys):
    assert main(["dump", f"{script}:f", "--out", str(tmp_path / "out")]) == 0
    assert "repro.py" in {p.name for p in next((tmp_path / "out").iterdir()).iterdir()}


def test_targets_command(capsys):
    assert main(["targets", "--coverage"]) == 0
    out = capsys.readouterr().out
    assert "cpu:" in out
    assert "dot_general" in out
    assert "nvgpu: " in out


@pytest.mark.parametrize(("where", "args", "message"), [
    ("nothing.py:f", None, "no file"), ("{}:g", None, "no function `g`"), ("{}", None, "FILE.py:FUNCTION"),
    ("{}:f", ["q[3"], "not understood"),
])  # fmt: skip
def test_command_errors(script, capsys, where, args, message):
    assert main(["explain", where.format(script), *(["--args", *args] if args else [])]) == 2
    assert message in capsys.readouterr().err


def test_shardings_over_an_empty_mesh_are_dropped():
    """Derivatives leave them in parameters; they say nothing, and have no place in printed source."""
    nowhere = jax.sharding.NamedSharding(
        jax.sharding.AbstractMesh((), ()), jax.sharding.PartitionSpec(None)
    )

    def f(x):
        convert = jax.lax.convert_element_type_p
        return (
            convert.bind(x * 2, new_dtype=np.dtype(np.int32), weak_type=False, sharding=nowhere) + 1
        )

    x = jnp.arange(4.0)
    np.testing.assert_array_equal(pbkern.jit(f)(x), [1, 3, 5, 7])
    assert "sharding" not in pbkern.jit(f).kernels(x)[0].source()
