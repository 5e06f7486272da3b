"""Object files in memory: what they define runs, and what the loader does not know is an error that names it."""

import ctypes
import platform

import pytest

from pbkern.core.errors import InternalError
from pbkern.targets.host.objects.elf_loader import Image, undefined_symbols

llvm = pytest.importorskip("llvmlite.binding")

CALLS = "declare i32 @other(i32)\ndefine i32 @f(i32 %x) {\n  %y = call i32 @other(i32 %x)\n  ret i32 %y\n}\n"


def made(text: str, reloc="static", codemodel="small", processor="x86_64") -> bytes:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(f"{processor}-unknown-linux-gnu").create_target_machine(
        reloc=reloc, codemodel=codemodel
    )
    return machine.emit_object(llvm.parse_assembly(text))


def test_code_calls_tables_constants_and_what_is_written():
    text = """@table = private constant [3 x i32] [i32 5, i32 7, i32 11]
@count = internal global i32 0
@zeros = internal global [4 x i64] zeroinitializer
declare double @cbrt(double)
define i32 @f(i32 %k) {
  %n = load i32, ptr @count
  %m = add i32 %n, 1
  store i32 %m, ptr @count
  %at = getelementptr [3 x i32], ptr @table, i32 0, i32 %k
  %x = load i32, ptr %at
  %y = mul i32 %x, %m
  ret i32 %y
}
define double @g(double %x) {
  %y = call double @cbrt(double %x)
  ret double %y
}
"""
    code = made(text, codemodel="jitdefault", processor=platform.machine())
    assert undefined_symbols(code) == {"cbrt"}
    image = Image(code, {})
    f = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)(image.address("f"))
    assert [f(0), f(1), f(2)] == [5, 14, 33]
    assert ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(image.address("g"))(
        27.0
    ) == pytest.approx(3)
    assert set(image.functions()) >= {"f", "g"}


@pytest.mark.parametrize(("text", "message"), [
    ("@v = thread_local global i32 3\n", "a section `.tdata`, which the loader does not know"),
    ('@v = global i64 3, section ".init_array"\n', "a section `.init_array`, which the loader does not know"),
    ("@v = common global i32 0\n", "symbol `v` is of a kind that the loader does not know"),
    (CALLS, "compiled code calls `other`, which nothing defines"),
])  # fmt: skip
def test_what_the_loader_does_not_know(text, message):
    with pytest.raises(InternalError, match=message):
        Image(made(text), {})


def test_relocations_of_other_kinds_and_out_of_reach():
    with pytest.raises(
        InternalError, match=r"a relocation of kind 4[12]"
    ):  # through a table of addresses
        text = "@v = external global i32\ndefine i32 @f() {\n  %x = load i32, ptr @v\n  ret i32 %x\n}\n"
        Image(made(text, reloc="pic"), {"v": 8})
    with pytest.raises(InternalError, match="`other` is too far away for its relocation") as e:
        Image(made(CALLS), {"other": 8})
    assert "kind 4" in str(e.value)


def test_files_that_end_too_soon():
    code = made(CALLS)
    with pytest.raises(InternalError, match="code is not an ELF object file"):
        Image(b"no object", {})
    for size in (64, len(code) // 2, len(code) - 1):
        with pytest.raises(InternalError, match="an object file is damaged"):
            Image(code[:size], {"other": 8})
