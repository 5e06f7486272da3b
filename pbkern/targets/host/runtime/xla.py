"""Programs under XLA: its thread pool, its handlers (FFI), and what an executable holds of a program.

LLVM dialect text.

Offsets are those of XLA FFI API 0.3 where pointers have 64 bits (xla/ffi/api/c_api.h, shipped with jaxlib);
`check_api_version` compares at first use. Threads come from XLA's own pool: the calling thread
works too, so nothing waits for a busy pool. The last participant to leave a loop frees its frame.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence

from pbkern.core.errors import TargetError
from pbkern.targets.host.processor import architecture
from pbkern.targets.host.program_text import INTERNAL

from . import arena, parallel, turns

API_VERSION = (0, 3)
# glibc maps and unmaps arrays above this size again each time (DEFAULT_MMAP_THRESHOLD_MAX of
# malloc.c).
POOLED_BYTES = 32 << 20
# Times that a calling thread looks for the end of a loop before it gives its core to others, about
# 20 to 50 us of pauses: where more threads call than there are cores, the thread that it waits for
# may need the core.
SPINS = 1000


@functools.cache
def check_api_version() -> None:
    """Raises TargetError if jaxlib's FFI header is not the version whose offsets are used here."""
    import jaxlib

    path = os.path.join(os.path.dirname(jaxlib.__file__), "include", "xla", "ffi", "api", "c_api.h")
    with open(path) as header:
        text = header.read()
    lines = [re.search(rf"XLA_FFI_API_{word} (\d+)", text) for word in ("MAJOR", "MINOR")]
    version = tuple(int(line[1]) for line in lines if line is not None)
    if len(version) < 2 or version[0] != API_VERSION[0] or version[1] < API_VERSION[1]:
        raise TargetError(
            "jaxlib's XLA FFI API is not supported",
            why=f"version {version}, tested with {API_VERSION}",
            hint="install a jaxlib from the range in pyproject.toml",
        )


def _api_call(offset: int, fields: Sequence[tuple[str, str]]) -> str:
    """Lines that call a function of XLA's table as `%answer`; `%frame` is the call frame.

    offset: of the function in XLA_FFI_Api. fields: of its arguments behind the first two words,
    which are their size in bytes and no extension: (value, type) each. `%one` is 1, `%null` the
    null pointer.
    """
    size = 8 * (2 + len(fields))
    words = [("%size", "i64"), ("%null", "!llvm.ptr"), *fields]
    places = [
        f"%a{8 * k} = llvm.getelementptr %a[{8 * k}] : (!llvm.ptr) -> !llvm.ptr, i8"
        for k in range(len(words))
    ]
    stores = [
        f"llvm.store {value}, %a{8 * k} : {kind}, !llvm.ptr"
        for k, (value, kind) in enumerate(words)
    ]
    lines = [
        f"%size = arith.constant {size} : i64",
        "%apip = llvm.getelementptr %frame[16] : (!llvm.ptr) -> !llvm.ptr, i8",
        "%api = llvm.load %apip : !llvm.ptr -> !llvm.ptr",
        f"%a = llvm.alloca %one x !llvm.array<{len(words)} x i64> : (i64) -> !llvm.ptr",
        *places,
        *stores,
        f"%functionp = llvm.getelementptr %api[{offset}] : (!llvm.ptr) -> !llvm.ptr, i8",
        "%function = llvm.load %functionp : !llvm.ptr -> !llvm.ptr",
        "%answer = llvm.call %function(%a) : !llvm.ptr, (!llvm.ptr) -> !llvm.ptr",
    ]
    return "\n".join("  " + line for line in lines)


_CONTEXT = """  %ctxp = llvm.getelementptr %frame[24] : (!llvm.ptr) -> !llvm.ptr, i8
  %ctx = llvm.load %ctxp : !llvm.ptr -> !llvm.ptr
"""

_ALLOCATOR = r"""
func.func private @malloc(i64) -> !llvm.ptr
func.func private @free(!llvm.ptr)
func.func private @aligned_alloc(i64, i64) -> !llvm.ptr
func.func private @sched_yield() -> i32
func.func private @madvise(!llvm.ptr, i64, i32) -> i32

func.func private @pbk_unref(%f: !llvm.ptr) {
  %minus = arith.constant -1 : i64
  %one = arith.constant 1 : i64
  %refs = llvm.getelementptr %f[128] : (!llvm.ptr) -> !llvm.ptr, i8
  %old = llvm.atomicrmw add %refs, %minus acq_rel : !llvm.ptr, i64
  %last = arith.cmpi eq, %old, %one : i64
  scf.if %last {
    func.call @free(%f) : (!llvm.ptr) -> ()
  }
  return
}
"""

_PARALLEL = r"""
func.func private @pbk_worker(%f: !llvm.ptr) {
  %one = arith.constant 1 : i64
  %slots = llvm.getelementptr %f[136] : (!llvm.ptr) -> !llvm.ptr, i8
  %slot = llvm.atomicrmw add %slots, %one acq_rel : !llvm.ptr, i64
  func.call @pbk_drain(%f, %slot) : (!llvm.ptr, i64) -> ()
  func.call @pbk_unref(%f) : (!llvm.ptr) -> ()
  return
}

func.func private @pbk_pool_size(%frame: !llvm.ptr) -> i64 {
  %one = arith.constant 1 : i64
  %null = llvm.mlir.zero : !llvm.ptr
  %out = llvm.alloca %one x i64 : (i64) -> !llvm.ptr
  llvm.store %one, %out : i64, !llvm.ptr
CONTEXT
NUM_THREADS
  %n = llvm.load %out : !llvm.ptr -> i64
  return %n : i64
}

func.func @pbk_parallel(%frame: !llvm.ptr, %task: !llvm.ptr, %args: !llvm.ptr, %n: i64, %chunk: i64, %limit: i64) {
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %null = llvm.mlir.zero : !llvm.ptr
  %has = llvm.icmp "ne" %frame, %null : !llvm.ptr
  %pool = scf.if %has -> (i64) {
    %size = func.call @pbk_pool_size(%frame) : (!llvm.ptr) -> i64
    scf.yield %size : i64
  } else {
    scf.yield %one : i64
  }
  %chunks = arith.ceildivsi %n, %chunk : i64
  %t0 = arith.minsi %pool, %limit : i64
  %most = arith.minsi %t0, %chunks : i64
  %parallel = arith.cmpi sgt, %most, %one : i64
  // Callers that are here at the same time have equal shares of the cores. One loop more than there are cores may run: a core
  // has work while the caller whose turn it is wakes up.
  %at_once = arith.addi %pool, %one : i64
  %threads = scf.if %parallel -> (i64) {
    %others = func.call @pbk_take_turn(%at_once) : (i64) -> i64
    %callers = arith.addi %others, %one : i64
    %share = arith.divsi %pool, %callers : i64
    %t1 = arith.minsi %most, %share : i64
    %t2 = arith.maxsi %t1, %one : i64
    scf.yield %t2 : i64
  } else {
    scf.yield %one : i64
  }
  %several = arith.cmpi sgt, %threads, %one : i64
  scf.if %several {
NEW_LOOP
    %a = llvm.alloca %one x !llvm.array<5 x i64> : (i64) -> !llvm.ptr
    %apip = llvm.getelementptr %frame[16] : (!llvm.ptr) -> !llvm.ptr, i8
    %api = llvm.load %apip : !llvm.ptr -> !llvm.ptr
    %ctxp = llvm.getelementptr %frame[24] : (!llvm.ptr) -> !llvm.ptr, i8
    %ctx = llvm.load %ctxp : !llvm.ptr -> !llvm.ptr
    %sp = llvm.getelementptr %api[136] : (!llvm.ptr) -> !llvm.ptr, i8
    %schedule = llvm.load %sp : !llvm.ptr -> !llvm.ptr
    %worker = func.constant @pbk_worker : (!llvm.ptr) -> ()
    %wp = builtin.unrealized_conversion_cast %worker : (!llvm.ptr) -> () to !llvm.ptr
    %size = arith.constant 40 : i64
    %a8 = llvm.getelementptr %a[8] : (!llvm.ptr) -> !llvm.ptr, i8
    %a16 = llvm.getelementptr %a[16] : (!llvm.ptr) -> !llvm.ptr, i8
    %a24 = llvm.getelementptr %a[24] : (!llvm.ptr) -> !llvm.ptr, i8
    %a32 = llvm.getelementptr %a[32] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %size, %a : i64, !llvm.ptr
    llvm.store %null, %a8 : !llvm.ptr, !llvm.ptr
    llvm.store %ctx, %a16 : !llvm.ptr, !llvm.ptr
    llvm.store %wp, %a24 : !llvm.ptr, !llvm.ptr
    llvm.store %f, %a32 : !llvm.ptr, !llvm.ptr
    scf.for %k = %one to %threads step %one : i64 {
      %error = llvm.call %schedule(%a) : !llvm.ptr, (!llvm.ptr) -> !llvm.ptr
      %failed = llvm.icmp "ne" %error, %null : !llvm.ptr
      scf.if %failed {
        func.call @pbk_unref(%f) : (!llvm.ptr) -> ()
      }
    }
    func.call @pbk_drain(%f, %zero) : (!llvm.ptr, i64) -> ()
    %spins = arith.constant SPINS : i64
    %waits = scf.while (%k = %zero) : (i64) -> i64 {
      %d = llvm.load %f64 atomic acquire {alignment = 8 : i64} : !llvm.ptr -> i64
      %waiting = arith.cmpi ne, %d, %n : i64
      scf.if %waiting {
        %long = arith.cmpi sgt, %k, %spins : i64
        scf.if %long {
          %yielded = func.call @sched_yield() : () -> i32
        } else {
          llvm.inline_asm has_side_effects "SPIN_HINT", "" : () -> ()
        }
      }
      scf.condition(%waiting) %k : i64
    } do {
    ^bb0(%k: i64):
      %next = arith.addi %k, %one : i64
      scf.yield %next : i64
    }
    func.call @pbk_unref(%f) : (!llvm.ptr) -> ()
  } else {
    llvm.call %task(%args, %zero, %n, %zero) : !llvm.ptr, (!llvm.ptr, i64, i64, i64) -> ()
  }
  scf.if %parallel {
    func.call @pbk_end_turn(%at_once) : (i64) -> ()
  }
  return
}
"""
for _name, _text in {
    "SPINS": str(SPINS),
    "CONTEXT": _CONTEXT,
    "NUM_THREADS": _api_call(144, [("%ctx", "!llvm.ptr"), ("%out", "!llvm.ptr")]),
    "NEW_LOOP": parallel.new_loop("func.call @malloc(%bytes) : (i64) -> !llvm.ptr", counted=True),
}.items():
    _PARALLEL = _PARALLEL.replace(_name, _text)

STATE = """
llvm.mlir.global external @pbk_state_type(0 : i64) {alignment = 8 : i64} : i64

func.func @pbk_hold(%frame: !llvm.ptr, %held: !llvm.ptr) -> !llvm.ptr {
  %one = arith.constant 1 : i64
  %null = llvm.mlir.zero : !llvm.ptr
  %before = llvm.atomicrmw add %held, %one acq_rel : !llvm.ptr, i64
  %type = llvm.mlir.addressof @pbk_state_type : !llvm.ptr
  %stagep = llvm.getelementptr %frame[32] : (!llvm.ptr) -> !llvm.ptr, i8
  %stage = llvm.load %stagep : !llvm.ptr -> i64
CONTEXT
STATE_SET
  return %answer : !llvm.ptr
}

func.func @pbk_drop(%held: !llvm.ptr) {
  %minus = arith.constant -1 : i64
  %before = llvm.atomicrmw add %held, %minus acq_rel : !llvm.ptr, i64
  return
}
""".replace("CONTEXT", _CONTEXT).replace(
    "STATE_SET",
    _api_call(
        104,
        [("%ctx", "!llvm.ptr"), ("%stage", "i64"), ("%type", "!llvm.ptr"), ("%held", "!llvm.ptr")],
    ),
)

# Counts numbers that are out of their range (dsl/primitives/in_range.py), for the whole process.
REPORTS = """
llvm.mlir.global external @pbk_reports(0 : i64) {alignment = 64 : i64} : i64

func.func @pbk_report() {
  %one = arith.constant 1 : i64
  %count = llvm.mlir.addressof @pbk_reports : !llvm.ptr
  %before = llvm.atomicrmw add %count, %one acq_rel : !llvm.ptr, i64
  return
}
"""

# Functions of the runtime that programs call. The execution engine resolves registered symbols
# under this prefix.
SYMBOLS = (
    "pbk_parallel",
    "pbk_run",
    "pbk_handle",
    "pbk_begin",
    "pbk_report",
)
PREFIX = "_mlir_ciface_"

# XLA_FFI_Error_Code_RESOURCE_EXHAUSTED of c_api.h.
RESOURCE_EXHAUSTED = 8

# @pbk_no_memory(frame, message) -> XLA's error with this text.
NO_MEMORY = f"""
func.func @pbk_no_memory(%frame: !llvm.ptr, %message: !llvm.ptr) -> !llvm.ptr {{
  %one = arith.constant 1 : i64
  %code = arith.constant {RESOURCE_EXHAUSTED} : i64
  %null = llvm.mlir.zero : !llvm.ptr
{_api_call(48, [("%message", "!llvm.ptr"), ("%code", "i64")])}
  return %answer : !llvm.ptr
}}
"""


def metadata_text(traits: int = 0) -> str:
    """@pbk_metadata(call frame) -> whether XLA asked what the handler is; it is told API version and traits."""
    return f"""
func.func @pbk_metadata(%frame: !llvm.ptr) -> i1 {INTERNAL} {{
  %extp = llvm.getelementptr %frame[8] : (!llvm.ptr) -> !llvm.ptr, i8
  %ext = llvm.load %extp : !llvm.ptr -> !llvm.ptr
  %null = llvm.mlir.zero : !llvm.ptr
  %has = llvm.icmp "ne" %ext, %null : !llvm.ptr
  %query = scf.if %has -> (i1) {{
    %tp = llvm.getelementptr %ext[8] : (!llvm.ptr) -> !llvm.ptr, i8
    %t = llvm.load %tp : !llvm.ptr -> i32
    %k = arith.constant 1 : i32
    %is = arith.cmpi eq, %t, %k : i32
    scf.yield %is : i1
  }} else {{
    %no = arith.constant false
    scf.yield %no : i1
  }}
  scf.if %query {{
    %mp = llvm.getelementptr %ext[24] : (!llvm.ptr) -> !llvm.ptr, i8
    %m = llvm.load %mp : !llvm.ptr -> !llvm.ptr
    %major = arith.constant {API_VERSION[0]} : i32
    %minor = arith.constant {API_VERSION[1]} : i32
    %traits = arith.constant {traits} : i32
    %type = arith.constant 0 : i64
    %m24 = llvm.getelementptr %m[24] : (!llvm.ptr) -> !llvm.ptr, i8
    %m28 = llvm.getelementptr %m[28] : (!llvm.ptr) -> !llvm.ptr, i8
    %m32 = llvm.getelementptr %m[32] : (!llvm.ptr) -> !llvm.ptr, i8
    %m40 = llvm.getelementptr %m[40] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %major, %m24 : i32, !llvm.ptr
    llvm.store %minor, %m28 : i32, !llvm.ptr
    llvm.store %traits, %m32 : i32, !llvm.ptr
    llvm.store %type, %m40 : i64, !llvm.ptr
  }}
  return %query : i1
}}
"""


# @pbk_begin(call frame, where executables are counted): counts one, unless XLA only asks what the handler is.
# @pbk_run(call frame or null, addresses, @pbk_main, facts, arenas): @pbk_main with an arena; 0, or 1 where there is no memory.
# @pbk_handle(call frame, @pbk_main, facts, arenas, message): answers XLA's metadata query, or gathers addresses and runs the
# program. A call with more operands than the program has inputs brings places for the results of POOLED_BYTES and more.
_CALLS = """
func.func @pbk_begin(%frame: !llvm.ptr, %held: !llvm.ptr) -> !llvm.ptr {
  %asked = func.call @pbk_metadata(%frame) : (!llvm.ptr) -> i1
  %error = scf.if %asked -> (!llvm.ptr) {
    %null = llvm.mlir.zero : !llvm.ptr
    scf.yield %null : !llvm.ptr
  } else {
    %e = func.call @pbk_hold(%frame, %held) : (!llvm.ptr, !llvm.ptr) -> !llvm.ptr
    scf.yield %e : !llvm.ptr
  }
  return %error : !llvm.ptr
}

func.func @pbk_run(%frame: !llvm.ptr, %buffers: !llvm.ptr, %main: !llvm.ptr, %facts: !llvm.ptr, %pool: !llvm.ptr) -> i32 {
  %done = arith.constant 0 : i32
  %no_memory = arith.constant 1 : i32
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %null = llvm.mlir.zero : !llvm.ptr
  %out = llvm.alloca %one x !llvm.ptr : (i64) -> !llvm.ptr
  %bytes_p = llvm.getelementptr %facts[ARENA_BYTES] : (!llvm.ptr) -> !llvm.ptr, i64
  %bytes = llvm.load %bytes_p : !llvm.ptr -> i64
  %needed = arith.cmpi ne, %bytes, %zero : i64
  %status = scf.if %needed -> (i32) {
    %align_p = llvm.getelementptr %facts[ARENA_ALIGNMENT] : (!llvm.ptr) -> !llvm.ptr, i64
    %align = llvm.load %align_p : !llvm.ptr -> i64
    %slot = func.call @pbk_acquire(%pool, %bytes, %align, %out) : (!llvm.ptr, i64, i64, !llvm.ptr) -> i64
    %arena = llvm.load %out : !llvm.ptr -> !llvm.ptr
    %has = llvm.icmp "ne" %arena, %null : !llvm.ptr
    %s = scf.if %has -> (i32) {
      llvm.call %main(%frame, %buffers, %arena) : !llvm.ptr, (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> ()
      scf.yield %done : i32
    } else {
      scf.yield %no_memory : i32
    }
    func.call @pbk_release(%pool, %arena, %slot) : (!llvm.ptr, !llvm.ptr, i64) -> ()
    scf.yield %s : i32
  } else {
    llvm.call %main(%frame, %buffers, %null) : !llvm.ptr, (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> ()
    scf.yield %done : i32
  }
  return %status : i32
}

func.func @pbk_handle(
    %frame: !llvm.ptr, %main: !llvm.ptr, %facts: !llvm.ptr, %pool: !llvm.ptr, %message: !llvm.ptr) -> !llvm.ptr {
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %null = llvm.mlir.zero : !llvm.ptr
  %inputs_p = llvm.getelementptr %facts[INPUTS] : (!llvm.ptr) -> !llvm.ptr, i64
  %inputs = llvm.load %inputs_p : !llvm.ptr -> i64
  %outputs_p = llvm.getelementptr %facts[OUTPUTS] : (!llvm.ptr) -> !llvm.ptr, i64
  %outputs = llvm.load %outputs_p : !llvm.ptr -> i64
  %total = arith.addi %inputs, %outputs : i64
  %buffers = llvm.alloca %total x !llvm.ptr : (i64) -> !llvm.ptr
  %asked = func.call @pbk_metadata(%frame) : (!llvm.ptr) -> i1
  %error = scf.if %asked -> (!llvm.ptr) {
    scf.yield %null : !llvm.ptr
  } else {
    %args_p = llvm.getelementptr %frame[72] : (!llvm.ptr) -> !llvm.ptr, i8
    %args = llvm.load %args_p : !llvm.ptr -> !llvm.ptr
    %rets_p = llvm.getelementptr %frame[112] : (!llvm.ptr) -> !llvm.ptr, i8
    %rets = llvm.load %rets_p : !llvm.ptr -> !llvm.ptr
    %count_p = llvm.getelementptr %frame[56] : (!llvm.ptr) -> !llvm.ptr, i8
    %count = llvm.load %count_p : !llvm.ptr -> i64
    %brings = arith.cmpi ne, %count, %inputs : i64
    scf.for %k = %zero to %inputs step %one : i64 {
      %at = llvm.getelementptr %args[%k] : (!llvm.ptr, i64) -> !llvm.ptr, !llvm.ptr
      %buffer = llvm.load %at : !llvm.ptr -> !llvm.ptr
      %data_p = llvm.getelementptr %buffer[24] : (!llvm.ptr) -> !llvm.ptr, i8
      %data = llvm.load %data_p : !llvm.ptr -> !llvm.ptr
      %slot = llvm.getelementptr %buffers[%k] : (!llvm.ptr, i64) -> !llvm.ptr, !llvm.ptr
      llvm.store %data, %slot : !llvm.ptr, !llvm.ptr
    }
    %pooled = arith.constant POOLED_BYTES : i64
    %sizes = llvm.getelementptr %facts[OUTPUT_BYTES] : (!llvm.ptr) -> !llvm.ptr, i64
    %results = llvm.getelementptr %buffers[%inputs] : (!llvm.ptr, i64) -> !llvm.ptr, !llvm.ptr
    %ends:2 = scf.for %k = %zero to %outputs step %one iter_args(%place = %inputs, %ret = %zero) -> (i64, i64) : i64 {
      %size_p = llvm.getelementptr %sizes[%k] : (!llvm.ptr, i64) -> !llvm.ptr, i64
      %size = llvm.load %size_p : !llvm.ptr -> i64
      %large = arith.cmpi sge, %size, %pooled : i64
      %placed = arith.andi %brings, %large : i1
      %place_at = llvm.getelementptr %args[%place] : (!llvm.ptr, i64) -> !llvm.ptr, !llvm.ptr
      %ret_at = llvm.getelementptr %rets[%ret] : (!llvm.ptr, i64) -> !llvm.ptr, !llvm.ptr
      %at = arith.select %placed, %place_at, %ret_at : !llvm.ptr
      %buffer = llvm.load %at : !llvm.ptr -> !llvm.ptr
      %data_p = llvm.getelementptr %buffer[24] : (!llvm.ptr) -> !llvm.ptr, i8
      %data = llvm.load %data_p : !llvm.ptr -> !llvm.ptr
      %slot = llvm.getelementptr %results[%k] : (!llvm.ptr, i64) -> !llvm.ptr, !llvm.ptr
      llvm.store %data, %slot : !llvm.ptr, !llvm.ptr
      func.call @pbk_huge(%data, %size) : (!llvm.ptr, i64) -> ()
      %one_place = arith.extui %placed : i1 to i64
      %one_ret = arith.subi %one, %one_place : i64
      %next_place = arith.addi %place, %one_place : i64
      %next_ret = arith.addi %ret, %one_ret : i64
      scf.yield %next_place, %next_ret : i64, i64
    }
    %status = func.call @pbk_run(%frame, %buffers, %main, %facts, %pool)
        : (!llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
    %done = arith.constant 0 : i32
    %failed = arith.cmpi ne, %status, %done : i32
    %e = scf.if %failed -> (!llvm.ptr) {
      %text = llvm.load %message : !llvm.ptr -> !llvm.ptr
      %made = func.call @pbk_no_memory(%frame, %text) : (!llvm.ptr, !llvm.ptr) -> !llvm.ptr
      scf.yield %made : !llvm.ptr
    } else {
      scf.yield %null : !llvm.ptr
    }
    scf.yield %e : !llvm.ptr
  }
  return %error : !llvm.ptr
}
"""
for _place, _name in enumerate(
    ("INPUTS", "OUTPUTS", "ARENA_BYTES", "ARENA_ALIGNMENT", "OUTPUT_BYTES")
):  # words of @pbk_facts, as `program_text` writes them
    _CALLS = _CALLS.replace(f"%facts[{_name}]", f"%facts[{_place}]")
_CALLS = _CALLS.replace("POOLED_BYTES", str(POOLED_BYTES))


def runtime_module_text() -> str:
    """The part that is compiled once per process. Raises TargetError on computers that programs are not compiled for."""
    host = architecture()
    loops = _PARALLEL.replace("SPIN_HINT", host.spin_hint)
    waits = parallel.DRAIN + turns.turns_text(host) + loops
    calls = STATE + NO_MEMORY + metadata_text() + _CALLS
    return _ALLOCATOR + waits + arena.HUGE + arena.LIST + calls + REPORTS


def program_text(arena_bytes: int, input_count: int, output_bytes: Sequence[int]) -> str:
    """The functions of one program that others call: @pbk_call (addresses), @pbk_handler and @pbk_instantiate (XLA FFI).

    They hand the program's facts to functions of the runtime. Code of its own for what those do would take 4 ms more to
    compile for each program.
    """
    facts = [input_count, len(output_bytes), *arena.extent(arena_bytes), *output_bytes]
    listed = ", ".join(map(str, facts))
    return f"""
func.func private @{PREFIX}pbk_parallel(!llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64, i64)
func.func private @{PREFIX}pbk_begin(!llvm.ptr, !llvm.ptr) -> !llvm.ptr
func.func private @{PREFIX}pbk_run(!llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
func.func private @{PREFIX}pbk_handle(!llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> !llvm.ptr
llvm.mlir.global external @pbk_message(0 : i64) {{alignment = 8 : i64}} : i64
llvm.mlir.global external @pbk_held(0 : i64) {{alignment = 64 : i64}} : i64
llvm.mlir.global external @pbk_pool() {{alignment = 64 : i64}} : !llvm.array<{2 * arena.ARENAS} x i64> {{
  %0 = llvm.mlir.zero : !llvm.array<{2 * arena.ARENAS} x i64>
  llvm.return %0 : !llvm.array<{2 * arena.ARENAS} x i64>
}}
llvm.mlir.global internal constant @pbk_facts(dense<[{listed}]> : tensor<{len(facts)}xi64>) : !llvm.array<{len(facts)} x i64>

func.func @pbk_instantiate(%frame: !llvm.ptr) -> !llvm.ptr {{
  %held = llvm.mlir.addressof @pbk_held : !llvm.ptr
  %error = func.call @{PREFIX}pbk_begin(%frame, %held) : (!llvm.ptr, !llvm.ptr) -> !llvm.ptr
  return %error : !llvm.ptr
}}

func.func @pbk_call(%buffers: !llvm.ptr) -> i32 {{
  %null = llvm.mlir.zero : !llvm.ptr
{_PASSED}
  %status = func.call @{PREFIX}pbk_run(%null, %buffers, %main, %facts, %pool)
      : (!llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
  return %status : i32
}}

func.func @pbk_handler(%frame: !llvm.ptr) -> !llvm.ptr {{
{_PASSED}
  %message = llvm.mlir.addressof @pbk_message : !llvm.ptr
  %error = func.call @{PREFIX}pbk_handle(%frame, %main, %facts, %pool, %message)
      : (!llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> !llvm.ptr
  return %error : !llvm.ptr
}}
"""


_PASSED = """  %function = func.constant @pbk_main : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> ()
  %main = builtin.unrealized_conversion_cast %function : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> () to !llvm.ptr
  %facts = llvm.mlir.addressof @pbk_facts : !llvm.ptr
  %pool = llvm.mlir.addressof @pbk_pool : !llvm.ptr"""
