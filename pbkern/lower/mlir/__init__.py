"""Typed SSA values -> MLIR text."""
