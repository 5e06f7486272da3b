"""What cannot be imported, and calls with wrong arguments: one explained error each, before anything is compiled."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.errors import ArgumentError, OptionError, UnsupportedOp


def exported(f, *args, **options):
    return jax.export.export(jax.jit(f), **options)(*args)


def test_files_that_are_no_program(tmp_path):
    wrong = tmp_path / "weights.mlir"
    wrong.write_text("module { func.func @main( }")
    with pytest.raises(ArgumentError, match=r"`.*weights.mlir` is no StableHLO program"):
        pbkern.from_stablehlo(wrong)
    wrong.write_bytes(bytes(range(256)))
    with pytest.raises(
        ArgumentError, match=r"`.*weights.mlir` is no StableHLO program\n.*why  neither MLIR"
    ):
        pbkern.from_stablehlo(str(wrong))
    wrong.write_bytes(b"ML\xefR" + bytes(40))
    with pytest.raises(ArgumentError, match=r"`.*weights.mlir` is no StableHLO program"):
        pbkern.from_stablehlo(wrong)
    with pytest.raises(
        ArgumentError, match=r"`.*missing.mlir` cannot be read\n.*why  FileNotFoundError"
    ):
        pbkern.from_stablehlo(tmp_path / "missing.mlir")
    with pytest.raises(ArgumentError, match="the text is no StableHLO program"):
        pbkern.from_stablehlo("module { nonsense }")
    with pytest.raises(ArgumentError, match="program of 0 bytes is no StableHLO program"):
        pbkern.from_stablehlo(b"")
    with pytest.raises(
        ArgumentError, match=r"is a path, bytes, text or a jax.export.Exported\n.*why  given int"
    ):
        pbkern.from_stablehlo(3)
    with pytest.raises(ArgumentError, match=r"has no function `main`\n.*why  it has f, g"):
        pbkern.from_stablehlo("module { func.func @f() { return }\n func.func @g() { return } }")


def test_all_that_cannot_be_imported_is_named_at_once():
    x = jnp.eye(3)
    with pytest.raises(
        UnsupportedOp,
        match=r"2 operations that cannot be imported\n.*@lapack_sgetrf_ffi.*@lapack_strsm_ffi",
    ):
        pbkern.from_stablehlo(exported(lambda x: jnp.linalg.inv(x), x))
    (n,) = jax.export.symbolic_shape("n")
    symbolic = jax.export.export(jax.jit(lambda x: x * 2))(jax.ShapeDtypeStruct((n, 3), "float32"))
    with pytest.raises(
        UnsupportedOp,
        match=r"argument 0 of `.*`: shape that is known only when it runs: tensor<\?x3xf32>",
    ):
        pbkern.from_stablehlo(symbolic)
    with pytest.raises(UnsupportedOp, match=r"is for several platforms\n.*why  cpu, tpu"):
        pbkern.from_stablehlo(exported(lambda x: x + 1, x, platforms=["cpu", "tpu"]))
    quantised = "tensor<3x!quant.uniform<i8:f32, 0.5>>"
    text = f"module {{ func.func @main(%a: {quantised}) -> {quantised} {{ return %a : {quantised} }} }}"
    with pytest.raises((UnsupportedOp, ArgumentError)):
        pbkern.from_stablehlo(text)
    normal = """module { func.func @main(%a: tensor<f32>) -> tensor<2xf32> {
      %s = stablehlo.constant dense<2> : tensor<1xi64>
      %r = stablehlo.rng %a, %a, %s, distribution = NORMAL : (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<2xf32>
      return %r : tensor<2xf32> } }"""
    with pytest.raises(UnsupportedOp, match=r"stablehlo.rng.*NORMAL numbers"):
        pbkern.from_stablehlo(normal)


def test_wrong_arguments():
    f = pbkern.from_stablehlo(exported(lambda x, y: x + y, np.ones((3, 4), "f4"), np.ones(4, "f4")))
    good = np.ones((3, 4), "f4"), np.ones(4, "f4")
    with pytest.raises(
        ArgumentError, match=r"argument 0 of .* has another type.*\n.*given float32\[4,3\]"
    ):
        f(good[0].T, good[1])
    with pytest.raises(
        ArgumentError, match=r"argument 1 of .*\n.*given int32\[4\], it takes float32\[4\]"
    ):
        f(good[0], np.ones(4, "i4"))
    with pytest.raises(ArgumentError, match="called with other arguments than it has"):
        f(good[0])
    with pytest.raises(ArgumentError, match="called with other arguments than it has"):
        f(*good, extra=1)
    assert f(*good).shape == (3, 4)
    one = pbkern.from_stablehlo(
        "module { func.func @main(%a: tensor<f32>) -> tensor<f32> { return %a : tensor<f32> } }"
    )
    assert one(3) == 3
    with pytest.raises(ArgumentError, match="called with other arguments than it has"):
        one(3, 4)


def test_options_that_mean_nothing():
    text = "module { func.func @main(%a: tensor<f32>) -> tensor<f32> { return %a : tensor<f32> } }"
    with pytest.raises(OptionError, match="`static_argnums` concerns Python functions"):
        pbkern.from_stablehlo(text, compile_options={"static_argnums": 0})
    with pytest.raises(OptionError, match="unknown compile option"):
        pbkern.from_stablehlo(text, compile_options={"tile": 3})
    with pytest.raises(OptionError, match="concerns ahead-of-time compilation"):
        pbkern.from_stablehlo(text, compile_options={"aot": True})
    again = pbkern.from_stablehlo(text).with_options({"strict_target": True})
    assert again.options.strict_target
    assert again(3) == 3


def test_operations_that_the_parser_does_not_know_are_named_with_their_line():
    text = """module { func.func @main(%a: tensor<3xf32>) -> tensor<?xf32> {
      %0 = "mhlo.unknown"(%a) : (tensor<3xf32>) -> tensor<?xf32> loc("model.py":5:4)
      return %0 : tensor<?xf32> } }"""
    with pytest.raises(
        UnsupportedOp,
        match=r"has an operation that cannot be imported\n.*'mhlo.unknown'.* at model.py:5",
    ):
        pbkern.from_stablehlo(text)
    with pytest.raises(
        ArgumentError,
        match=r"is no StableHLO program\n.*expected non-function type at program:1",
    ):
        pbkern.from_stablehlo("module { func.func @main( }")
