"""Kernel -> KernelError where programs along a dimension declared "parallel" all store to the same elements of a result.

Which of them is last is not known: the result is that of any. Seen without running: the result's
block does not move with the dimension, and the body stores to constant places in it, under no
condition or mask. `pbkern.interpret` finds the rest as it runs (RaceError).
"""

from __future__ import annotations

from jax.extend import core as jex

from pbkern.core.errors import KernelError
from pbkern.dsl.interpret import parallel_dims
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.primitives.ref_access import Point, Range, is_ref_access, ref_access


def check_parallel_stores(kernel: Kernel) -> None:
    """Raises KernelError. Kernels of the fuser are not looked at."""
    for axis in parallel_dims(kernel) if kernel.defined_at else ():
        if kernel.grid[axis] == 1:
            continue
        for n, output in enumerate(kernel.outputs):
            stays = None not in output.starts and all(
                axis not in start.symbols for start in output.starts if start is not None
            )
            if stays and _stores_to_constant_places(
                kernel.body.jaxpr, kernel.body.jaxpr.invars[len(kernel.inputs) + n]
            ):
                raise KernelError(
                    f"programs of kernel `{kernel.name}` that run in parallel write the same elements of {output.origin}",
                    at=kernel.defined_at,
                    why=f'grid {kernel.grid}, dimension {axis} is "parallel", and '
                    f"the index map of {output.origin} does not use it",
                    hint=f'an index map that moves with grid dimension {axis}, or "arbitrary" in dimension_semantics, '
                    "where programs run in order",
                )


def _stores_to_constant_places(jaxpr: jex.Jaxpr, ref: jex.Var) -> bool:
    for eqn in jaxpr.eqns:
        if is_ref_access(eqn):
            access = ref_access(eqn)
            stores = access.ref is ref and access.kind != "load" and access.mask is None
            if stores and all(map(_is_constant, access.indices)):
                return True
    return False


def _is_constant(index) -> bool:
    match index:
        case Point(int()) | Range(int()):
            return True
    return False
