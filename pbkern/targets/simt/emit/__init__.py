"""KernelNests whose points are dealt out -> the MLIR function of one thread block."""
