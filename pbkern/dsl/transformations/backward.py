"""Kernel -> its backward kernel: reverse mode.

A program of the backward kernel takes the cotangents of what its counterpart in the kernel left
behind, and gives those of what that saw: `jax.vjp` of the program as a pure function. Where programs
depend on those before them, by scratch or by blocks of results that several of them visit, the
backward kernel walks the grid backwards: cotangents of scratch wait in scratch, those of results in
their array. The state before each program is then saved by a second run of the kernel, as far as the
derivative reads it. Blocks of operands that several programs read get sums over these programs, in
order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern import _jax
from pbkern.core.jaxprs import retrace_into, rules_kept
from pbkern.dsl.kernel import ArrayType, BlockMapping, Kernel, Scratch
from pbkern.dsl.primitives import atomics, grid
from pbkern.dsl.trace import body_dtypes, needs_x64, trace_kernel

from .blocks import (
    ProgramOrder,
    are_apart,
    are_everywhere,
    inside,
    sequential_dims,
    with_repeats_outside,
    with_zeros_outside,
)
from .pure_program import pure_program
from .refusals import refuse, refuse_order, refuse_views
from .tangent import Absent, is_differentiable, values_kept, without_stores


def cotangents(
    primitive, kernel: Kernel, active: tuple[bool, ...], operands: Sequence, given: Sequence
) -> list:
    """Cotangents of a kernel's active operands.

    Args:
      primitive: calls the kernels.
      kernel: has no last stage.
      active: which of its operands.
      operands: of the kernel.
      given: cotangents of its differentiable results.
    """
    plan = backward_plan(kernel, active)
    saved: Sequence = ()
    if plan.saving is not None:
        saved = primitive.bind(*operands, kernel=plan.saving)[-len(plan.saved) :]
    zeros = [jnp.zeros(type_.shape, type_.dtype) for type_ in plan.sums]
    results = primitive.bind(*operands, *given, *saved, *zeros, kernel=plan.backward)
    by_operand = dict(zip(plan.operands, results))
    return [
        lax.convert_element_type(by_operand[n], kernel.inputs[n].array.dtype)
        for n, is_active in enumerate(active)
        if is_active
    ]


@dataclass(frozen=True)
class BackwardPlan:
    """The kernels of a backward pass.

    Attributes:
      backward: (operands of the kernel, cotangents of its results, saved states, zeros) ->
        cotangents.
      operands: which operand of the kernel each result of `backward` is the cotangent of; None for
        contents of results that nobody asks for.
      sums: types of the results that begin as zeros.
      saving: operands -> whatever the kernel reads back, then the saved states; None if there are none.
      saved: numbers of these.
    """

    backward: Kernel
    operands: tuple[int | None, ...]
    sums: tuple[ArrayType, ...]
    saving: Kernel | None
    saved: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def backward_plan(kernel: Kernel, active: tuple[bool, ...]) -> BackwardPlan:
    """Makes the kernels. UnsupportedKernel, at the user's line, for bodies that are not differentiated."""
    refuse(kernel)
    refuse_views(kernel)
    with jax.enable_x64(True):  # every type is explicit by now
        derivative = _Derivative(kernel, active)
        backward = derivative.kernel()
    saved = derivative.saved
    saving = saving_kernel(kernel, saved) if saved else None
    return BackwardPlan(backward, derivative.operands, derivative.sums, saving, saved)


class _Derivative:
    """The derivative of one kernel's programs, and what of it is carried from program to program.

    Attributes:
      blocks: numbers of operands whose blocks get cotangents; those that share memory with a result
        are not among them: their contents are that result's before the first program.
      states: numbers of differentiable states, results' blocks before scratch.
      carried: numbers of scratch that a program may read as another one left it.
      in_place: numbers of results whose cotangents are changed in their array: contents that were
        there before may be read, or stay.
      saved: numbers of states whose values before each program are saved.
    """

    def __init__(self, kernel: Kernel, active: tuple[bool, ...]) -> None:
        self.source, self.program = kernel, pure_program(kernel)
        self.shared = dict(kernel.aliases)
        self.blocks = [n for n, has in enumerate(active) if has and n not in self.shared]
        self.states = [n for n, type_ in enumerate(self.program.state) if is_differentiable(type_)]
        results = range(len(kernel.outputs))
        visited_again = {n for n in results if not are_apart(kernel, kernel.outputs[n])}
        self.in_place = [
            n
            for n in results
            if n in self.states and (n in visited_again or n in self.shared.values())
        ]
        in_order = sequential_dims(kernel)
        self.carried = self._carried() if in_order else set()
        is_ordered = bool(self.carried or visited_again)
        self.order = ProgramOrder(kernel, in_order if is_ordered else ())
        if is_ordered:
            refuse_order(kernel)
        self.saved = tuple(
            n for n in self._read_states() if n in visited_again or n in self.carried
        )
        self.sums = tuple(
            ArrayType(m.array.shape, _sum_type(m.array.dtype))
            for m in (kernel.inputs[n] for n in self.blocks)
            if not self._is_once(m)
        )
        operands = {output: n for n, output in self.shared.items()}
        self.operands = (*self.blocks, *(operands.get(n) for n in self.in_place))

    def _is_once(self, mapping: BlockMapping) -> bool:
        """Whether each element is in the block of one program."""
        return are_apart(self.source, mapping) and are_everywhere(self.source, mapping)

    def _carried(self) -> set[int]:
        """Scratch whose contents before a program lead to a result, of that program or of a later one."""
        count, first = len(self.program.state), len(self.source.outputs)
        operands = len(self.program.function.in_avals)
        leads, reached = set(range(first)), set(range(first))
        while reached:
            wanted = [n in leads for n in range(count)]
            _, used = _jax.needed_operands(self.program.function, wanted)
            reached = {n for n, is_used in enumerate(used[operands - count :]) if is_used} - leads
            leads |= reached
        return leads - set(range(first))

    def pulled(self, place, sides, blocks, state, given) -> tuple[list, list]:
        """Cotangents of blocks and of states before a program, from those of states after it."""

        def after(moving_blocks, moving_states):
            states = [*state]
            for n, value in zip(self.states, moving_states):
                states[n] = value
            values = [*blocks]
            for n, value in zip(self.blocks, moving_blocks):
                values[n] = value
            for n, output in self.shared.items():
                values[n] = states[output]
            result = self.program(place, sides, values, states)
            return [result[n] for n in self.states]

        _, pull = jax.vjp(after, [blocks[n] for n in self.blocks], [state[n] for n in self.states])
        return pull(list(given))

    def _read_states(self) -> list[int]:
        """States whose values before a program the derivative reads, as far as its results are stored."""
        avals = self.program.function.in_avals
        rank, count = len(self.source.grid), len(self.program.state)
        num_blocks = len(self.source.inputs)
        num_sides = len(avals) - rank - num_blocks - count
        ends = np.cumsum([rank, num_sides, num_blocks, count])

        def run(*args):
            parts = [args[: ends[0]], *(args[a:b] for a, b in itertools.pairwise(ends))]
            blocks, states = self.pulled(*parts, args[ends[-1] :])
            return [*blocks, *states]

        given = [avals[ends[2] + n] for n in self.states]
        closed = jax.make_jaxpr(run)(*avals, *given)
        stored = [True] * len(self.blocks) + [
            n in self.in_place or n in self.carried for n in self.states
        ]
        _, used = _jax.needed_operands(closed, stored)
        return [n for n in range(count) if used[ends[2] + n]]

    def kernel(self) -> Kernel:
        """The backward kernel."""
        source, order, state = self.source, self.order, self.program.state
        results = [source.outputs[n] for n in self.states if n < len(source.outputs)]
        in_place = [source.outputs[n] for n in self.in_place]
        moving = [source.inputs[n] for n in self.blocks]
        sums = [m for m in moving if not self._is_once(m)]
        saved = [state[n] for n in self.saved]
        types = [
            *source.in_types,
            *(m.array for m in results),
            *(ArrayType(source.grid + type_.shape, type_.dtype) for type_ in saved),
            *self.sums,
        ]
        specs = [
            *map(order.spec, (*source.inputs, *results)),
            *(order.spec_per_program(type_.shape) for type_ in saved),
            *map(order.spec, sums),
        ]
        begin = iter(self.sums)
        out_types = [m.array if self._is_once(m) else next(begin) for m in moving]
        first_sum, first_result = len(types) - len(sums), len(source.inputs)
        aliases = [
            (first_sum + k, n)
            for k, n in enumerate(n for n, m in enumerate(moving) if not self._is_once(m))
        ]
        aliases += [
            (first_result + self.states.index(n), len(moving) + k)
            for k, n in enumerate(self.in_place)
        ]
        outputs = (*moving, *in_place)
        apart = [all(m.moves_apart(axis) for m in outputs) for axis in range(len(source.grid))]
        return trace_kernel(
            self.body,
            grid=source.grid,
            in_types=types,
            out_types=[*out_types, *(m.array for m in in_place)],
            in_specs=specs[source.num_scalar_prefetch :],
            out_specs=list(map(order.spec, outputs)),
            scratch_shapes=[
                Scratch(state[n].shape, state[n].dtype) for n in sorted(self._carried_cotangents())
            ],
            aliases=sorted(aliases),
            compiler_params={
                target: atomics.ordered(params, apart)
                for target, params in source.compiler_params.items()
            },
            name=f"{source.name}_backward",
            num_scalar_prefetch=source.num_scalar_prefetch,
            x64=needs_x64(body_dtypes(source.body.jaxpr)),
            dynamic_grid=source.dynamic_grid,
            source=source.defined_at,
        )

    def _carried_cotangents(self) -> set[int]:
        return self.carried & set(self.states)

    def body(self, *refs) -> None:
        """Body of the backward kernel."""
        source, state = self.source, self.program.state
        results = [n for n in self.states if n < len(source.outputs)]
        counts = [len(source.inputs), len(results), len(self.saved), len(self.sums)]
        counts += [len(self.blocks), len(self.in_place)]
        ends = np.cumsum([0, *counts])
        operands, given, saved, _, moving, in_place = (
            refs[a:b] for a, b in itertools.pairwise(ends)
        )
        cotangents = dict(zip(results, given)) | dict(zip(self.in_place, in_place))
        waiting = dict(zip(sorted(self._carried_cotangents()), refs[ends[-1] :]))
        place = self.order.place([grid.program_id(axis) for axis in range(len(source.grid))])
        if waiting:

            @grid.when(grid.is_first_program(self.order.reversed_dims))
            def _():
                for ref in waiting.values():
                    ref[...] = jnp.zeros_like(ref)

        sides = [side for m, ref in zip(source.inputs, operands) for side in inside(source, m, ref)]
        for n, mapping in enumerate(source.outputs):
            sides += inside(source, mapping, cotangents.get(n))
        blocks = [with_repeats_outside(source, m, x) for m, x in zip(source.inputs, operands)]
        before = [jnp.zeros(type_.shape, type_.dtype) for type_ in state]
        for n, output in self.shared.items():
            before[output] = blocks[n]
        for n, ref in zip(self.saved, saved):
            before[n] = ref[...]
        after = []
        for n in self.states:
            if n in cotangents:
                after.append(with_zeros_outside(source, source.outputs[n], cotangents[n]))
            else:
                after.append(waiting[n][...] if n in waiting else jnp.zeros_like(before[n]))
        of_blocks, of_states = self.pulled(place, sides, blocks, before, after)
        for n, ref, value in zip(self.blocks, moving, of_blocks):
            once = self._is_once(source.inputs[n])
            ref[...] = value if once else ref[...] + value.astype(ref.dtype)
        for n, value in zip(self.states, of_states):
            if n in self.in_place:
                cotangents[n][...] = value
            elif n in waiting:
                waiting[n][...] = value


def _sum_type(dtype: np.dtype) -> np.dtype:
    """The type in which cotangents of many programs are added up."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(np.float32) if is_narrow else dtype


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
            source=kernel.defined_at,
        )
