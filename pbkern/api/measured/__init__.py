"""Measured times of kernels, and choices that tuning found with them."""
