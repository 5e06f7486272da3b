"""KernelNests whose points are mapped to threads -> the MLIR function of one thread block."""
