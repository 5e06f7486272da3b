"""Affine integer expressions over named symbols: sum(coefficient * symbol) + constant.

Symbols are any hashable: grid axes (ints) in index maps, dimension names in loop nests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Affine:
    """sum(c * s for s, c in terms) + const. `terms` is sorted and holds no zero coefficient."""

    terms: tuple[tuple[Hashable, int], ...] = ()
    const: int = 0

    @staticmethod
    def make(terms: Mapping[Hashable, int], const: int = 0) -> Affine:
        kept = ((s, int(c)) for s, c in terms.items() if c)
        return Affine(tuple(sorted(kept, key=lambda t: str(t[0]))), int(const))

    @staticmethod
    def symbol(s: Hashable, coefficient: int = 1) -> Affine:
        return Affine.make({s: coefficient})

    def __add__(self, other: Affine | int) -> Affine:
        if not isinstance(other, Affine):  # an int, also NumPy's
            return Affine(self.terms, self.const + int(other))
        if not self.terms or not other.terms:
            return Affine(self.terms or other.terms, self.const + other.const)
        merged = dict(self.terms)
        for s, c in other.terms:
            merged[s] = merged.get(s, 0) + c
        return Affine.make(merged, self.const + other.const)

    def __mul__(self, k: int) -> Affine:
        k = int(k)
        return Affine(tuple((s, c * k) for s, c in self.terms) if k else (), self.const * k)

    def __sub__(self, other: Affine | int) -> Affine:
        return self + (other * -1)

    def coefficient(self, s: Hashable) -> int:
        for t, c in self.terms:
            if t == s:
                return c
        return 0

    @property
    def symbols(self) -> frozenset[Hashable]:
        return frozenset(s for s, _ in self.terms)

    @property
    def is_const(self) -> bool:
        return not self.terms

    def linear(self) -> Affine:
        """The part without the constant."""
        return Affine(self.terms, 0)

    def substitute(self, f: Callable[[Hashable], Affine | int | None]) -> Affine:
        """Replaces each symbol s by f(s); None keeps it."""
        out = Affine((), self.const)
        for s, c in self.terms:
            r = f(s)
            out = out + (Affine.symbol(s) if r is None else r if isinstance(r, Affine) else Affine((), r)) * c
        return out

    def evaluate(self, values: Mapping[Hashable, int]) -> int:
        return self.const + sum(c * values[s] for s, c in self.terms)

    def bounds(self, extents: Callable[[Hashable], int]) -> tuple[int, int]:
        """(smallest, largest) value with each symbol s in [0, extents(s))."""
        lo = hi = self.const
        for s, c in self.terms:
            reach = c * max(extents(s) - 1, 0)
            lo, hi = lo + min(reach, 0), hi + max(reach, 0)
        return lo, hi

    def __str__(self) -> str:
        parts = [f"{s}" if c == 1 else f"{c}*{s}" for s, c in self.terms]
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts).replace("+ -", "- ")
