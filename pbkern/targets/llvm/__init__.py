"""llvmlite's LLVM, which makes code of libraries and of GPUs, in child processes (process.py, child.py): LLVM may end them."""
