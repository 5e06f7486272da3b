"""Memory of a call beside operands and results: for temporaries, then each thread's scratch.

LLVM dialect text.

Programs keep arenas from call to call, in a list; each of several calls at the same time takes one.
"""

from __future__ import annotations

import mmap

from pbkern.core.machine import PAGE_BYTES

# Bytes of a huge page of Linux where small ones have 4 KB.
HUGE_PAGE_BYTES = 2 << 20
# Results and arenas of this size and more are advised to use huge pages: first touch of 4 KB pages
# costs ten times more.
HUGE_BYTES = 4 << 20
# The number of madvise's advice to use huge pages (Linux, asm-generic/mman-common.h).
MADV_HUGEPAGE = 14
# Arenas that a program keeps from call to call: (whether in use, address) each.
ARENAS = 64


def extent(arena_bytes: int) -> tuple[int, int]:
    """(bytes, alignment) of an arena as it is allocated: whole pages."""
    align = HUGE_PAGE_BYTES if arena_bytes >= HUGE_BYTES else PAGE_BYTES
    return -(-arena_bytes // align) * align, align


# @pbk_huge(address, bytes): asks for huge pages where that pays.
HUGE = r"""
func.func @pbk_huge(%p: !llvm.ptr, %bytes: i64) {
  %limit = arith.constant HUGE_BYTES : i64
  %page = arith.constant PAGE_BYTES : i64
  %mask = arith.constant -PAGE_BYTES : i64
  %big = arith.cmpi sge, %bytes, %limit : i64
  scf.if %big {
    %advice = arith.constant MADV_HUGEPAGE : i32
    %a = llvm.ptrtoint %p : !llvm.ptr to i64
    %b = arith.addi %a, %page : i64
    %start = arith.andi %b, %mask : i64
    %q = llvm.inttoptr %start : i64 to !llvm.ptr
    %len = arith.subi %bytes, %page : i64
    %r = func.call @madvise(%q, %len, %advice) : (!llvm.ptr, i64, i32) -> i32
  }
  return
}
""".replace("MADV_HUGEPAGE", str(MADV_HUGEPAGE)).replace("HUGE_BYTES", str(HUGE_BYTES))
HUGE = HUGE.replace("PAGE_BYTES", str(mmap.PAGESIZE))

# @pbk_acquire(places, bytes, align, where to store the address) -> number of the place; @pbk_release(places, address, number).
LIST = r"""
func.func @pbk_acquire(%pool: !llvm.ptr, %bytes: i64, %align: i64, %out: !llvm.ptr) -> i64 {
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %two = arith.constant 2 : i64
  %slots = arith.constant 64 : i64
  %slot = scf.while (%k = %zero) : (i64) -> i64 {
    %i = arith.muli %k, %two : i64
    %p = llvm.getelementptr %pool[%i] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    %in = arith.cmpi slt, %k, %slots : i64
    %busy = scf.if %in -> (i1) {
      %old = llvm.atomicrmw xchg %p, %one acq_rel : !llvm.ptr, i64
      %b = arith.cmpi ne, %old, %zero : i64
      scf.yield %b : i1
    } else {
      %no = arith.constant false
      scf.yield %no : i1
    }
    scf.condition(%busy) %k : i64
  } do {
  ^bb0(%k: i64):
    %next = arith.addi %k, %one : i64
    scf.yield %next : i64
  }
  %held = arith.cmpi slt, %slot, %slots : i64
  %known = scf.if %held -> (i64) {
    %i = arith.muli %slot, %two : i64
    %j = arith.addi %i, %one : i64
    %p = llvm.getelementptr %pool[%j] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    %old = llvm.load %p : !llvm.ptr -> i64
    %fresh = arith.cmpi eq, %old, %zero : i64
    %mem = scf.if %fresh -> (i64) {
      %m = func.call @aligned_alloc(%align, %bytes) : (i64, i64) -> !llvm.ptr
      func.call @pbk_huge(%m, %bytes) : (!llvm.ptr, i64) -> ()
      %v = llvm.ptrtoint %m : !llvm.ptr to i64
      llvm.store %v, %p : i64, !llvm.ptr
      scf.yield %v : i64
    } else {
      scf.yield %old : i64
    }
    scf.yield %mem : i64
  } else {
    %m = func.call @aligned_alloc(%align, %bytes) : (i64, i64) -> !llvm.ptr
    %v = llvm.ptrtoint %m : !llvm.ptr to i64
    scf.yield %v : i64
  }
  llvm.store %known, %out : i64, !llvm.ptr
  return %slot : i64
}

func.func @pbk_release(%pool: !llvm.ptr, %arena: !llvm.ptr, %slot: i64) {
  %zero = arith.constant 0 : i64
  %two = arith.constant 2 : i64
  %slots = arith.constant 64 : i64
  %held = arith.cmpi slt, %slot, %slots : i64
  scf.if %held {
    %i = arith.muli %slot, %two : i64
    %p = llvm.getelementptr %pool[%i] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    llvm.store %zero, %p atomic release {alignment = 8 : i64} : i64, !llvm.ptr
  } else {
    func.call @free(%arena) : (!llvm.ptr) -> ()
  }
  return
}
"""
