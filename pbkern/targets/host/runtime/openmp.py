"""Programs on OpenMP's threads, as libraries use them. LLVM dialect text.

GOMP_parallel is the interface of GCC's libgomp; LLVM's and Intel's runtimes export it too. It waits
for all participants, so that the frame of a loop is on the stack and nobody is counted. A call
within a parallel region is serial, as nested regions are by default; omp_set_num_threads and
OMP_NUM_THREADS are obeyed. Fewer threads than asked for do all the work.
"""

from __future__ import annotations

from . import parallel

_CALLED = """
func.func private @GOMP_parallel(!llvm.ptr, !llvm.ptr, i32, i32)
func.func private @omp_get_thread_num() -> i32
func.func private @omp_get_max_threads() -> i32
func.func private @omp_in_parallel() -> i32
"""

_PARALLEL = """
func.func @pbk_worker(%f: !llvm.ptr) {
  %number = func.call @omp_get_thread_num() : () -> i32
  %slot = arith.extsi %number : i32 to i64
  func.call @pbk_drain(%f, %slot) : (!llvm.ptr, i64) -> ()
  return
}

func.func @_mlir_ciface_pbk_parallel(
    %frame: !llvm.ptr, %task: !llvm.ptr, %args: !llvm.ptr, %n: i64, %chunk: i64, %limit: i64) {
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %no = arith.constant 0 : i32
  %inside = func.call @omp_in_parallel() : () -> i32
  %nested = arith.cmpi ne, %inside, %no : i32
  %pool = scf.if %nested -> (i64) {
    scf.yield %one : i64
  } else {
    %most = func.call @omp_get_max_threads() : () -> i32
    %size = arith.extsi %most : i32 to i64
    scf.yield %size : i64
  }
  %chunks = arith.ceildivsi %n, %chunk : i64
  %t0 = arith.minsi %pool, %limit : i64
  %threads = arith.minsi %t0, %chunks : i64
  %several = arith.cmpi sgt, %threads, %one : i64
  scf.if %several {
NEW_LOOP
    %worker = func.constant @pbk_worker : (!llvm.ptr) -> ()
    %wp = builtin.unrealized_conversion_cast %worker : (!llvm.ptr) -> () to !llvm.ptr
    %count = arith.trunci %threads : i64 to i32
    func.call @GOMP_parallel(%wp, %f, %count, %no) : (!llvm.ptr, !llvm.ptr, i32, i32) -> ()
  } else {
    llvm.call %task(%args, %zero, %n, %zero) : !llvm.ptr, (!llvm.ptr, i64, i64, i64) -> ()
  }
  return
}
""".replace(
    "NEW_LOOP",
    parallel.new_loop(
        "llvm.alloca %bytes x i8 {alignment = 64 : i64} : (i64) -> !llvm.ptr", counted=False
    ),
)

# @_mlir_ciface_pbk_parallel and what it calls.
OPENMP = _CALLED + parallel.DRAIN + _PARALLEL
