"""Values that results of a kernel hold -> reads of these results, in the derivative of its programs.

    y = tanh(x); o[...] = y        ct * (1 - tanh(x)**2)   ->   ct * (1 - o[...]**2)

Equal values have equal numbers: those of one primitive on operands of equal numbers. A conditional is
a choice among the numbers of its branches, which the branches of another conditional of the same may know.
A block that several programs store holds what the last of them stores.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.calls import called_jaxpr
from pbkern.core.jaxprs.walks import inner_jaxprs, literal_value, selector
from pbkern.core.machine import Machine
from pbkern.dsl.kernel import Kernel

# Primitives whose results are finite where their operands are, short of an overflow.
FINITE = frozenset(
    "add add_any sub mul neg abs sign max min square copy stop_gradient convert_element_type reduce_precision"
    " select_n broadcast_in_dim reshape squeeze transpose rev slice"
    " concatenate pad reduce_sum reduce_max reduce_min cumsum dot_general tanh logistic one_minus_square".split()
)

# A number of what a conditional selects by -> the branch that is known to run.
Facts = Mapping[int, int]


def with_known_results(
    kernel: Kernel, closed: jex.ClosedJaxpr, known: Sequence[int]
) -> jex.ClosedJaxpr:
    """The function with blocks of results as further operands.

    Args:
      kernel: whose derivative it is.
      closed: (the program's place in the grid, anything) -> anything, then what each result's block
        holds after the program.
      known: numbers of the results.
    """
    blocks = [closed.out_avals[n - len(kernel.outputs)] for n in known]
    count = len(closed.in_avals)

    def run(*args):
        seen = _NumberedValues(kernel, closed, dict(zip(known, args[count:])))
        return seen.run(closed.jaxpr, closed.consts, args[:count], seen.operands, {})

    return jax.make_jaxpr(run)(*closed.in_avals, *blocks) if known else closed


def may_be_any_number(closed: jex.ClosedJaxpr, operand: int) -> bool:
    """Whether no finite value of an operand, such as another row's, makes a result infinite or NaN."""
    return _stays_finite(closed.jaxpr, {closed.jaxpr.invars[operand]}) is not None


def _stays_finite(jaxpr: jex.Jaxpr, reached: set) -> set | None:
    """The variables that depend on those in `reached`; None if one of them may be infinite."""
    reached = set(reached)
    for eqn in jaxpr.eqns:
        is_reached = [isinstance(atom, jex.Var) and atom in reached for atom in eqn.invars]
        if not any(is_reached):
            continue
        if is_reached[0] and eqn.primitive.name in ("cond", "select_n"):
            return None  # another choice may be infinite
        if eqn.primitive.name == "cond":
            for branch in eqn.params["branches"]:
                inner = branch.jaxpr
                given = {var for var, has in zip(inner.invars, is_reached[1:]) if has}
                after = _stays_finite(inner, given)
                if after is None:
                    return None
                reached |= {
                    var
                    for var, result in zip(eqn.outvars, inner.outvars)
                    if isinstance(result, jex.Var) and result in after
                }
        elif eqn.primitive.name in FINITE or _is_positive_power(eqn):
            reached |= set(eqn.outvars)
        else:
            return None
    return reached


def _is_positive_power(eqn) -> bool:
    return eqn.primitive.name == "integer_pow" and eqn.params["y"] > 0


class _NumberedValues:
    """A function's values while it is traced again, and their numbers.

    Attributes:
      blocks: number of a result -> what its array holds.
      after: per result the number of what its block holds after the program.
      ends: keys of predicates that are true of the last programs along a grid dimension, which is their value.
      shapes: of values that equations compute.
      alive: what numbers go by the identity of.
    """

    def __init__(self, kernel: Kernel, closed: jex.ClosedJaxpr, blocks: Mapping) -> None:
        self.kernel, self.blocks = kernel, blocks
        self.numbers: dict[Hashable, int] = {}
        self.keys: list = []
        self.alive: list = []
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.operands = [self.number("operand", n) for n in range(len(closed.in_avals))]
        self.ends = self.predicates_of_ends()
        results = self.results(closed.jaxpr, closed.consts, self.operands, {})
        self.after = results[len(results) - len(kernel.outputs) :]

    def predicates_of_ends(self) -> dict[Hashable, int]:
        """Key of a predicate that is true of the last programs along a grid dimension -> the dimension."""
        sizes = dict(enumerate(self.kernel.grid))
        for axis, _ in self.kernel.dynamic_grid:
            del sizes[axis]
        return {
            (
                name,
                self.operands[axis],
                self.number("literal", np.dtype(np.int32), np.int32(size - 1).tobytes()),
                (),
                0,
            ): axis
            for axis, size in sizes.items()
            for name in ("eq", "ge")
        }

    def number(self, *key) -> int:
        """The number of values with this key."""
        if key not in self.numbers:
            self.numbers[key] = len(self.keys)
            self.keys.append(key)
        return self.numbers[key]

    def chosen(self, number: int, facts: Facts, last: Collection[int] = ()) -> int:
        """The number of the same value where the branches of some conditionals are known.

        `last`: grid dimensions along which the program is the last one.
        """
        key = self.keys[number]
        while key[0] == "choice":
            if key[1] in facts:
                number = key[2][facts[key[1]]]
            elif last and self.is_implied(key[1], last):
                number = key[2][1]
            else:
                break
            key = self.keys[number]
        return number

    def is_implied(self, number: int, last: Collection[int]) -> bool:
        """Whether a predicate is true in the last program along grid dimensions."""
        key = self.keys[number]
        if key[0] in ("convert_element_type", "and"):
            return all(self.is_implied(operand, last) for operand in key[1:-2])
        return self.ends.get(key) in last

    def read(self, atom, env: Mapping, facts: Facts) -> int:
        if isinstance(atom, jex.Literal):
            value = literal_value(atom)
            return self.number("literal", value.dtype, value.tobytes())
        return self.chosen(env[atom], facts)

    def begin(self, jaxpr: jex.Jaxpr, consts: Sequence, operands: Sequence[int]) -> dict:
        """Numbers of a jaxpr's constants and operands."""
        self.alive += consts
        known = {
            var: self.number("constant", id(const)) for var, const in zip(jaxpr.constvars, consts)
        }
        return known | dict(zip(jaxpr.invars, operands))

    def results(self, jaxpr, consts: Sequence, operands: Sequence[int], facts: Facts) -> list[int]:
        """Numbers of a jaxpr's results, from those of its operands."""
        env = self.begin(jaxpr, consts, operands)
        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.of_equation(eqn, env, facts)))
        return [self.read(atom, env, facts) for atom in jaxpr.outvars]

    def of_equation(self, eqn, env: Mapping, facts: Facts) -> list[int]:
        """Numbers of an equation's results."""
        operands = [self.read(atom, env, facts) for atom in eqn.invars]
        if eqn.primitive.name == "cond":
            by_branch = [
                self.results(branch.jaxpr, branch.consts, operands[1:], {**facts, operands[0]: n})
                for n, branch in enumerate(eqn.params["branches"])
            ]
            return [self.number("choice", operands[0], numbers) for numbers in zip(*by_branch)]
        if (inner := called_jaxpr(eqn)) is not None:
            return self.results(inner.jaxpr, inner.consts, operands, facts)
        params: Hashable = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
        try:
            hash(params)
        except TypeError:
            params = id(eqn)
            self.alive.append(eqn)
        name = eqn.primitive.name
        results = [self.number(name, *operands, params, n) for n, _ in enumerate(eqn.outvars)]
        self.shapes |= {number: array_aval(var).shape for number, var in zip(results, eqn.outvars)}
        return results

    def held(self, facts: Facts) -> dict:
        """Number of a value -> the block of a result that holds it, where the branches of some conditionals are known."""
        last = self.last_along(facts)
        blocks: dict = {}
        for n, block in self.blocks.items():
            mapping, grid = self.kernel.outputs[n], self.kernel.grid
            again = {
                axis for axis, size in enumerate(grid) if size > 1 and not mapping.moves_apart(axis)
            }
            if again <= last:
                blocks |= self.seen_in(self.chosen(self.after[n], facts, last), block)
        return {n: x for n, x in blocks.items() if self.keys[n][0] not in ("operand", "literal")}

    def seen_in(self, number: int, block: jax.Array) -> dict:
        """The value that a block holds, and those of which it is a copy with more or fewer dimensions of size 1."""
        seen = {number: block}
        while (key := self.keys[number])[0] in ("broadcast_in_dim", "squeeze"):
            number, shape = key[1], self.shapes.get(key[1])
            if shape is None or math.prod(shape) != block.size:
                break
            seen[number] = lax.reshape(block, shape)
        return seen

    def last_along(self, facts: Facts) -> set[int]:
        """Grid dimensions along which the program is known to be the last one."""
        axes, true = set(), [number for number, branch in facts.items() if branch == 1]
        while true:
            key = self.keys[true.pop()]
            if key in self.ends:
                axes.add(self.ends[key])
            elif key[0] in ("convert_element_type", "and"):
                true += key[1:-2]
        return axes

    def run(
        self, jaxpr, consts: Sequence, args: Sequence, operands: Sequence[int], facts: Facts
    ) -> list:
        """The jaxpr's results on `args`, whose numbers are `operands`."""
        held = self.held(facts)
        env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))
        numbers = self.begin(jaxpr, consts, operands)
        producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

        def read(atom):
            if isinstance(atom, jex.Literal):
                return literal_value(atom)
            return held.get(self.chosen(numbers[atom], facts), env[atom])

        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name == "cond":
                results = self.conditional(
                    eqn, values[1:], numbers, facts, *_choice(eqn, producers, read)
                )
            else:
                results = _jax.bind_again(eqn, self.of_maximum(eqn, values, numbers, held, facts))
            numbers.update(zip(eqn.outvars, self.of_equation(eqn, numbers, facts)))
            env.update(zip(eqn.outvars, results))
        return list(map(read, jaxpr.outvars))

    def conditional(self, eqn, values, numbers, facts: Facts, kind: str, choice) -> Sequence:
        selected, *operands = [self.read(atom, numbers, facts) for atom in eqn.invars]
        branches = [
            lambda n=n, branch=branch: self.run(
                branch.jaxpr, branch.consts, values, operands, {**facts, selected: n}
            )
            for n, branch in enumerate(eqn.params["branches"])
        ]
        if selected in facts:
            return branches[facts[selected]]()
        return lax.cond(choice, *branches[::-1]) if kind == "pred" else lax.switch(choice, branches)

    def of_maximum(self, eqn, values: list, numbers, held: Mapping, facts: Facts) -> list:
        """x > c  ->  max(x, c) > c, where a result holds the maximum."""
        if eqn.primitive.name == "gt":
            pair = [self.read(atom, numbers, facts) for atom in eqn.invars]
            for order in (pair, pair[::-1]):
                number = self.numbers.get(("max", *order, (), 0))
                if number in held:
                    return [held[number], values[1]]
        return values


def _choice(eqn, producers: dict, read) -> tuple:
    kind, atom = selector(eqn, producers)
    return kind, read(atom)


def program_seconds(jaxpr: jex.Jaxpr, machine: Machine) -> float:
    """The arithmetic of one program, on all cores of a machine: operations of each element, and products."""
    return sum(_equation_seconds(eqn, machine) for eqn in jaxpr.eqns)


def _equation_seconds(eqn, machine: Machine) -> float:
    name, inner = eqn.primitive.name, [*inner_jaxprs(eqn)]
    if inner:
        parts = [program_seconds(closed.jaxpr, machine) for closed in inner]
        return sum(parts) / len(parts) * (eqn.params["length"] if name == "scan" else 1)
    largest = max((array_aval(atom) for atom in (*eqn.invars, *eqn.outvars)), key=lambda x: x.size)
    if name == "dot_general":
        ((contracted, _), _), left = eqn.params["dimension_numbers"], array_aval(eqn.invars[0])
        depth = math.prod(left.shape[axis] for axis in contracted)
        return 2 * depth * array_aval(eqn.outvars[0]).size / machine.flops(left.dtype.name)
    vectors = largest.size / machine.lanes(largest.dtype.itemsize)
    return machine.cycles(name) * vectors / (machine.clock_hz * machine.cores)
