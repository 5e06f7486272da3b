"""Addresses in instructions of AArch64, on any computer: as Arm's manual encodes them, and where objects in memory lead."""

import ctypes
import struct

import pytest

from pbkern.core.errors import InternalError
from pbkern.targets.host.objects.elf_loader import Image, undefined_symbols
from pbkern.targets.host.objects.relocations import AARCH64, X86_64
from tests.native.test_elf_loader import CALLS, made

PLACE = 0x7F00_1234_5678 & -4096  # of the instruction

# Number of the relocation in ELF for the Arm 64-bit architecture, the instruction with zeros where the address goes, the
# address, and the instruction that reaches it, as GNU's assembler encodes it (`adrp`: Arm's manual, C6.2).
INSTRUCTIONS = [
    (283, 0x94000000, PLACE + 0x1000, 0x94000400),  # bl .+0x1000
    (283, 0x94000000, PLACE + 0x7FFFFFC, 0x95FFFFFF),  # bl .+0x7fffffc
    (282, 0x14000000, PLACE - 4, 0x17FFFFFF),  # b .-4
    (265, 0xD2A00000, 0x1234_5678, 0xD2A24680),  # movz x0, #0x1234, lsl #16
    (263, 0xF2800000, 0xABCD, 0xF29579A0),  # movk x0, #0xabcd
    (264, 0xF2800000, 0x1111_2222_3333_ABCD, 0xF29579A0),
    (266, 0xF2A00000, 0x1111_2222_ABCD_4444, 0xF2B579A0),  # movk x0, #0xabcd, lsl #16
    (268, 0xF2C00000, 0x1111_5678_3333_4444, 0xF2CACF00),  # movk x0, #0x5678, lsl #32
    (269, 0xF2E00000, 0x9ABC_2222_3333_4444, 0xF2F35780),  # movk x0, #0x9abc, lsl #48
    (277, 0x91000000, 0x7F00_0000_0123, 0x91048C00),  # add x0, x0, #0x123
    (278, 0x39400000, 0x7F00_0000_0001, 0x39400400),  # ldrb w0, [x0, #1]
    (284, 0x79400000, 0x7F00_0000_0002, 0x79400400),  # ldrh w0, [x0, #2]
    (285, 0xB9400000, 0x7F00_0000_0004, 0xB9400400),  # ldr w0, [x0, #4]
    (286, 0xF9400000, 0x7F00_0000_0FF8, 0xF947FC00),  # ldr x0, [x0, #0xff8]
    (312, 0xF9400000, 0x7F00_0000_0008, 0xF9400400),  # ldr x0, [x0, #8]
    (299, 0x3DC00000, 0x7F00_0000_0010, 0x3DC00400),  # ldr q0, [x0, #16]
    (275, 0x90000000, PLACE + 0x5678, 0xB0000020),  # adrp x0, .+0x5000
    (275, 0x90000000, PLACE - 0x2345, 0xB0FFFFE0),  # adrp x0, .-0x3000
    (311, 0x90000000, PLACE + 0x5678, 0xB0000020),
    (257, 0, 0x1111_2222_3333_4444, 0x1111_2222_3333_4444),
    (260, 0, PLACE - 8, 0xFFFF_FFFF_FFFF_FFF8),
    (261, 0, PLACE - 8, 0xFFFF_FFF8),
    (258, 0, 0x8000_0000, 0x8000_0000),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "word", "target", "expected"), INSTRUCTIONS)
def test_instructions_of_aarch64_reach_addresses(kind, word, target, expected):
    relocation = AARCH64[kind]
    assert relocation.written(word, relocation.value(target, PLACE)) == expected
    assert relocation.written(expected, relocation.value(target, PLACE)) == expected
    assert expected < 1 << 8 * relocation.size


@pytest.mark.parametrize(
    ("kinds", "kind", "target"),
    [
        (AARCH64, 283, PLACE + (1 << 27)),
        (AARCH64, 283, PLACE - (1 << 27) - 4),
        (AARCH64, 282, PLACE + 2),
        (AARCH64, 275, PLACE + (1 << 32)),
        (AARCH64, 286, PLACE + 4),
        (AARCH64, 299, PLACE + 8),
        (AARCH64, 263, 1 << 16),
        (AARCH64, 265, 1 << 32),
        (AARCH64, 267, 1 << 48),
        (AARCH64, 261, PLACE + (1 << 32)),
        (X86_64, 2, PLACE + (1 << 31)),
        (X86_64, 10, -1),
        (X86_64, 11, 1 << 31),
    ],
)
def test_addresses_that_instructions_do_not_reach(kinds, kind, target):
    with pytest.raises(ValueError):
        kinds[kind].value(target, PLACE)


def words_at(address: int, count: int) -> list[int]:
    return list(struct.unpack(f"<{count}I", ctypes.string_at(address, 4 * count)))


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> bits - 1 else value


def called(address: int) -> int:
    """Where the first `b` or `bl` at an address or behind it leads."""
    for word in words_at(address, 16):
        if word >> 26 in (0b000101, 0b100101):
            return address + 4 * signed(word & 0x3FFFFFF, 26)
        address += 4
    raise AssertionError("no branch")


def loaded(address: int) -> int:
    """The address that the first `adrp` and the next `add` or `ldr` with an offset give."""
    words = words_at(address, 16)
    n = next(n for n, word in enumerate(words) if word & 0x9F000000 == 0x90000000)
    low, high = words[n] >> 29 & 3, words[n] >> 5 & 0x7FFFF
    page = (address + 4 * n & -4096) + (signed(high << 2 | low, 21) << 12)
    register = words[n] & 31
    rest = next(
        w
        for w in words[n + 1 :]
        if w >> 5 & 31 == register and w & 0x3B000000 in (0x11000000, 0x39000000)
    )
    is_vector = rest & 0x04800000 == 0x04800000
    scale = 0 if rest & 0x3B000000 == 0x11000000 else 4 if is_vector else rest >> 30
    return page + ((rest >> 10 & 0xFFF) << scale)


def test_objects_for_aarch64_reach_what_they_need():
    """Calls of what is far away lead to stubs; tables, variables and entries of other objects are where instructions look."""
    text = """@count = internal global i32 7
@wide = internal constant <4 x i32> <i32 1, i32 2, i32 3, i32 4>
@pointer = internal global ptr @count
@outside = external global i32
define internal i32 @near(i32 %x) noinline {
  %y = mul i32 %x, %x
  ret i32 %y
}
declare i32 @far(i32)
define i32 @calls_near(i32 %x) {
  %y = call i32 @near(i32 %x)
  %z = add i32 %y, 1
  ret i32 %z
}
define i32 @calls_far(i32 %x) {
  %y = call i32 @far(i32 %x)
  %z = add i32 %y, 1
  ret i32 %z
}
define i32 @loads() {
  %x = load volatile i32, ptr @count
  ret i32 %x
}
define <4 x i32> @loads_wide(<4 x i32> %a) {
  %x = load <4 x i32>, ptr @wide
  %y = add <4 x i32> %x, %a
  ret <4 x i32> %y
}
define i32 @loads_outside() {
  %x = load i32, ptr @outside
  ret i32 %x
}
"""
    far, outside = 0x7E00_0000_1230, 0x1122_3344_5566_7788
    code = made(text, reloc="pic", processor="aarch64")
    assert undefined_symbols(code) == {"far", "outside"}
    image = Image(code, {"far": far, "outside": outside})
    assert called(image.address("calls_near")) == image.address("near")
    stub = called(image.address("calls_far"))
    assert words_at(stub, 4) == [0x58000050, 0xD61F0200, far & 0xFFFFFFFF, far >> 32]
    assert loaded(image.address("loads")) == image.address("count")
    assert loaded(image.address("loads_wide")) == image.address("wide")
    (pointer,) = struct.unpack("<Q", ctypes.string_at(image.address("pointer"), 8))
    assert pointer == image.address("count")
    (entry,) = struct.unpack("<Q", ctypes.string_at(loaded(image.address("loads_outside")), 8))
    assert entry == outside


def test_addresses_in_four_parts():
    """Code for the large model holds addresses in four parts."""
    text = "@v = external dso_local global i32\ndefine ptr @f() {\n  ret ptr @v\n}\n"
    address = 0x0123_4567_89AB_CDEC
    code = made(text, codemodel="large", processor="aarch64")
    image = Image(code, {"v": address})
    parts = [word for word in words_at(image.address("f"), 8) if word & 0x9F800000 == 0x92800000]
    assert sum((word >> 5 & 0xFFFF) << 16 * (word >> 21 & 3) for word in parts) == address


def test_what_objects_for_aarch64_lack():
    with pytest.raises(InternalError, match="compiled code calls `other`, which nothing defines"):
        Image(made(CALLS, processor="aarch64"), {})
    with pytest.raises(InternalError, match=r"a section `\.tdata`"):
        Image(made("@v = thread_local global i32 3\n", processor="aarch64"), {})
