"""Kernels of a function as source that can be edited, and edited kernels in the function."""
