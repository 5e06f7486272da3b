"""Relocatable ELF object -> executable memory of this process. Static relocations only (relocations.py).

LLVM's objects, whether just made or read from disk, are loaded here: the sections of one object are
in one mapping, code and constants first, then what is written to. On AArch64 stubs follow the code:
jumps to functions that are too far away for a call. Symbols that the object lacks come from a table
(the runtime's entry points) and from the C library. Whatever this loader does not know is an
InternalError, never a guess. Unwind tables are left out: no exception passes through compiled code.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
import struct
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from pbkern.core.errors import InternalError
from pbkern.core.lazy_dataclass import dataclass

from .relocations import ADDRESS_IN_STUB, JUMP, KINDS, STUB_BYTES, Relocation

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
# Kind of an object file: relocatable.
ET_REL = 1
# Section number of a symbol that the object lacks.
SHN_UNDEF = 0
# Section number of a symbol whose value is no address in a section.
SHN_ABS = 0xFFF1
# The first section number with a meaning of its own.
SHN_LORESERVE = 0xFF00
# Binding of a symbol that may be missing.
STB_WEAK = 2
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
        kinds, sections = _kinds(content), _sections(content)
        entries = [
            (part.info, *entry)
            for part in sections
            if part.kind == SHT_RELA and _is_needed(sections[part.info])
            for entry in struct.iter_unpack("<QIIq", _slice(content, part))
        ]
        stubs = dict.fromkeys(
            (symbol, addend)
            for _, _, kind, symbol, addend in entries
            if kind in kinds and kinds[kind].stub
        )
        places, stubs_at, code_bytes, total = _places(sections, len(stubs) * STUB_BYTES)
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
        addresses = _Addresses(names, [value for value, _ in values])
        for number, (symbol, addend) in enumerate(stubs):
            at = stubs_at + number * STUB_BYTES
            struct.pack_into("<IIQ", self.memory, at, *JUMP, addresses.of(symbol) + addend)
            addresses.stubs[symbol, addend] = base + at
        for section, offset, kind, symbol, addend in entries:
            if kind not in kinds:
                why = f"of symbol `{names[symbol]}`"
                raise InternalError(f"an object file has a relocation of kind {kind}", why=why)
            at = places[section] + offset
            word = slice(at, at + kinds[kind].size)
            try:
                value = addresses.value(kinds[kind], symbol, addend, base + at)
            except ValueError as e:
                raise InternalError(
                    f"`{names[symbol]}` is too far away for its relocation", why=f"kind {kind}, {e}"
                ) from None
            before = int.from_bytes(self.memory[word], "little")
            after = kinds[kind].written(before, value)
            self.memory[word] = after.to_bytes(kinds[kind].size, "little")
        self.defined = {
            name: value for name, (value, here) in zip(names, values) if here and value is not None
        }
        _protect(base, code_bytes)


@dataclass(frozen=True)
class _Addresses:
    """Addresses of an object's symbols, and of their stubs."""

    names: list[str]
    symbols: list[int | None]
    stubs: dict[tuple[int, int], int] = field(default_factory=dict)

    def of(self, symbol: int) -> int:
        address = self.symbols[symbol]
        if address is None:
            name = self.names[symbol]
            raise InternalError(f"compiled code calls `{name}`, which nothing defines")
        return address

    def value(self, kind: Relocation, symbol: int, addend: int, place: int) -> int:
        """Returns what a relocation writes. Raises ValueError where that does not fit, through a stub either."""
        if kind.stub == "address":
            return kind.value(self.stubs[symbol, addend] + ADDRESS_IN_STUB, place)
        try:
            return kind.value(self.of(symbol) + addend, place)
        except ValueError:
            if kind.stub != "jump":
                raise
            return kind.value(self.stubs[symbol, addend], place)


def undefined_symbols(content: bytes) -> set[str]:
    """Names that an object file expects others to define."""
    sections = _sections(content)
    table = next((section for section in sections if section.kind == SHT_SYMTAB), None)
    names, values = _symbols(content, sections, table, {}, {}, search=False)
    return {name for name, (value, here) in zip(names, values) if name and not here}


def _kinds(content: bytes) -> Mapping[int, Relocation]:
    """Relocations of the object's processor."""
    kind, machine = struct.unpack_from("<HH", content.ljust(20), 16)
    if content[:6] != b"\x7fELF\x02\x01" or kind != ET_REL or machine not in KINDS:
        raise InternalError("code is not an ELF object file", why=repr(content[:20]))
    return KINDS[machine]


def _sections(content: bytes) -> list[_Section]:
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


def _is_needed(section: _Section) -> bool:
    """Whether a section is in memory at run time."""
    is_unwind = section.kind == SHT_X86_64_UNWIND or section.name == ".eh_frame"
    return bool(section.flags & SHF_ALLOC) and not is_unwind


def _places(sections: list[_Section], stub_bytes: int) -> tuple[dict[int, int], int, int, int]:
    """Offsets of sections that are needed at run time, and of stubs; bytes of what is not written to, and of all."""
    needed = [n for n, section in enumerate(sections) if _is_needed(section)]
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
    end = stubs_at = code_bytes = 0
    for writable in (False, True):
        for number in needed:
            part = sections[number]
            if bool(part.flags & SHF_WRITE) == writable:
                places[number] = _rounded(end, part.align)
                end = places[number] + part.size
        if not writable:
            stubs_at = _rounded(end, STUB_BYTES)
            end = code_bytes = _rounded(stubs_at + stub_bytes, PAGE)
    return places, stubs_at, code_bytes, end


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to


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
    """Memory may be written to or run, not both. What a core has read as instructions before is read again."""
    if not size:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(
        ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_EXEC
    ):
        # The system refuses: another process may be allowed to, so that this is no failure of the
        # code.
        raise OSError(ctypes.get_errno(), "memory cannot be made executable: mprotect")
    if platform.machine() == "aarch64":  # whose caches of instructions do not follow stores
        clear_cache = ctypes.CDLL("libgcc_s.so.1").__clear_cache
        clear_cache(ctypes.c_void_p(address), ctypes.c_void_p(address + size))


def _slice(content: bytes, section: _Section) -> bytes:
    if section.offset + section.size > len(content):
        raise ValueError(f"section `{section.name}` ends beyond the file")
    return content[section.offset : section.offset + section.size]


def _text(content: bytes, at: int) -> str:
    return content[at : content.index(b"\0", at)].decode()
