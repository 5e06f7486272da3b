"""Kernel -> its backward kernel: reverse mode.

Each program of the kernel is a pure function from blocks and states to states: states are blocks of results, and
scratch. A program of the backward kernel is `jax.vjp` of that function: it takes the cotangents of the states after the
program and gives those of its blocks and of the states before it.

Where programs depend on earlier ones, by scratch or by blocks of results that several of them visit, the backward kernel
walks the grid backwards. Cotangents of scratch wait in scratch, cotangents of results in their array. A second run of the
kernel saves the states before each program that the derivative reads, unless a result holds their values. An operand's
block that several programs read gets the sum of their cotangents, in the order of the grid.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern.core.errors import UnsupportedKernel
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.body_rewrites.derivative_refusals import (
    refuse,
    refuse_views,
)
from pbkern.dsl.kernel import ArrayType, Kernel

from .backward_kernels import backward_kernel, saving_kernel
from .blocks import (
    ProgramOrder,
)
from .last_maxima import online_softmax
from .program_derivative import Derivative

# Parts that are added one by one: a sum over leading dimensions takes XLA several times as long on CPUs.
# Source: 4 parts of 512 x 512 floats, 12 ms against 1, on a Xeon with AVX-512, November 2026.
MOST_ADDED = 16


def cotangents(
    primitive,
    kernel: Kernel,
    active: tuple[bool, ...],
    operands: Sequence,
    known: Mapping[int, jax.Array],
    given: Sequence,
    finals: tuple[int, ...] = (),
) -> list:
    """Cotangents of a kernel's active operands, by calls of its backward kernel and of the one that saves states.

    Args:
      primitive: calls kernels.
      kernel: has no last stage.
      active: per operand, whether its cotangent is asked for.
      operands: the kernel's.
      known: number of a result -> the result, of those that may be read. Final states are further results.
      given: cotangents of its differentiable results.
      finals: numbers of the scratch whose final states are among `known`.
    """
    plan = backward_plan(kernel, active, tuple(known), finals)
    read = [known[n] for n in plan.read]
    saved: Sequence = ()
    if plan.saving is not None:
        saved = primitive.bind(*operands, kernel=plan.saving)[-len(plan.saved) :]
    zeros = [jnp.zeros(type_.shape, type_.dtype) for type_ in plan.sums]
    sizes = plan.order.sizes(operands)
    results = primitive.bind(*sizes, *operands, *read, *given, *saved, *zeros, kernel=plan.backward)
    by_operand = dict(zip(plan.operands, results))
    return [_total(by_operand[n], kernel.inputs[n].array) for n, has in enumerate(active) if has]


def _total(parts: jax.Array, type_: ArrayType) -> jax.Array:
    """The sum over leading dimensions that a type lacks, in that type."""
    leading = parts.ndim - len(type_.shape)
    places = list(np.ndindex(parts.shape[:leading]))
    if len(places) <= MOST_ADDED:
        total = functools.reduce(lax.add, (parts[place] for place in places))
    else:
        total = parts.sum(tuple(range(leading)))
    return lax.convert_element_type(total, type_.dtype)


@dataclass(frozen=True)
class BackwardPlan:
    """The kernels of a backward pass.

    Attributes:
      order: the order of its programs.
      backward: (sizes that `order` needs, operands of the kernel, results that are read, cotangents of its results, saved
        states, zeros) -> cotangents, some of them sums in parts, stacked along leading dimensions.
      read: numbers of the results that are read.
      operands: which operand of the kernel each result of `backward` is the cotangent of; None for
        contents of results that nobody asks for.
      sums: types of the results that begin as zeros.
      saving: operands -> whatever the kernel reads back, then the saved states; None if there are none.
      saved: numbers of these.
    """

    order: ProgramOrder
    backward: Kernel
    read: tuple[int, ...]
    operands: tuple[int | None, ...]
    sums: tuple[ArrayType, ...]
    saving: Kernel | None
    saved: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def backward_plan(
    kernel: Kernel,
    active: tuple[bool, ...],
    known: tuple[int, ...] | None = None,
    finals: tuple[int, ...] = (),
) -> BackwardPlan:
    """Makes the kernels of a backward pass.

    Args:
      kernel: has no last stage.
      active: per operand, whether its cotangent is asked for.
      known: numbers of results that may be read; None for all. Final states are further results.
      finals: numbers of the scratch whose final states are further results, that of the maxima first.

    Raises:
      UnsupportedKernel, at the user's line: a body that is not differentiated.
    """
    refuse(kernel)
    refuse_views(kernel)
    count = len(kernel.outputs) + len(finals)
    with jax.enable_x64(True):  # every type is explicit by now
        derivative = Derivative(kernel, active, range(count) if known is None else known, finals)
        backward = backward_kernel(derivative)
    saved = derivative.saved
    saving = saving_kernel(derivative.source, saved) if saved else None
    return BackwardPlan(
        derivative.order,
        backward,
        derivative.read,
        derivative.operands,
        derivative.sums,
        saving,
        saved,
    )


@functools.lru_cache(maxsize=256)
def final_states(kernel: Kernel, active: tuple[bool, ...]) -> tuple[int, ...]:
    """Numbers of the scratch whose final states replace states between programs, in the derivative; () if none do.

    The maxima of an online softmax come first, its sums of rows behind them. Its other sums follow if the derivative needs
    them.
    """
    try:
        softmax = online_softmax(kernel)
    except UnsupportedKernel:  # `backward_plan` raises it again if the kernel is transposed
        softmax = None
    if softmax is None:
        return ()
    rows = [
        n
        for n in softmax.products
        if kernel.scratch[n].shape == kernel.scratch[softmax.maximum].shape
    ]
    for products in (rows, softmax.products):
        finals = (softmax.maximum, *products)
        try:
            backward_plan(kernel, active, None, finals)
        except UnsupportedKernel:
            continue
        return finals
    return ()
