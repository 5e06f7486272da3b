"""The file of weights in memory: NAME_load(path) and NAME_unload(), by the C library's open, lseek and mmap. LLVM IR text."""

from __future__ import annotations

import re
import struct

from pbkern.aot.interface.arguments import (
    NO_WEIGHTS,
    NULL_POINTER,
    OTHER_WEIGHTS,
    UNREADABLE_WEIGHTS,
)
from pbkern.aot.interface.weights_file import FileLayout

# The variable that holds the address of a loaded file, or null.
LOADED = "pbk_weights"
# Lines of @pbk_call that return a code where no file is loaded.
LOADED_TEST = f"""  %loaded = load atomic ptr, ptr @{LOADED} acquire, align 8
  %unloaded = icmp eq ptr %loaded, null
  br i1 %unloaded, label %no.weights, label %weights
no.weights:
  ret i32 {NO_WEIGHTS}
weights:"""
# Arguments of the C library, the same on Linux (asm-generic/fcntl.h, asm-generic/mman-common.h,
# linux/fs.h) and macOS (sys/fcntl.h, sys/mman.h, sys/unistd.h).
O_RDONLY = 0
# lseek: from the end (the same headers).
SEEK_END = 2
# mmap: pages may be read (the same headers).
PROT_READ = 1
# mmap: changes, which nobody makes, would be the process's own (the same headers).
MAP_PRIVATE = 2

_LOADING = """
@LOADED = internal global ptr null, align 8

declare i32 @open(ptr, i32, ...)
declare i64 @lseek(i32, i64, i32)
declare ptr @mmap(ptr, i64, i32, i32, i32, i64)
declare i32 @munmap(ptr, i64)
declare i32 @close(i32)

define internal void @pbk_load(ptr %new) #0 {
  %old = atomicrmw xchg ptr @LOADED, ptr %new acq_rel
  %none = icmp eq ptr %old, null
  br i1 %none, label %done, label %unmap
unmap:
  %ignored = call i32 @munmap(ptr %old, i64 SIZE)
  br label %done
done:
  ret void
}

define void @NAME_unload() #0 {
  call void @pbk_load(ptr null)
  ret void
}

define i32 @NAME_load(ptr %path) #0 {
  %null = icmp eq ptr %path, null
  br i1 %null, label %no.path, label %open
no.path:
  ret i32 NULL_POINTER
open:
  %file = call i32 (ptr, i32, ...) @open(ptr %path, i32 O_RDONLY)
  %refused = icmp slt i32 %file, 0
  br i1 %refused, label %unreadable, label %opened
unreadable:
  ret i32 UNREADABLE_WEIGHTS
opened:
  %size = call i64 @lseek(i32 %file, i64 0, i32 SEEK_END)
  %fits = icmp eq i64 %size, SIZE
  br i1 %fits, label %map, label %other.size
other.size:
  %closed.other = call i32 @close(i32 %file)
  ret i32 OTHER_WEIGHTS
map:
  %at = call ptr @mmap(ptr null, i64 SIZE, i32 PROT_READ, i32 MAP_PRIVATE, i32 %file, i64 0)
  %closed = call i32 @close(i32 %file)
  %failed = icmp eq ptr %at, inttoptr (i64 -1 to ptr)
  br i1 %failed, label %unreadable, label %compare
compare:
COMPARISON
  %alike = icmp eq i64 %differences, 0
  br i1 %alike, label %right, label %wrong
wrong:
  %unmapped = call i32 @munmap(ptr %at, i64 SIZE)
  ret i32 OTHER_WEIGHTS
right:
  call void @pbk_load(ptr %at)
  ret i32 0
}
"""


def loading_text(name: str, layout: FileLayout) -> str:
    """Both functions, and the variable LOADED."""
    lines, total = [], "0"
    words = struct.unpack(f"<{len(layout.head) // 8}q", layout.head)
    for k, word in enumerate(words):
        result = "differences" if k == len(words) - 1 else f"or{k}"
        lines += [
            f"  %at{k} = getelementptr i8, ptr %at, i64 {8 * k}",
            f"  %is{k} = load i64, ptr %at{k}, align 8",
            f"  %xor{k} = xor i64 %is{k}, {word}",
            f"  %{result} = or i64 {total}, %xor{k}",
        ]
        total = f"%{result}"
    replacements = {
        "COMPARISON": "\n".join(lines),
        "LOADED": LOADED,
        "NAME": name,
        "NULL_POINTER": str(NULL_POINTER),
        "UNREADABLE_WEIGHTS": str(UNREADABLE_WEIGHTS),
        "OTHER_WEIGHTS": str(OTHER_WEIGHTS),
        "O_RDONLY": str(O_RDONLY),
        "SEEK_END": str(SEEK_END),
        "PROT_READ": str(PROT_READ),
        "MAP_PRIVATE": str(MAP_PRIVATE),
        "SIZE": str(layout.size),
    }
    return re.sub("|".join(replacements), lambda match: replacements[match[0]], _LOADING)
