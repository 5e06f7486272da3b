"""Kernels of a backward pass: the one that computes cotangents, and the one that saves states before each program."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pbkern.core.jaxprs.calls import rules_kept
from pbkern.core.jaxprs.retracing import retrace_into
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.body_rewrites.pure_program import pure_program
from pbkern.dsl.kernel import ArrayType, Kernel, Scratch, with_input_fusion
from pbkern.dsl.primitives import atomics, grid
from pbkern.dsl.trace import body_dtypes, needs_x64, trace_kernel

from .blocks import (
    ProgramOrder,
    inside,
    sequential_dims,
    with_repeats_outside,
    with_zeros_outside,
)
from .program_derivative import Derivative
from .stores import StoreTarget, run_and_store
from .tangent import Absent, values_kept, without_stores


def backward_kernel(derivative: Derivative) -> Kernel:
    """The kernel whose programs are these derivatives."""
    source, order, state = derivative.source, derivative.order, derivative.program.state
    results = [source.outputs[n] for n in derivative.states if n < len(source.outputs)]
    read = [source.outputs[n] for n in derivative.read]
    saved = [state[n] for n in derivative.saved]
    types = [
        *order.size_types,
        *source.in_types,
        *(mapping.array for mapping in (*read, *results)),
        *(ArrayType(source.grid + type_.shape, type_.dtype) for type_ in saved),
        *derivative.sums,
    ]
    specs = [
        *map(order.spec, (*source.inputs, *read, *results)),
        *(order.spec_per_program(type_.shape) for type_ in saved),
        *(order.spec(mapping) for mapping in derivative.moving if not derivative.is_once(mapping)),
    ]
    outputs = (*derivative.moving, *(source.outputs[n] for n in derivative.in_place))
    axes = range(len(source.grid))
    apart = [all(mapping.moves_apart(axis) for mapping in outputs) for axis in axes]
    num_sizes = len(order.size_types)
    return trace_kernel(
        _BackwardProgram(derivative).body,
        grid=source.grid,
        in_types=types,
        out_types=[mapping.array for mapping in outputs],
        in_specs=specs[source.num_scalar_prefetch :],
        out_specs=list(map(order.spec, outputs)),
        scratch_shapes=[
            Scratch(state[n].shape, state[n].dtype)
            for n in derivative.stored
            if n in derivative.carried
        ],
        aliases=_aliases(derivative, len(types)),
        compiler_params={
            target: atomics.ordered(params, apart)
            for target, params in with_input_fusion(source.compiler_params, ()).items()
        },
        name=f"{derivative.name}_backward",
        num_scalar_prefetch=num_sizes + source.num_scalar_prefetch,
        x64=needs_x64(body_dtypes(source.body.jaxpr)),
        dynamic_grid=[(axis, num_sizes + n) for axis, n in source.dynamic_grid],
        source=source.defined_at,
    )


def _aliases(derivative: Derivative, num_operands: int) -> list[tuple[int, int]]:
    """(operand, result) pairs of the backward kernel: sums with their zeros, cotangents of results in their arrays."""
    first_sum = num_operands - len(derivative.sums)
    added = [n for n, mapping in enumerate(derivative.moving) if not derivative.is_once(mapping)]
    aliases = [(first_sum + k, n) for k, n in enumerate(added)]
    first_given = (
        len(derivative.order.size_types) + len(derivative.source.inputs) + len(derivative.read)
    )
    aliases += [
        (first_given + derivative.states.index(n), len(derivative.moving) + k)
        for k, n in enumerate(derivative.in_place)
    ]
    return sorted(aliases)


class _BackwardProgram:
    """One program of the backward kernel."""

    def __init__(self, derivative: Derivative) -> None:
        self.derivative = derivative

    def body(self, *refs) -> None:
        parts = self._parts(refs)
        numbers = [grid.program_id(axis) for axis in range(len(self.derivative.source.grid))]
        place = self.derivative.order.place(numbers, parts.sizes)
        if parts.waiting:

            @grid.when(grid.is_first_program(self.derivative.order.reversed_dims))
            def _():
                for ref in parts.waiting.values():
                    ref[...] = jnp.zeros_like(ref)

        inputs, outputs = self.derivative.source.inputs, self.derivative.source.outputs
        sides = [
            side
            for mapping, ref in zip(inputs, parts.operands)
            for side in inside(self.derivative.source, mapping, ref)
        ]
        for n, mapping in enumerate(outputs):
            sides += inside(self.derivative.source, mapping, parts.cotangents.get(n))
        blocks = [
            with_repeats_outside(self.derivative.source, mapping, ref)
            for mapping, ref in zip(inputs, parts.operands)
        ]
        before = self._states_before(parts, blocks)
        after = self._cotangents_after(parts, before)
        known = [
            with_repeats_outside(self.derivative.source, outputs[n], ref)
            for n, ref in zip(self.derivative.read[: self.derivative.num_known], parts.read)
        ]
        values = [*place, *sides, *blocks, *before, *after, *known]
        run_and_store(self.derivative.function, values, self._targets(parts, after))

    def _parts(self, refs: Sequence) -> _BodyRefs:
        results = [n for n in self.derivative.states if n < len(self.derivative.source.outputs)]
        counts = [
            len(self.derivative.order.size_types),
            len(self.derivative.source.inputs),
            len(self.derivative.read),
            len(results),
            len(self.derivative.saved),
            len(self.derivative.sums),
            len(self.derivative.blocks),
            len(self.derivative.in_place),
        ]
        ends = np.cumsum([0, *counts])
        sizes, operands, read, given, saved, _, moving, in_place = (
            refs[start:end] for start, end in itertools.pairwise(ends)
        )
        return _BodyRefs(
            sizes,
            operands,
            read,
            saved,
            moving,
            dict(zip(results, given)) | dict(zip(self.derivative.in_place, in_place)),
            dict(
                zip(
                    (n for n in self.derivative.stored if n in self.derivative.carried),
                    refs[ends[-1] :],
                )
            ),
        )

    def _states_before(self, parts: _BodyRefs, blocks: Sequence) -> list:
        """Values of all states before the program; zeros for those that the derivative does not read."""
        before = [jnp.zeros(type_.shape, type_.dtype) for type_ in self.derivative.program.state]
        for n, output in self.derivative.shared.items():
            before[output] = blocks[n]
        for n, ref in zip(self.derivative.saved, parts.saved):
            before[n] = ref[...]
        for n, result in self.derivative.maxima.items():
            before[n] = parts.read[self.derivative.read.index(result)][...]
        return before

    def _cotangents_after(self, parts: _BodyRefs, before: Sequence) -> list:
        """Cotangents of the states after the program, in the order of `states`."""
        after = []
        for n in self.derivative.states:
            if n in parts.cotangents:
                mapping = self.derivative.source.outputs[n]
                after.append(
                    with_zeros_outside(self.derivative.source, mapping, parts.cotangents[n])
                )
            elif n in parts.waiting:
                after.append(parts.waiting[n][...])
            else:
                after.append(jnp.zeros_like(before[n]))
        return after

    def _targets(self, parts: _BodyRefs, after: Sequence) -> list[StoreTarget]:
        """Refs that the derivative's results go to, and the values that these hold."""
        targets = [
            StoreTarget(ref, adds=not self.derivative.is_once(mapping))
            for mapping, ref in zip(self.derivative.moving, parts.moving)
        ]
        contents = dict(zip(self.derivative.states, after))
        for n in self.derivative.stored:
            refs = parts.cotangents if n in self.derivative.in_place else parts.waiting
            targets.append(StoreTarget(refs[n], contents=contents[n]))
        return targets


@dataclass(frozen=True, eq=False)
class _BodyRefs:
    """Refs of the backward kernel's body.

    Attributes:
      sizes: of dynamic grid dimensions, as the order of programs needs them.
      operands: of the kernel.
      read: results of the kernel.
      saved: states before the program.
      moving: cotangents of operands.
      cotangents: number of a result -> its cotangent; that after the program, which is changed in place for some.
      waiting: number of a state in scratch -> its cotangent.
    """

    sizes: Sequence
    operands: Sequence
    read: Sequence
    saved: Sequence
    moving: Sequence
    cotangents: Mapping[int, Any]
    waiting: Mapping[int, Any]


def saving_kernel(kernel: Kernel, saved: Sequence[int]) -> Kernel:
    """The kernel that also stores states before each program.

    Its results are those that the body reads back, then an array of the grid's shape, and a state's, for each of `saved`.
    """
    program, num_in = pure_program(kernel), len(kernel.inputs)
    stored, order = values_kept(kernel), ProgramOrder(kernel)
    types = [program.state[n] for n in saved]

    def body(*refs):
        operands, results = refs[:num_in], refs[num_in : num_in + len(stored)]
        copies = refs[num_in + len(stored) : num_in + len(stored) + len(saved)]
        scratch = refs[num_in + len(stored) + len(saved) :]
        given = dict(zip(stored, results))
        memory = [*(given.get(n, Absent()) for n in range(len(kernel.outputs))), *scratch]

        @grid.when(grid.is_first_program(sequential_dims(kernel)))
        def _():
            for n in saved:
                if n >= len(kernel.outputs):
                    memory[n][...] = jnp.zeros_like(memory[n])

        for n, copy in zip(saved, copies):
            copy[...] = memory[n][...]
        with rules_kept():
            retrace_into(kernel.differentiable.jaxpr, (), [*operands, *memory], without_stores)

    with jax.enable_x64(True):  # every type is explicit by now
        return trace_kernel(
            body,
            grid=kernel.grid,
            in_types=kernel.in_types,
            out_types=[
                *(kernel.outputs[n].array for n in stored),
                *(ArrayType(kernel.grid + type_.shape, type_.dtype) for type_ in types),
            ],
            in_specs=list(map(order.spec, kernel.inputs[kernel.num_scalar_prefetch :])),
            out_specs=[
                *(order.spec(kernel.outputs[n]) for n in stored),
                *(order.spec_per_program(type_.shape) for type_ in types),
            ],
            scratch_shapes=kernel.scratch,
            aliases=[(i, stored.index(output)) for i, output in kernel.aliases],
            compiler_params=dict(kernel.compiler_params),
            name=f"{kernel.name}_saving",
            num_scalar_prefetch=kernel.num_scalar_prefetch,
            x64=needs_x64(body_dtypes(kernel.body.jaxpr)),
            dynamic_grid=kernel.dynamic_grid,
            source=kernel.defined_at,
        )
