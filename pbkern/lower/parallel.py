"""Kernel -> grid dimensions whose programs may run in any order, on several threads.

"parallel" in dimension_semantics is the author's licence. Without one, a dimension counts as parallel when its programs
provably write disjoint blocks, keep nothing in scratch and share no aliased operand.
"""

from __future__ import annotations

from ..dsl.kernel import Kernel


def parallel_dimensions(kernel: Kernel, semantics: tuple[str, ...] | None) -> tuple[int, ...]:
    """Axes of the grid, ascending."""
    if semantics is not None:
        return tuple(d for d, s in enumerate(semantics) if s == "parallel")
    if kernel.scratch or kernel.aliases:
        return tuple(d for d, n in enumerate(kernel.grid) if n == 1)
    return tuple(d for d, n in enumerate(kernel.grid) if n == 1 or all(_disjoint(m, d) for m in kernel.outputs))


def _disjoint(mapping, dim: int) -> bool:
    """Whether blocks of two programs that differ in `dim` never overlap: some axis moves with it alone, by a block or more."""
    for start, block in zip(mapping.starts, mapping.dims):
        if start is not None and start.symbols == {dim} and abs(start.coefficient(dim)) >= block.size:
            return True
    return False
