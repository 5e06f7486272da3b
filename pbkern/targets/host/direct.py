"""A compiled program called with addresses, on the threads of an OpenMP runtime that is in the process.

The program's objects are loaded once more, with the parallel loop of runtime/openmp.py in the place
of the one that asks XLA's call frame for threads. omp_set_num_threads, and with it
torch.set_num_threads, is obeyed, calls inside a parallel region are serial, and ctypes releases the
interpreter's lock around a call. Without OpenMP a program runs on the calling thread. In a process
that was forked it does, too: the runtime's threads stayed in the other one, and waiting for them
would never end.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from . import lifetime
from .loaded_program import PROTOTYPE, LoadedProgram
from .objects.elf_loader import PAGE
from .objects.object_code import image_of
from .runtime import arena, openmp, serial
from .runtime.parallel import PARALLEL
from .runtime_symbols import loaded, runtime_symbols

CALLED = ("GOMP_parallel", "omp_get_thread_num", "omp_get_max_threads", "omp_in_parallel")
# A forked process counts as a parallel region: it stands in for omp_in_parallel.
_INSIDE = """
llvm.mlir.global external @pbk_forked(0 : i32) {alignment = 4 : i64} : i32
func.func private @omp_in_parallel() -> i32

func.func @pbk_in_parallel() -> i32 {
  %p = llvm.mlir.addressof @pbk_forked : !llvm.ptr
  %forked = llvm.load %p : !llvm.ptr -> i32
  %inside = func.call @omp_in_parallel() : () -> i32
  %either = arith.ori %forked, %inside : i32
  return %either : i32
}
"""


def entry(compiled: LoadedProgram, openmp_library: str | None) -> Callable[[Any], None]:
    """f(addresses): runs the program on addresses of inputs, then results.

    The arrays start at cache lines; `addresses` is a ctypes array or bytes. Raises MemoryError
    where there is no memory for temporaries.

    openmp_library: file of a library that is an OpenMP runtime or is linked to one; None: the
    calling thread does all.
    """
    symbols = runtime_symbols() | {PARALLEL: _parallel_loop(openmp_library)}
    image = image_of(compiled.code, compiled.linked(symbols))
    call = compiled.entry(image)
    weakref.finalize(call, lifetime.free_arenas, image).atexit = False
    return call


class Redirection:
    """Lets a function of `entry` run another program for a while.

    The address that a ctypes function calls is overwritten, so that calls cost nothing more at other times.
    What it has called lives as long as this value: calls may be under way in other threads.

    Args:
      call: the function.
      other: gives the function that takes its place, at the first call.
    Attributes:
      error: what `other` has raised; the program itself runs then.
    """

    def __init__(self, call: Any, other: Callable[[], Any]):
        self.place = ctypes.c_void_p.from_address(ctypes.addressof(call))
        self.usual, self.other = self.place.value or 0, other
        self.error: Exception | None = None
        self.first, self.once = PROTOTYPE(self._first), threading.Lock()

    def begin(self) -> None:
        self.error = None
        self.place.value = _address(self.first)

    def end(self) -> None:
        self.place.value = self.usual

    def _first(self, buffers: int | None) -> int:
        address = self.usual
        try:
            with self.once:
                address = self.place.value = _address(self._other)
        except Exception as e:
            self.error = e
            self.end()
        return PROTOTYPE(address)(buffers)

    @functools.cached_property
    def _other(self) -> Any:
        return self.other()


def ask_for_huge_pages(address: int, nbytes: int) -> None:
    """For new memory of HUGE_BYTES and more: first touch of small pages costs ten times more."""
    start = -(-address // PAGE) * PAGE
    _c().madvise(start, nbytes - PAGE, arena.MADV_HUGEPAGE)


@functools.cache
def _c() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


@functools.cache
def _parallel_loop(library: str | None) -> int:
    """Address of the function that divides programs among threads."""
    if library is None:
        return loaded("parallel loop: serial", serial.SERIAL, PARALLEL, {}).address(PARALLEL)
    handle = ctypes.CDLL(
        library
    )  # a name is looked up in the libraries that it is linked to as well
    addresses = {name: _address(getattr(handle, name)) for name in CALLED}
    called = {"omp_in_parallel": addresses["omp_in_parallel"]}
    inside = loaded("parallel loop: forked", _INSIDE, "pbk_in_parallel", called)
    forked = ctypes.c_int32.from_address(inside.address("pbk_forked"))

    def in_child() -> None:
        forked.value = 1

    os.register_at_fork(after_in_child=in_child)
    addresses["omp_in_parallel"] = inside.address("pbk_in_parallel")
    return loaded("parallel loop: openmp", openmp.OPENMP, PARALLEL, addresses).address(PARALLEL)


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
