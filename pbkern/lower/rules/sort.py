"""A sort of values -> its results.

Short lines stay in registers (sorting_network.py), others are stored and sorted there
(targets/cpu/emit/sorts/radix_sort.py).
"""

from __future__ import annotations

import math

from jax.extend import core as jex

from pbkern.lower.nest.ir import Sort
from pbkern.lower.values.values import Opaque, Stored, Value

from .sorting_network import sorted_lines
from .views import joined


def sorted_values(builder, eqn, ins: list[Value], first: int) -> list[Value]:
    """Sorted operands, of whose lines `first` elements are read."""
    axis, keys = eqn.params["dimension"], eqn.params["num_keys"]
    shape = ins[0].shape
    if shape[axis] and builder.context.options.sorts_in_registers(shape[axis], keys, len(ins)):
        return [
            builder.new(joined(parts, shape, axis))
            for parts in sorted_lines(builder, ins, axis, keys)
        ]
    perm = [k for k in range(len(shape)) if k != axis] + [axis]
    moved = tuple(shape[dim] for dim in perm)
    length, lines = shape[axis], math.prod(shape) // max(shape[axis], 1)
    results: list[Stored] = []

    def make(inner_builder, *operands: Value) -> Stored:
        targets = [inner_builder.new_buffer(moved, source.dtype) for source in operands]
        for target, operand in zip(targets, operands):
            inner_builder.store_value(target, operand, lambda ix: tuple(ix[dim] for dim in perm))
        flat = [inner_builder.reinterpret(dest, (lines, length)) for dest in targets]
        sizes = inner_builder.context.options.sort_scratch(
            lines, length, [source.dtype for source in operands], keys, first
        )
        spare = [inner_builder.new_buffer(shape, dtype) for shape, dtype in sizes]
        inner_builder.stmts.append(
            Sort(
                tuple(rows.buf for rows in flat),
                tuple(scratch.buf for scratch in spare),
                keys,
                first,
            )
        )
        for target in targets:
            stored = Stored(
                shape, target.dtype, target.buf, lambda ix: tuple(ix[dim] for dim in perm)
            )
            inner_builder.keep(stored)
            results.append(stored)
        return results[0]

    main = builder.new(Opaque(shape, ins[0].dtype, tuple(ins), make, needs_buffers=False))
    further = [
        builder.new(Opaque(shape, input_.dtype, (main,), lambda inner_builder, _, k=k: results[k]))
        for k, input_ in enumerate(ins[1:], 1)
    ]
    return [main, *further]


def elements_read(jaxpr: jex.Jaxpr, eqn) -> int:
    """Counts the first elements of each sorted line that are read: all, unless there are only slices of the results."""
    axis = eqn.params["dimension"]
    length = eqn.outvars[0].aval.shape[axis]
    results = set(eqn.outvars)
    if any(not isinstance(atom, jex.Literal) and atom in results for atom in jaxpr.outvars):
        return length
    last = 0
    for user in jaxpr.eqns:
        for var in user.invars:
            if isinstance(var, jex.Literal) or var not in results:
                continue
            if user.primitive.name != "slice":
                return length
            last = max(last, user.params["limit_indices"][axis])
    return last
