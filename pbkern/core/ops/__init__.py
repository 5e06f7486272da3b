"""Equations of a few large primitives, read once for fusion and for lowering."""
