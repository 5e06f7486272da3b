"""A kernel that is called in the body of another: its one program, on the values of that body."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from pbkern.core.errors import UnsupportedKernel, UnsupportedOp
from pbkern.dsl.kernel import Kernel

from .pure_program import pure_program


def inlined(kernel: Kernel, operands: Sequence, at: str | None) -> list:
    """Results of a kernel's one program, as equations of the body that is traced.

    Raises UnsupportedOp, at the call, for a kernel of several programs.
    """
    for stage in kernel.stages:
        if stage.num_programs != 1 or stage.dynamic_grid or stage.num_scalar_prefetch:
            raise UnsupportedOp(
                f"kernel `{kernel.name}`, called in the body of another, has a grid",
                at=at,
                why=f"grid={stage.grid}; a body is one program",
                hint="a kernel without a grid, over the block that the body holds, or a plain function",
            )
    try:
        return _run(kernel, operands)
    except UnsupportedKernel as error:
        raise UnsupportedOp(
            f"kernel `{kernel.name}`, called in the body of another",
            at=at,
            why=f"{error.why} ({error.at})",
            hint="a loop that stores one element at a time",
        ) from None


def _run(kernel: Kernel, operands: Sequence) -> list:
    results = _one_program(kernel.stages[0], operands[: len(kernel.stages[0].inputs)])
    if kernel.finish is not None:
        further = operands[len(kernel.stages[0].inputs) :]
        results = _one_program(kernel.finish, [*results, *further])
    return results


def _one_program(kernel: Kernel, operands: Sequence) -> list:
    """The blocks of a single program are its arrays, unless they reach over their ends."""
    program = pure_program(kernel)
    mappings = (*kernel.inputs, *kernel.outputs)
    for mapping in mappings:
        if mapping.ref_shape != mapping.array.shape:
            raise UnsupportedOp(
                f"{mapping.origin} of kernel `{kernel.name}`, called in the body of another, is not one block",
                why=f"array {mapping.array}, block {mapping.ref_shape}",
                hint="no BlockSpec: the block is the array",
            )
    inside = [np.ones(size, bool) for mapping in mappings for size in mapping.ref_shape]
    state = [jnp.zeros(type_.shape, type_.dtype) for type_ in program.state]
    for operand, result in kernel.aliases:
        state[result] = operands[operand]
    return program([np.int32(0)] * len(kernel.grid), inside, operands, state)[: len(kernel.outputs)]
