"""Reports of the kernels in a function that fusion did not make: hand-written ones and Pallas calls.

For each: where it is from, and for each dimension of its grid whether programs run in parallel or
in order, and why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import UnsupportedOp
from pbkern.core.jaxprs.walks import inner_jaxprs
from pbkern.core.options import CompileOptions
from pbkern.dsl.call import kernel_p
from pbkern.dsl.kernel import Kernel
from pbkern.fuse.algebra.grouped_products import ROWS_BY_GROUP, SUMS_BY_GROUP
from pbkern.lower.grid.parallelism import grid_dimensions
from pbkern.targets import get_target

if TYPE_CHECKING:
    from pbkern.fuse import Explanation
    from pbkern.fuse.emit.explain import HandWrittenKernel

PALLAS = "pallas_call"


def explained(
    explanation: Explanation, jaxpr: jex.Jaxpr, target_name: str, pallas_is_native: bool
) -> Explanation:
    """The explanation with an entry for each hand-written kernel and each Pallas call of the function `jaxpr`.

    Args:
      explanation: of the function's fusion.
      jaxpr: the function.
      target_name: name of the target that compiles the kernels.
      pallas_is_native: whether pbkern.pallas.install() is in force; otherwise XLA gets what JAX
        makes of the call.
    """
    written = tuple(_report(call, target_name, pallas_is_native) for call in _calls(jaxpr))
    left = explanation.left
    if pallas_is_native:  # XLA calls it, but it is a kernel
        left = tuple(
            dataclasses.replace(x, why="a Pallas kernel, which is compiled by itself")
            if x.op == PALLAS
            else x
            for x in left
        )
    return dataclasses.replace(explanation, written=written, left=left)


def _calls(jaxpr: jex.Jaxpr) -> Iterator:
    """Equations that call a kernel, at any depth, but not inside Pallas calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is kernel_p or eqn.primitive.name == PALLAS:
            yield eqn
            continue
        for inner in inner_jaxprs(eqn):
            yield from _calls(inner.jaxpr)


def _report(eqn, target_name: str, pallas_is_native: bool) -> HandWrittenKernel:
    from pbkern.fuse.emit.explain import GROUPED, HandWrittenKernel

    at = _jax.user_line(eqn)
    if eqn.primitive is kernel_p:
        kernel = eqn.params["kernel"]
        grouped = kernel.name in (ROWS_BY_GROUP, SUMS_BY_GROUP)
        origin = GROUPED if grouped else kernel.origin
        lines = _grid_lines(kernel, target_name)
        return HandWrittenKernel(kernel.name, origin, at, kernel.grid, lines)
    name = eqn.params["name"] or "pallas_call"
    grid = tuple(eqn.params["grid_mapping"].grid)
    if eqn.params["interpret"]:
        return HandWrittenKernel(
            name, "Pallas", at, grid, ("runs in JAX's interpreter, as interpret= asks for",)
        )
    if not pallas_is_native:
        return HandWrittenKernel(
            name, "Pallas", at, grid, ("is JAX's: pbkern.pallas.install() compiles it",)
        )
    from pbkern.frontends.pallas.call import import_call

    try:
        kernel = import_call(
            **{key: param for key, param in eqn.params.items() if key != "interpret"},
            target=target_name,
        ).kernel
    except UnsupportedOp as e:
        return HandWrittenKernel(name, "Pallas", at, grid, (f"cannot be compiled: {e.what}",))
    return HandWrittenKernel(kernel.name, kernel.origin, at, grid, _grid_lines(kernel, target_name))


def _grid_lines(kernel: Kernel, target_name: str) -> tuple[str, ...]:
    target = get_target(target_name)
    options = target.backend.build_options(kernel, CompileOptions())
    lines = tuple(map(str, grid_dimensions(kernel, options)))
    lines += target.block_copies(kernel, CompileOptions())
    return (
        lines
        if kernel.finish is None
        else (*lines, f"last stage: {kernel.finish.name}, once all programs are done")
    )
