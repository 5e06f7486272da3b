"""Texts that MLIR does not take are errors with what it says of them."""

import pytest

from pbkern.core.errors import InternalError, TargetError
from pbkern.targets import mlir

GOOD = "func.func @f(%x: i32) -> i32 {\n  return %x : i32\n}\n"


def test_texts_that_do_not_parse():
    with pytest.raises(
        InternalError, match=r"(?s)generated MLIR does not parse.*undeclared SSA value"
    ):
        mlir.parse(GOOD.replace("return %x", "return %y"))


def test_modules_that_are_not_lowered():
    module = mlir.parse(GOOD)
    with pytest.raises(InternalError, match=r"operation func.func was not lowered"):
        mlir.check_lowered(module)
    mlir.check_lowered(mlir.run_passes(module, "convert-func-to-llvm"))
    assert "define i32 @f(i32 %0)" in mlir.llvm_ir(module)


def test_definitions_win_over_declarations():
    first, second = (
        mlir.parse(GOOD),
        mlir.parse("func.func private @f(i32) -> i32\nfunc.func @g() {\n  return\n}\n"),
    )
    mlir.join(first, second)
    text = str(first)
    assert text.count("@f") == 1
    assert "func.func @g" in text
    assert "private" not in text


def test_without_bindings_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(mlir, "PACKAGES", ("no_such_package",))
    assert mlir.installed() == ()
    with pytest.raises(
        TargetError, match=r"(?s)MLIR's Python bindings are not installed.*pip install torch-mlir"
    ):
        mlir.bindings.__wrapped__()
