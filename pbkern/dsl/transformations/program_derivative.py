"""Derivative: of one kernel's programs as pure functions, and what is carried from program to program.

It chooses which results the derivative reads, which states are saved, and in which order programs run backwards.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.machine import DEFAULT_MACHINE
from pbkern.dsl.body_rewrites.derivative_refusals import (
    derivative_error,
    refuse_saving,
)
from pbkern.dsl.body_rewrites.pure_program import pure_program
from pbkern.dsl.interpret import parallel_dims
from pbkern.dsl.kernel import ArrayType, BlockMapping, Kernel
from pbkern.dsl.specs import block_mapping

from .blocks import (
    ProgramOrder,
    are_apart,
    are_everywhere,
    ragged_axes,
    sequential_dims,
)
from .known_results import may_be_any_number, program_seconds, with_known_results
from .last_maxima import online_softmax, with_final_states, with_last_maxima
from .normalized_sums import with_sums
from .running_sums import with_shared_sums
from .sinking import sunk
from .tangent import is_differentiable

# Sums in parts: their memory, over that of all operands and results. Source: not recorded.
LARGEST_PARTS = 2


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


class Derivative:
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
        self.sums = tuple(m.array for m in self.moving if not self.is_once(m))
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

    def is_once(self, mapping: BlockMapping) -> bool:
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
        whole = [n for n in self.blocks if not axes[n] and self.is_once(source.inputs[n])]
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


def _with_sum_type(mapping: BlockMapping) -> BlockMapping:
    """The mapping, in an array of the type in which cotangents of many programs are added up."""
    dtype = mapping.array.dtype
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    array = ArrayType(mapping.array.shape, np.dtype(np.float32) if is_narrow else dtype)
    return dataclasses.replace(mapping, array=array)
