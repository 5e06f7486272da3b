"""Kernels that people wrote, with their producers and consumers computed on their blocks."""
