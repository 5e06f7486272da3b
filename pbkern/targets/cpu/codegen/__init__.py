"""Kernels -> MLIR functions, and their launches in the host's program (launches.py); targets/host does the rest."""
