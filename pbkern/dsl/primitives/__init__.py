"""Primitives that bodies of kernels have beside lax: grid, accesses of Refs, atomics, random keys."""
