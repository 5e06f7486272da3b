"""The AMD GPU target: KernelNests -> MLIR for threads (targets/simt/) -> LLVM IR -> object -> code object, linked by lld."""
