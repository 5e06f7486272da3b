"""The child process that makes the code of libraries: its program joins modules, and keeps only what is asked for global."""

import ctypes
import io
import json
import sys
import types

import pytest

llvm = pytest.importorskip("llvmlite.binding")

from pbkern.aot.codegen import llvm_child  # noqa: E402

MAIN = "declare i32 @helper(i32)\ndefine i32 @pbk_main(i32 %x) {\n  %y = call i32 @helper(i32 %x)\n  ret i32 %y\n}\n"
PLUS = "@unused = global i32 7\ndefine i32 @helper(i32 %x) {\n  %y = add i32 %x, 40\n  ret i32 %y\n}\n"
TIMES = "define i32 @helper(i32 %x) {\n  %y = mul i32 %x, 3\n  ret i32 %y\n}\n"
ENTRY = """declare i32 @first(i32)
declare i32 @second(i32)
define i32 @both(i32 %x) {
  %a = call i32 @first(i32 %x)
  %b = call i32 @second(i32 %a)
  ret i32 %b
}
"""


def made(monkeypatch, kinds):
    """Two variants, in modules of which one is optimised, and what calls both."""
    texts = [[MAIN, PLUS], [MAIN, TIMES], [ENTRY]]
    request = {
        "sizes": [[len(t) for t in variant] for variant in texts], "scalar": [[False, True], [True, False], [False]],
        "names": ["first", "second", None], "keep": ["both"], "triple": llvm.get_default_triple(), "cpu": "", "kinds": kinds,
    }  # fmt: skip
    sent = json.dumps(request) + "\n" + "".join(t for variant in texts for t in variant)
    answer = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(sent.encode())))
    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(buffer=answer))
    llvm_child.main()
    head, _, rest = answer.getvalue().partition(b"\n")
    found = {}
    for kind, size in json.loads(head).items():
        found[kind], rest = rest[:size], rest[size:]
    assert not rest and set(found) == set(kinds)
    return found


def test_variants_are_joined_and_only_what_is_kept_is_global(monkeypatch):
    found = made(monkeypatch, ["obj", "asm", "llvm"])
    module = llvm.parse_assembly(found["llvm"].decode())
    linkage = {d.name: d.linkage for d in llvm_child.definitions(module)}
    assert linkage.pop("both") == llvm.Linkage.external
    assert {"first", "second"} <= set(linkage) and set(linkage.values()) == {llvm.Linkage.internal}
    assert b".globl\tboth" in found["asm"] and found["asm"].count(b".globl") == 1
    assert made(monkeypatch, ["obj"]) == {"obj": found["obj"]}  # the same text gives the same bytes


def test_the_object_computes(monkeypatch):
    llvm.initialize_native_target()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic", codemodel="small", jit=True)
    with llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine) as engine:
        engine.add_object_file(llvm.ObjectFileRef.from_data(made(monkeypatch, ["obj"])["obj"]))
        engine.finalize_object()
        both = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)(engine.get_function_address("both"))
        assert [both(x) for x in (0, 2, -41)] == [(x + 40) * 3 for x in (0, 2, -41)]
