"""Equation of a body -> value or statements, by family of primitives."""
