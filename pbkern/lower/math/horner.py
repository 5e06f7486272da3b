"""Polynomials of values."""

from __future__ import annotations

from pbkern.lower.mlir.ops import Builder, Ssa

from .coefficients import COEFFICIENTS


def poly(b: Builder, x: Ssa, coefficients) -> Ssa:
    """Horner's scheme; coefficients are constant first."""
    acc = b.c(coefficients[-1], x.el)
    for coefficient in reversed(coefficients[:-1]):
        acc = b.fma(acc, x, b.c(coefficient, x.el))
    return acc


def fit(b: Builder, x: Ssa, name: str, *, scale: float = 1.0) -> Ssa:
    """The fitted polynomial of that name, times a power of two."""
    return poly(b, x, [scale * coefficient for coefficient in COEFFICIENTS[name, x.el]])
