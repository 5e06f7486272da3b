"""Machine code: object files made by MLIR and LLVM or found in the store on disk, and the loader that puts them into memory."""
