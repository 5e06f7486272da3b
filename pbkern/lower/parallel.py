"""Kernel -> grid dimensions whose programs may run in any order, on several threads.

"parallel" in dimension_semantics is the author's licence. Without one, a dimension counts as parallel when its programs
provably write disjoint blocks, keep nothing in scratch and read no block of an aliased operand but their own. Dimensions of
dynamic size run in order.
"""

from __future__ import annotations

from .. import jaxprs
from ..dsl.kernel import Kernel


def parallel_dimensions(kernel: Kernel, semantics: tuple[str, ...] | None) -> tuple[int, ...]:
    """Axes of the grid, ascending."""
    dynamic = {d for d, _ in kernel.dynamic_grid}
    static = [d for d in range(len(kernel.grid)) if d not in dynamic]
    if semantics is not None:
        return tuple(d for d in static if semantics[d] == "parallel")
    single = tuple(d for d in static if kernel.grid[d] == 1)
    if not all(s.scoped for s in kernel.scratch) or not all(_same_blocks(kernel, *pair) for pair in kernel.aliases):
        return single
    return tuple(d for d in static if d in single or all(_disjoint(m, d) for m in kernel.outputs))


def _same_blocks(kernel: Kernel, operand: int, result: int) -> bool:
    """Whether every program reads of an aliased operand exactly the block that it writes."""
    a, b = kernel.inputs[operand], kernel.outputs[result]
    return a.dims == b.dims and operand >= kernel.num_scalar_prefetch and jaxprs.same(a.index_map, b.index_map)


def _disjoint(mapping, dim: int) -> bool:
    """Whether blocks of two programs that differ in `dim` never overlap: some axis moves with it alone, by a block or more."""
    for start, block in zip(mapping.starts, mapping.dims):
        if start is not None and start.symbols == {dim} and abs(start.coefficient(dim)) >= block.size:
            return True
    return False
