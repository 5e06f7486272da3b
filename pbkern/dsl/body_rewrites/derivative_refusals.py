"""Kernel -> UnsupportedKernel, at the user's line, where its body has no derivative in reverse."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pbkern import _jax
from pbkern.core.errors import UnsupportedKernel
from pbkern.core.jaxprs.walks import equations
from pbkern.core.process.jaxpr_digest import fingerprint
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.primitives.ref_access import GatheredIndex, RefAccess

from .counted_indices import CountedIndices

# Size of a grid dimension that nothing limits but its type.
UNLIMITED_SIZE = np.iinfo(np.int32).max
CUSTOM = "jax.custom_vjp around the kernel, with a kernel for the backward pass"


def derivative_error(kernel: Kernel, why: str, hint: str, eqn=None) -> UnsupportedKernel:
    """Makes the error, at the line of an equation or where the kernel is defined."""
    return UnsupportedKernel(
        f"derivative of kernel `{kernel.name}`",
        at=(eqn and _jax.user_line(eqn)) or kernel.defined_at or None,
        why=why,
        hint=f"{hint}, or {CUSTOM}",
    )


def refuse(kernel: Kernel) -> None:
    """Raises UnsupportedKernel for equations that are not differentiated."""
    counted = CountedIndices.of(kernel)
    for eqn in equations(kernel.differentiable.jaxpr):
        is_loop = eqn.primitive.name == "while" and counted.most_rounds(eqn) is None
        if is_loop and any(map(_is_float, (*eqn.outvars, *eqn.invars))):
            raise derivative_error(
                kernel,
                "how often this loop runs at most is not known when the kernel is traced",
                "jnp.minimum(rounds, a Python number)",
                eqn,
            )


def refuse_arrays_of_indices(kernel: Kernel, eqn, access: RefAccess) -> None:
    """Raises UnsupportedKernel for a store through an array of indices."""
    if any(isinstance(index, GatheredIndex) for index in access.indices):
        raise derivative_error(
            kernel,
            "it stores through an array of indices that is not known to name each element once",
            "pbkern.atomic_add, or a loop that stores one element at a time",
            eqn,
        )


def refuse_views(kernel: Kernel) -> None:
    """Raises UnsupportedKernel if the body reads an operand that shares memory with a result of other blocks."""
    read = _jax.read_inputs(kernel.body.jaxpr)
    for i, output in kernel.aliases:
        operand, result = kernel.inputs[i], kernel.outputs[output]
        same = operand.dims == result.dims and fingerprint(operand.index_map) == fingerprint(
            result.index_map
        )
        if i in read and not same:
            raise derivative_error(
                kernel,
                f"{operand.origin} and {result.origin} are one array in blocks of their own",
                "equal BlockSpecs for both",
            )


def refuse_saving(kernel: Kernel) -> None:
    """Raises UnsupportedKernel if states of programs must be saved, and nothing says how many there are at most."""
    if any(kernel.grid[axis] == UNLIMITED_SIZE for axis, _ in kernel.dynamic_grid):
        raise derivative_error(
            kernel,
            "it needs what each program finds in scratch or results, for a number of programs that is not known",
            "a grid of constant size",
        )


def _is_float(atom) -> bool:
    return jnp.issubdtype(_jax.ref_contents(atom.aval).dtype, jnp.inexact)
