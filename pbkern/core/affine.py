"""Affine integer expressions over named symbols: sum(coefficient * symbol) + constant.

Symbols are any hashable: grid axes (`Affine[int]`) in index maps, names of dimensions
(`Affine[str]`) in loop nests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from pbkern.core.lazy_dataclass import dataclass

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Affine(Generic[S]):
    """sum(c * s for s, c in terms) + const. `terms` is sorted and holds no zero coefficient."""

    terms: tuple[tuple[S, int], ...] = ()
    const: int = 0

    @staticmethod
    def make(terms: Mapping[S, int], const: int = 0) -> Affine[S]:
        nonzero = [(var, int(term)) for var, term in terms.items() if term]
        if len(nonzero) > 1:
            nonzero.sort(key=lambda term: str(term[0]))
        return Affine(tuple(nonzero), int(const))

    @staticmethod
    def symbol(var: S, coefficient: int = 1) -> Affine[S]:
        return Affine(((var, int(coefficient)),) if coefficient else ())

    def __add__(self, other: Affine[S] | int) -> Affine[S]:
        if not isinstance(other, Affine):  # an int, also NumPy's
            return Affine(self.terms, self.const + int(other))
        if not self.terms or not other.terms:
            return Affine(self.terms or other.terms, self.const + other.const)
        merged = dict(self.terms)
        for var, coeff in other.terms:
            merged[var] = merged.get(var, 0) + coeff
        return Affine.make(merged, self.const + other.const)

    def __mul__(self, factor: int) -> Affine[S]:
        factor = int(factor)
        return Affine(
            tuple((var, coeff * factor) for var, coeff in self.terms) if factor else (),
            self.const * factor,
        )

    def __sub__(self, other: Affine[S] | int) -> Affine[S]:
        return self + (other * -1)

    def coefficient(self, var: S) -> int:
        for candidate, coeff in self.terms:
            if candidate == var:
                return coeff
        return 0

    @property
    def symbols(self) -> frozenset[S]:
        return frozenset(var for var, _ in self.terms)

    @property
    def is_const(self) -> bool:
        return not self.terms

    def linear(self) -> Affine[S]:
        """The part without the constant."""
        return Affine(self.terms, 0)

    def substitute(self, f: Callable[[S], Affine[S] | int | None]) -> Affine[S]:
        """Replaces each symbol s by f(s); None keeps it."""
        out: Affine[S] = Affine((), self.const)
        for var, coeff in self.terms:
            value = f(var)
            out = (
                out
                + (
                    Affine.symbol(var)
                    if value is None
                    else value
                    if isinstance(value, Affine)
                    else Affine((), value)
                )
                * coeff
            )
        return out

    def evaluate(self, values: Mapping[S, int]) -> int:
        return self.const + sum(coeff * values[var] for var, coeff in self.terms)

    def bounds(self, extents: Callable[[S], int]) -> tuple[int, int]:
        """(smallest, largest) value with each symbol s in [0, extents(s))."""
        lo = hi = self.const
        for var, coeff in self.terms:
            reach = coeff * max(extents(var) - 1, 0)
            lo, hi = lo + min(reach, 0), hi + max(reach, 0)
        return lo, hi

    def __str__(self) -> str:
        parts = [f"{var}" if coeff == 1 else f"{coeff}*{var}" for var, coeff in self.terms]
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts).replace("+ -", "- ")
