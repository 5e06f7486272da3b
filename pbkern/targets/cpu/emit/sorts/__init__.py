"""Sorts of lines as scf and vector operations: by digits, and the first elements alone."""
