"""Parallel loops, on whoever's threads: how tasks are divided, and the frame that participants share.

LLVM dialect text.

    @_mlir_ciface_pbk_parallel(frame, task, args, n, chunk, limit)

runs task(args, low, high, slot) for programs [0, n) in tasks of `chunk`, on at most `limit`
threads; `slot` tells which scratch a thread may use. `frame` is the caller's context, which
runtime/xla.py asks for threads; runtime/openmp.py and runtime/serial.py do not look at it.

Tasks are divided among threads in order: from call to call, each works on the part of the arrays
that its cache may hold. A thread without tasks of its own takes those of others.

Frame of a parallel loop (bytes): 64 programs done, 128 references, 136 slots handed out, 184
threads, 192 programs, 200 programs per task, 208 task function, 216 its arguments, 256 and every 64
behind it: tasks taken of each thread's.
"""

from __future__ import annotations

# The function that divides a loop's programs among threads: each kind of threads has its own.
PARALLEL = "_mlir_ciface_pbk_parallel"
# What the frame holds at first, by offset. References and slots are counted where threads come and
# go as they like.
_FIELDS = {
    64: "%zero : i64",
    128: "%threads : i64",
    136: "%one : i64",
    184: "%threads : i64",
    192: "%n : i64",
    200: "%chunk : i64",
    208: "%task : !llvm.ptr",
    216: "%args : !llvm.ptr",
}
_COUNTED = (128, 136)


def new_loop(allocated: str, counted: bool) -> str:
    """Lines that make the frame %f of a loop on %threads, in memory that the expression `allocated` gives for %bytes.

    counted: whether participants are counted, because the last to leave frees the frame.
    """
    fields = {at: value for at, value in _FIELDS.items() if counted or at not in _COUNTED}
    lines = [
        "%line = arith.constant 64 : i64",
        "%head = arith.constant 256 : i64",
        "%parts = arith.muli %threads, %line : i64",
        "%bytes = arith.addi %head, %parts : i64",
        f"%f = {allocated}",
        "scf.for %at = %head to %bytes step %line : i64 {",
        "  %part = llvm.getelementptr %f[%at] : (!llvm.ptr, i64) -> !llvm.ptr, i8",
        "  llvm.store %zero, %part : i64, !llvm.ptr",
        "}",
        *(f"%f{at} = llvm.getelementptr %f[{at}] : (!llvm.ptr) -> !llvm.ptr, i8" for at in fields),
        *(
            f"llvm.store {value.partition(' ')[0]}, %f{at} {value.partition(' ')[2]}, !llvm.ptr"
            for at, value in fields.items()
        ),
    ]
    return "\n".join("    " + line for line in lines)


# @pbk_drain(frame of a loop, slot): runs tasks until none is left.
DRAIN = r"""
func.func private @pbk_drain(%f: !llvm.ptr, %slot: i64) {
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %line = arith.constant 64 : i64
  %before_parts = arith.constant 192 : i64
  %done = llvm.getelementptr %f[64] : (!llvm.ptr) -> !llvm.ptr, i8
  %threadsp = llvm.getelementptr %f[184] : (!llvm.ptr) -> !llvm.ptr, i8
  %np = llvm.getelementptr %f[192] : (!llvm.ptr) -> !llvm.ptr, i8
  %cp = llvm.getelementptr %f[200] : (!llvm.ptr) -> !llvm.ptr, i8
  %tp = llvm.getelementptr %f[208] : (!llvm.ptr) -> !llvm.ptr, i8
  %ap = llvm.getelementptr %f[216] : (!llvm.ptr) -> !llvm.ptr, i8
  %threads = llvm.load %threadsp : !llvm.ptr -> i64
  %n = llvm.load %np : !llvm.ptr -> i64
  %chunk = llvm.load %cp : !llvm.ptr -> i64
  %task = llvm.load %tp : !llvm.ptr -> !llvm.ptr
  %args = llvm.load %ap : !llvm.ptr -> !llvm.ptr
  %tasks = arith.ceildivsi %n, %chunk : i64
  scf.for %k = %zero to %threads step %one : i64 {
    %turned = arith.addi %slot, %k : i64
    %part = arith.remsi %turned, %threads : i64
    %after = arith.addi %part, %one : i64
    %ahead = arith.muli %part, %tasks : i64
    %first = arith.divsi %ahead, %threads : i64
    %until = arith.muli %after, %tasks : i64
    %end = arith.divsi %until, %threads : i64
    %offset = arith.muli %after, %line : i64
    %place = arith.addi %offset, %before_parts : i64
    %next = llvm.getelementptr %f[%place] : (!llvm.ptr, i64) -> !llvm.ptr, i8
    scf.while : () -> () {
      %taken = llvm.atomicrmw add %next, %one acq_rel : !llvm.ptr, i64
      %i = arith.addi %first, %taken : i64
      %more = arith.cmpi slt, %i, %end : i64
      scf.if %more {
        %low = arith.muli %i, %chunk : i64
        %above = arith.addi %low, %chunk : i64
        %high = arith.minsi %above, %n : i64
        llvm.call %task(%args, %low, %high, %slot) : !llvm.ptr, (!llvm.ptr, i64, i64, i64) -> ()
        %count = arith.subi %high, %low : i64
        %before = llvm.atomicrmw add %done, %count acq_rel : !llvm.ptr, i64
      }
      scf.condition(%more)
    } do {
      scf.yield
    }
  }
  return
}
"""
