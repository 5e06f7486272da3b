"""Bodies that write to Refs of operands: the writes go to a copy, never to the caller's array.

A block's copy lives for one program. Operands that are prefetched whole keep what programs write to
them from one program to the next, as on a TPU, whose kernels hold their state there. Along
dimensions declared parallel each program starts again, as cores do; without declared ones the whole
grid runs in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import jax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jaxprs.retracing import retrace_into
from pbkern.dsl.interpret import parallel_dims
from pbkern.dsl.kernel import Kernel, Scratch
from pbkern.dsl.primitives import grid


def with_private_inputs(kernel: Kernel, restarting: Collection[int] | None = None) -> Kernel:
    """The kernel with scratch in place of every operand that its body writes to.

    Args:
      kernel: returned itself if there is no such operand.
      restarting: grid dimensions along which each program starts with the caller's values; None:
        those declared parallel.
    """
    restarting = parallel_dims(kernel) if restarting is None else restarting
    written = sorted(
        operand
        for operand in _jax.written_inputs(kernel.body.jaxpr)
        if operand < len(kernel.inputs)
    )
    if not written:
        return kernel
    prefetched = [position for position in written if position < kernel.num_scalar_prefetch]
    copies = [
        Scratch(
            kernel.inputs[position].ref_shape,
            kernel.inputs[position].array.dtype,
            scoped=position not in prefetched,
        )
        for position in written
    ]
    return dataclasses.replace(
        kernel,
        scratch=(*kernel.scratch, *copies),
        body=_with_copies(kernel, written, prefetched, copies, restarting),
    )


def _with_copies(
    kernel: Kernel, written: list[int], prefetched: list[int], copies: list[Scratch], restarting
) -> jex.ClosedJaxpr:
    avals = [_jax.fresh_aval(var.aval) for var in kernel.body.jaxpr.invars] + [
        _jax.ref_aval(copy.shape, copy.dtype) for copy in copies
    ]

    def run(*refs):
        mine = dict(zip(written, refs[len(refs) - len(copies) :]))
        original = {id(copy): refs[n] for n, copy in mine.items()}
        for position in (number for number in written if number not in prefetched):
            mine[position][...] = refs[position][...]
        if prefetched:
            in_order = [axis for axis in range(len(kernel.grid)) if axis not in restarting]
            _in_first_program(in_order, [(mine[number], refs[number]) for number in prefetched])

        def rewrite(eqn, *operands):
            if eqn.primitive.name == "in_bounds" and id(operands[0]) in original:
                return [eqn.primitive.bind(original[id(operands[0])], **eqn.params)]
            return None

        operands = [mine.get(n, ref) for n, ref in enumerate(refs[: len(refs) - len(copies)])]
        retrace_into(kernel.body.jaxpr, (), operands, rewrite)

    with jax.enable_x64(True):  # every type is explicit by now
        return jax.make_jaxpr(run)(*avals)


def _in_first_program(dims: list[int], pairs: list) -> None:
    """The first program along these dimensions copies each (target, source)."""

    @grid.when(grid.is_first_program(dims))
    def _():
        for target, source in pairs:
            target[...] = source[...]
