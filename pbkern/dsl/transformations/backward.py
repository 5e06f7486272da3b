"""Kernel -> its backward kernel: reverse mode.

A program of the backward kernel takes the cotangents of what its counterpart in the kernel left
behind, and gives those of what that saw: `jax.vjp` of the program as a pure function. Where programs
depend on those before them, by scratch or by blocks of results that several of them visit, the
backward kernel walks the grid backwards: cotangents of scratch wait in scratch, those of results in
their array. The state before each program is then saved by a second run of the kernel, as far as the
derivative reads it. Values that a result holds are read from there. Blocks of operands that several
programs read get sums over these programs, in order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

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
    """Cotangents of a kernel's active operands.

    Args:
      primitive: calls the kernels.
      kernel: has no last stage.
      active: which of its operands.
      operands: of the kernel.
      known: number of a result -> the result, of those that may be read. Final states are further results.
      given: cotangents of its differentiable results.
      finals: numbers of scratch, of which the final states are.
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
    """Makes the kernels. UnsupportedKernel, at the user's line, for bodies that are not differentiated.

    Args:
      kernel: without a last stage.
      active: which of its operands have cotangents.
      known: numbers of results that may be read; None for all. Final states are further results.
      finals: numbers of scratch whose final states there are, that of the maxima first.
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
    """Numbers of scratch whose final states make a derivative that reads no states in between; none if there is no such.

    The maxima of an online softmax come first, its sums of rows behind them, then the others if it needs these.
    """
    try:
        softmax = online_softmax(kernel)
    except UnsupportedKernel:  # the transpose says so, where there is one
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
    """The derivative of one kernel's programs, and what of it is carried from program to program.

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
      maxima: number of a state that is not saved, as all of its values are the last one -> of the result that has that.
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
        """Takes the programs that have the last maxima of their line."""
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
        """Block mappings of the operands' cotangents: of the operands, or of arrays of parts that are added up afterwards.

        Programs of a parallel dimension that read the same blocks have a part each, so that they
        stay parallel, while the parts are no larger than a multiple of all that the kernel reads and writes.
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
        """Memory of the operands' cotangents that are in parts along grid dimensions."""
        inputs, grid_ = self.source.inputs, self.source.grid
        parts = {n: math.prod(grid_[axis] for axis in along) for n, along in axes.items() if along}
        return sum(count * inputs[n].array.nbytes for n, count in parts.items())

    def _in_parts(self, number: int, axes: tuple[int, ...]) -> BlockMapping:
        """The block mapping of an operand, in an array with leading dimensions: one each of these of the grid."""
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

    def pulled(self, place, sides, blocks, state, given) -> tuple[list, list, list]:
        """Cotangents of blocks and of states before a program, from those of states after it; results' blocks after it."""

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
        """The cheapest way to the cotangents that are stored.

        `known`: results that may be read. `lasting`: states that a program may read as another one left them.
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
            wild = {
                n
                for n, operand in zip(reads, itertools.count(len(closed.in_avals)))
                if ragged_axes(self.source, self.source.outputs[n])
                and not may_be_any_number(function, operand)
            }
            if wild:
                return variant([n for n in reads if n not in wild])
            saved = tuple(n for n in range(count) if used[ends[3] + n] and n in lasting)
            operands = tuple(n for n in range(num_blocks) if used[ends[2] + n])
            return _Pulled(sunk(with_shared_sums(function)), operands, read, saved)

        best = variant(list(known))
        for n in best.read:
            without = variant([other for other in best.read if other != n])
            best = min(without, best, key=self.seconds)
        return best

    def seconds(self, pulled: _Pulled) -> float:
        """The predicted time of a derivative on the default machine, with what it reads and the states that it saves."""
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
        in_place = [source.outputs[n] for n in self.in_place]
        moving = self.moving
        sums = [m for m in moving if not self._is_once(m)]
        saved = [state[n] for n in self.saved]
        read = [source.outputs[n] for n in self.read]
        sizes = order.size_types
        types = [
            *sizes,
            *source.in_types,
            *(m.array for m in read),
            *(m.array for m in results),
            *(ArrayType(source.grid + type_.shape, type_.dtype) for type_ in saved),
            *self.sums,
        ]
        specs = [
            *map(order.spec, (*source.inputs, *read, *results)),
            *(order.spec_per_program(type_.shape) for type_ in saved),
            *map(order.spec, sums),
        ]
        first_sum = len(types) - len(sums)
        first_result = len(sizes) + len(source.inputs) + len(read)
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
            out_types=[m.array for m in outputs],
            in_specs=specs[source.num_scalar_prefetch :],
            out_specs=list(map(order.spec, outputs)),
            scratch_shapes=[
                Scratch(state[n].shape, state[n].dtype) for n in self.stored if n in self.carried
            ],
            aliases=sorted(aliases),
            compiler_params={
                target: atomics.ordered(params, apart)
                for target, params in with_input_fusion(source.compiler_params, ()).items()
            },
            name=f"{self.name}_backward",
            num_scalar_prefetch=len(sizes) + source.num_scalar_prefetch,
            x64=needs_x64(body_dtypes(source.body.jaxpr)),
            dynamic_grid=[(axis, len(sizes) + n) for axis, n in source.dynamic_grid],
            source=source.defined_at,
        )

    def body(self, *refs) -> None:
        """Body of the backward kernel."""
        source, state = self.source, self.program.state
        results = [n for n in self.states if n < len(source.outputs)]
        counts = [
            len(self.order.size_types),
            len(source.inputs),
            len(self.read),
            len(results),
            len(self.saved),
            len(self.sums),
        ]
        counts += [len(self.blocks), len(self.in_place)]
        ends = np.cumsum([0, *counts])
        sizes, operands, read, given, saved, _, moving, in_place = (
            refs[a:b] for a, b in itertools.pairwise(ends)
        )
        cotangents = dict(zip(results, given)) | dict(zip(self.in_place, in_place))
        waiting = dict(zip((n for n in self.stored if n in self.carried), refs[ends[-1] :]))
        numbers = [grid.program_id(axis) for axis in range(len(source.grid))]
        place = self.order.place(numbers, sizes)
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
        for n, result in self.maxima.items():
            before[n] = read[self.read.index(result)][...]
        after = []
        for n in self.states:
            if n in cotangents:
                after.append(with_zeros_outside(source, source.outputs[n], cotangents[n]))
            else:
                after.append(waiting[n][...] if n in waiting else jnp.zeros_like(before[n]))
        held = [
            with_repeats_outside(source, source.outputs[n], ref)
            for n, ref in zip(self.read[: self.num_known], read)
        ]
        targets = [
            StoreTarget(ref, adds=not self._is_once(mapping))
            for mapping, ref in zip(self.moving, moving)
        ]
        contents = dict(zip(self.states, after))
        targets += [
            StoreTarget((cotangents if n in self.in_place else waiting)[n], contents=contents[n])
            for n in self.stored
        ]
        values = [*place, *sides, *blocks, *before, *after, *held]
        run_and_store(self.function, values, targets)


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
