"""The child process that makes the code of libraries: its program joins modules, and keeps only what is asked for global."""

import ctypes
import io
import json

import pytest

llvm = pytest.importorskip("llvmlite.binding")

from pbkern.targets.llvm import child  # noqa: E402

MAIN = "declare i32 @helper(i32)\ndefine i32 @pbk_main(i32 %x) {\n  %y = call i32 @helper(i32 %x)\n  ret i32 %y\n}\n"
PLUS = (
    "@unused = global i32 7\ndefine i32 @helper(i32 %x) {\n  %y = add i32 %x, 40\n  ret i32 %y\n}\n"
)
TIMES = "define i32 @helper(i32 %x) {\n  %y = mul i32 %x, 3\n  ret i32 %y\n}\n"
ENTRY = """declare i32 @first(i32)
declare i32 @second(i32)
define i32 @both(i32 %x) {
  %a = call i32 @first(i32 %x)
  %b = call i32 @second(i32 %a)
  ret i32 %b
}
"""
MACHINE = {"cpu": "", "reloc": "pic", "codemodel": "small"}


@pytest.fixture(autouse=True)
def native():
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def answered(request: dict, texts: list) -> dict:
    """Results that the child writes for one request."""
    request = request | {"sizes": [[len(t) for t in module] for module in texts]}
    sent = io.BytesIO(
        (json.dumps(request) + "\n" + "".join(t for module in texts for t in module)).encode()
    )
    answer = io.BytesIO()
    assert child.serve(sent, answer)
    assert not child.serve(sent, answer)
    head, _, rest = answer.getvalue().partition(b"\n")
    sizes = json.loads(head)
    if "error" in sizes:
        return sizes
    found = {}
    for kind, size in sizes.items():
        found[kind], rest = rest[:size], rest[size:]
    assert not rest
    return found


def made(kinds):
    """Two variants, in modules of which one is optimised, and what calls both."""
    library = {
        "scalar": [[False, True], [True, False], [False]],
        "names": ["first", "second", None],
        "keep": ["both"],
    }
    request = {
        "triple": llvm.get_default_triple(),
        "level": 2,
        "machine": MACHINE,
        "kinds": kinds,
        "library": library,
    }
    found = answered(request, [[MAIN, PLUS], [MAIN, TIMES], [ENTRY]])
    assert set(found) == set(kinds)
    return found


def test_variants_are_joined_and_only_what_is_kept_is_global():
    found = made(["obj", "asm", "llvm"])
    module = llvm.parse_assembly(found["llvm"].decode())
    linkage = {d.name: d.linkage for d in child.definitions(module)}
    assert linkage.pop("both") == llvm.Linkage.external
    assert {"first", "second"} <= set(linkage)
    assert set(linkage.values()) == {llvm.Linkage.internal}
    assert b".globl\tboth" in found["asm"]
    assert found["asm"].count(b".globl") == 1
    assert made(["obj"]) == {"obj": found["obj"]}  # the same text gives the same bytes


def test_the_object_computes():
    machine = llvm.Target.from_default_triple().create_target_machine(
        reloc="pic", codemodel="small", jit=True
    )
    with llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine) as engine:
        engine.add_object_file(llvm.ObjectFileRef.from_data(made(["obj"])["obj"]))
        engine.finalize_object()
        both = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)(engine.get_function_address("both"))
        assert [both(x) for x in (0, 2, -41)] == [(x + 40) * 3 for x in (0, 2, -41)]


def test_one_text_is_made_by_itself():
    request = {
        "triple": llvm.get_default_triple(),
        "level": 2,
        "machine": MACHINE,
        "kinds": ["asm"],
        "library": None,
    }
    assert b"helper" in answered(request, [[TIMES]])["asm"]
    assert "expected top-level entity" in answered(request, [["nonsense"]])["error"]
