"""Parallel loops of callers in several threads take turns, in the order in which they came.

LLVM dialect text.

@pbk_take_turn(at_once) returns when fewer than `at_once` loops that came before are still running.
The result is the number of other loops that run or wait then: they share the cores
(runtime/xla.py). When many more loops than cores run at the same time, all of them finish late, and
each takes the others' caches. A turn is no lock: a caller that has waited for long goes ahead.

@pbk_turns holds words of 32 bits: the number of the next turn, how many turns have ended, and
TURN_SLOTS counts of wake-ups. A caller waits for the count of its turn's number modulo TURN_SLOTS
(a Linux futex): the end of a turn wakes one caller, not all of them.
"""

from __future__ import annotations

import string

from pbkern.targets.host.processor import Architecture

# Nanoseconds of one wait for a turn's end. Source: not recorded.
WAIT_NANOSECONDS = 20_000_000
# Waits after which a caller goes ahead: 1.3 s if no turn ends, or 64 turns. Source: not recorded.
MOST_WAITS = 64
# Times that a caller looks before it waits in the kernel: about 5 us of pauses.
LOOKS = 100
TURN_SLOTS = 64  # a power of two
# FUTEX_WAIT | FUTEX_PRIVATE_FLAG (linux/futex.h).
FUTEX_WAIT_PRIVATE = 128
# FUTEX_WAKE | FUTEX_PRIVATE_FLAG (linux/futex.h).
FUTEX_WAKE_PRIVATE = 129

_TURNS = string.Template("""
llvm.mlir.global external @pbk_turns() {alignment = 64 : i64} : !llvm.array<$WORDS x i32> {
  %0 = llvm.mlir.zero : !llvm.array<$WORDS x i32>
  llvm.return %0 : !llvm.array<$WORDS x i32>
}
func.func private @pbk_slot_of_turn(%turn: i32) -> !llvm.ptr {
  %turns = llvm.mlir.addressof @pbk_turns : !llvm.ptr
  %last = arith.constant $LAST_SLOT : i32
  %two = arith.constant 2 : i32
  %slot = arith.andi %turn, %last : i32
  %word = arith.addi %slot, %two : i32
  %place = llvm.getelementptr %turns[%word] : (!llvm.ptr, i32) -> !llvm.ptr, i32
  return %place : !llvm.ptr
}
func.func private @syscall(i64, !llvm.ptr, i64, i64, !llvm.ptr) -> i64

func.func private @pbk_take_turn(%at_once: i64) -> i64 {
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %one32 = arith.constant 1 : i32
  %looks = arith.constant $LOOKS : i64
  %most = arith.constant $MOST : i64
  %nanoseconds = arith.constant $WAIT_NANOSECONDS : i64
  %futex = arith.constant $SYS_FUTEX : i64
  %wait = arith.constant $FUTEX_WAIT : i64
  %turns = llvm.mlir.addressof @pbk_turns : !llvm.ptr
  %ended = llvm.getelementptr %turns[4] : (!llvm.ptr) -> !llvm.ptr, i8
  %time = llvm.alloca %one x !llvm.array<2 x i64> : (i64) -> !llvm.ptr
  %time8 = llvm.getelementptr %time[8] : (!llvm.ptr) -> !llvm.ptr, i8
  llvm.store %zero, %time : i64, !llvm.ptr
  llvm.store %nanoseconds, %time8 : i64, !llvm.ptr
  %mine = llvm.atomicrmw add %turns, %one32 seq_cst : !llvm.ptr, i32
  %slot = func.call @pbk_slot_of_turn(%mine) : (i32) -> !llvm.ptr
  %tries = scf.while (%k = %zero) : (i64) -> i64 {
    %wakes = llvm.load %slot atomic seq_cst {alignment = 4 : i64} : !llvm.ptr -> i32
    %now = llvm.load %ended atomic seq_cst {alignment = 4 : i64} : !llvm.ptr -> i32
    %before32 = arith.subi %mine, %now : i32
    %before = arith.extsi %before32 : i32 to i64
    %full = arith.cmpi sge, %before, %at_once : i64
    %patient = arith.cmpi slt, %k, %most : i64
    %waiting = arith.andi %full, %patient : i1
    scf.if %waiting {
      %long = arith.cmpi sge, %k, %looks : i64
      scf.if %long {
        %expected = arith.extui %wakes : i32 to i64
        %r = func.call @syscall(%futex, %slot, %wait, %expected, %time) : (i64, !llvm.ptr, i64, i64, !llvm.ptr) -> i64
      } else {
        llvm.inline_asm has_side_effects "$SPIN_HINT", "" : () -> ()
      }
    }
    scf.condition(%waiting) %k : i64
  } do {
  ^bb0(%k: i64):
    %next = arith.addi %k, %one : i64
    scf.yield %next : i64
  }
  %come32 = llvm.load %turns atomic seq_cst {alignment = 4 : i64} : !llvm.ptr -> i32
  %gone32 = llvm.load %ended atomic seq_cst {alignment = 4 : i64} : !llvm.ptr -> i32
  %present32 = arith.subi %come32, %gone32 : i32
  %others32 = arith.subi %present32, %one32 : i32
  %others = arith.extsi %others32 : i32 to i64
  return %others : i64
}

func.func private @pbk_end_turn(%at_once: i64) {
  %one32 = arith.constant 1 : i32
  %zero32 = arith.constant 0 : i32
  %futex = arith.constant $SYS_FUTEX : i64
  %wake = arith.constant $FUTEX_WAKE : i64
  %all = arith.constant 2147483647 : i64
  %null = llvm.mlir.zero : !llvm.ptr
  %turns = llvm.mlir.addressof @pbk_turns : !llvm.ptr
  %ended = llvm.getelementptr %turns[4] : (!llvm.ptr) -> !llvm.ptr, i8
  %before = llvm.atomicrmw add %ended, %one32 seq_cst : !llvm.ptr, i32
  %at_once32 = arith.trunci %at_once : i64 to i32
  %mayrun = arith.addi %before, %at_once32 : i32
  %come = llvm.load %turns atomic seq_cst {alignment = 4 : i64} : !llvm.ptr -> i32
  %waiting = arith.subi %come, %mayrun : i32
  %is_there = arith.cmpi sgt, %waiting, %zero32 : i32
  scf.if %is_there {
    %slot = func.call @pbk_slot_of_turn(%mayrun) : (i32) -> !llvm.ptr
    %woken = llvm.atomicrmw add %slot, %one32 seq_cst : !llvm.ptr, i32
    %r = func.call @syscall(%futex, %slot, %wake, %all, %null) : (i64, !llvm.ptr, i64, i64, !llvm.ptr) -> i64
  }
  return
}
""")


def turns_text(host: Architecture) -> str:
    """@pbk_take_turn and @pbk_end_turn for this kind of processor."""
    return _TURNS.substitute(
        SPIN_HINT=host.spin_hint,
        SYS_FUTEX=host.futex,
        LOOKS=LOOKS,
        MOST=LOOKS + MOST_WAITS,
        WAIT_NANOSECONDS=WAIT_NANOSECONDS,
        LAST_SLOT=TURN_SLOTS - 1,
        WORDS=TURN_SLOTS + 2,
        FUTEX_WAIT=FUTEX_WAIT_PRIVATE,
        FUTEX_WAKE=FUTEX_WAKE_PRIVATE,
    )
