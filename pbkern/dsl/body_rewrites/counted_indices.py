"""Arrays of indices that count, such as `(start + arange(rows))[:, None] * stride + arange(columns)` -> walks along a Ref.

Kernels in the style of Triton address all memory so. An array that is a scalar plus a distance for
each position along its dimensions walks along the Ref; where its longer steps pass over all of its
shorter ones, it names each element once.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import equations, literal_value
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.views import SHAPE_VIEWS
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.primitives.ref_access import (
    Atom,
    GatheredIndex,
    Index,
    Range,
    RefAccess,
    value_axes,
)

from .contents import Walk, extent_of

# Equations that pass a value on.
SAME = ("convert_element_type", "copy", "stop_gradient")
UNKNOWN = (-math.inf, math.inf)
Bounds = tuple[float, float]


def _products(left: Bounds, right: Bounds) -> Bounds:
    ends = [x * y if x and y else 0 for x in left for y in right]
    return min(ends), max(ends)


def _quotients(left: Bounds, right: Bounds) -> Bounds:
    """Quotients that are rounded towards zero, of positive numbers alone."""
    if right[0] <= 0:
        return UNKNOWN
    ends = [x / y for x in left for y in right if not math.isinf(x) or not math.isinf(y)]
    low, high = min(ends), max(ends)
    return low if math.isinf(low) else math.trunc(low), high if math.isinf(high) else math.trunc(
        high
    )


# Equation of scalars -> smallest and largest results, from those of its operands.
BOUNDS: Mapping[str, Callable[..., Bounds]] = {
    "mul": _products,
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "clamp": lambda low, x, high: (
        min(max(low[0], x[0]), high[0]),
        min(max(low[1], x[1]), high[1]),
    ),
    "rem": lambda x, y: (0, min(x[1], y[1] - 1)) if x[0] >= 0 and y[0] > 0 else UNKNOWN,
    "div": _quotients,
    "neg": lambda x: (-x[1], -x[0]),
    "sign": lambda x: (-1, 1),
}
# Comparison -> (whether the first operand is the larger one, what to add to the larger one for "less than").
COMPARISONS = {"lt": (False, 0), "le": (False, 1), "gt": (True, 0), "ge": (True, 1)}


@dataclass(frozen=True)
class Count:
    """A scalar plus a distance for each position along an array's dimensions.

    `bounds`: the smallest and the largest value that the scalar may have.
    """

    distances: tuple[int, ...]
    bounds: Bounds

    @property
    def is_uniform(self) -> bool:
        return not any(self.distances)

    @property
    def constant(self) -> int | None:
        low, high = self.bounds
        return int(low) if self.is_uniform and low == high else None

    def times(self, factor: int) -> Count:
        distances = tuple(distance * factor for distance in self.distances)
        return Count(distances, _products(self.bounds, (factor, factor)))

    def plus(self, other: Count) -> Count:
        distances = tuple(
            x + y for x, y in itertools.zip_longest(self.distances, other.distances, fillvalue=0)
        )  # a number beside an array has no dimensions
        low, high = (x + y for x, y in zip(self.bounds, other.bounds))
        return Count(distances, (low, high))


@dataclass(frozen=True)
class Rounds:
    """Rounds of a loop whose carry of this number grows by one in each, from a start on, while it is less than a stop."""

    carry: int
    start: Atom
    stop: Atom


@dataclass
class CountedIndices:
    """The equations of a body, by the variables that they define.

    Attributes:
      makers: variable -> its equation.
      given: variable of a loop or branch -> what the equations around it give for it.
      counters: variable of a loop that counts its rounds -> (its start, what it is less than).
    """

    kernel: Kernel
    makers: dict[jex.Var, jex.JaxprEqn] = field(default_factory=dict)
    given: dict[jex.Var, list] = field(default_factory=lambda: defaultdict(list))
    counters: dict[jex.Var, tuple[Atom, Atom]] = field(default_factory=dict)
    counts: dict[jex.Var, Count | None] = field(default_factory=dict)

    @classmethod
    def of(cls, kernel: Kernel) -> CountedIndices:
        body = cls(kernel)
        for eqn in equations(kernel.differentiable.jaxpr):
            body.makers |= dict.fromkeys(eqn.outvars, eqn)
            body._enter(eqn)
        return body

    def _enter(self, eqn: jex.JaxprEqn) -> None:
        """Notes the operands that an equation gives to its inner jaxprs."""
        params = _jax.params_of(eqn)
        match eqn.primitive.name:
            case "cond":
                inner = [(branch.jaxpr, eqn.invars[1:]) for branch in params["branches"]]
            case "scan":
                first, carries = params["num_consts"], params["num_carry"]
                inner = [(params["jaxpr"].jaxpr, eqn.invars[:first])]
                for n in range(carries):
                    if _grows(inner[0][0], first, n):
                        start, counter = eqn.invars[first + n], inner[0][0].invars[first + n]
                        if isinstance(start, jex.Literal):
                            self.counters[counter] = start, int(start.val) + params["length"]
            case "while":
                first, end = _ends_of_constants(params)
                inner = [(params["body_jaxpr"].jaxpr, eqn.invars[first:end])]
                rounds = rounds_of(eqn)
                if rounds is not None:
                    counter = inner[0][0].invars[end - first + rounds.carry]
                    self.counters[counter] = rounds.start, rounds.stop
            case _:
                return
        for jaxpr, atoms in inner:
            for var, atom in zip(jaxpr.invars, atoms):
                self.given[var].append(atom)

    def most_rounds(self, eqn: jex.JaxprEqn) -> int | None:
        """The largest number of rounds of a `while` equation, None where it is not known."""
        rounds = rounds_of(eqn)
        if rounds is None:
            return None
        start, stop = self.count(rounds.start), self.count(rounds.stop)
        if start is None or stop is None:
            return None
        most = stop.bounds[1] - start.bounds[0]
        return None if math.isinf(most) else max(int(most), 0)

    def walks(self, eqn: jex.JaxprEqn, access: RefAccess) -> list[Walk] | None:
        """The walk of an access along each dimension of its Ref; None where an array does not count.

        Args:
          eqn: its equation, in the body.
          access: the same on values, while the body is traced again.

        Without a mask, positions must be inside: negative ones count from the end, and those outside
        are moved inside one by one.
        """
        atoms, axes = list(self._index_atoms(eqn)), value_axes(access.indices)
        if len(atoms) != len(access.indices):
            return None
        number = _jax.REF_OPERANDS[eqn.primitive.name]
        masks = eqn.invars[:number][
            {"masked_load": 1, "masked_store": 2}.get(eqn.primitive.name, number) :
        ][:1]
        walks = []
        for index, atom, places, size in zip(access.indices, atoms, axes, access.ref.shape):
            walk = self._walk(index, atom, places, size, masks)
            if walk is None:
                return None
            walks.append(walk)
        walked = [axis for walk in walks for axis, _, _ in walk.steps]
        value = array_aval(eqn.outvars[0] if access.kind == "load" else eqn.invars[1])
        long = {axis for axis, size in enumerate(value.shape) if size > 1}
        if len(set(walked)) < len(walked) or (access.kind != "load" and long - {*walked}):
            return None
        return walks

    @staticmethod
    def _index_atoms(eqn: jex.JaxprEqn) -> Iterator:
        """The atoms of an equation's only indexer, one per dimension; nothing for chained ones."""
        number = _jax.REF_OPERANDS[eqn.primitive.name]
        indexers = _jax.unflatten_indexers(eqn.params["tree"], list(eqn.invars[number:]))
        if len(indexers) == 1:
            yield from indexers[0]

    def _walk(
        self, index: Index, atom, places: Sequence[int], size: int, masks: Sequence
    ) -> Walk | None:
        is_array = isinstance(index, GatheredIndex)
        count = self.count(atom.start if isinstance(index, Range) else atom)
        if count is None:
            return None
        distances = count.distances if is_array else ()
        sizes = np.shape(index.at) if isinstance(index, GatheredIndex) else ()
        steps = [
            (
                place,
                min([length, *(self.reach(mask, place, length) for mask in masks)]),
                distance,
            )
            for place, length, distance in zip(places, sizes, distances)
            if distance and length > 1
        ]
        if isinstance(index, Range):
            steps = [(places[0], index.size, index.stride)]
        steps.sort(key=lambda step: -abs(step[2]))
        if any(extent_of(steps[n + 1 :]) > abs(step[2]) for n, step in enumerate(steps[:-1])):
            return None
        before = sum((length - 1) * distance for _, length, distance in steps if distance < 0)
        low, high = count.bounds
        is_inside = low + before >= 0 and high + before + extent_of(steps) <= size
        if not isinstance(index, GatheredIndex):
            start = index.start if isinstance(index, Range) else index.at
            return Walk(start, tuple(steps), is_inside)
        if not masks and not is_inside and steps:
            return None
        # The largest position is no negative one that counts from the end, if any of them is inside.
        far = [length - 1 if distance > 0 else 0 for length, distance in zip(sizes, distances)]
        reach = sum(last * distance for last, distance in zip(far, distances))
        at = jnp.asarray(index.at)
        start = at[tuple(far)] + np.asarray(before - reach, at.dtype)
        return Walk(start, tuple(steps), is_inside)

    def count(self, atom) -> Count | None:
        """The count that an array of integers is; None where it is none, or not known."""
        if isinstance(atom, (int, np.integer, jex.Literal)):
            value = literal_value(atom) if isinstance(atom, jex.Literal) else atom
            return Count((0,) * np.ndim(value), (int(value), int(value)))
        if atom not in self.counts:
            self.counts[atom] = self._counted(atom)
        return self.counts[atom]

    def _counted(self, atom: jex.Var) -> Count | None:
        aval = array_aval(atom)
        unknown = Count((0,) * len(aval.shape), UNKNOWN) if math.prod(aval.shape) == 1 else None
        if not np.issubdtype(aval.dtype, np.integer):
            return None
        if atom in self.counters:
            start, stop = map(self.count, self.counters[atom])
            return start and stop and Count((), (start.bounds[0], stop.bounds[1] - 1))
        if len(self.given.get(atom, ())) == 1:
            return self.count(self.given[atom][0])
        eqn = self.makers.get(atom)
        count = (None if eqn is None else self._made(eqn)) or unknown
        if count is None:
            return None
        limits = np.iinfo(aval.dtype)
        known = [bound for bound in count.bounds if not math.isinf(bound)]
        if all(limits.min <= bound <= limits.max for bound in known):
            return count  # what is loaded is taken for small enough not to wrap around
        return replace(count, bounds=UNKNOWN)

    def _made(self, eqn: jex.JaxprEqn) -> Count | None:
        name, params, shape = eqn.primitive.name, eqn.params, array_aval(eqn.outvars[0]).shape
        if name == "program_id":
            return Count((), (0, max(self.kernel.grid[params["axis"]] - 1, 0)))
        if name == "iota":
            along = params["dimension"]
            return Count(
                tuple(int(n == along and size > 1) for n, size in enumerate(shape)), (0, 0)
            )
        if name == "select_n" and self._counts_from_the_end(eqn.invars):
            return self.count(eqn.invars[1])
        if name == "select_n":
            cases = list(map(self.count, eqn.invars[1:]))
            if not all(case is not None and case.is_uniform for case in cases) or shape:
                return None
            lows, highs = zip(*(case.bounds for case in cases if case is not None))
            return Count((), (min(lows), max(highs)))
        if name not in (*SAME, *BOUNDS, "add", "sub", *SHAPE_VIEWS):
            return None
        counts = [count for atom in eqn.invars if (count := self.count(atom)) is not None]
        if len(counts) < len(eqn.invars):
            return None
        if name in SAME:
            return counts[0]
        if name in SHAPE_VIEWS:
            return self._moved(eqn, counts[0])
        if name in ("add", "sub"):
            return counts[0].plus(counts[1].times(1 if name == "add" else -1))
        for count, factor in (counts, counts[::-1]) if name == "mul" else ():
            if factor.constant is not None:
                return count.times(factor.constant)
        if all(count.is_uniform for count in counts):
            return Count((0,) * len(shape), BOUNDS[name](*(count.bounds for count in counts)))
        return None

    def _counts_from_the_end(self, given: Sequence) -> bool:
        """Whether operands of select_n are those of `where(at < 0, at + size, at)`, which JAX writes for each index."""
        makers = [self.makers[x] for x in given[::2] if isinstance(x, jex.Var) and x in self.makers]
        if len(given) != 3 or len(makers) != 2:
            return False
        test, other = makers
        names = (test.primitive.name, other.primitive.name)
        return names == ("lt", "add") and test.invars[0] is other.invars[0] is given[1]

    @staticmethod
    def _moved(eqn: jex.JaxprEqn, count: Count) -> Count | None:
        """The count with the dimensions of the result of an equation that only moves them."""
        distances = [0] * len(array_aval(eqn.outvars[0]).shape)
        for axis, distance in enumerate(count.distances):
            place = _place_of(eqn, axis) if distance else None
            if distance and place is None:
                return None
            if place is not None:
                distances[place] = distance
        return Count(tuple(distances), count.bounds)

    def reach(self, mask, axis: int, length: int) -> int:
        """Positions along a dimension of this length, at least one, beyond which a mask is false."""
        if isinstance(mask, jex.Literal) or array_aval(mask).shape[axis] == 1:
            return length  # the same for all
        if len(self.given.get(mask, ())) == 1:
            return self.reach(self.given[mask][0], axis, length)
        eqn = self.makers.get(mask)
        if eqn is None:
            return length
        name = eqn.primitive.name
        if name == "and":
            return min(self.reach(operand, axis, length) for operand in eqn.invars)
        if name in SHAPE_VIEWS:
            sizes = array_aval(eqn.invars[0]).shape
            same = [n for n, size in enumerate(sizes) if size > 1 and _place_of(eqn, n) == axis]
            return self.reach(eqn.invars[0], same[0], length) if same else length
        if name not in COMPARISONS:
            return length
        first_is_larger, more = COMPARISONS[name]
        counts = [self.count(operand) for operand in eqn.invars]
        smaller, larger = counts[::-1] if first_is_larger else counts
        if smaller is None or larger is None:
            return length
        difference = smaller.plus(larger.times(-1))
        step = dict(enumerate(difference.distances)).get(axis, 0)
        sizes = array_aval(eqn.outvars[0]).shape
        least = difference.bounds[0] + sum(
            min(distance * (size - 1), 0) for distance, size in zip(difference.distances, sizes)
        )
        if step <= 0 or least == -math.inf:
            return length
        return min(max(math.ceil((more - least) / step), 1), length)


def _place_of(eqn: jex.JaxprEqn, axis: int) -> int | None:
    """The dimension of the result that is dimension `axis` of the operand, of an equation that only moves dimensions."""
    before, after = array_aval(eqn.invars[0]).shape, array_aval(eqn.outvars[0]).shape
    if eqn.primitive.name == "broadcast_in_dim":
        place = eqn.params["broadcast_dimensions"][axis]
        return place if after[place] == before[axis] else None
    old, new = ([n for n, size in enumerate(shape) if size > 1] for shape in (before, after))
    same = [before[n] for n in old] == [after[n] for n in new]
    return new[old.index(axis)] if same and axis in old else None


def _ends_of_constants(params: Mapping) -> tuple[int, int]:
    """Ends of the constants of the condition and of the body of a `while` equation, among its operands."""
    first = params["cond_nconsts"]
    return first, first + params["body_nconsts"]


def _grows(body: jex.Jaxpr, first: int, number: int) -> bool:
    """Whether a carry of a loop's body is one more after each round."""
    var, result = body.invars[first + number], body.outvars[number]
    steps = [eqn for eqn in body.eqns if result in eqn.outvars and eqn.primitive.name == "add"]
    return any(
        eqn.invars[0] is var
        and isinstance(eqn.invars[1], jex.Literal)
        and np.all(eqn.invars[1].val == 1)
        for eqn in steps
    )


def rounds_of(eqn: jex.JaxprEqn) -> Rounds | None:
    """The rounds of a `while` equation that is a loop from one number to another, else None."""
    condition, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
    first, end = _ends_of_constants(eqn.params)
    places = {var: n for n, var in enumerate(condition.invars)}
    test = condition.eqns[-1] if len(condition.eqns) == 1 else None
    if test is None or test.primitive.name != "lt" or isinstance(test.invars[0], jex.Literal):
        return None
    if test.invars[0] not in places:
        return None
    number, stop = places[test.invars[0]] - first, test.invars[1]
    if number < 0 or not _grows(body, end - first, number):
        return None
    if not isinstance(stop, jex.Literal):
        place = places[stop] - first
        if place >= 0 and body.outvars[place] is not body.invars[end - first + place]:
            return None
        stop = eqn.invars[place + (end if place >= 0 else first)]
    return Rounds(number, eqn.invars[end + number], stop)
