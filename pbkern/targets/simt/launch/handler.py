"""HostProgram -> XLA FFI handler that launches its kernels: the stream is XLA's, temporaries are a further result of the call.

    @pbk_handler(call frame)    gathers addresses and the stream, runs the steps, and makes an error of what failed
    @pbk_direct(buffers, temporaries, stream)    the same for callers that have addresses: the text of an error, or null
    @pbk_main(call, buffers, temporaries)    the steps; `call` holds the stream, the first error, the kernel that it is of, and
                                             the device

It does not hold the addresses of the driver's table and of kernels' rows of handles: they are symbols of its object file, so
that later processes can load it.

    @pbk_table, @pbk_recent    of the driver (driver.py)
    @pbk_row<n>                row of the program's kernel n

After an error no further step does anything. Conditions of loops and branches, recorded times,
prints and checks are read back from the device, which waits for the stream: such a call cannot be
part of a command buffer, and the handler tells XLA so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

from pbkern.core.errors import InternalError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.process import disk_cache
from pbkern.core.process.disk_cache import DiskStore
from pbkern.dsl.host_program import BufferView, Cond, HostProgram, HostWhile, Launch, Step
from pbkern.dsl.kernel import Kernel
from pbkern.targets import mlir
from pbkern.targets.host.objects import object_files
from pbkern.targets.host.objects.object_code import (
    ObjectCode,
    find_code,
    stored_code,
    stored_key,
)
from pbkern.targets.host.program_text import HostText, Temporaries
from pbkern.targets.host.runtime import xla
from pbkern.targets.simt.program import DeviceProgram, KernelCode, LinkedHandler

from .driver import BEYOND, DEVICES, NAMES, RECENT_LAUNCHES, Driver

# The structure `call`, which functions here share, begins with the stream.
# Bytes from the start of `call` to the error.
CALL_ERROR = 8
# Bytes from the start of `call` to the kernel.
CALL_KERNEL = 16
# Bytes from the start of `call` to the device.
CALL_DEVICE = 24
DRIVER_ALIGNMENT = 256  # of memory that the driver gives. Source: CUDA C++ Programming Guide, device memory accesses
# Bytes from the start of XLA's table to the function that makes an error. Source: XLA FFI API 0.3
# (xla/ffi/api/c_api.h).
ERROR_CREATE = 48
# Bytes from the start of XLA's table to the function that gives the stream (same source).
STREAM_GET = 80
# Bit of a handler's traits: it may be recorded in a command buffer (same source).
COMMAND_BUFFERS = 1
# The number of the kind of error "internal" (same source).
ERRC_INTERNAL = 13


@dataclass(frozen=True)
class KernelMemory:
    """Places of what kernels need beside their operands, in the memory that a call brings; in bytes from its start.

    Attributes:
      scratch: behind the temporaries of the program.
      record: recorded times. reports: prints and failed checks.
      end: bytes of all.
    """

    scratch: int
    record: int
    reports: int
    end: int

    @classmethod
    def of(cls, compiled: DeviceProgram, temporary_bytes: int) -> KernelMemory:
        """One kernel runs at a time: each place is as large as the largest of them needs."""
        functions = [code.function for code in compiled.codes.values()]
        scratch = max(
            (function.global_bytes * function.blocks for function in functions), default=0
        )
        record = _aligned(temporary_bytes + scratch)
        recorded = max((function.record_bytes for function in functions), default=0)
        reports = record + _aligned(recorded)
        reported = max(
            (function.reports.nbytes for function in functions if function.reports), default=0
        )
        return cls(temporary_bytes, record, reports, reports + reported)


def _aligned(size: int) -> int:
    return -(-size // DRIVER_ALIGNMENT) * DRIVER_ALIGNMENT


@dataclass(frozen=True)
class DriverSteps:
    """See host.program_text.StepHooks: steps by the driver's functions.

    rows: symbols of the rows of handles, by id of the kernels.
    """

    compiled: DeviceProgram
    rows: Mapping[int, str]
    places: KernelMemory

    def copy(self, text: HostText, destination: str, source: str, size: int) -> None:
        text.lines.append(
            f"func.call @pbk_copy(%frame, {destination}, {source}, {text.const(size)}) : "
            "(!llvm.ptr, !llvm.ptr, !llvm.ptr, i64) -> ()"
        )

    def load(self, text: HostText, view: BufferView, kind: str) -> str:
        """A value on the device; zero after an error."""
        place = text.alloca("i64")
        text.lines.append(f"llvm.store {text.const(0)}, {place} : i64, !llvm.ptr")
        size = text.const(view.type.nbytes)
        text.lines.append(
            f"func.call @pbk_read(%frame, {place}, {text.pointer(view)}, {size}) : "
            "(!llvm.ptr, !llvm.ptr, !llvm.ptr, i64) -> ()"
        )
        return text.put(f"llvm.load {place} : !llvm.ptr -> {kind}")

    def launch(self, text: HostText, step: Launch) -> None:
        function = self.compiled.codes[id(step.kernel)].function
        if not function.blocks:
            return
        views = [*text.operands(step), *step.results]
        pointers = [text.pointer(views[operand]) for operand in function.operands]
        if function.global_bytes:
            pointers.append(text.arena(self.places.scratch))
        if function.profile:
            recorded = text.arena(self.places.record)
            pointers.append(recorded)
        if function.reports:
            handed = _handed_over(text, step, views)
            pointers.append(self._cleared(text, function.reports.cleared_bytes))
        # The driver is given addresses of arguments.
        places = _pointers(text, [_pointers(text, [pointer]) for pointer in pointers])
        address = text.put(f"llvm.mlir.addressof @{self.rows[id(step.kernel)]} : !llvm.ptr")
        row = text.put(f"llvm.ptrtoint {address} : !llvm.ptr to i64")
        numbers = (function.blocks, function.threads, function.dynamic_shared_bytes)
        passed = ", ".join([row, *map(text.const, numbers), places])
        text.lines.append(
            f"func.call @pbk_launch(%frame, {passed}) : (!llvm.ptr, i64, i64, i64, i64, !llvm.ptr) -> ()"
        )
        if function.profile:
            text.lines.append(
                f"func.call @pbk_record(%frame, {row}, {recorded}) : "
                "(!llvm.ptr, i64, !llvm.ptr) -> ()"
            )
        if function.reports:
            text.lines.append(
                f"func.call @pbk_report(%frame, {row}, {pointers[-1]}, {handed}) : "
                "(!llvm.ptr, i64, !llvm.ptr, !llvm.ptr) -> ()"
            )

    def _cleared(self, text: HostText, size: int) -> str:
        """The place of what a kernel reports, its first bytes zero."""
        place = text.arena(self.places.reports)
        text.lines.append(
            f"func.call @pbk_clear(%frame, {place}, {text.const(size)}) : (!llvm.ptr, !llvm.ptr, i64) -> ()"
        )
        return place


def _handed_over(text: HostText, step: Launch, views: Sequence[BufferView]) -> str:
    """An array of the operands' addresses, of copies where the kernel updates them."""
    copies = text.copies(step, views)
    return _pointers(
        text, [copies.get(i) or text.pointer(views[i]) for i in range(len(step.operands))]
    )


def _pointers(text: HostText, pointers: Sequence[str]) -> str:
    """An array of pointers."""
    array = text.alloca(f"!llvm.array<{max(len(pointers), 1)} x ptr>")
    text.stored(pointers, array)
    return array


_MAIN = """
llvm.mlir.global external @pbk_table() : i64
llvm.mlir.global external @pbk_recent() : i64

func.func private @pbk_failed(%call: !llvm.ptr) -> i1 {{
  %p = llvm.getelementptr %call[{CALL_ERROR}] : (!llvm.ptr) -> !llvm.ptr, i8
  %rc = llvm.load %p : !llvm.ptr -> i32
  %none = arith.constant 0 : i32
  %is = arith.cmpi ne, %rc, %none : i32
  return %is : i1
}}

func.func private @pbk_note(%call: !llvm.ptr, %rc: i32, %kernel: i64) {{
  %none = arith.constant 0 : i32
  %bad = arith.cmpi ne, %rc, %none : i32
  scf.if %bad {{
    %p = llvm.getelementptr %call[{CALL_ERROR}] : (!llvm.ptr) -> !llvm.ptr, i8
    %k = llvm.getelementptr %call[{CALL_KERNEL}] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %rc, %p : i32, !llvm.ptr
    llvm.store %kernel, %k : i64, !llvm.ptr
  }}
  return
}}

func.func private @pbk_entry(%at: i64) -> !llvm.ptr {{
  %table = llvm.mlir.addressof @pbk_table : !llvm.ptr
  %p = llvm.getelementptr %table[%at] : (!llvm.ptr, i64) -> !llvm.ptr, i8
  %f = llvm.load %p : !llvm.ptr -> !llvm.ptr
  return %f : !llvm.ptr
}}

func.func private @pbk_begin(%call: !llvm.ptr) {{
  %none = arith.constant 0 : i64
  %program = arith.constant -1 : i64
  %error = llvm.getelementptr %call[{CALL_ERROR}] : (!llvm.ptr) -> !llvm.ptr, i8
  %kernel = llvm.getelementptr %call[{CALL_KERNEL}] : (!llvm.ptr) -> !llvm.ptr, i8
  %device = llvm.getelementptr %call[{CALL_DEVICE}] : (!llvm.ptr) -> !llvm.ptr, i8
  llvm.store %none, %error : i64, !llvm.ptr
  llvm.store %none, %kernel : i64, !llvm.ptr
  llvm.store %none, %device : i64, !llvm.ptr
  %at = arith.constant {ready} : i64
  %is = func.call @pbk_entry(%at) : (i64) -> !llvm.ptr
  %ready = llvm.ptrtoint %is : !llvm.ptr to i64
  %closed = arith.cmpi eq, %ready, %none : i64
  scf.if %closed {{
    %opens = arith.constant {open} : i64
    %f = func.call @pbk_entry(%opens) : (i64) -> !llvm.ptr
    %rc = llvm.call %f() : !llvm.ptr, () -> i32
    func.call @pbk_note(%call, %rc, %program) : (!llvm.ptr, i32, i64) -> ()
  }}
  %failed = func.call @pbk_failed(%call) : (!llvm.ptr) -> i1
  scf.if %failed {{
  }} else {{
    %asks = arith.constant {device} : i64
    %f = func.call @pbk_entry(%asks) : (i64) -> !llvm.ptr
    %rc = llvm.call %f(%device) : !llvm.ptr, (!llvm.ptr) -> i32
    func.call @pbk_note(%call, %rc, %program) : (!llvm.ptr, i32, i64) -> ()
    %number = llvm.load %device : !llvm.ptr -> i64
    %most = arith.constant {DEVICES} : i64
    %beyond = arith.cmpi uge, %number, %most : i64
    %code = arith.constant {BEYOND} : i32
    %fine = arith.constant 0 : i32
    %far = arith.select %beyond, %code, %fine : i32
    func.call @pbk_note(%call, %far, %program) : (!llvm.ptr, i32, i64) -> ()
  }}
  return
}}

func.func private @pbk_launch(%call: !llvm.ptr, %kernel: i64, %blocks: i64, %threads: i64, %shared: i64,
                              %arguments: !llvm.ptr) {{
  %failed = func.call @pbk_failed(%call) : (!llvm.ptr) -> i1
  scf.if %failed {{
  }} else {{
    %devicep = llvm.getelementptr %call[{CALL_DEVICE}] : (!llvm.ptr) -> !llvm.ptr, i8
    %device = llvm.load %devicep : !llvm.ptr -> i64
    %row = llvm.inttoptr %kernel : i64 to !llvm.ptr
    %handlep = llvm.getelementptr %row[%device] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    %known = llvm.load %handlep : !llvm.ptr -> i64
    %none = arith.constant 0 : i64
    %new = arith.cmpi eq, %known, %none : i64
    scf.if %new {{
      %at = arith.constant {prepare} : i64
      %f = func.call @pbk_entry(%at) : (i64) -> !llvm.ptr
      %number = arith.trunci %device : i64 to i32
      %rc = llvm.call %f(%row, %number) : !llvm.ptr, (!llvm.ptr, i32) -> i32
      func.call @pbk_note(%call, %rc, %kernel) : (!llvm.ptr, i32, i64) -> ()
    }}
    %refused = func.call @pbk_failed(%call) : (!llvm.ptr) -> i1
    scf.if %refused {{
    }} else {{
      %handle = llvm.load %handlep : !llvm.ptr -> !llvm.ptr
      func.call @pbk_launched(%call, %kernel, %handle, %blocks, %threads, %shared, %arguments) : (
        !llvm.ptr, i64, !llvm.ptr, i64, i64, i64, !llvm.ptr) -> ()
    }}
  }}
  return
}}

func.func private @pbk_launched(%call: !llvm.ptr, %kernel: i64, %handle: !llvm.ptr, %blocks: i64, %threads: i64,
                                %shared: i64, %arguments: !llvm.ptr) {{
  %at = arith.constant {launch} : i64
  %f = func.call @pbk_entry(%at) : (i64) -> !llvm.ptr
  %stream = llvm.load %call : !llvm.ptr -> !llvm.ptr
  %b = arith.trunci %blocks : i64 to i32
  %t = arith.trunci %threads : i64 to i32
  %one = arith.constant 1 : i32
  %s = arith.trunci %shared : i64 to i32
  %null = llvm.mlir.zero : !llvm.ptr
  %rc = llvm.call %f(%handle, %b, %one, %one, %t, %one, %one, %s, %stream, %arguments, %null) : !llvm.ptr, (
    !llvm.ptr, i32, i32, i32, i32, i32, i32, i32, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
  func.call @pbk_note(%call, %rc, %kernel) : (!llvm.ptr, i32, i64) -> ()
  %none = arith.constant 0 : i32
  %good = arith.cmpi eq, %rc, %none : i32
  scf.if %good {{
    %devicep = llvm.getelementptr %call[{CALL_DEVICE}] : (!llvm.ptr) -> !llvm.ptr, i8
    %device = llvm.load %devicep : !llvm.ptr -> i64
    %stride = arith.constant {RING_BYTES} : i64
    %offset = arith.muli %device, %stride : i64
    %first = llvm.mlir.addressof @pbk_recent : !llvm.ptr
    %countp = llvm.getelementptr %first[%offset] : (!llvm.ptr, i64) -> !llvm.ptr, i8
    %count = llvm.load %countp : !llvm.ptr -> i64
    %size = arith.constant {RECENT_LAUNCHES} : i64
    %slot = arith.remui %count, %size : i64
    %ring = llvm.getelementptr %countp[8] : (!llvm.ptr) -> !llvm.ptr, i8
    %slotp = llvm.getelementptr %ring[%slot] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    llvm.store %kernel, %slotp : i64, !llvm.ptr
    %more = arith.constant 1 : i64
    %next = arith.addi %count, %more : i64
    llvm.store %next, %countp : i64, !llvm.ptr
  }}
  return
}}

func.func private @pbk_record(%call: !llvm.ptr, %kernel: i64, %from: !llvm.ptr) {{
  %failed = func.call @pbk_failed(%call) : (!llvm.ptr) -> i1
  scf.if %failed {{
  }} else {{
    %at = arith.constant {record} : i64
    %f = func.call @pbk_entry(%at) : (i64) -> !llvm.ptr
    %stream = llvm.load %call : !llvm.ptr -> !llvm.ptr
    %k = llvm.inttoptr %kernel : i64 to !llvm.ptr
    %rc = llvm.call %f(%k, %from, %stream) : !llvm.ptr, (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
    func.call @pbk_note(%call, %rc, %kernel) : (!llvm.ptr, i32, i64) -> ()
  }}
  return
}}

func.func private @pbk_report(%call: !llvm.ptr, %kernel: i64, %from: !llvm.ptr, %operands: !llvm.ptr) {{
  %failed = func.call @pbk_failed(%call) : (!llvm.ptr) -> i1
  scf.if %failed {{
  }} else {{
    %at = arith.constant {report} : i64
    %f = func.call @pbk_entry(%at) : (i64) -> !llvm.ptr
    %stream = llvm.load %call : !llvm.ptr -> !llvm.ptr
    %k = llvm.inttoptr %kernel : i64 to !llvm.ptr
    %rc = llvm.call %f(%k, %from, %operands, %stream) : !llvm.ptr, (!llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
    func.call @pbk_note(%call, %rc, %kernel) : (!llvm.ptr, i32, i64) -> ()
  }}
  return
}}

func.func private @pbk_clear(%call: !llvm.ptr, %to: !llvm.ptr, %bytes: i64) {{
  %failed = func.call @pbk_failed(%call) : (!llvm.ptr) -> i1
  scf.if %failed {{
  }} else {{
    %at = arith.constant {clear} : i64
    %f = func.call @pbk_entry(%at) : (i64) -> !llvm.ptr
    %stream = llvm.load %call : !llvm.ptr -> !llvm.ptr
    %zero = arith.constant 0 : i32
    %rc = llvm.call %f(%to, %zero, %bytes, %stream) : !llvm.ptr, (!llvm.ptr, i32, i64, !llvm.ptr) -> i32
    %none = arith.constant 0 : i64
    func.call @pbk_note(%call, %rc, %none) : (!llvm.ptr, i32, i64) -> ()
  }}
  return
}}

func.func private @pbk_copy(%call: !llvm.ptr, %to: !llvm.ptr, %from: !llvm.ptr, %bytes: i64) {{
  %failed = func.call @pbk_failed(%call) : (!llvm.ptr) -> i1
  scf.if %failed {{
  }} else {{
    %at = arith.constant {copy} : i64
    %f = func.call @pbk_entry(%at) : (i64) -> !llvm.ptr
    %stream = llvm.load %call : !llvm.ptr -> !llvm.ptr
    %rc = llvm.call %f(%to, %from, %bytes, %stream) : !llvm.ptr, (!llvm.ptr, !llvm.ptr, i64, !llvm.ptr) -> i32
    %none = arith.constant 0 : i64
    func.call @pbk_note(%call, %rc, %none) : (!llvm.ptr, i32, i64) -> ()
  }}
  return
}}

func.func private @pbk_fetch(%call: !llvm.ptr, %to: !llvm.ptr, %from: !llvm.ptr, %bytes: i64) {{
  %failed = func.call @pbk_failed(%call) : (!llvm.ptr) -> i1
  scf.if %failed {{
  }} else {{
    %at = arith.constant {read} : i64
    %f = func.call @pbk_entry(%at) : (i64) -> !llvm.ptr
    %stream = llvm.load %call : !llvm.ptr -> !llvm.ptr
    %rc = llvm.call %f(%to, %from, %bytes, %stream) : !llvm.ptr, (!llvm.ptr, !llvm.ptr, i64, !llvm.ptr) -> i32
    %none = arith.constant 0 : i64
    func.call @pbk_note(%call, %rc, %none) : (!llvm.ptr, i32, i64) -> ()
  }}
  return
}}

func.func private @pbk_wait(%call: !llvm.ptr) {{
  %failed = func.call @pbk_failed(%call) : (!llvm.ptr) -> i1
  scf.if %failed {{
  }} else {{
    %at = arith.constant {synchronize} : i64
    %f = func.call @pbk_entry(%at) : (i64) -> !llvm.ptr
    %stream = llvm.load %call : !llvm.ptr -> !llvm.ptr
    %rc = llvm.call %f(%stream) : !llvm.ptr, (!llvm.ptr) -> i32
    %none = arith.constant 0 : i64
    func.call @pbk_note(%call, %rc, %none) : (!llvm.ptr, i32, i64) -> ()
  }}
  return
}}

func.func private @pbk_read(%call: !llvm.ptr, %to: !llvm.ptr, %from: !llvm.ptr, %bytes: i64) {{
  func.call @pbk_fetch(%call, %to, %from, %bytes) : (!llvm.ptr, !llvm.ptr, !llvm.ptr, i64) -> ()
  func.call @pbk_wait(%call) : (!llvm.ptr) -> ()
  return
}}

func.func private @pbk_said(%call: !llvm.ptr) -> !llvm.ptr {{
  %failed = func.call @pbk_failed(%call) : (!llvm.ptr) -> i1
  %text = scf.if %failed -> (!llvm.ptr) {{
    %rcp = llvm.getelementptr %call[{CALL_ERROR}] : (!llvm.ptr) -> !llvm.ptr, i8
    %rc = llvm.load %rcp : !llvm.ptr -> i32
    %kernelp = llvm.getelementptr %call[{CALL_KERNEL}] : (!llvm.ptr) -> !llvm.ptr, i8
    %kernel = llvm.load %kernelp : !llvm.ptr -> !llvm.ptr
    %devicep = llvm.getelementptr %call[{CALL_DEVICE}] : (!llvm.ptr) -> !llvm.ptr, i8
    %device = llvm.load %devicep : !llvm.ptr -> i32
    %at = arith.constant {describe} : i64
    %f = func.call @pbk_entry(%at) : (i64) -> !llvm.ptr
    %said = llvm.call %f(%kernel, %rc, %device) : !llvm.ptr, (!llvm.ptr, i32, i32) -> !llvm.ptr
    scf.yield %said : !llvm.ptr
  }} else {{
    %null = llvm.mlir.zero : !llvm.ptr
    scf.yield %null : !llvm.ptr
  }}
  return %text : !llvm.ptr
}}

func.func @pbk_direct(%buffers: !llvm.ptr, %arena: !llvm.ptr, %stream: !llvm.ptr) -> !llvm.ptr {{
  %one = arith.constant 1 : i64
  %call = llvm.alloca %one x !llvm.array<4 x i64> : (i64) -> !llvm.ptr
  llvm.store %stream, %call : !llvm.ptr, !llvm.ptr
  func.call @pbk_begin(%call) : (!llvm.ptr) -> ()
  func.call @pbk_main(%call, %buffers, %arena) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> ()
  %text = func.call @pbk_said(%call) : (!llvm.ptr) -> !llvm.ptr
  return %text : !llvm.ptr
}}
"""

_STREAM = f"""
    %getp = llvm.getelementptr %api[{STREAM_GET}] : (!llvm.ptr) -> !llvm.ptr, i8
    %get = llvm.load %getp : !llvm.ptr -> !llvm.ptr
    %asked_for = llvm.call %get(%query) : !llvm.ptr, (!llvm.ptr) -> !llvm.ptr
"""

_HANDLER = """
func.func @pbk_handler(%frame: !llvm.ptr) -> !llvm.ptr {{
  %one = arith.constant 1 : i64
  %zero = arith.constant 0 : i64
  %null = llvm.mlir.zero : !llvm.ptr
  %asked = func.call @pbk_metadata(%frame) : (!llvm.ptr) -> i1
  %error = scf.if %asked -> (!llvm.ptr) {{
    scf.yield %null : !llvm.ptr
  }} else {{
    %buffers = llvm.alloca %one x !llvm.array<{count} x ptr> : (i64) -> !llvm.ptr
    %call = llvm.alloca %one x !llvm.array<4 x i64> : (i64) -> !llvm.ptr
    %apip = llvm.getelementptr %frame[16] : (!llvm.ptr) -> !llvm.ptr, i8
    %api = llvm.load %apip : !llvm.ptr -> !llvm.ptr
    %ctxp = llvm.getelementptr %frame[24] : (!llvm.ptr) -> !llvm.ptr, i8
    %ctx = llvm.load %ctxp : !llvm.ptr -> !llvm.ptr
    %size = arith.constant 32 : i64
    %query = llvm.alloca %one x !llvm.array<4 x i64> : (i64) -> !llvm.ptr
    %query8 = llvm.getelementptr %query[8] : (!llvm.ptr) -> !llvm.ptr, i8
    %query16 = llvm.getelementptr %query[16] : (!llvm.ptr) -> !llvm.ptr, i8
    %query24 = llvm.getelementptr %query[24] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %size, %query : i64, !llvm.ptr
    llvm.store %zero, %query8 : i64, !llvm.ptr
    llvm.store %ctx, %query16 : !llvm.ptr, !llvm.ptr
    llvm.store %zero, %query24 : i64, !llvm.ptr
    {stream}
    %stream = llvm.load %query24 : !llvm.ptr -> !llvm.ptr
    llvm.store %stream, %call : !llvm.ptr, !llvm.ptr
    func.call @pbk_begin(%call) : (!llvm.ptr) -> ()
    {gathered}
    func.call @pbk_main(%call, %buffers, %arena) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> ()
    %text = func.call @pbk_said(%call) : (!llvm.ptr) -> !llvm.ptr
    %bad = llvm.icmp "ne" %text, %null : !llvm.ptr
    %made = scf.if %bad -> (!llvm.ptr) {{
      %kind = arith.constant {ERRC_INTERNAL} : i64
      llvm.store %text, %query16 : !llvm.ptr, !llvm.ptr
      llvm.store %kind, %query24 : i64, !llvm.ptr
      %makep = llvm.getelementptr %api[{ERROR_CREATE}] : (!llvm.ptr) -> !llvm.ptr, i8
      %make = llvm.load %makep : !llvm.ptr -> !llvm.ptr
      %e = llvm.call %make(%query) : !llvm.ptr, (!llvm.ptr) -> !llvm.ptr
      scf.yield %e : !llvm.ptr
    }} else {{
      scf.yield %null : !llvm.ptr
    }}
    scf.yield %made : !llvm.ptr
  }}
  return %error : !llvm.ptr
}}
"""


def handler(compiled: DeviceProgram, driver: Driver) -> LinkedHandler:
    """A program's handler for a driver: what the store has, else made now and stored.

    No driver is asked for anything.
    """
    text, temporaries = _handler_text(compiled, driver)
    sizes = argument_sizes(compiled)
    symbols = _symbols(compiled.kernels, sizes, driver)

    def make() -> ObjectCode:
        module = object_files.host_module(text)
        mlir.check_lowered(module)
        level = object_files.VECTOR_OPT_LEVEL
        return ObjectCode((mlir.object_code(module, level, "pbk_handler", symbols),), temporaries)

    key = disk_cache.digest(text)
    _, image, _ = stored_code(key, symbols, make)
    return LinkedHandler(image, stored_key(key), temporaries)


def stored_handler(
    store: DiskStore,
    key: str,
    kernels: Sequence[KernelCode],
    sizes: Sequence[tuple[int, ...]],
    driver: Driver,
) -> LinkedHandler | None:
    """The handler whose object file an earlier process has stored under `key`, with `sizes` of its kernels' arguments.

    None where the store has it no more.
    """
    loaded = find_code(store, key, _symbols(kernels, sizes, driver))
    if loaded is None:
        return None
    code, image = loaded
    return LinkedHandler(image, key, code.arena_bytes)


def argument_sizes(compiled: DeviceProgram) -> list[tuple[int, ...]]:
    """Bytes of each argument of each kernel."""
    return [_sizes(compiled, kernel) for kernel in compiled.codes]


def _symbols(
    kernels: Sequence[KernelCode], sizes: Sequence[tuple[int, ...]], driver: Driver
) -> dict[str, int]:
    """Addresses of what a handler's object file lacks."""
    rows = {_row(n): driver.load(code, size) for n, (code, size) in enumerate(zip(kernels, sizes))}
    return {"pbk_table": driver.table, "pbk_recent": ctypes.addressof(driver.recent), **rows}


def _row(number: int) -> str:
    return f"pbk_row{number}"


def _handler_text(compiled: DeviceProgram, driver: Driver) -> tuple[str, int]:
    """(MLIR of a program's handler, bytes of temporaries that a call brings)."""
    rows = {kernel: _row(n) for n, kernel in enumerate(compiled.codes)}
    memory = Temporaries.of(compiled.program, lambda kernel: _copied(compiled, kernel))
    places = KernelMemory.of(compiled, memory.nbytes)
    text = HostText(compiled.program, memory, DriverSteps(compiled, rows, places))
    text.steps(compiled.program.steps)
    constants = {
        "CALL_ERROR": CALL_ERROR,
        "CALL_KERNEL": CALL_KERNEL,
        "CALL_DEVICE": CALL_DEVICE,
        "DEVICES": DEVICES,
        "BEYOND": BEYOND,
        "RECENT_LAUNCHES": RECENT_LAUNCHES,
        "RING_BYTES": 8 * (1 + RECENT_LAUNCHES),
        **{name: 8 * k for k, name in enumerate(NAMES)},
    }
    count = max(len(compiled.program.inputs) + len(compiled.program.outputs), 1)
    entry = _HANDLER.format(
        **constants,
        ERRC_INTERNAL=ERRC_INTERNAL,
        ERROR_CREATE=ERROR_CREATE,
        count=count,
        stream=_STREAM if driver.platform != "cpu" else "",
        gathered=_gathered(compiled.program),
    )
    functions = [kernel_code.function for kernel_code in compiled.kernels]
    waits = _reads_back(compiled.program.steps) or any(
        function.profile or function.reports for function in functions
    )
    traits = 0 if waits else COMMAND_BUFFERS
    globals_ = [f"llvm.mlir.global external @{row}() : i64" for row in rows.values()]
    parts = [*globals_, text.text(), _MAIN.format(**constants), xla.metadata_text(traits), entry]
    return "\n".join(parts), places.end


def _copied(compiled: DeviceProgram, kernel: Kernel) -> Sequence[int]:
    """Operands of which a launch keeps a copy: its reports tell their values from before."""
    reports = compiled.codes[id(kernel)].function.reports
    return reports.copied if reports else ()


def _gathered(program: HostProgram) -> str:
    """Lines that store the addresses of inputs and results in %buffers, and name that of the temporaries %arena."""
    lines = []
    for name, offset in (("args", 72), ("rets", 112)):
        lines += [
            f"%{name}p = llvm.getelementptr %frame[{offset}] : (!llvm.ptr) -> !llvm.ptr, i8",
            f"%{name} = llvm.load %{name}p : !llvm.ptr -> !llvm.ptr",
        ]
    places = [("args", k) for k in range(len(program.inputs))] + [
        ("rets", k) for k in range(len(program.outputs) + 1)
    ]
    for k, (base, n) in enumerate(places):
        name = "%arena" if k == len(places) - 1 else f"%data{k}"
        lines += [
            f"%at{k} = llvm.getelementptr %{base}[{8 * n}] : (!llvm.ptr) -> !llvm.ptr, i8",
            f"%buffer{k} = llvm.load %at{k} : !llvm.ptr -> !llvm.ptr",
            f"%dp{k} = llvm.getelementptr %buffer{k}[24] : (!llvm.ptr) -> !llvm.ptr, i8",
            f"{name} = llvm.load %dp{k} : !llvm.ptr -> !llvm.ptr",
        ]
        if k < len(places) - 1:
            lines += [
                f"%slot{k} = llvm.getelementptr %buffers[{8 * k}] : (!llvm.ptr) -> !llvm.ptr, i8",
                f"llvm.store %data{k}, %slot{k} : !llvm.ptr, !llvm.ptr",
            ]
    return "\n    ".join(lines)


def _sizes(compiled: DeviceProgram, kernel: int) -> tuple[int, ...]:
    """Bytes of each argument of a kernel."""
    step = next(
        (launch for launch in compiled.program.launches if id(launch.kernel) == kernel), None
    )
    if step is None:
        raise InternalError("a kernel without a launch was compiled")
    function, types = (
        compiled.codes[kernel].function,
        [*step.kernel.in_types, *step.kernel.out_types],
    )
    reported = function.reports.nbytes if function.reports else 0
    extra = [
        size
        for size in (function.global_bytes * function.blocks, function.record_bytes, reported)
        if size
    ]
    return (*(types[operand].nbytes for operand in function.operands), *extra)


def _reads_back(steps: tuple[Step, ...]) -> bool:
    return any(
        isinstance(step, HostWhile | Cond) or _reads_back(getattr(step, "steps", ()))
        for step in steps
    )
