"""A program's kernels compile in parts, on threads, and equal ones once; what runs does not depend on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pbkern.core import config
from pbkern.core.errors import InternalError
from pbkern.targets import mlir
from pbkern.targets.cpu.codegen import outlining
from pbkern.targets.cpu.codegen.compile import compile_program
from pbkern.targets.host.objects import object_files
from pbkern.targets.host.objects.object_code import ObjectCode, image_of
from pbkern.targets.host.runtime_symbols import runtime_symbols
from tests.fuse.checking import planned

X = np.linspace(-1, 1, 96 * 96, dtype="f").reshape(96, 96)


def layers(x, *weights):
    """Products that no kernel shares."""
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def built(f, *args):
    (program,) = planned(f, *args, disable_affine_fusion=True).programs()
    with config.override(cache=False):
        return compile_program(program)


def check(compiled, f, *args):
    (got,) = compiled(*args)
    with jax.enable_x64(True):
        want = np.asarray(f(*(np.asarray(a, np.float64) for a in args)))
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-5 * np.abs(want).max())


def test_equal_kernels_are_lowered_once():
    weights = [X * k for k in (1.0, 0.5, 0.25)]
    made = built(layers, X, *weights)
    assert len(made.program.kernels()) == 6
    assert len(made.lowered.lowered) == 2
    check(made, layers, X, *weights)


def test_kernels_that_differ_are_lowered_each():
    def f(x, w):
        return (x @ w * 2.0) @ w * 3.0 @ w[:, :50]

    made = built(f, X, X)
    assert (
        len(made.lowered.lowered) == len(made.program.kernels()) - 1
    )  # two of three products are equal
    check(made, f, X, X)


def test_objects_of_several_parts_call_each_other(monkeypatch):
    monkeypatch.setattr(object_files, "PART_CHARACTERS", 1)
    made = built(layers, X, X, X)
    assert len(made.code.objects) == 2  # a kernel, and another one with the host functions
    check(made, layers, X, X, X)


def waves(x):
    """More calls of long functions than are written out, so that these are functions of their own, in a body of many pieces."""
    for n in range(8):
        x = jnp.cos(x * 0.7) * n + jnp.sin(x[:, ::-1]) * 0.5 - jax.lax.lgamma(x * x + 1) * 0.01
    return x


@pytest.mark.parametrize("part", [1, 20_000])
def test_pieces_call_long_functions_of_other_parts(monkeypatch, part):
    monkeypatch.setattr(object_files, "PART_CHARACTERS", part)
    monkeypatch.setattr(outlining, "LONGEST_PIECE", 100)
    monkeypatch.setattr(outlining, "SHORTEST_PIECE", 20)
    x = np.random.default_rng(1).normal(size=(8, 24))
    (program,) = planned(waves, x.astype("f")).programs()
    with config.override(cache=False):
        compiled = compile_program(program)
    (kernel,) = compiled.lowered.lowered
    names = [f.name for f in kernel.pieces]
    assert any("sin" in name for name in names)
    assert len(names) > 3
    assert len(compiled.code.objects) > 2
    (got,) = compiled(x.astype("f"))
    with jax.enable_x64(True):
        want = np.asarray(waves(x))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * np.abs(want).max())


def test_objects_do_not_depend_on_timing(monkeypatch):
    monkeypatch.setattr(object_files, "PART_CHARACTERS", 1)
    first, second = (built(layers, X, X, X).code for _ in range(2))
    assert first == second


def test_parts_survive_the_store(monkeypatch):
    monkeypatch.setattr(object_files, "PART_CHARACTERS", 1)
    made = built(layers, X, X)
    code = ObjectCode.unpacked(made.code.packed())
    assert code == made.code
    assert len(code.objects) > 1
    made.image = image_of(code, runtime_symbols())
    check(made, layers, X, X)


def test_errors_of_threads_are_raised(monkeypatch):
    def fail(module):
        raise InternalError("operation x was not lowered")

    monkeypatch.setattr(mlir, "check_lowered", fail)
    runtime_symbols()
    with pytest.raises(InternalError, match="was not lowered"):
        built(layers, X + 1, X)


def test_a_pass_that_fails_is_an_error(capfd):
    text = """
    func.func @f(%a: tensor<4xf32>) -> tensor<4xf32> {
      %b = tosa.abs %a : (tensor<4xf32>) -> tensor<4xf32>
      return %b : tensor<4xf32>
    }"""
    with pytest.raises(InternalError, match="a pass failed"):
        mlir.run_passes(mlir.parse(text), "one-shot-bufferize")
    assert "was not bufferized" in capfd.readouterr().err


def test_what_is_left_of_other_dialects_is_an_error():
    module = mlir.parse("func.func @f() { return }")
    with pytest.raises(InternalError, match=r"func.func was not lowered"):
        mlir.check_lowered(module)
    text = "llvm.func @f() {\n %c = arith.constant 1 : i32\n llvm.return\n}"
    with pytest.raises(InternalError, match=r"arith.constant was not lowered"):
        mlir.check_lowered(mlir.parse(text))
