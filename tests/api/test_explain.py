"""The report of what was fused: rejected fusions first, accepted ones on request, times of kernels on request."""

import jax
import jax.numpy as jnp
import pytest

import pbkern
from pbkern.api import measure
from pbkern.cli import main
from pbkern.dsl.kernel import ArrayType
from pbkern.targets.cpu.codegen import compile


@pbkern.jit
def mlp(x, w1, b1, w2):
    return jax.nn.gelu(x @ w1 + b1) @ w2


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


TYPES = (f32(256, 512), f32(512, 1024), f32(1024), f32(1024, 512))


def test_rejected_fusions_come_before_the_count_of_accepted_ones():
    lines = str(mlp.explain(*TYPES)).splitlines()
    rejected = [n for n, line in enumerate(lines) if line.startswith("  not fused: ")]
    (count,) = [n for n, line in enumerate(lines) if line.startswith("  fused: ")]
    kernels = [n for n, line in enumerate(lines) if line.startswith("  kernel ")]
    assert len(kernels) == 2 and rejected and max(kernels) < min(rejected) <= max(rejected) < count
    number = int(lines[count].split()[1])
    full = str(mlp.explain(*TYPES, verbose=True)).splitlines()
    assert sum(line.startswith("  fused: ") for line in full) == number > 1
    assert [line for line in full if "not fused" in line] == [lines[n] for n in rejected]


def test_nothing_is_compiled_unless_it_is_to_be_measured():
    before = len(compile._resident)
    assert all(k.measured is None for k in mlp.explain(*TYPES).kernels)
    assert len(compile._resident) == before


def test_measured_times_stand_beside_the_predicted_ones():
    found = mlp.explain(*TYPES, measure=True)
    for k in found.kernels:
        # 134 Mflop and 67 Mflop: neither a microsecond nor a second on any machine.
        assert 1e-6 < k.measured < 1.0
        assert f"{k.cost.seconds * 1e6:.1f} us predicted, {k.measured * 1e6:.1f} us measured" in str(k)
    assert mlp.explain(*TYPES).kernels[0].measured is None


def test_larger_kernels_take_longer():
    f = pbkern.jit(lambda x: jnp.exp(jnp.sin(x)))
    small, large = (f.explain(f32(n, 1024), measure=True).kernels[0].measured for n in (64, 4096))
    assert large > 4 * small


def test_the_command_measures(tmp_path, capsys):
    (tmp_path / "model.py").write_text("import jax.numpy as jnp\ndef f(x):\n    return jnp.exp(x) * 2 + x\n")
    where = f"{tmp_path}/model.py:f"
    assert main.main(["explain", where, "--args", "f32[64,64]", "--measure", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "us measured" in out and "fused: exp" in out
    assert main.main(["explain", where, "--args", "f32[64,64]"]) == 0
    out = capsys.readouterr().out
    assert "measured" not in out and "fused: exp" not in out


def test_the_command_refuses_what_is_no_python_file(tmp_path, capsys):
    (tmp_path / "model.txt").write_text("def f(x):\n    return x\n")
    assert main.main(["explain", f"{tmp_path}/model.txt:f", "--args", "f32[4]"]) != 0
    assert "model.txt is no Python file" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "float16"])
def test_random_operands_have_their_types(dtype):
    t = ArrayType((3, 5), jnp.dtype(dtype))
    (x,) = measure.random_operands([t])
    assert x.shape == t.shape and x.dtype == t.dtype
    assert len(set(x.ravel().tolist())) > 1


def test_calls_take_turns():
    order = []
    times = measure.least_seconds([lambda: order.append("a"), lambda: order.append("b")], 0.0)
    assert order == ["a", "b"] * (1 + measure.MIN_CALLS) and all(0 <= t < 1 for t in times)
