"""The NVIDIA GPU target: KernelNests -> MLIR for threads (targets/simt/) -> LLVM IR -> PTX -> machine code."""
