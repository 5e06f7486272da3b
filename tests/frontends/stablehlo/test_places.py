"""Kernels and errors of imported programs name the lines that the programs were written at."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

TEXT = """module { func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %a, %a : tensor<4xf32>
  %1 = stablehlo.sine %0 : tensor<4xf32>
  return %1 : tensor<4xf32>
} }"""


def places(program, *args):
    """Line of each operation of the kernels."""
    return {op: at for kernel in program.explain(*args).kernels for op, at in kernel.ops}


def test_a_text_without_locations_has_its_own_lines(tmp_path):
    path = tmp_path / "sums.mlir"
    path.write_text(TEXT)
    assert places(pbkern.from_stablehlo(TEXT), np.ones(4, "f4")) == {
        "add": "program:2:8 (program)",
        "sin": "program:3:8 (program)",
    }
    found = places(pbkern.from_stablehlo(path), np.ones(4, "f4"))
    assert found == {"add": f"{path}:2:8 (program)", "sin": f"{path}:3:8 (program)"}


def test_exports_have_the_lines_of_their_functions():
    def centred(x):
        y = x - x.mean()
        return jnp.cumsum(y)

    exported = jax.export.export(jax.jit(centred))(jnp.ones(5))
    first = centred.__code__.co_firstlineno
    found = places(pbkern.from_stablehlo(exported.serialize()), np.ones(5, "f4"))
    expected = {"reduce_sum": 1, "sub": 1, "reduce_window_sum": 2}
    assert {op: at.split(":")[:2] for op, at in found.items() if op in expected} == {
        op: [__file__, str(first + line)] for op, line in expected.items()
    }
    assert found["sub"].endswith(".centred)")


def test_errors_name_the_lines():
    text = TEXT.replace(
        "stablehlo.sine %0 : tensor<4xf32>",
        "stablehlo.custom_call @mine(%0) : (tensor<4xf32>) -> tensor<4xf32>",
    )
    with pytest.raises(pbkern.errors.UnsupportedOp, match="custom_call @mine at program:3"):
        pbkern.from_stablehlo(text)
