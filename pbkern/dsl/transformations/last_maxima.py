"""Programs that carry an online softmax -> the same with the maximum that is there in the end, for reverse mode.

    m' = max(m, rowmax(s))                                     M: what `m` is after the last program of the line
    p = exp(s - m')                                            p = exp(s - M)
    l' = l * exp(m - m') + sum(p)                     ->       l' = l + sum(p)
    acc' = acc * exp(m - m') + p @ v                           acc' = acc + p @ v
    last: o = acc / l                                          last: o = acc / l

Results are the same for all maxima, which `maximum_types` proves: their derivatives by the maxima are zero, and any numbers may
stand for them. With one number for a whole line of programs, sums are what remains, and the derivative of a
sum reads no state that a program finds. `M` is no smaller than the maxima that it stands for: exponentials do not grow.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs import literal_value, primitive_names, retrace_into, rules_kept, selector
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
    FirstAlong,
    MaximumProduct,
    MaximumSum,
    PlaceInGrid,
    ValueType,
    alternatives,
    cancels,
    is_independent,
    maximum,
    renamed,
    type_of_literal,
    type_of_result,
)

# Rounds in which the types of what is carried settle: two are usual.
MOST_SETTLING_ROUNDS = 6


# The maxima that a program finds, as a symbol.
MAXIMA_BEFORE = 0


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
    walk = _MaximumWalk(line, program.state[number], axes)
    types: list[ValueType] = [
        NOTHING if n in begun else INDEPENDENT for n in range(len(program.state))
    ]
    types[number] = maximum(MAXIMA_BEFORE, axes)
    for _ in range(MOST_SETTLING_ROUNDS):
        operands = operand_types(kernel, closed, types)
        _, after = walk.walk(closed.jaxpr, closed.consts, None, operands, ())
        symbol = _symbol(after[number], axes)
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


def _symbol(type_: ValueType, axes: tuple[int, ...] | None = None) -> int | None:
    """The maximum that a value is, with these axes if they are given."""
    is_along = isinstance(type_, MaximumSum) and axes in (None, type_.axes)
    return type_.symbol if isinstance(type_, MaximumSum) and is_along else None


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
    """The programs with the last maxima of their line where they would find those of the program before.

    `kernel` has final states behind its results, `program` is its programs. No derivative by the maxima is taken here. What is
    derived reads the maxima and their sums from the final states, and has a derivative by both.
    """
    closed, first = program.function, len(kernel.outputs)
    scratch = softmax.types[len(softmax.types) - len(kernel.scratch) :]
    results = softmax.types[: len(softmax.types) - len(kernel.scratch)]
    finals = [UNKNOWN] * (first - len(results))
    types = operand_types(kernel, closed, [*results, *finals, *scratch])
    position = len(types) - len(kernel.scratch) + softmax.maximum

    def run(*args):
        last = args[position]
        walk = _MaximumWalk(
            softmax.line, program.state[first + softmax.maximum], softmax.axes, last
        )
        results, _ = walk.walk(closed.jaxpr, closed.consts, args, types, ())
        results[first + softmax.maximum] = last
        return results

    with rules_kept():
        function = jax.make_jaxpr(run)(*map(_jax.fresh_aval, closed.in_avals))
    return dataclasses.replace(program, function=function)


def with_final_states(kernel: Kernel, numbers: Sequence[int]) -> Kernel:
    """The kernel with what the last program of each line leaves in scratch of these numbers, as further results."""
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
    """The block mapping of what lines of programs leave in scratch: one block each."""
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


# --- types of a function's values, and the function with one number for all maxima
# ------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_jvp)
def known_quotient(numerator, denominator, quotient):
    """`quotient`, which is that of the others: its derivative reads it."""
    return quotient


@known_quotient.defjvp
def _(primals, tangents):
    _, denominator, quotient = primals
    of_numerator, of_denominator, _ = tangents
    return quotient, (of_numerator - quotient * of_denominator) / denominator


class _MaximumWalk:
    """Goes through a function's equations.

    Attributes:
      line: grid dimensions of a line of programs.
      state: type of the maxima's scratch.
      axes: along which they may differ.
      last: their value, where the function is traced again.
    """

    def __init__(
        self, line: Sequence[int], state: ArrayType, axes: tuple[int, ...], last=None
    ) -> None:
        self.line, self.state, self.axes, self.last = frozenset(line), state, axes, last
        self.symbols = itertools.count(MAXIMA_BEFORE + 1)

    def walk(
        self,
        jaxpr: jex.Jaxpr,
        consts: Sequence,
        values: Sequence | None,
        types: Sequence[ValueType],
        path: tuple[Hashable, ...],
    ) -> tuple[list, list[ValueType]]:
        """(results, their types). `values`: None for types alone. `path`: where the jaxpr is."""
        known: dict = dict.fromkeys(jaxpr.constvars, INDEPENDENT)
        known |= dict(zip(jaxpr.invars, types))
        env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, values or ()))
        producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

        def type_of(atom) -> ValueType:
            return type_of_literal(atom) if isinstance(atom, jex.Literal) else known[atom]

        def read(atom):
            return literal_value(atom) if isinstance(atom, jex.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            of_operands = [type_of(atom) for atom in eqn.invars]
            operands = None if values is None else [read(atom) for atom in eqn.invars]
            if eqn.primitive.name == "cond":
                kind, choice = selector(eqn, producers)
                chosen = None if values is None else read(choice)
                results, result_types = self.conditional(
                    eqn, kind, chosen, operands, type_of(choice), of_operands[1:], path
                )
            elif eqn.primitive.name == "scan" and not all(map(is_independent, of_operands)):
                results, result_types = self.loop(eqn, operands, of_operands, path)
            else:
                result_types = self.types_of_results(eqn, of_operands, producers, path)
                results = (
                    []
                    if operands is None
                    else self.results(eqn, operands, of_operands, result_types)
                )
            known.update(zip(eqn.outvars, result_types))
            if values is not None:
                env.update(zip(eqn.outvars, map(self.with_last, results, result_types)))
        return [] if values is None else list(map(read, jaxpr.outvars)), list(
            map(type_of, jaxpr.outvars)
        )

    def with_last(self, value, type_: ValueType):
        """The last maxima in place of values that are all of the maxima."""
        is_whole = _symbol(type_, self.axes) is not None
        return self.last if is_whole and self.is_state(value) else value

    def is_state(self, value) -> bool:
        return value.shape == self.state.shape and value.dtype == self.state.dtype

    def types_of_results(self, eqn, types, producers, path) -> list[ValueType]:
        if eqn.primitive.name == "max" and not all(map(is_independent, types)):
            return [self.of_maximum(eqn, types, producers)]
        if len(eqn.outvars) == 1:
            return [type_of_result(eqn, types, (*path, id(eqn.outvars[0])))]
        return [INDEPENDENT if all(map(is_independent, types)) else UNKNOWN for _ in eqn.outvars]

    def of_maximum(self, eqn, types, producers) -> ValueType:
        """A new maximum, if the larger of one and something that is equal where the maximum is."""
        for number, type_ in enumerate(types):
            if not isinstance(type_, MaximumSum) or type_.symbol is None:
                continue
            other, atom = types[1 - number], eqn.invars[1 - number]
            rest = [
                axis
                for axis in range(len(array_aval(eqn.outvars[0]).shape))
                if axis not in type_.axes
            ]
            is_maximum = _symbol(other, type_.axes) is not None
            if is_maximum or (
                is_independent(other) and not any(_varies(atom, axis, producers) for axis in rest)
            ):
                return maximum(next(self.symbols), type_.axes)
        return UNKNOWN

    def results(self, eqn, operands: Sequence, of_operands, result_types) -> Sequence:
        """Results of an equation that is no control flow."""
        if len(eqn.outvars) != 1:
            return _jax.bind_again(eqn, operands)
        name, result = eqn.primitive.name, array_aval(eqn.outvars[0])
        if cancels(result_types[0]):
            fill = 0 if isinstance(result_types[0], MaximumSum) else 1
            return [lax.full(result.shape, fill, result.dtype)]
        if name == "max" and _symbol(result_types[0]) is not None:
            number = 0 if _symbol(of_operands[0]) is not None else 1
            return [jnp.broadcast_to(operands[number], result.shape)]
        if name in ("mul", "div") and cancels(of_operands[1]):
            return [jnp.broadcast_to(operands[0], result.shape)]
        if name == "mul" and cancels(of_operands[0]):
            return [jnp.broadcast_to(operands[1], result.shape)]
        results = _jax.bind_again(eqn, operands)
        if name == "div" and all(isinstance(type_, MaximumProduct) for type_ in of_operands):
            return [known_quotient(*operands, *results)]
        return results

    # --- control flow

    def conditional(self, eqn, kind, chosen, operands, of_choice, types, path) -> tuple:
        branches = eqn.params["branches"]
        inside = (*path, id(eqn))
        by_branch = [
            self.walk(branch.jaxpr, branch.consts, None, types, inside)[1] for branch in branches
        ]
        is_first = (
            kind == "pred" and isinstance(of_choice, FirstAlong) and of_choice.axes >= self.line
        )
        starts = [is_first and n == 1 for n in range(len(branches))]
        joined = _Joined(self, by_branch, starts, eqn.outvars)
        result_types = [
            self.of_output(joined, eqn, types, number, inside) for number in range(len(eqn.outvars))
        ]
        if not is_independent(of_choice):
            result_types = [UNKNOWN] * len(result_types)
        if operands is None:
            return [], result_types

        def run(number: int):
            branch = branches[number]
            results, _ = self.walk(branch.jaxpr, branch.consts, operands[1:], types, inside)
            begins = joined.begins[number]
            return [self.last if new else x for x, new in zip(results, begins)]

        calls = [functools.partial(run, number) for number in range(len(branches))]
        if kind == "pred":
            return lax.cond(chosen, calls[1], calls[0]), result_types
        return lax.switch(chosen, calls), result_types

    def of_output(self, joined: _Joined, eqn, types, number: int, inside) -> ValueType:
        """The type of a conditional's result."""
        branches = eqn.params["branches"]
        passed = {
            branch.jaxpr.invars.index(branch.jaxpr.outvars[number])
            if branch.jaxpr.outvars[number] in branch.jaxpr.invars
            else None
            for branch in branches
        }
        (operand,) = passed if len(passed) == 1 else (None,)
        if operand is not None:
            return types[operand]
        result = joined.type_of(number)
        if isinstance(result, MaximumProduct) and joined.num_going_on > 1:
            # What is added outside of a branch may be missing in one of them.
            implies = frozenset(key for key in result.implies if _is_inside(key, inside))
            return dataclasses.replace(result, implies=implies)
        return result

    def loop(self, eqn, operands, types, path) -> tuple:
        """A scan whose carries may be an online softmax."""
        params = _jax.params_of(eqn)
        inner, num_consts, num_carry = params["jaxpr"], params["num_consts"], params["num_carry"]
        inside = (*path, id(eqn))
        consts, rest = list(types[:num_consts]), list(types[num_consts:])
        carry, xs = rest[:num_carry], rest[num_carry:]
        ys = len(eqn.outvars) - num_carry
        symbols = {symbol for type_ in carry if (symbol := _symbol(type_)) is not None}
        unknown = [UNKNOWN] * len(eqn.outvars)
        if len(symbols) != 1 or not all(map(is_independent, xs)):
            return self.left(eqn, operands), unknown
        each, result_types = next(self.symbols), list[ValueType](unknown)
        (outer,) = symbols
        carry = [renamed(type_, {outer: each}) for type_ in carry]
        for _ in range(MOST_SETTLING_ROUNDS):
            _, result_types = self.walk(
                inner.jaxpr, inner.consts, None, [*consts, *carry, *xs], inside
            )
            maxima = [n for n, type_ in enumerate(carry) if _symbol(type_) == each]
            (symbol, *more) = {_symbol(result_types[n]) for n in maxima}
            if symbol is None or more:
                return self.left(eqn, operands), unknown
            new = [
                alternatives([old, renamed(type_, {symbol: each})], [True, True])
                for old, type_ in zip(carry, result_types)
            ]
            if new == carry:
                break
            carry = new
        else:
            return self.left(eqn, operands), unknown
        last = next(self.symbols)
        results = [renamed(type_, {each: last}) for type_ in carry]
        results += [
            type_ if is_independent(type_) else UNKNOWN for type_ in result_types[num_carry:]
        ]
        if operands is None:
            return [], results

        def step(values, x):
            outputs, _ = self.walk(
                inner.jaxpr,
                inner.consts,
                [*operands[:num_consts], *values, *x],
                [*consts, *carry, *xs],
                inside,
            )
            # Maxima stay what they are.
            for n in range(num_carry):
                if _symbol(carry[n]) is not None:
                    outputs[n] = values[n]
            return tuple(outputs[:num_carry]), tuple(outputs[num_carry:])

        init = operands[num_consts : num_consts + num_carry]
        out, stacked = lax.scan(
            step,
            tuple(init),
            tuple(operands[num_consts + num_carry :]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        assert len(stacked) == ys
        return [*out, *stacked], results

    def left(self, eqn, operands) -> list:
        return [] if operands is None else _jax.bind_again(eqn, operands)


class _Joined:
    """Types of the results of a conditional's branches, with one symbol for maxima that differ from branch to branch.

    Attributes:
      begins: per branch and result, whether the value begins a line, so that any maximum may stand for it.
      num_going_on: branches that do not begin a line.
    """

    def __init__(
        self, walk: _MaximumWalk, by_branch: list[list[ValueType]], starts: Sequence[bool], outvars
    ) -> None:
        self.by_branch, self.starts = by_branch, starts
        self.num_going_on = list(starts).count(False)
        self.names: list[dict[int, int]] = [{} for _ in by_branch]
        self.begins = [[False] * len(outvars) for _ in by_branch]
        self.joint: dict[int, ValueType] = {}
        for number, var in enumerate(outvars):
            column = [types[number] for types in by_branch]
            if len(set(map(_symbol, column))) > 1:
                self.join(walk, number, column, array_aval(var))

    def join(self, walk: _MaximumWalk, number: int, column: Sequence[ValueType], aval) -> None:
        """Gives the maxima of one result a name, if that is what it is in each branch."""
        maxima = [
            type_ for type_ in column if isinstance(type_, MaximumSum) and type_.symbol is not None
        ]
        begins = [_symbol(type_) is None for type_ in column]
        is_whole = walk.is_state(aval) and maxima[0].axes == walk.axes
        if len({type_.axes for type_ in maxima}) > 1 or any(
            new and not (start and is_whole and is_independent(type_))
            for new, start, type_ in zip(begins, self.starts, column)
        ):
            return
        symbols = list(map(_symbol, column))
        known = {
            names.get(symbol) for names, symbol in zip(self.names, symbols) if symbol is not None
        }
        if known != {None}:
            if len(known) > 1:
                return
            (joint,) = known
        else:
            joint = next(walk.symbols)
        assert joint is not None
        for branch, symbol in enumerate(symbols):
            if symbol is not None:
                self.names[branch][symbol] = joint
            self.begins[branch][number] = begins[branch]
        self.joint[number] = maximum(joint, maxima[0].axes)

    def type_of(self, number: int) -> ValueType:
        if number in self.joint:
            return self.joint[number]
        column = [types[number] for types in self.by_branch]
        if len(set(column)) == 1:
            return column[0]
        new = [renamed(type_, names) for type_, names in zip(column, self.names)]
        return alternatives(new, self.starts)


def _is_inside(key: Hashable, path: tuple[Hashable, ...]) -> bool:
    """Whether the value of a key is computed at a path, or further inside."""
    return isinstance(key, tuple) and key[: len(path)] == path


def _varies(atom, axis: int, producers) -> bool:
    """Whether elements may differ along an axis, as the equations show it."""
    if isinstance(atom, jex.Literal) or array_aval(atom).shape[axis] == 1:
        return False
    eqn = producers.get(atom)
    if eqn is None or eqn.primitive.name != "broadcast_in_dim":
        return True
    dims = list(eqn.params["broadcast_dimensions"])
    return axis in dims and _varies(eqn.invars[0], dims.index(axis), producers)
