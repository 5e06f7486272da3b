"""KINDS: processor of an ELF object -> kind of relocation -> the bits of an instruction or word that an address goes to.

Sources: System V ABI, AMD64 supplement, 4.4.1; ELF for the Arm 64-bit architecture (aaelf64), 5.7.
Kinds that are not here are those of other code models, and of thread-local and shared data.
"""

from __future__ import annotations

from typing import Literal

from pbkern.core.lazy_dataclass import dataclass

# Range of values of which a relocation takes some bits, whatever the others are.
ANY = (-(1 << 64), 1 << 64)
# Bytes of what `adrp` calls a page, whatever the system's pages are (Arm Architecture Reference Manual, C6.2, ADRP).
ADRP_BYTES = 4096
# `ldr x16, .+8` and `br x16`: a jump to the address behind them. The calling convention leaves x16 to such code.
JUMP = (0x58000050, 0xD61F0200)
# Bytes of a stub: the jump, and the address.
STUB_BYTES = 16
# Offset of the address in a stub.
ADDRESS_IN_STUB = 8


@dataclass(frozen=True)
class Relocation:
    """The way in which an address, or a distance to it, is written.

    Attributes:
      fields: (lowest bit of the value, number of bits, their place in the word), each.
      limits: the least value, and the least that is too large.
      size: bytes of the word.
      base: what is subtracted: nothing, the word's own address, or from the address's page that of the word.
      align: what divides the value.
      stub: which part a stub of the symbol has: "jump" where the value is too large, "address" always.
    """

    fields: tuple[tuple[int, int, int], ...]
    limits: tuple[int, int] = ANY
    size: int = 4
    base: Literal["", "place", "page"] = ""
    align: int = 1
    stub: Literal["", "jump", "address"] = ""

    def value(self, target: int, place: int) -> int:
        """Returns the value that is written at `place` for an address. Raises ValueError where it does not fit."""
        if self.base == "page":
            target, place = target & -ADRP_BYTES, place & -ADRP_BYTES
        value = target - place if self.base else target
        if value % self.align or not self.limits[0] <= value < self.limits[1]:
            raise ValueError(f"value {value:#x}")
        return value

    def written(self, word: int, value: int) -> int:
        """The word with the value in its fields."""
        for low, count, place in self.fields:
            mask = (1 << count) - 1
            word = word & ~(mask << place) | (value >> low & mask) << place
        return word


def _unsigned(bits: int) -> tuple[int, int]:
    return 0, 1 << bits


def _signed(bits: int) -> tuple[int, int]:
    return -(1 << bits - 1), 1 << bits - 1


_WORD = ((0, 32, 0),)
_WIDE_WORD = ((0, 64, 0),)
_ADR = ((12, 2, 29), (14, 19, 5))
_BRANCH = Relocation(((2, 26, 0),), _signed(28), base="place", align=4, stub="jump")


def _loads(log2: int, stub: Literal["", "address"] = "") -> Relocation:
    """Low 12 bits of an address, in units of 1 << log2 bytes, as `ldr` and `str` take them."""
    return Relocation(((log2, 12 - log2, 10),), align=1 << log2, stub=stub)


X86_64 = {
    1: Relocation(_WIDE_WORD, size=8),  # 64
    2: Relocation(_WORD, _signed(32), base="place"),  # PC32
    4: Relocation(_WORD, _signed(32), base="place"),  # PLT32
    10: Relocation(_WORD, _unsigned(32)),  # 32
    11: Relocation(_WORD, _signed(32)),  # 32S
    24: Relocation(_WIDE_WORD, size=8, base="place"),  # PC64
}
AARCH64 = {
    257: Relocation(_WIDE_WORD, size=8),  # ABS64
    258: Relocation(_WORD, (-(1 << 31), 1 << 32)),  # ABS32
    260: Relocation(_WIDE_WORD, size=8, base="place"),  # PREL64
    261: Relocation(_WORD, (-(1 << 31), 1 << 32), base="place"),  # PREL32
    263: Relocation(((0, 16, 5),), _unsigned(16)),  # MOVW_UABS_G0
    264: Relocation(((0, 16, 5),)),  # MOVW_UABS_G0_NC
    265: Relocation(((16, 16, 5),), _unsigned(32)),  # MOVW_UABS_G1
    266: Relocation(((16, 16, 5),)),  # MOVW_UABS_G1_NC
    267: Relocation(((32, 16, 5),), _unsigned(48)),  # MOVW_UABS_G2
    268: Relocation(((32, 16, 5),)),  # MOVW_UABS_G2_NC
    269: Relocation(((48, 16, 5),)),  # MOVW_UABS_G3
    275: Relocation(_ADR, _signed(33), base="page"),  # ADR_PREL_PG_HI21
    277: _loads(0),  # ADD_ABS_LO12_NC
    278: _loads(0),  # LDST8_ABS_LO12_NC
    282: _BRANCH,  # JUMP26
    283: _BRANCH,  # CALL26
    284: _loads(1),  # LDST16_ABS_LO12_NC
    285: _loads(2),  # LDST32_ABS_LO12_NC
    286: _loads(3),  # LDST64_ABS_LO12_NC
    299: _loads(4),  # LDST128_ABS_LO12_NC
    311: Relocation(_ADR, _signed(33), base="page", stub="address"),  # ADR_GOT_PAGE
    312: _loads(3, "address"),  # LD64_GOT_LO12_NC
}
# EM_X86_64 and EM_AARCH64 of elf.h.
KINDS = {62: X86_64, 183: AARCH64}
