"""KernelNests -> the MLIR function of one thread block per program, for GPUs of every vendor (simt/emit/kernel.py)."""
