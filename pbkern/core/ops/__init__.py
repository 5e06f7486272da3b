"""Primitives: a row per elementwise one, and the equations of a few large ones, read once for fusion and for lowering."""
