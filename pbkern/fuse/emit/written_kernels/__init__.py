"""Kernels that people wrote, with what stands before and behind them computed on their blocks."""
