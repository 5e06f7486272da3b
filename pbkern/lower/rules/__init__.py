"""Equation of a body -> value or statements, by family of primitives. The rules register when this package is imported."""

from . import contractions, control_flow, views

__all__ = ["contractions", "control_flow", "views"]
