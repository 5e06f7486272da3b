"""LLVM: llvmlite's in child processes, which it may end (process.py, child.py), and what LLVM does not compile (repairs.py)."""
