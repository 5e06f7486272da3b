"""Affine integer expressions over named symbols: sum(coefficient * symbol) + constant.

Symbols are any hashable: grid axes (`Affine[int]`) in index maps, names of dimensions
(`Affine[str]`) in loop nests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Affine(Generic[S]):
    """sum(c * s for s, c in terms) + const. `terms` is sorted and holds no zero coefficient."""

    terms: tuple[tuple[S, int], ...] = ()
    const: int = 0

    @staticmethod
    def make(terms: Mapping[S, int], const: int = 0) -> Affine[S]:
        kept = ((s, int(term)) for s, term in terms.items() if term)
        return Affine(tuple(sorted(kept, key=lambda t: str(t[0]))), int(const))

    @staticmethod
    def symbol(s: S, coefficient: int = 1) -> Affine[S]:
        return Affine.make({s: coefficient})

    def __add__(self, other: Affine[S] | int) -> Affine[S]:
        if not isinstance(other, Affine):  # an int, also NumPy's
            return Affine(self.terms, self.const + int(other))
        if not self.terms or not other.terms:
            return Affine(self.terms or other.terms, self.const + other.const)
        merged = dict(self.terms)
        for s, c in other.terms:
            merged[s] = merged.get(s, 0) + c
        return Affine.make(merged, self.const + other.const)

    def __mul__(self, k: int) -> Affine[S]:
        k = int(k)
        return Affine(tuple((s, c * k) for s, c in self.terms) if k else (), self.const * k)

    def __sub__(self, other: Affine[S] | int) -> Affine[S]:
        return self + (other * -1)

    def coefficient(self, s: S) -> int:
        for t, c in self.terms:
            if t == s:
                return c
        return 0

    @property
    def symbols(self) -> frozenset[S]:
        return frozenset(s for s, _ in self.terms)

    @property
    def is_const(self) -> bool:
        return not self.terms

    def linear(self) -> Affine[S]:
        """The part without the constant."""
        return Affine(self.terms, 0)

    def substitute(self, f: Callable[[S], Affine[S] | int | None]) -> Affine[S]:
        """Replaces each symbol s by f(s); None keeps it."""
        out: Affine[S] = Affine((), self.const)
        for s, c in self.terms:
            r = f(s)
            out = (
                out
                + (Affine.symbol(s) if r is None else r if isinstance(r, Affine) else Affine((), r))
                * c
            )
        return out

    def evaluate(self, values: Mapping[S, int]) -> int:
        return self.const + sum(c * values[s] for s, c in self.terms)

    def bounds(self, extents: Callable[[S], int]) -> tuple[int, int]:
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
