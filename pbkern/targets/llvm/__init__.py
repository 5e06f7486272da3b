"""LLVM: llvmlite's in child processes, which it may end (process.py, child.py), and operations that it does not compile (repairs.py)."""
