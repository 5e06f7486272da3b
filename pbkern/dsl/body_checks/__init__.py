"""Checks of hand-written kernels: nothing, or a KernelError at the user's line.

explain.py says what libraries raise in terms of kernels, static_indices.py finds constant indices
outside of Refs, unwritten_results.py results that programs do not write in full. definitions.py
checks what a definition gives beside its body, verify.py the canonical kernel.
"""
