"""Loops over small values -> kernels that hold the whole loop, cut into programs where elements are independent."""
