"""BuildOptions: what a target decides before there is a nest. Defaults suit any device; a target gives its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BuildOptions:
    """What building nests and the shared passes may know of a target. Plain data: it is part of the keys of the disk cache.

    Attributes:
      semantics: dimension_semantics of the kernel for this target; None: derived (lower/grid/parallelism.py).
      contract: sums may be reassociated, products and sums contracted.
    """

    semantics: tuple[str, ...] | None = None
    contract: bool = True
