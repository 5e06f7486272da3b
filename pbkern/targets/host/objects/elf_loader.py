"""Relocatable ELF object -> executable memory of this process. x86-64, static relocations only.

LLVM's objects, whether just made or read from disk, are loaded here: the sections of one object are
in one mapping, code and constants first, then what is written to. Symbols that the object lacks
come from a table (the runtime's entry points) and from the C library. Whatever this loader does not
know is an InternalError, never a guess. Unwind tables are left out: no exception passes through
compiled code.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pbkern.core.errors import InternalError

PAGE = mmap.PAGESIZE
# Bit of a section's flags: it is in memory. Source of all numbers here: elf.h, System V ABI.
SHF_ALLOC = 0x2
# Bit of a section's flags: it is written to.
SHF_WRITE = 0x1
# Bit of a section's flags: each thread has its own.
SHF_TLS = 0x400
# Kind of a section: relocations with addends.
SHT_RELA = 4
# Kind of a section: zeros that the file does not hold.
SHT_NOBITS = 8
# Kind of a section: the table of symbols.
SHT_SYMTAB = 2
# Kind of a section: functions to call first.
SHT_INIT_ARRAY = 14
# Kind of a section: unwind tables (System V ABI, AMD64 supplement).
SHT_X86_64_UNWIND = 0x70000001
# Section number of a symbol that the object lacks.
SHN_UNDEF = 0
# Section number of a symbol whose value is no address in a section.
SHN_ABS = 0xFFF1
# The first section number with a meaning of its own.
SHN_LORESERVE = 0xFF00
# Binding of a symbol that may be missing.
STB_WEAK = 2
# R_X86_64_{64, PC32, PLT32, 32, 32S, PC64} -> (whether relative to the place, format).
RELOCATIONS = {
    1: (False, "<Q"),
    2: (True, "<i"),
    4: (True, "<i"),
    10: (False, "<I"),
    11: (False, "<i"),
    24: (True, "<q"),
}
LIBRARIES = (None, "libm.so.6", "libgcc_s.so.1")  # None: what this process has loaded


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int


class Image:
    """One object in memory, for as long as this value lives.

    Args:
      content: the object file.
      symbols: addresses of what it calls, by name; the C library's functions need not be among
        them.
      other: an image whose functions it may call, too, and those which that one may call; it lives
        as long as this one.
    Attributes:
      holds: what the code points to, besides.
    Raises InternalError for damaged files, symbols that nothing defines, and relocations of other
    kinds.
    """

    def __init__(self, content: bytes, symbols: Mapping[str, int], other: Image | None = None):
        self.other = other
        self.holds: Any = None
        try:
            self._load(content, {**symbols, **(other.functions() if other else {})})
        except (struct.error, IndexError, ValueError) as e:
            raise InternalError(
                "an object file is damaged", why=f"{len(content)} bytes: {e}"
            ) from None

    def address(self, name: str) -> int:
        """Address of a function that the object defines."""
        return self.defined[name]

    def functions(self) -> dict[str, int]:
        """Addresses of what this object and the others behind it define."""
        return {**(self.other.functions() if self.other else {}), **self.defined}

    def _load(self, content: bytes, symbols: Mapping[str, int]) -> None:
        sections = _sections(content)
        places, code_bytes, total = _places(sections)
        self.memory = mmap.mmap(-1, max(total, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for n, at in places.items():
            part = sections[n]
            if part.kind != SHT_NOBITS:
                self.memory[at : at + part.size] = _slice(content, part)
        table = next((section for section in sections if section.kind == SHT_SYMTAB), None)
        names, values = _symbols(
            content, sections, table, {n: base + at for n, at in places.items()}, symbols
        )
        for part in sections:
            if part.kind == SHT_RELA and part.info in places:
                self._relocate(_slice(content, part), places[part.info], base, names, values)
        self.defined = {
            name: value for name, (value, here) in zip(names, values) if here and value is not None
        }
        _protect(base, code_bytes)

    def _relocate(self, entries: bytes, at: int, base: int, names: list[str], values: list) -> None:
        for offset, info, addend in struct.iter_unpack("<QQq", entries):
            kind, symbol = info & 0xFFFFFFFF, info >> 32
            if kind not in RELOCATIONS:
                raise InternalError(
                    f"an object file has a relocation of kind {kind}",
                    why=f"of symbol `{names[symbol]}`",
                )
            value, _ = values[symbol]
            if value is None:
                raise InternalError(f"compiled code calls `{names[symbol]}`, which nothing defines")
            relative, form = RELOCATIONS[kind]
            value += addend - (base + at + offset if relative else 0)
            value = value % (1 << 64) if form == "<Q" else value
            try:
                struct.pack_into(form, self.memory, at + offset, value)
            except struct.error:
                why = f"kind {kind}, value {value:#x}"
                raise InternalError(
                    f"`{names[symbol]}` is too far away for its relocation", why=why
                ) from None


def undefined_symbols(content: bytes) -> set[str]:
    """Names that an object file expects others to define."""
    sections = _sections(content)
    table = next((section for section in sections if section.kind == SHT_SYMTAB), None)
    names, values = _symbols(content, sections, table, {}, {}, search=False)
    return {name for name, (value, here) in zip(names, values) if name and not here}


def _sections(content: bytes) -> list[_Section]:
    if content[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<HH", content, 16) != (1, 62):
        raise InternalError("code is not an x86-64 object file", why=repr(content[:20]))
    (table,) = struct.unpack_from("<Q", content, 40)
    size, count, names_at = struct.unpack_from("<HHH", content, 58)
    raw = [struct.unpack_from("<IIQQQQIIQQ", content, table + n * size) for n in range(count)]
    strings = raw[names_at][4]
    return [
        _Section(
            _text(content, strings + name), kind, flags, offset, length, link, info, max(align, 1)
        )
        for name, kind, flags, _, offset, length, link, info, align, _ in raw
    ]


def _places(sections: list[_Section]) -> tuple[dict[int, int], int, int]:
    """(offset of each section that is needed at run time, bytes of those that are not written to, bytes of all)."""
    needed = [
        n
        for n, section in enumerate(sections)
        if section.flags & SHF_ALLOC
        and section.kind != SHT_X86_64_UNWIND
        and section.name != ".eh_frame"
    ]
    for number in needed:
        if (
            sections[number].flags & SHF_TLS
            or sections[number].kind == SHT_INIT_ARRAY
            or sections[number].align > PAGE
        ):
            raise InternalError(
                f"an object file has a section `{sections[number].name}`, which the loader does not know"
            )
    places: dict[int, int] = {}
    end = code_bytes = 0
    for writable in (False, True):
        for number in needed:
            part = sections[number]
            if bool(part.flags & SHF_WRITE) == writable:
                at = -(-end // part.align) * part.align
                places[number], end = at, at + part.size
        end = -(-end // PAGE) * PAGE
        code_bytes = code_bytes or end
    return places, code_bytes, end


def _symbols(
    content,
    sections,
    table: _Section | None,
    bases: Mapping[int, int],
    given: Mapping[str, int],
    search=True,
):
    """(names, [(address or None, whether the object defines it)]) in the order of the symbol table."""
    names: list[str] = []
    values: list[tuple[int | None, bool]] = []
    if table is None:
        return names, values
    for name_at, info, _, index, value, _ in struct.iter_unpack("<IBBHQQ", _slice(content, table)):
        name = _text(content, sections[table.link].offset + name_at)
        names.append(name)
        if index == SHN_UNDEF:
            address = given.get(name) if name else 0
            if address is None and search:
                address = 0 if info >> 4 == STB_WEAK else _of_library(name)
            values.append((address, False))
        elif index == SHN_ABS:
            values.append((value, True))
        elif index >= SHN_LORESERVE:
            raise InternalError(
                f"symbol `{name}` is of a kind that the loader does not know",
                why=f"section {index:#x}",
            )
        else:
            values.append((bases[index] + value if index in bases else None, True))
    return names, values


@functools.cache
def _of_library(name: str) -> int | None:
    for library in LIBRARIES:
        try:
            return ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def _protect(address: int, size: int) -> None:
    """Memory may be written to or run, not both."""
    if not size:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(
        ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_EXEC
    ):
        # The system refuses: another process may be allowed to, so that this is no failure of the
        # code.
        raise OSError(ctypes.get_errno(), "memory cannot be made executable: mprotect")


def _slice(content: bytes, section: _Section) -> bytes:
    if section.offset + section.size > len(content):
        raise ValueError(f"section `{section.name}` ends beyond the file")
    return content[section.offset : section.offset + section.size]


def _text(content: bytes, at: int) -> str:
    return content[at : content.index(b"\0", at)].decode()
