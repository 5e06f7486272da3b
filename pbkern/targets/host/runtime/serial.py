"""Programs on the caller's thread alone, for libraries that need no threads of anybody.

LLVM dialect text.
"""

# @_mlir_ciface_pbk_parallel, see runtime/parallel.py.
SERIAL = """
func.func @_mlir_ciface_pbk_parallel(
    %frame: !llvm.ptr, %task: !llvm.ptr, %args: !llvm.ptr, %n: i64, %chunk: i64, %limit: i64) {
  %zero = arith.constant 0 : i64
  llvm.call %task(%args, %zero, %n, %zero) : !llvm.ptr, (!llvm.ptr, i64, i64, i64) -> ()
  return
}
"""
