"""Walk through a function's equations by the types of maximum_types.py.

It gives the types of the results, and the function with one number for all maxima of a line of programs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import literal_value, selector
from pbkern.dsl.kernel import ArrayType

from .maximum_types import (
    INDEPENDENT,
    UNKNOWN,
    FirstAlong,
    MaximumProduct,
    MaximumSum,
    ValueType,
    alternatives,
    cancels,
    is_independent,
    maximum,
    renamed,
    type_of_literal,
    type_of_result,
)

# Rounds in which the types of carries and states settle, at most: two are usual.
MOST_SETTLING_ROUNDS = 6
# Symbol of the maxima that a program finds.
MAXIMA_BEFORE = 0


def symbol_of(type_: ValueType, axes: tuple[int, ...] | None = None) -> int | None:
    """Symbol of the maximum that a value is; None for other values, and for axes other than `axes`, if given."""
    if isinstance(type_, MaximumSum) and axes in (None, type_.axes):
        return type_.symbol
    return None


@functools.partial(jax.custom_jvp)
def known_quotient(numerator, denominator, quotient):
    """numerator / denominator, which is known already as `quotient`. The derivative reads this value."""
    return quotient


@known_quotient.defjvp
def _(primals, tangents):
    _, denominator, quotient = primals
    of_numerator, of_denominator, _ = tangents
    return quotient, (of_numerator - quotient * of_denominator) / denominator


class MaximumWalk:
    """Goes through a function's equations.

    Attributes:
      line: grid dimensions of a line of programs.
      state: type of the scratch that has the maxima.
      axes: of that scratch, along which the maxima may differ.
      last: value of the maxima after the last program, for a walk with values; None for a walk with types alone.
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
        """Goes through one jaxpr.

        Args:
          jaxpr: the function.
          consts: values of its constvars.
          values: of its operands; None for types alone.
          types: of its operands.
          path: ids of the equations of control flow that have the jaxpr inside.

        Returns:
          (results, or [] for types alone; types of the results).
        """
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
        """The last maxima in place of a value that is a maximum, and in full; other values as they are."""
        is_whole = symbol_of(type_, self.axes) is not None
        return self.last if is_whole and self.is_state(value) else value

    def is_state(self, value) -> bool:
        """Whether a value has the shape and dtype of the maxima's scratch."""
        return value.shape == self.state.shape and value.dtype == self.state.dtype

    def types_of_results(self, eqn, types, producers, path) -> list[ValueType]:
        if eqn.primitive.name == "max" and not all(map(is_independent, types)):
            return [self.of_maximum(eqn, types, producers)]
        if len(eqn.outvars) == 1:
            return [type_of_result(eqn, types, (*path, id(eqn.outvars[0])))]
        return [INDEPENDENT if all(map(is_independent, types)) else UNKNOWN for _ in eqn.outvars]

    def of_maximum(self, eqn, types, producers) -> ValueType:
        """The type of max(m, x): a new maximum if m is one, and x is one too or is equal along the axes that m lacks.

        UNKNOWN for other operands.
        """
        for number, type_ in enumerate(types):
            if not isinstance(type_, MaximumSum) or type_.symbol is None:
                continue
            other, atom = types[1 - number], eqn.invars[1 - number]
            rest = [
                axis
                for axis in range(len(array_aval(eqn.outvars[0]).shape))
                if axis not in type_.axes
            ]
            is_maximum = symbol_of(other, type_.axes) is not None
            is_even = is_independent(other) and not any(
                _varies(atom, axis, producers) for axis in rest
            )
            if is_maximum or is_even:
                return maximum(next(self.symbols), type_.axes)
        return UNKNOWN

    def results(self, eqn, operands: Sequence, of_operands, result_types) -> Sequence:
        """Results of an equation that is no control flow, with one number for all maxima."""
        if len(eqn.outvars) != 1:
            return _jax.bind_again(eqn, operands)
        name, result = eqn.primitive.name, array_aval(eqn.outvars[0])
        if cancels(result_types[0]):
            fill = 0 if isinstance(result_types[0], MaximumSum) else 1
            return [lax.full(result.shape, fill, result.dtype)]
        if name == "max" and symbol_of(result_types[0]) is not None:
            number = 0 if symbol_of(of_operands[0]) is not None else 1
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
        """(results, their types) of a cond.

        Args:
          eqn: the equation.
          kind: "pred" or "index", as `selector` gives it.
          chosen: value of the predicate or index; None for types alone.
          operands: values of all operands; None for types alone.
          of_choice: type of the predicate or index.
          types: of the branches' operands.
          path: as in `walk`.
        """
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
        """(results, their types) of a scan whose carries may be an online softmax.

        Without one, or where a scanned array depends on the maxima, all results are UNKNOWN.
        """
        params = _jax.params_of(eqn)
        inner, num_consts, num_carry = params["jaxpr"], params["num_consts"], params["num_carry"]
        inside = (*path, id(eqn))
        consts, rest = list(types[:num_consts]), list(types[num_consts:])
        carry, xs = rest[:num_carry], rest[num_carry:]
        symbols = {symbol for type_ in carry if (symbol := symbol_of(type_)) is not None}
        settled = None
        if len(symbols) == 1 and all(map(is_independent, xs)):
            (outer,) = symbols
            each = next(self.symbols)
            begun = [renamed(type_, {outer: each}) for type_ in carry]
            settled = self.settled_carries(inner, consts, begun, xs, each, inside)
        if settled is None:
            return self.left(eqn, operands), [UNKNOWN] * len(eqn.outvars)
        carry, stacked_types = settled
        last = next(self.symbols)
        results = [renamed(type_, {each: last}) for type_ in carry]
        results += [type_ if is_independent(type_) else UNKNOWN for type_ in stacked_types]
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
                if symbol_of(carry[n]) is not None:
                    outputs[n] = values[n]
            return tuple(outputs[:num_carry]), tuple(outputs[num_carry:])

        out, stacked = lax.scan(
            step,
            tuple(operands[num_consts : num_consts + num_carry]),
            tuple(operands[num_consts + num_carry :]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        assert len(stacked) == len(stacked_types)
        return [*out, *stacked], results

    def settled_carries(
        self,
        body: jex.ClosedJaxpr,
        consts: Sequence[ValueType],
        carry: list[ValueType],
        xs: Sequence[ValueType],
        each: int,
        path: tuple[Hashable, ...],
    ) -> tuple[list[ValueType], list[ValueType]] | None:
        """Types of a loop's carries that a step gives back as it takes them.

        Args:
          body: one step.
          consts: types of its constants.
          carry: types of the carries before the first step.
          xs: types of the scanned arrays' elements.
          each: symbol of the maxima that a step takes.
          path: as in `walk`.

        Returns:
          (types of the carries, types of a step's further results). None where the maxima do not stay one value, or where the
          types have not settled after MOST_SETTLING_ROUNDS.
        """
        for _ in range(MOST_SETTLING_ROUNDS):
            _, results = self.walk(body.jaxpr, body.consts, None, [*consts, *carry, *xs], path)
            maxima = [n for n, type_ in enumerate(carry) if symbol_of(type_) == each]
            (symbol, *more) = {symbol_of(results[n]) for n in maxima}
            if symbol is None or more:
                return None
            new = [
                alternatives([old, renamed(type_, {symbol: each})], [True, True])
                for old, type_ in zip(carry, results)
            ]
            if new == carry:
                return carry, results[len(carry) :]
            carry = new
        return None

    def left(self, eqn, operands) -> list:
        """Results of an equation that stays as it is; [] for types alone."""
        return [] if operands is None else _jax.bind_again(eqn, operands)


class _Joined:
    """Types of the results of a conditional's branches, with one symbol for maxima that differ from branch to branch.

    Attributes:
      begins: per branch and result, whether the value begins a line, so that any maximum may stand for it.
      num_going_on: branches that do not begin a line.
    """

    def __init__(
        self, walk: MaximumWalk, by_branch: list[list[ValueType]], starts: Sequence[bool], outvars
    ) -> None:
        self.by_branch, self.starts = by_branch, starts
        self.num_going_on = list(starts).count(False)
        self.names: list[dict[int, int]] = [{} for _ in by_branch]
        self.begins = [[False] * len(outvars) for _ in by_branch]
        self.joint: dict[int, ValueType] = {}
        for number, var in enumerate(outvars):
            column = [types[number] for types in by_branch]
            if len(set(map(symbol_of, column))) > 1:
                self.join(walk, number, column, array_aval(var))

    def join(self, walk: MaximumWalk, number: int, column: Sequence[ValueType], aval) -> None:
        """Gives one result a common symbol, if it is a maximum or begins a line in each branch."""
        maxima = [
            type_ for type_ in column if isinstance(type_, MaximumSum) and type_.symbol is not None
        ]
        begins = [symbol_of(type_) is None for type_ in column]
        is_whole = walk.is_state(aval) and maxima[0].axes == walk.axes
        if len({type_.axes for type_ in maxima}) > 1 or any(
            new and not (start and is_whole and is_independent(type_))
            for new, start, type_ in zip(begins, self.starts, column)
        ):
            return
        symbols = list(map(symbol_of, column))
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
