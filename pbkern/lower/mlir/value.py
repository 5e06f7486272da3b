"""Operands of operations: an SSA name with its type."""

from __future__ import annotations

from typing import NamedTuple

from .element_types import mlir_type


class Ssa(NamedTuple):
    """An SSA name, its MLIR element type, and its lanes (0: scalar)."""

    name: str
    el: str
    lanes: int

    @property
    def type(self) -> str:
        return self.typed(self.el)

    def typed(self, el: str) -> str:
        """The type with these lanes and another element type."""
        return mlir_type(el, self.lanes)
