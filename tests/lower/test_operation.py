"""Operations as records: how they are printed, and how they are renamed and replaced within regions."""

import pytest

from pbkern.lower.mlir.operation import (
    CALL,
    Operation,
    Region,
    call_syntax,
    called,
    for_syntax,
    lines,
    replaced,
    walk,
)
from pbkern.lower.mlir.text import Text


@pytest.mark.parametrize(
    ("op", "text", "value", "names", "defined"),
    [
        (Operation("arith.addf", ("%v1", "%v2"), "vector<8xf32>", " %s, %s fastmath<contract>", result="%v3"),
         "%v3 = arith.addf %v1, %v2 fastmath<contract> : vector<8xf32>", "%v3", ["%v3", "%v1", "%v2"], ("%v3",)),
        (Operation("arith.addi", ("%v1", "%v9#1"), "index", result="%v3"),
         "%v3 = arith.addi %v1, %v9#1 : index", "%v3", ["%v3", "%v1", "%v9"], ("%v3",)),
        (Operation("vector.store", ("%v3", "%a0", "%v4"), "memref<64xf32>, vector<8xf32>"),
         "vector.store %v3, %a0[%v4] : memref<64xf32>, vector<8xf32>", None, ["%v3", "%a0", "%v4"], ()),
        (Operation("scf.for", ("%v5", "%v1", "%v2", "%v3", "%v6", "%v7", "%v8", "%v4"), "", for_syntax(["f32", "f32"]),
                   result="%v9", count=2, arguments=("%v5", "%v6", "%v8")),
         "%v9:2 = scf.for %v5 = %v1 to %v2 step %v3 iter_args(%v6 = %v7, %v8 = %v4) -> (f32, f32)", None,
         ["%v9", "%v5", "%v1", "%v2", "%v3", "%v6", "%v7", "%v8", "%v4"], ("%v9", "%v5", "%v6", "%v8")),
        (Operation("func.call", ("%a0", "%v1"), "(memref<4xf32>, index) -> ()", " @k_0(%s, %s)"),
         "func.call @k_0(%a0, %v1) : (memref<4xf32>, index) -> ()", None, ["%a0", "%v1"], ()),
        (Operation("scf.while", (), "() -> ()"), "scf.while : () -> ()", None, [], ()),
        (Operation("scf.yield"), "scf.yield", None, [], ()),
    ],
)  # fmt: skip
def test_operations_are_printed_and_read(op, text, value, names, defined):
    assert list(op.lines()) == [text]
    assert (op.value, op.names, op.defined) == (value, names, defined)
    assert op.renamed(lambda _: lambda name: name).head == text
    assert op.size == 1


def test_which_operations_take_an_index_in_brackets():
    assert Operation("memref.load", ("%a", "%i"), "memref<4xf32>").indexes
    assert not Operation("arith.addi", ("%i", "%j"), "index").indexes


def loop_with_branch() -> list[Operation]:
    text = Text(approx=False, contract=True)

    def fill(inner, _):
        text.when(
            inner,
            "%test",
            lambda b: b.add("first.op", ("%x",)),
            lambda b: b.add("second.op", ("%x",)),
        )
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
    renamed = loop.renamed(lambda op: lambda name: "%y" if name == "%x" else name)
    assert "first.op %y" in renamed.lines()
    assert "first.op %x" in loop.lines()
    others = [Operation("a.op"), Operation("b.op")]
    (changed,) = replaced([loop], lambda op: others if op.name == "first.op" else None)
    assert [line for line in lines([changed]) if ".op" in line] == ["a.op", "b.op", "second.op %x"]
    empty = (Region([]), Region([], "do"))
    assert Operation("scf.while", (), "() -> ()", regions=empty).size == 3


def test_branches_and_loops_of_a_builder_hold_operations():
    text = Text(approx=False, contract=True)
    b = text.builder(text.top, 4)
    x = b.c(1.0, "f32")
    b.rare(b.cmp("gt", x, x), x, lambda inner: inner.add(x, x))
    b.repeat(3, x, lambda inner, value: inner.add(value, value))
    *_, branch, loop = text.top.operations
    assert [[op.name for op in region.operations] for region in branch.regions] == [
        ["arith.addf", "arith.select", "scf.yield"],
        ["scf.yield"],
    ]
    assert [op.name for op in loop.regions[0].operations] == ["arith.addf", "scf.yield"]
    assert loop.size == 4


def test_called_functions_are_those_of_calls():
    """Also within regions; a text that looks like a call is none."""
    call = Operation(CALL, ("%x", "%y"), "(f32, f32) -> f32", call_syntax("f_1", 2), result="%z")
    loop = Operation("scf.for", regions=(Region([call]),))
    text = Operation("llvm.inline_asm", syntax=' "func.call @f_2(%x)"')
    assert call.head == "%z = func.call @f_1(%x, %y) : (f32, f32) -> f32"
    assert called([loop, text]) == {"f_1"}
    assert text.callee is None
