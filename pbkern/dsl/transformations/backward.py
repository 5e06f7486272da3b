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

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import UnsupportedKernel
from pbkern.core.jaxprs import retrace_into, rules_kept
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.machine import DEFAULT_MACHINE
from pbkern.dsl.body_rewrites.derivative_refusals import (
    derivative_error,
    refuse,
    refuse_saving,
    refuse_views,
)
from pbkern.dsl.body_rewrites.pure_program import pure_program
from pbkern.dsl.interpret import parallel_dims
from pbkern.dsl.kernel import ArrayType, BlockMapping, Kernel, Scratch, with_input_fusion
from pbkern.dsl.primitives import atomics, grid
from pbkern.dsl.specs import block_mapping
from pbkern.dsl.trace import body_dtypes, needs_x64, trace_kernel

from .blocks import (
    ProgramOrder,
    are_apart,
    are_everywhere,
    inside,
    ragged_axes,
    sequential_dims,
    with_repeats_outside,
    with_zeros_outside,
)
from .known_results import may_be_any_number, program_seconds, with_known_results
from .last_maxima import online_softmax, with_final_states, with_last_maxima
from .normalized_sums import with_sums
from .running_sums import with_shared_sums
from .sinking import sunk
from .stores import StoreTarget, run_and_store
from .tangent import Absent, is_differentiable, values_kept, without_stores

# Sums in parts: their memory, over that of all operands and results. Source: not recorded.
LARGEST_PARTS = 2
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
        derivative = _Derivative(kernel, active, range(count) if known is None else known, finals)
        backward = derivative.kernel()
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


@dataclass(frozen=True)
class _Pulled:
    """A program's derivative.

    Attributes:
      function: (the program's operands, cotangents of states after it, blocks of `read`) ->
        cotangents of blocks, then of states before it.
      operands: numbers of operands that it reads.
      read: numbers of results that it reads.
      saved: numbers of states before the program that it reads, of those that others may leave behind.
    """

    function: jex.ClosedJaxpr
    operands: tuple[int, ...]
    read: tuple[int, ...]
    saved: tuple[int, ...]


class _Derivative:
    """The derivative of one kernel's programs, and the values that are carried from program to program.

    Attributes:
      name: of the kernel.
      blocks: numbers of operands whose blocks get cotangents; those that share memory with a result
        are not among them: their contents are that result's before the first program.
      states: numbers of differentiable states, results' blocks before scratch.
      carried: numbers of scratch that a program may read as another one left it.
      in_place: numbers of results whose cotangents are changed in their array: contents that were
        there before may be read, or stay.
      stored: numbers of states whose cotangents before a program are stored for those before it.
      saved: numbers of states whose values before each program are saved.
      read: numbers of results whose blocks are read.
      maxima: number of a state whose values are all replaced by the final one -> number of the result that has this.
      products: numbers of states with a power of exp(maximum) as a factor, which cannot be saved.
      source: the kernel, with final states among its results where it carries an online softmax.
      program: its programs as a pure function.
      shared: number of an operand -> number of the result that shares its memory.
      order: in which programs run backwards.
      function: as _Pulled.function.
      num_known: how many of `read` the function takes.
      moving: block mappings of the cotangents of operands.
      sums: types of those that are sums over several programs.
      operands: as BackwardPlan.operands.
    """

    def __init__(
        self,
        kernel: Kernel,
        active: tuple[bool, ...],
        known: Sequence[int],
        finals: tuple[int, ...] = (),
    ) -> None:
        self.name, results = kernel.name, range(len(kernel.outputs))
        self.maxima: dict[int, int] = {}
        self.products: set[int] = set()
        hidden: set[int] = set()
        if finals:
            kernel = self._begin_with_last_maxima(kernel, finals)
            hidden = {*range(len(results), len(kernel.outputs)), *self.maxima}
        else:
            self.source, self.program = kernel, pure_program(kernel)
        self.shared = dict(kernel.aliases)
        self.blocks = [n for n, has in enumerate(active) if has and n not in self.shared]
        self.states = [
            n
            for n, type_ in enumerate(self.program.state)
            if is_differentiable(type_) and n not in hidden
        ]
        visited_again = {n for n in results if not are_apart(kernel, kernel.outputs[n])}
        self.in_place = [
            n
            for n in results
            if n in self.states and (n in visited_again or n in self.shared.values())
        ]
        in_order = sequential_dims(kernel)
        self.carried = self._carried() - hidden if in_order else set()
        is_ordered = bool(self.carried or visited_again)
        self.order = ProgramOrder(kernel, in_order if is_ordered else ())
        self.stored = [n for n in self.states if n in self.in_place or n in self.carried]
        chosen = self._pulled(known, self.carried | visited_again)
        self.function, self.saved = chosen.function, chosen.saved
        self.read = (*chosen.read, *(n for n in self.maxima.values() if n not in chosen.read))
        self.num_known = len(chosen.read)
        if self.products & set(self.saved):
            raise derivative_error(
                kernel, "it reads sums of an online softmax before the last one", "no such results"
            )
        if self.saved:
            refuse_saving(kernel)
        self.moving = self._moving()
        self.sums = tuple(m.array for m in self.moving if not self._is_once(m))
        operands = {output: n for n, output in self.shared.items()}
        self.operands = (*self.blocks, *(operands.get(n) for n in self.in_place))

    def _begin_with_last_maxima(self, kernel: Kernel, finals: Sequence[int]) -> Kernel:
        """Sets `source` and `program` to those with the last maxima of each line; returns `source`."""
        softmax = online_softmax(kernel)
        assert softmax is not None  # it has final states
        self.source = with_final_states(kernel, finals)
        first = len(self.source.outputs)
        program = with_last_maxima(self.source, pure_program(self.source), softmax)
        self.maxima = {first + softmax.maximum: len(kernel.outputs) + finals.index(softmax.maximum)}
        products = {first + n for n in softmax.products}
        self.program, normalized = with_sums(program, softmax, len(kernel.scratch))
        self.products = products | set(normalized)
        return self.source

    def _is_once(self, mapping: BlockMapping) -> bool:
        """Whether each element is in the block of one program."""
        return are_apart(self.source, mapping) and are_everywhere(self.source, mapping)

    def _moving(self) -> list[BlockMapping]:
        """Block mappings of the operands' cotangents: the operands', or those of arrays of parts that are added up afterwards.

        Where programs of a parallel dimension read the same block, each has a part of the sum, so that the programs stay
        parallel. All parts have at most LARGEST_PARTS times the bytes of the kernel's operands and results.
        """
        source, axes = self.source, dict[int, tuple[int, ...]](dict.fromkeys(self.blocks, ()))
        types = [m.array for m in (*source.inputs, *source.outputs)]
        free = LARGEST_PARTS * sum(type_.nbytes for type_ in types)
        for axis in parallel_dims(source):
            shared = [n for n in self.blocks if not source.inputs[n].moves_apart(axis)]
            stay = all(
                start is not None and axis not in start.symbols
                for n in shared
                for start in source.inputs[n].starts
            )
            apart = all(source.outputs[n].moves_apart(axis) for n in self.in_place)
            wider = axes | {n: (*axes[n], axis) for n in shared}
            if stay and apart and self._bytes(wider) <= free:
                axes = wider
        whole = [n for n in self.blocks if not axes[n] and self._is_once(source.inputs[n])]
        return [
            source.inputs[n] if n in whole else _with_sum_type(self._in_parts(n, axes[n]))
            for n in self.blocks
        ]

    def _bytes(self, axes: Mapping[int, tuple[int, ...]]) -> int:
        """Bytes of the operands' cotangents that are in parts; `axes`: operand -> grid dimensions with a part each."""
        inputs, grid_ = self.source.inputs, self.source.grid
        parts = {n: math.prod(grid_[axis] for axis in along) for n, along in axes.items() if along}
        return sum(count * inputs[n].array.nbytes for n, count in parts.items())

    def _in_parts(self, number: int, axes: tuple[int, ...]) -> BlockMapping:
        """The block mapping of an operand's cotangent in parts: the array has a leading dimension per axis of `axes`."""
        source, mapping = self.source, self.source.inputs[number]
        if not axes:
            return mapping
        shape = (*(source.grid[axis] for axis in axes), *mapping.array.shape)
        return block_mapping(
            ProgramOrder(source).spec(mapping, axes),
            ArrayType(shape, mapping.array.dtype),
            mapping.origin,
            source.grid,
            source.in_types[: source.num_scalar_prefetch],
        )

    def _carried(self) -> set[int]:
        """Numbers of the scratch whose contents before a program reach a result of that program or of a later one."""
        count, first = len(self.program.state), len(self.source.outputs)
        operands = len(self.program.function.in_avals)
        leads, reached = set(range(first)), set(range(first))
        while reached:
            wanted = [n in leads for n in range(count)]
            _, used = _jax.needed_operands(self.program.function, wanted)
            reached = {n for n, is_used in enumerate(used[operands - count :]) if is_used} - leads
            leads |= reached
        return leads - set(range(first))

    def pulled(self, place, sides, blocks, state, given) -> tuple[list, list, list]:
        """The derivative of one program.

        Args:
          place: the program's number along each grid dimension.
          sides: flags of elements inside arrays (blocks.inside).
          blocks: of the operands.
          state: before the program.
          given: cotangents of the states after it, in the order of `states`.

        Returns:
          (cotangents of blocks, cotangents of states before the program, results' blocks after it).
        """

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
            return [result[n] for n in self.states], result[: len(self.source.outputs)]

        _, pull, results = jax.vjp(
            after,
            [blocks[n] for n in self.blocks],
            [state[n] for n in self.states],
            has_aux=True,
        )
        return *pull(list(given)), results

    def _pulled(self, known: Sequence[int], lasting: set[int]) -> _Pulled:
        """The cheapest function that gives the cotangents that are stored.

        Args:
          known: numbers of the results that may be read.
          lasting: numbers of the states that a program may read as another one left them.
        """
        avals = self.program.function.in_avals
        rank, count = len(self.source.grid), len(self.program.state)
        num_blocks = len(self.source.inputs)
        num_sides = len(avals) - rank - num_blocks - count
        ends = np.cumsum([0, rank, num_sides, num_blocks, count])

        def run(*args):
            parts = [args[a:b] for a, b in itertools.pairwise(ends)]
            return list(itertools.chain(*self.pulled(*parts, args[ends[-1] :])))

        given = [avals[ends[3] + n] for n in self.states]
        closed = jax.make_jaxpr(run)(*avals, *given)
        stored = [True] * len(self.blocks) + [n in self.stored for n in self.states]
        stored += [False] * len(self.source.outputs)

        def variant(reads: Sequence[int]) -> _Pulled:
            function = with_known_results(self.source, closed, reads)
            function, used = _jax.needed_operands(function, stored)
            read = tuple(n for n, is_used in zip(reads, used[len(closed.in_avals) :]) if is_used)
            if len(read) < len(reads):
                return variant(read)
            unspecified = {
                n
                for n, operand in zip(reads, itertools.count(len(closed.in_avals)))
                if ragged_axes(self.source, self.source.outputs[n])
                and not may_be_any_number(function, operand)
            }
            if unspecified:
                return variant([n for n in reads if n not in unspecified])
            saved = tuple(n for n in range(count) if used[ends[3] + n] and n in lasting)
            operands = tuple(n for n in range(num_blocks) if used[ends[2] + n])
            return _Pulled(sunk(with_shared_sums(function)), operands, read, saved)

        best = variant(list(known))
        for n in best.read:
            without = variant([other for other in best.read if other != n])
            best = min(without, best, key=self.seconds)
        return best

    def seconds(self, pulled: _Pulled) -> float:
        """Predicted seconds of a derivative on the default machine, with its reads and the run that saves states."""
        machine, source, saved = DEFAULT_MACHINE, self.source, pulled.saved
        if self.products & set(saved):
            return math.inf
        steps = program_seconds(pulled.function.jaxpr, machine)
        read = [source.inputs[n] for n in pulled.operands]
        read += [source.outputs[n] for n in pulled.read]
        moved = sum(mapping.array.nbytes for mapping in read)
        if saved:
            wanted = [n in saved for n in range(len(self.program.state))]
            again, _ = _jax.needed_operands(self.program.function, wanted)
            steps += program_seconds(again.jaxpr, machine)
            moved += 2 * source.num_programs * sum(self.program.state[n].nbytes for n in saved)
        return source.num_programs * steps + moved / machine.dram_bandwidth

    def kernel(self) -> Kernel:
        """The backward kernel."""
        source, order, state = self.source, self.order, self.program.state
        results = [source.outputs[n] for n in self.states if n < len(source.outputs)]
        read = [source.outputs[n] for n in self.read]
        saved = [state[n] for n in self.saved]
        types = [
            *order.size_types,
            *source.in_types,
            *(mapping.array for mapping in (*read, *results)),
            *(ArrayType(source.grid + type_.shape, type_.dtype) for type_ in saved),
            *self.sums,
        ]
        specs = [
            *map(order.spec, (*source.inputs, *read, *results)),
            *(order.spec_per_program(type_.shape) for type_ in saved),
            *(order.spec(mapping) for mapping in self.moving if not self._is_once(mapping)),
        ]
        outputs = (*self.moving, *(source.outputs[n] for n in self.in_place))
        axes = range(len(source.grid))
        apart = [all(mapping.moves_apart(axis) for mapping in outputs) for axis in axes]
        num_sizes = len(order.size_types)
        return trace_kernel(
            self.body,
            grid=source.grid,
            in_types=types,
            out_types=[mapping.array for mapping in outputs],
            in_specs=specs[source.num_scalar_prefetch :],
            out_specs=list(map(order.spec, outputs)),
            scratch_shapes=[
                Scratch(state[n].shape, state[n].dtype) for n in self.stored if n in self.carried
            ],
            aliases=self._aliases(len(types)),
            compiler_params={
                target: atomics.ordered(params, apart)
                for target, params in with_input_fusion(source.compiler_params, ()).items()
            },
            name=f"{self.name}_backward",
            num_scalar_prefetch=num_sizes + source.num_scalar_prefetch,
            x64=needs_x64(body_dtypes(source.body.jaxpr)),
            dynamic_grid=[(axis, num_sizes + n) for axis, n in source.dynamic_grid],
            source=source.defined_at,
        )

    def _aliases(self, num_operands: int) -> list[tuple[int, int]]:
        """(operand, result) pairs of the backward kernel: sums with their zeros, cotangents of results in their arrays."""
        first_sum = num_operands - len(self.sums)
        added = [n for n, mapping in enumerate(self.moving) if not self._is_once(mapping)]
        aliases = [(first_sum + k, n) for k, n in enumerate(added)]
        first_given = len(self.order.size_types) + len(self.source.inputs) + len(self.read)
        aliases += [
            (first_given + self.states.index(n), len(self.moving) + k)
            for k, n in enumerate(self.in_place)
        ]
        return sorted(aliases)

    def body(self, *refs) -> None:
        """Body of the backward kernel."""
        parts = self._parts(refs)
        numbers = [grid.program_id(axis) for axis in range(len(self.source.grid))]
        place = self.order.place(numbers, parts.sizes)
        if parts.waiting:

            @grid.when(grid.is_first_program(self.order.reversed_dims))
            def _():
                for ref in parts.waiting.values():
                    ref[...] = jnp.zeros_like(ref)

        inputs, outputs = self.source.inputs, self.source.outputs
        sides = [
            side
            for mapping, ref in zip(inputs, parts.operands)
            for side in inside(self.source, mapping, ref)
        ]
        for n, mapping in enumerate(outputs):
            sides += inside(self.source, mapping, parts.cotangents.get(n))
        blocks = [
            with_repeats_outside(self.source, mapping, ref)
            for mapping, ref in zip(inputs, parts.operands)
        ]
        before = self._states_before(parts, blocks)
        after = self._cotangents_after(parts, before)
        known = [
            with_repeats_outside(self.source, outputs[n], ref)
            for n, ref in zip(self.read[: self.num_known], parts.read)
        ]
        values = [*place, *sides, *blocks, *before, *after, *known]
        run_and_store(self.function, values, self._targets(parts, after))

    def _parts(self, refs: Sequence) -> _BodyRefs:
        results = [n for n in self.states if n < len(self.source.outputs)]
        counts = [
            len(self.order.size_types),
            len(self.source.inputs),
            len(self.read),
            len(results),
            len(self.saved),
            len(self.sums),
            len(self.blocks),
            len(self.in_place),
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
            dict(zip(results, given)) | dict(zip(self.in_place, in_place)),
            dict(zip((n for n in self.stored if n in self.carried), refs[ends[-1] :])),
        )

    def _states_before(self, parts: _BodyRefs, blocks: Sequence) -> list:
        """Values of all states before the program; zeros for those that the derivative does not read."""
        before = [jnp.zeros(type_.shape, type_.dtype) for type_ in self.program.state]
        for n, output in self.shared.items():
            before[output] = blocks[n]
        for n, ref in zip(self.saved, parts.saved):
            before[n] = ref[...]
        for n, result in self.maxima.items():
            before[n] = parts.read[self.read.index(result)][...]
        return before

    def _cotangents_after(self, parts: _BodyRefs, before: Sequence) -> list:
        """Cotangents of the states after the program, in the order of `states`."""
        after = []
        for n in self.states:
            if n in parts.cotangents:
                mapping = self.source.outputs[n]
                after.append(with_zeros_outside(self.source, mapping, parts.cotangents[n]))
            elif n in parts.waiting:
                after.append(parts.waiting[n][...])
            else:
                after.append(jnp.zeros_like(before[n]))
        return after

    def _targets(self, parts: _BodyRefs, after: Sequence) -> list[StoreTarget]:
        """Refs that the derivative's results go to, and the values that these hold."""
        targets = [
            StoreTarget(ref, adds=not self._is_once(mapping))
            for mapping, ref in zip(self.moving, parts.moving)
        ]
        contents = dict(zip(self.states, after))
        for n in self.stored:
            refs = parts.cotangents if n in self.in_place else parts.waiting
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


def _with_sum_type(mapping: BlockMapping) -> BlockMapping:
    """The mapping, in an array of the type in which cotangents of many programs are added up."""
    dtype = mapping.array.dtype
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    array = ArrayType(mapping.array.shape, np.dtype(np.float32) if is_narrow else dtype)
    return dataclasses.replace(mapping, array=array)


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
