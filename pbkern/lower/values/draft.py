"""A nest while its expressions are made: pulling a value into it may add reductions and reduced dimensions."""

from __future__ import annotations

from collections.abc import Iterable

from pbkern.core.errors import InternalError
from pbkern.lower.nest.ir import Accumulator, Nest, Reduction, Store


class NestDraft:
    """Collects dimensions and reductions of one nest; `nest` makes it."""

    def __init__(
        self,
        dims: Iterable[tuple[str, int]] = (),
        rdims: tuple[str, ...] = (),
        ordered: bool = False,
        at: str | None = None,
    ) -> None:
        self.dims = dict(dims)
        self.rdims = rdims
        self.reductions: list[Reduction] = []
        # (id of a contraction, index) -> its accumulator
        self.inlined: dict[tuple, Accumulator] = {}
        self.ordered = ordered
        self.at = at

    def reduce_over(self, dims: dict[str, int]) -> None:
        """Adds the dimensions over which the nest reduces."""
        if self.rdims:
            raise InternalError(f"a nest reduces over {self.rdims} and over {tuple(dims)}")
        self.dims |= dims
        self.rdims = tuple(dims)

    def add(self, reduction: Reduction) -> int:
        """Adds a reduction and returns its number."""
        self.reductions.append(reduction)
        return len(self.reductions) - 1

    def nest(self, *stores: Store) -> Nest:
        """Makes the nest that stores these values."""
        return Nest(self.dims, self.rdims, tuple(self.reductions), stores, self.ordered, self.at)
