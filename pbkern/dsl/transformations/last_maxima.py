"""Programs that carry an online softmax, with the maximum of its last step in all steps, for reverse mode.

    m' = max(m, rowmax(s))                                     M: `m` after the last program of the line
    p = exp(s - m')                                            p = exp(s - M)
    l' = l * exp(m - m') + sum(p)                     ->       l' = l + sum(p)
    acc' = acc * exp(m - m') + p @ v                           acc' = acc + p @ v
    last: o = acc / l                                          last: o = acc / l

maximum_types.py proves that results are the same for all maxima. So their derivatives by the maxima are zero, and any numbers
may stand for the maxima. With one number for a whole line of programs, only sums are carried, and the derivative of a
sum reads no state of the program before. `M` is no smaller than each maximum, so that exponentials do not grow.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jaxprs.calls import rules_kept
from pbkern.core.jaxprs.retracing import retrace_into
from pbkern.core.jaxprs.walks import primitive_names
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.body_rewrites.pure_program import PureProgram, folded, pure_program
from pbkern.dsl.kernel import ArrayType, BlockMapping, Kernel
from pbkern.dsl.primitives import grid
from pbkern.dsl.specs import BlockSpec, block_mapping
from pbkern.dsl.trace import canonical_body, with_both_bodies

from .blocks import ragged_axes, sequential_dims
from .maximum_types import (
    INDEPENDENT,
    NOTHING,
    UNKNOWN,
    MaximumProduct,
    MaximumSum,
    PlaceInGrid,
    ValueType,
    alternatives,
    is_independent,
    maximum,
    renamed,
)
from .maximum_walk import MAXIMA_BEFORE, MOST_SETTLING_ROUNDS, MaximumWalk, symbol_of


@dataclass(frozen=True)
class OnlineSoftmax:
    """The maxima and sums that a kernel carries over lines of programs.

    Attributes:
      line: grid dimensions of a line, whose first program begins anew.
      maximum: number of the scratch that has the maxima.
      axes: of the maxima, without those along which all elements are equal.
      types: of the states that a program finds, results' blocks before scratch.
      products: numbers of the scratch that has a power of exp(maximum) as a factor.
    """

    line: tuple[int, ...]
    maximum: int
    axes: tuple[int, ...]
    types: tuple[ValueType, ...]
    products: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def online_softmax(kernel: Kernel) -> OnlineSoftmax | None:
    """The online softmax of a kernel, if its differentiable results are proved to be the same for all maxima."""
    names, in_order = primitive_names(kernel.body), sequential_dims(kernel)
    has_both = "max" in names and names & {"exp", "exp2"}
    if not in_order or not has_both or kernel.dynamic_grid or not kernel.scratch:
        return None
    if any(ragged_axes(kernel, mapping) for mapping in kernel.outputs):
        return None  # rows outside have maxima of unspecified elements
    program = pure_program(kernel)
    for line in _lines(kernel, in_order):
        begun = _begun_anew(kernel, program, line)
        for number in begun:
            for axes in _subsets(program.state[number].shape):
                softmax = _proved(kernel, program, line, number, axes, begun)
                if softmax is not None:
                    return softmax
    return None


def _lines(kernel: Kernel, in_order: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Grid dimensions of lines of programs that run one after the other, the shortest lines first."""
    for count in range(1, len(in_order) + 1):
        line = tuple(in_order[-count:])
        within = {axis for axis in range(line[0], len(kernel.grid)) if kernel.grid[axis] > 1}
        if within <= set(line):
            yield line


def _begun_anew(kernel: Kernel, program: PureProgram, line: tuple[int, ...]) -> list[int]:
    """Numbers of states in scratch, of floats, that the first program of a line does not read."""
    avals, rank, count = program.function.in_avals, len(kernel.grid), len(program.state)

    def run(*args):
        place = [np.int32(0) if axis in line else args[axis] for axis in range(rank)]
        jaxpr, consts = program.function.jaxpr, program.function.consts
        operands = [*place, *args[rank:]]
        return retrace_into(jaxpr, consts, operands, lambda eqn, *values: folded(eqn, values))

    with jax.enable_x64(True), rules_kept():
        first = jax.make_jaxpr(run)(*map(_jax.fresh_aval, avals))
    _, used = _jax.needed_operands(first, [True] * count)
    return [
        n
        for n in range(len(kernel.outputs), count)
        if not used[len(avals) - count + n] and jnp.issubdtype(program.state[n].dtype, jnp.floating)
    ]


def _subsets(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Axes of a shape along which elements may differ, the most first."""
    wide = [axis for axis, size in enumerate(shape) if size > 1]
    for count in range(len(wide), -1, -1):
        yield from itertools.combinations(wide, count)


def _proved(
    kernel: Kernel,
    program: PureProgram,
    line: tuple[int, ...],
    number: int,
    axes: tuple[int, ...],
    begun: Sequence[int],
) -> OnlineSoftmax | None:
    """The online softmax whose maxima are in a state, if there is one.

    Args:
      kernel: that may have one.
      program: its programs.
      line: grid dimensions of a line.
      number: of the state.
      axes: along which the maxima may differ.
      begun: states that begin anew in each line.
    """
    first, closed = len(kernel.outputs), program.function
    walk = MaximumWalk(line, program.state[number], axes)
    types: list[ValueType] = [
        NOTHING if n in begun else INDEPENDENT for n in range(len(program.state))
    ]
    types[number] = maximum(MAXIMA_BEFORE, axes)
    for _ in range(MOST_SETTLING_ROUNDS):
        operands = operand_types(kernel, closed, types)
        _, after = walk.walk(closed.jaxpr, closed.consts, None, operands, ())
        symbol = symbol_of(after[number], axes)
        if symbol is None:
            return None
        settled = [
            _over_programs(old, renamed(new, {symbol: MAXIMA_BEFORE}))
            for old, new in zip(types, after)
        ]
        floats = [jnp.issubdtype(state.dtype, jnp.floating) for state in program.state]
        if not all(map(is_independent, itertools.compress(settled[:first], floats))):
            return None
        if settled == types:
            break
        types = settled
    else:
        return None
    products = [n for n in range(first, len(types)) if isinstance(types[n], MaximumProduct)]
    if not products or not set(products) <= set(begun):
        return None
    return OnlineSoftmax(
        line, number - first, axes, tuple(types), tuple(n - first for n in products)
    )


def operand_types(
    kernel: Kernel, closed: jex.ClosedJaxpr, types: Sequence[ValueType]
) -> list[ValueType]:
    """Types of the operands of a pure program, from those of its states."""
    rank = len(kernel.grid)
    rest = [INDEPENDENT] * (len(closed.in_avals) - rank - len(types))
    return [*map(PlaceInGrid, range(rank)), *rest, *types]


def _over_programs(before: ValueType, after: ValueType) -> ValueType:
    """The type of a state that some programs find as the first one, others as another program left it."""
    if isinstance(after, (MaximumSum, MaximumProduct)) and any(
        s != MAXIMA_BEFORE for s, _ in after.terms
    ):
        return UNKNOWN  # maxima that the next program does not know
    return alternatives([before, after], [True, True])


# --- programs with the last maxima
# ------------------------------------------------------------------------------------------------


def with_last_maxima(kernel: Kernel, program: PureProgram, softmax: OnlineSoftmax) -> PureProgram:
    """The programs with the last maxima of their line in place of those of the program before.

    The derivative of such a program takes the maxima and their sums from the final states.

    Args:
      kernel: has final states behind its results (`with_final_states`).
      program: its programs.
      softmax: what they carry.
    """
    closed, first = program.function, len(kernel.outputs)
    scratch = softmax.types[len(softmax.types) - len(kernel.scratch) :]
    results = softmax.types[: len(softmax.types) - len(kernel.scratch)]
    finals = [UNKNOWN] * (first - len(results))
    types = operand_types(kernel, closed, [*results, *finals, *scratch])
    position = len(types) - len(kernel.scratch) + softmax.maximum

    def run(*args):
        last = args[position]
        walk = MaximumWalk(softmax.line, program.state[first + softmax.maximum], softmax.axes, last)
        results, _ = walk.walk(closed.jaxpr, closed.consts, args, types, ())
        results[first + softmax.maximum] = last
        return results

    with rules_kept():
        function = jax.make_jaxpr(run)(*map(_jax.fresh_aval, closed.in_avals))
    return dataclasses.replace(program, function=function)


def with_final_states(kernel: Kernel, numbers: Sequence[int]) -> Kernel:
    """The kernel with final states as further results: scratch of these numbers, after the last program of each line."""
    softmax = online_softmax(kernel)
    assert softmax is not None  # it has states of these numbers
    line, num_in, num_out = softmax.line, len(kernel.inputs), len(kernel.outputs)
    finals = tuple(_final(kernel, line, n) for n in numbers)
    types = [(m.ref_shape, m.array.dtype) for m in (*kernel.inputs, *kernel.outputs, *finals)]
    types += [(buf.shape, buf.dtype) for buf in kernel.scratch]

    def run(*refs):
        results = refs[: num_in + num_out]
        stored, scratch = refs[num_in + num_out :][: len(finals)], refs[-len(kernel.scratch) :]
        with rules_kept():
            retrace_into(kernel.differentiable.jaxpr, (), [*results, *scratch], lambda *_: None)

        @grid.when(grid.is_last_program(line, kernel.grid))
        def _():
            for n, ref in zip(numbers, stored):
                ref[...] = scratch[n][...]

    with jax.enable_x64(True):  # every type is explicit by now
        body = jax.make_jaxpr(run)(*[_jax.ref_aval(*type_) for type_ in types])
    both = dataclasses.replace(
        kernel, name=f"{kernel.name}_final", outputs=(*kernel.outputs, *finals), with_rules=None
    )

    def complete(closed: jex.ClosedJaxpr) -> Kernel:
        return dataclasses.replace(both, body=canonical_body(closed, kernel.name))

    return with_both_bodies(complete, body)


def _final(kernel: Kernel, line: Sequence[int], number: int) -> BlockMapping:
    """The block mapping of a final state: each line of programs has a block."""
    scratch = kernel.scratch[number]
    rest = [axis for axis in range(len(kernel.grid)) if axis not in line]

    def index_map(*args):
        return (*(args[axis] for axis in rest), *(0,) * len(scratch.shape))

    shape = (*(kernel.grid[axis] for axis in rest), *scratch.shape)
    return block_mapping(
        BlockSpec((*(None,) * len(rest), *scratch.shape), index_map),
        ArrayType(shape, scratch.dtype),
        f"scratch {number} in the end",
        kernel.grid,
        kernel.in_types[: kernel.num_scalar_prefetch],
    )
