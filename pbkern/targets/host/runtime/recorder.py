"""Records of what runs in recorded programs: which step, on which thread, from when to when. LLVM dialect text.

    @pbk_open(program, site, parent, low, high) -> number of a new record, whose time begins
    @pbk_close(number)                             ends its time

A record is RECORD_WORDS words of 64 bits: program, site, parent, low, high, thread (pthread_self), begin and end in
nanoseconds of CLOCK_MONOTONIC. They are in memory of Python's (targets/host/recording.py), to which
@pbk_records points: its address, the number of records that it holds, and how many were opened. A
number of 0 records turns recording off; those that find no place are counted alone.

PARALLEL_LOOP is a parallel loop (runtime/parallel.py) that records itself and each task, and calls
another one.
"""

from __future__ import annotations

from .parallel import PARALLEL
from .xla import PREFIX

# 64-bit words of a record: a cache line, so that threads do not write to the same one.
RECORD_WORDS = 8
# CLOCK_MONOTONIC of Linux (time.h).
CLOCK = 1
# Site of a record that is a parallel loop of a launch.
LOOP_SITE = -1
# Site of a record that is a task of such a loop; its parent is the loop.
TASK_SITE = -2
# Parent of a record that has none.
NO_PARENT = -1
# Name by which PARALLEL_LOOP calls the loop that does the work.
INNER_PARALLEL = "pbk_inner_parallel"

DECLARATIONS = f"""
func.func private @{PREFIX}pbk_open(!llvm.ptr, i64, i64, i64, i64) -> i64
func.func private @{PREFIX}pbk_close(i64)
"""
SYMBOLS = ("pbk_open", "pbk_close")

_FIELDS = ("%word", "%site", "%parent", "%low", "%high", "%thread", "%begin")

RECORDER = f"""
llvm.mlir.global external @pbk_records() {{alignment = 64 : i64}} : !llvm.array<3 x i64> {{
  %0 = llvm.mlir.zero : !llvm.array<3 x i64>
  llvm.return %0 : !llvm.array<3 x i64>
}}
func.func private @clock_gettime(i32, !llvm.ptr) -> i32
func.func private @pthread_self() -> i64

func.func private @pbk_now() -> i64 {{
  %one = arith.constant 1 : i64
  %clock = arith.constant {CLOCK} : i32
  %second = arith.constant 1000000000 : i64
  %time = llvm.alloca %one x !llvm.array<2 x i64> : (i64) -> !llvm.ptr
  %status = func.call @clock_gettime(%clock, %time) : (i32, !llvm.ptr) -> i32
  %time8 = llvm.getelementptr %time[8] : (!llvm.ptr) -> !llvm.ptr, i8
  %seconds = llvm.load %time : !llvm.ptr -> i64
  %rest = llvm.load %time8 : !llvm.ptr -> i64
  %whole = arith.muli %seconds, %second : i64
  %now = arith.addi %whole, %rest : i64
  return %now : i64
}}

func.func private @pbk_place(%number: i64) -> !llvm.ptr {{
  %bytes = arith.constant {8 * RECORD_WORDS} : i64
  %records = llvm.mlir.addressof @pbk_records : !llvm.ptr
  %base = llvm.load %records : !llvm.ptr -> !llvm.ptr
  %offset = arith.muli %number, %bytes : i64
  %place = llvm.getelementptr %base[%offset] : (!llvm.ptr, i64) -> !llvm.ptr, i8
  return %place : !llvm.ptr
}}

func.func private @pbk_fits(%number: i64) -> i1 {{
  %records = llvm.mlir.addressof @pbk_records : !llvm.ptr
  %most = llvm.getelementptr %records[8] : (!llvm.ptr) -> !llvm.ptr, i8
  %limit = llvm.load %most atomic acquire {{alignment = 8 : i64}} : !llvm.ptr -> i64
  %fits = arith.cmpi ult, %number, %limit : i64
  return %fits : i1
}}

func.func @pbk_open(%program: !llvm.ptr, %site: i64, %parent: i64, %low: i64, %high: i64) -> i64 {{
  %one = arith.constant 1 : i64
  %records = llvm.mlir.addressof @pbk_records : !llvm.ptr
  %count = llvm.getelementptr %records[16] : (!llvm.ptr) -> !llvm.ptr, i8
  %number = llvm.atomicrmw add %count, %one acq_rel : !llvm.ptr, i64
  %fits = func.call @pbk_fits(%number) : (i64) -> i1
  scf.if %fits {{
    %word = llvm.ptrtoint %program : !llvm.ptr to i64
    %thread = func.call @pthread_self() : () -> i64
    %place = func.call @pbk_place(%number) : (i64) -> !llvm.ptr
    %begin = func.call @pbk_now() : () -> i64
{chr(10).join(f"    %p{n} = llvm.getelementptr %place[{8 * n}] : (!llvm.ptr) -> !llvm.ptr, i8" for n in range(len(_FIELDS)))}
{chr(10).join(f"    llvm.store {field}, %p{n} : i64, !llvm.ptr" for n, field in enumerate(_FIELDS))}
  }}
  return %number : i64
}}

func.func @pbk_close(%number: i64) {{
  %fits = func.call @pbk_fits(%number) : (i64) -> i1
  scf.if %fits {{
    %end = func.call @pbk_now() : () -> i64
    %place = func.call @pbk_place(%number) : (i64) -> !llvm.ptr
    %last = llvm.getelementptr %place[{8 * (RECORD_WORDS - 1)}] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %end, %last : i64, !llvm.ptr
  }}
  return
}}
"""

PARALLEL_LOOP = f"""
func.func private @{INNER_PARALLEL}(!llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64, i64)
{DECLARATIONS}
func.func @pbk_recorded_task(%loop: !llvm.ptr, %low: i64, %high: i64, %slot: i64) {{
  %site = arith.constant {TASK_SITE} : i64
  %null = llvm.mlir.zero : !llvm.ptr
  %loop8 = llvm.getelementptr %loop[8] : (!llvm.ptr) -> !llvm.ptr, i8
  %loop16 = llvm.getelementptr %loop[16] : (!llvm.ptr) -> !llvm.ptr, i8
  %task = llvm.load %loop : !llvm.ptr -> !llvm.ptr
  %args = llvm.load %loop8 : !llvm.ptr -> !llvm.ptr
  %parent = llvm.load %loop16 : !llvm.ptr -> i64
  %number = func.call @{PREFIX}pbk_open(%null, %site, %parent, %low, %high) : (!llvm.ptr, i64, i64, i64, i64) -> i64
  llvm.call %task(%args, %low, %high, %slot) : !llvm.ptr, (!llvm.ptr, i64, i64, i64) -> ()
  func.call @{PREFIX}pbk_close(%number) : (i64) -> ()
  return
}}

func.func @{PARALLEL}(
    %frame: !llvm.ptr, %task: !llvm.ptr, %args: !llvm.ptr, %n: i64, %chunk: i64, %limit: i64) {{
  %site = arith.constant {LOOP_SITE} : i64
  %none = arith.constant {NO_PARENT} : i64
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %null = llvm.mlir.zero : !llvm.ptr
  %number = func.call @{PREFIX}pbk_open(%null, %site, %none, %zero, %n) : (!llvm.ptr, i64, i64, i64, i64) -> i64
  %loop = llvm.alloca %one x !llvm.array<3 x i64> : (i64) -> !llvm.ptr
  %loop8 = llvm.getelementptr %loop[8] : (!llvm.ptr) -> !llvm.ptr, i8
  %loop16 = llvm.getelementptr %loop[16] : (!llvm.ptr) -> !llvm.ptr, i8
  llvm.store %task, %loop : !llvm.ptr, !llvm.ptr
  llvm.store %args, %loop8 : !llvm.ptr, !llvm.ptr
  llvm.store %number, %loop16 : i64, !llvm.ptr
  %recorded = func.constant @pbk_recorded_task : (!llvm.ptr, i64, i64, i64) -> ()
  %pointer = builtin.unrealized_conversion_cast %recorded : (!llvm.ptr, i64, i64, i64) -> () to !llvm.ptr
  func.call @{INNER_PARALLEL}(%frame, %pointer, %loop, %n, %chunk, %limit)
      : (!llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64, i64) -> ()
  func.call @{PREFIX}pbk_close(%number) : (i64) -> ()
  return
}}
"""
