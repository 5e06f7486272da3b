"""Parallel loops of callers in several threads take turns, in the order in which they came. LLVM dialect text.

Loops that run at the same time on the same cores finish late all of them, and each takes the others' caches: with eight callers
on two cores, the slowest of a hundred calls took twice as long as when loops take turns. As many loops as there are cores for
run at once. A turn is no lock: who has waited for long goes ahead.

@pbk_turns holds two words: the number of the next turn, and how many turns have ended (Linux futexes wait for that).
"""

from __future__ import annotations

# One wait, and the number of waits after which a caller goes ahead: 1.3 s if no turn ends, or 64 turns.
WAIT_NANOSECONDS = 20_000_000
MOST_WAITS = 64
# How often a caller looks before it waits in the kernel: about 5 us of pauses.
LOOKS = 100
# Linux on x86-64: number of the system call, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, FUTEX_WAKE | FUTEX_PRIVATE_FLAG (linux/futex.h).
SYS_FUTEX = 202
FUTEX_WAIT_PRIVATE = 128
FUTEX_WAKE_PRIVATE = 129

TURNS = """
llvm.mlir.global external @pbk_turns() {alignment = 64 : i64} : !llvm.array<2 x i32> {
  %0 = llvm.mlir.zero : !llvm.array<2 x i32>
  llvm.return %0 : !llvm.array<2 x i32>
}
func.func private @syscall(i64, !llvm.ptr, i64, i64, !llvm.ptr) -> i64

func.func private @pbk_take_turn(%at_once: i64) {
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %one32 = arith.constant 1 : i32
  %looks = arith.constant LOOKS : i64
  %most = arith.constant MOST : i64
  %nanoseconds = arith.constant WAIT_NANOSECONDS : i64
  %futex = arith.constant SYS_FUTEX : i64
  %wait = arith.constant FUTEX_WAIT : i64
  %turns = llvm.mlir.addressof @pbk_turns : !llvm.ptr
  %ended = llvm.getelementptr %turns[4] : (!llvm.ptr) -> !llvm.ptr, i8
  %time = llvm.alloca %one x !llvm.array<2 x i64> : (i64) -> !llvm.ptr
  %time8 = llvm.getelementptr %time[8] : (!llvm.ptr) -> !llvm.ptr, i8
  llvm.store %zero, %time : i64, !llvm.ptr
  llvm.store %nanoseconds, %time8 : i64, !llvm.ptr
  %mine = llvm.atomicrmw add %turns, %one32 seq_cst : !llvm.ptr, i32
  %tries = scf.while (%k = %zero) : (i64) -> i64 {
    %now = llvm.load %ended atomic seq_cst {alignment = 4 : i64} : !llvm.ptr -> i32
    %before32 = arith.subi %mine, %now : i32
    %before = arith.extsi %before32 : i32 to i64
    %full = arith.cmpi sge, %before, %at_once : i64
    %patient = arith.cmpi slt, %k, %most : i64
    %waiting = arith.andi %full, %patient : i1
    scf.if %waiting {
      %long = arith.cmpi sge, %k, %looks : i64
      scf.if %long {
        %expected = arith.extui %now : i32 to i64
        %r = func.call @syscall(%futex, %ended, %wait, %expected, %time) : (i64, !llvm.ptr, i64, i64, !llvm.ptr) -> i64
      } else {
        llvm.inline_asm has_side_effects "pause", "" : () -> ()
      }
    }
    scf.condition(%waiting) %k : i64
  } do {
  ^bb0(%k: i64):
    %next = arith.addi %k, %one : i64
    scf.yield %next : i64
  }
  return
}

func.func private @pbk_end_turn() {
  %one32 = arith.constant 1 : i32
  %futex = arith.constant SYS_FUTEX : i64
  %wake = arith.constant FUTEX_WAKE : i64
  %all = arith.constant 2147483647 : i64
  %null = llvm.mlir.zero : !llvm.ptr
  %turns = llvm.mlir.addressof @pbk_turns : !llvm.ptr
  %ended = llvm.getelementptr %turns[4] : (!llvm.ptr) -> !llvm.ptr, i8
  %before = llvm.atomicrmw add %ended, %one32 seq_cst : !llvm.ptr, i32
  %now = arith.addi %before, %one32 : i32
  %next = llvm.load %turns atomic seq_cst {alignment = 4 : i64} : !llvm.ptr -> i32
  %others = arith.cmpi ne, %now, %next : i32
  scf.if %others {
    %r = func.call @syscall(%futex, %ended, %wake, %all, %null) : (i64, !llvm.ptr, i64, i64, !llvm.ptr) -> i64
  }
  return
}
"""
for _name, _value in {
    "LOOKS": LOOKS, "MOST": LOOKS + MOST_WAITS, "WAIT_NANOSECONDS": WAIT_NANOSECONDS, "SYS_FUTEX": SYS_FUTEX,
    "FUTEX_WAIT": FUTEX_WAIT_PRIVATE, "FUTEX_WAKE": FUTEX_WAKE_PRIVATE,
}.items():  # fmt: skip
    TURNS = TURNS.replace(f" {_name} ", f" {_value} ")
