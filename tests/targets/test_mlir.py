"""Texts that MLIR does not take are errors with what it says of them."""

import subprocess
import sys
import textwrap

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


def test_marks_of_loops_need_no_python_classes():
    text = """
        import sys
        from pbkern.targets import mlir
        module = mlir.run_passes(mlir.parse('''
            func.func @f(%a: memref<8xf32>, %low: index, %high: index, %step: index, %x: f32) {
              scf.for %i = %low to %high step %step {
                memref.store %x, %a[%i] : memref<8xf32>
              } {llvm.loop_annotation = #llvm.loop_annotation<unroll = <disable = true>>}
              return
            }
        '''), mlir.KERNEL_PASSES)
        mlir.keep_loops(module)
        print(any(name.endswith("dialects.llvm") for name in sys.modules))
        print(mlir.llvm_ir(module))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, check=True
    )
    loaded, ir = run.stdout.split("\n", 1)
    assert loaded == "False"
    assert "llvm.loop.unroll.disable" in ir
