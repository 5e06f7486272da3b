"""Kernel -> for each grid dimension, whether its programs may run in any order, on several threads, and why.

"parallel" in dimension_semantics is the author's licence. Without one, a dimension counts as
parallel when its programs provably write disjoint blocks, or elements (store_disjointness.py), pass
nothing on in scratch (scratch_resets.py) and read no block of an aliased operand but their own.
Dimensions of dynamic size run in order.
"""

from __future__ import annotations

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.process.jaxpr_digest import same
from pbkern.dsl.kernel import Kernel
from pbkern.lower.build_options import BuildOptions

from .scratch_resets import restarting_dimension


@dataclass(frozen=True)
class GridDimension:
    """One grid dimension: `size` programs, None where an operand gives it, which run in parallel or in order, and why."""

    axis: int
    size: int | None
    parallel: bool
    why: str

    def __str__(self) -> str:
        size = "of dynamic size" if self.size is None else f"of {self.size}"
        return f"grid dimension {self.axis} {size}: {'parallel' if self.parallel else 'in order'}, {self.why}"


def grid_dimensions(kernel: Kernel, options: BuildOptions) -> tuple[GridDimension, ...]:
    """One entry per grid dimension."""
    semantics = options.semantics
    dynamic = {dim for dim, _ in kernel.dynamic_grid}
    dimensions = []
    for axis, size in enumerate(kernel.grid):
        if axis in dynamic:
            dimensions.append(GridDimension(axis, None, False, "because an operand gives its size"))
        elif semantics is not None:
            dimensions.append(
                GridDimension(
                    axis, size, semantics[axis] == "parallel", f'declared "{semantics[axis]}"'
                )
            )
        elif size == 1:
            dimensions.append(GridDimension(axis, size, True, "a single program"))
        else:
            shared = _shared_memory(kernel, axis)
            why = shared or _overlap(kernel, axis)
            proof = "blocks"
            if why is not None and not shared and _apart_in_body(kernel, axis, options):
                why, proof = None, "elements"
            dimensions.append(
                GridDimension(
                    axis, size, why is None, why or f"proved: its programs write disjoint {proof}"
                )
            )
    return tuple(dimensions)


def _shared_memory(kernel: Kernel, dim: int) -> str | None:
    """Names what programs that differ along `dim` may hand to each other, or None."""
    for n, scratch in enumerate(kernel.scratch):
        if not scratch.scoped and dim >= restarting_dimension(kernel, n):
            return f"because scratch {n} is kept from program to program"
    for i, result in kernel.aliases:
        if not _same_blocks(kernel, i, result):
            return (
                f"because programs may read of {kernel.inputs[i].origin} what others write through "
                f"{kernel.outputs[result].origin}"
            )
    return None


def _overlap(kernel: Kernel, dim: int) -> str | None:
    """Which result's blocks may overlap along `dim`, or None."""
    mapping = next((output for output in kernel.outputs if not output.moves_apart(dim)), None)
    if mapping is None:
        return None
    unmoved = all(start is not None and dim not in start.symbols for start in mapping.starts)
    what = "are the same along it" if unmoved else "are not proved to be disjoint"
    return f"because blocks of {mapping.origin} {what}"


def _apart_in_body(kernel: Kernel, dim: int, options: BuildOptions) -> bool:
    """Whether the body keeps programs apart that block mappings do not."""
    from .store_disjointness import moves_apart  # builds bodies: too much for `import pbkern`

    return all(
        output.moves_apart(dim) or moves_apart(kernel, result, dim, options)
        for result, output in enumerate(kernel.outputs)
    )


def _same_blocks(kernel: Kernel, operand: int, result: int) -> bool:
    """Whether every program reads of an aliased operand exactly the block that it writes."""
    source, target = kernel.inputs[operand], kernel.outputs[result]
    return (
        source.dims == target.dims
        and operand >= kernel.num_scalar_prefetch
        and same(source.index_map, target.index_map)
    )
