"""Operations as records: what they are taken apart into, and that they print as they were written."""

import pytest

from pbkern.lower.mlir.operation import Operation, Region, lines, replaced, walk
from pbkern.lower.mlir.text import Text


@pytest.mark.parametrize(
    ("text", "name", "result", "operands", "defined"),
    [
        ("%v3 = arith.addf %v1, %v2 fastmath<contract> : vector<8xf32>", "arith.addf", "%v3", ("%v1", "%v2"), ["%v3"]),
        ("vector.store %v3, %a0[%v4] : memref<64xf32>, vector<8xf32>", "vector.store", None, ("%v3", "%a0", "%v4"), []),
        ("%v9:2 = scf.for %v5 = %v1 to %v2 step %v3 iter_args(%v6 = %v7, %v8 = %v4) -> (f32, f32)", "scf.for", None,
         ("%v5", "%v1", "%v2", "%v3", "%v6", "%v7", "%v8", "%v4"), ["%v9", "%v5", "%v6", "%v8"]),
        ('"llvm.intr.memcpy"(%v1, %v2, %v3) : (!llvm.ptr, !llvm.ptr, i64) -> ()', "llvm.intr.memcpy", None,
         ("%v1", "%v2", "%v3"), []),
        ("func.call @k_0(%a0, %v1) : (memref<4xf32>, index) -> ()", "func.call", None, ("%a0", "%v1"), []),
    ],
)  # fmt: skip
def test_compile_units(text, name, result, operands, defined):
    op = Operation(text)
    assert (op.name, op.result, op.operands, op.defined) == (name, result, operands, defined)
    assert op.with_names(op.names) == text
    assert list(op.lines()) == [text]
    assert op.size == 1


def loop_with_branch() -> list[Operation]:
    text = Text(approx=False, contract=True)

    def fill(inner, _):
        text.when(inner, "%test", lambda b: b.add("first.op %x"), lambda b: b.add("second.op %x"))
        return []

    text.loop(text.top, "i", 0, 9, 1, fill)
    return text.top.operations


def test_regions_print_between_braces():
    (loop,) = loop_with_branch()
    head, *body = loop.lines()
    assert head.startswith("scf.for %v")
    assert head.endswith(" {")
    assert body == ["scf.if %test {", "first.op %x", "} else {", "second.op %x", "}", "}"]
    assert loop.size == 7
    assert [op.name for op in walk([loop])] == [
        "scf.for",
        "scf.if",
        "first.op",
        "second.op",
    ]


def test_operations_are_renamed_and_replaced_within_regions():
    (loop,) = loop_with_branch()
    renamed = loop.mapped(lambda op: op.with_names("%y" if n == "%x" else n for n in op.names))
    assert "first.op %y" in renamed.lines()
    assert "first.op %x" in loop.lines()
    others = [Operation("a.op"), Operation("b.op")]
    (changed,) = replaced([loop], lambda op: others if op.name == "first.op" else None)
    assert [line for line in lines([changed]) if ".op" in line] == ["a.op", "b.op", "second.op %x"]
    assert Operation("scf.while : () -> ()", (Region([]), Region([], "do"))).size == 3
