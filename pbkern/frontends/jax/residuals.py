"""Split of a jaxpr into known and unknown values -> Residuals: the values that the forward half saves for the backward one.

JAX saves every value that the second half reads. Here, values that follow from operands, results or
other saved values by elementwise arithmetic and broadcasts alone are computed again where they are
read: in a fused kernel that costs less than writing and reading them. Which values to save is a
minimum cut: each value costs its bytes, operands and results cost nothing because they exist
anyway, and most else (reductions, convolutions, random bits) cannot be crossed. A product may be
computed again too, at the price of its arithmetic: the scores of attention are, from queries, keys
and the statistics of the rows, and layers of a network are not.

A value that is computed again may be rounded in another way, as the two halves have other kernels.
A decision that is made again of such a value may be another one: the gradient of a maximum goes to
the elements that equal it, and could go to none. So decisions are saved, one byte for each
comparison, unless all that they are made of is saved.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import dtypes
from jax.extend import core as jex

from pbkern._jax import Split, part_of
from pbkern.core.jax_types import Atom, array_aval
from pbkern.core.jaxprs.calls import called_jaxpr
from pbkern.core.jaxprs.maximum_tests import compare_operands
from pbkern.core.jaxprs.walks import variables

# Cheap per element, or without cost inside a kernel.
RECOMPUTED = frozenset(
    """abs acos add add_any and asin atan2 atan broadcast_in_dim ceil clamp convert_element_type copy cos cosh div eq
    erf exp exp2 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg not or pow reshape
    round rsqrt select_n sign sin sinh sqrt square squeeze stop_gradient sub tan tanh transpose xor""".split()
)

# Arithmetic of a product that costs as much as a saved byte of f32 results: a little more than the
# time of both says, as what is not saved needs no memory between the two halves either.
OPERATIONS_PER_BYTE = 96

# Of what is recomputed: results that follow from operands without arithmetic, the same in every kernel.
MOVES = frozenset(
    """abs broadcast_in_dim clamp convert_element_type copy imag max min neg real reshape select_n squeeze
    stop_gradient transpose""".split()
)
# Floating-point results that jump where an operand passes a limit.
STEPS = frozenset("ceil floor round".split())
ORDER = frozenset("ge gt le lt".split())


class Residuals(NamedTuple):
    """The two halves of a split and the values that pass between them.

    known: known operands -> known results, then saved values.
    unknown: kept operands, kept results (saved values among them), unknown operands -> unknown results.
    unknown_results: per result of the whole.
    kept_operands, kept_results: positions among the known half's operands and results.
    """

    known: jex.ClosedJaxpr
    unknown: jex.ClosedJaxpr
    unknown_results: tuple[bool, ...]
    kept_operands: tuple[int, ...]
    kept_results: tuple[int, ...]


def choose_residuals(split: Split) -> Residuals:
    split = split._replace(known=compare_operands(split.known))
    jaxpr = split.known.jaxpr
    count = len(jaxpr.outvars) - split.residuals
    results, residuals = jaxpr.outvars[:count], jaxpr.outvars[count:]
    cut = with_decisions(
        jaxpr, minimum_cut(jaxpr, variables(results), variables(residuals)), residuals
    )
    operands = {var: n for n, var in enumerate(jaxpr.invars)}
    places = {
        result: n for n, result in reversed(list(enumerate(results))) if isinstance(result, jex.Var)
    }
    kept_operands = [var for var in cut if var in operands]
    kept_results = [var for var in cut if var not in operands and var in places]
    saved = [var for var in cut if var not in operands and var not in places]
    known = part_of(split.known, jaxpr.invars, [*results, *saved], jaxpr.eqns)
    outputs = [*kept_operands, *kept_results, *saved]
    again = part_of(split.known, outputs, residuals, equations_between(jaxpr, outputs, residuals))
    positions = [*(places[result] for result in kept_results), *range(count, count + len(saved))]
    return Residuals(
        known,
        recomputing(again, split.unknown, split.residuals),
        split.unknown_results,
        tuple(operands[operand] for operand in kept_operands),
        tuple(positions),
    )


def recomputing(
    again: jex.ClosedJaxpr, unknown: jex.ClosedJaxpr, residuals: int
) -> jex.ClosedJaxpr:
    """The unknown half on kept values: computes its residuals first."""
    count = len(again.in_avals)

    def run(*args):
        return jex.jaxpr_as_fun(unknown)(*jex.jaxpr_as_fun(again)(*args[:count]), *args[count:])

    return jax.make_jaxpr(run)(*again.in_avals, *unknown.in_avals[residuals:])


def equations_between(jaxpr: jex.Jaxpr, given: Sequence, wanted: Sequence) -> list:
    """The equations that make `wanted` of `given` and constants, in order."""
    have, needed, chosen = set(given), set(variables(wanted)), []
    for eqn in reversed(jaxpr.eqns):
        if any(var in needed and var not in have for var in eqn.outvars):
            chosen.append(eqn)
            needed.update(variables(eqn.invars))
    return chosen[::-1]


def with_decisions(jaxpr: jex.Jaxpr, cut: Sequence[jex.Var], residuals: Sequence) -> list[jex.Var]:
    """The cut and the decisions behind it that would be made of other values than before, without what they replace."""
    exact, decisions = {*cut, *jaxpr.constvars}, []  # exact: the same in both halves
    for eqn in equations_between(jaxpr, cut, residuals):
        operands = variables(eqn.invars)
        if exact.issuperset(operands):
            if is_exact(eqn):
                exact.update(eqn.outvars)
        elif decides(eqn):
            exact.update(eqn.outvars)
            decisions += [var for var in eqn.outvars if var not in cut]
        elif not any(map(_is_inexact, eqn.outvars)):
            exact.update(eqn.outvars)
    if not decisions:
        return list(cut)
    saved = {*cut, *decisions}
    read = {
        var
        for eqn in equations_between(jaxpr, [*saved], residuals)
        for var in variables(eqn.invars)
    }
    saved &= read | {*variables(residuals)}
    order = [*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]
    return [var for var in order if var in saved]


def decides(eqn) -> bool:
    """Whether an equation makes a decision of numbers: a result that jumps where an operand changes by a rounding error.

    An order between a number and a fixed limit does not count: the limit moves by a rounding error,
    which is no more than happens to the values of a continuous function.
    """
    inner = called_jaxpr(eqn)
    if inner is not None:
        return any(map(decides, inner.jaxpr.eqns))
    name, operands = eqn.primitive.name, variables(eqn.invars)
    if not any(map(_is_inexact, operands)) or (name in ORDER and len(operands) < 2):
        return False
    return name in STEPS or not any(map(_is_inexact, eqn.outvars))


def is_exact(eqn) -> bool:
    """Whether an equation on the same operands has the same results in every kernel."""
    inner = called_jaxpr(eqn)
    if inner is not None:
        return all(map(is_exact, inner.jaxpr.eqns))
    return eqn.primitive.name in MOVES | STEPS or not any(map(_is_inexact, eqn.outvars))


def _is_inexact(atom: Atom) -> bool:
    return dtypes.issubdtype(array_aval(atom).dtype, np.inexact)


def is_recomputed(eqn) -> bool:
    inner = called_jaxpr(eqn)
    if eqn.effects:
        return False
    return (
        all(map(is_recomputed, inner.jaxpr.eqns))
        if inner is not None
        else eqn.primitive.name in RECOMPUTED
    )


# --- minimum cut
# ----------------------------------------------------------------------------------------------------

# The node of a flow network from which all flow comes.
SOURCE = "source"
# The node of a flow network to which all flow goes.
SINK = "sink"


def minimum_cut(
    jaxpr: jex.Jaxpr, results: Sequence[jex.Var], residuals: Sequence[jex.Var]
) -> list[jex.Var]:
    """The cheapest values from which all residuals follow, in the order in which they are made.

    Every value is an edge from (value, 0) to (value, 1) of its price; recomputation leads from
    (operand, 1) to (result, 0) at no price; values that are not recomputed hang on the source,
    products by the price of their arithmetic.
    """
    free = {*jaxpr.invars, *jaxpr.constvars, *results}
    producers = {value: producer for producer in jaxpr.eqns for value in producer.outvars}
    constants = set(jaxpr.constvars)
    flow = Flow()
    waiting, seen = list(residuals), set()
    for node in residuals:
        flow.add((node, 1), SINK, math.inf)
    while waiting:
        node = waiting.pop()
        if node in seen or node in constants:
            continue
        seen.add(node)
        flow.add((node, 0), (node, 1), 0 if node in free else price(node.aval))
        eqn = producers.get(node)
        if eqn is None:
            flow.add(SOURCE, (node, 0), math.inf)
            continue
        if not is_recomputed(eqn):
            effort = product_price(eqn)
            flow.add(SOURCE, (node, 0), effort)
            if effort == math.inf:
                continue
        for var in variables(eqn.invars):
            if var not in constants:
                flow.add((var, 1), (node, 0), math.inf)
                waiting.append(var)
    reached = flow.saturate()
    cut = {value for value in seen if (value, 0) in reached and (value, 1) not in reached}
    order = [*jaxpr.invars, *(value for equation in jaxpr.eqns for value in equation.outvars)]
    return [value for value in order if value in cut]


def price(aval) -> float:
    """Bytes of a value, and a little for being one more."""
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8) + 64


def product_price(eqn) -> float:
    """Cost of computing a product again and reading its operands, in saved bytes; infinite for other equations."""
    if eqn.primitive.name != "dot_general":
        return math.inf
    (contracted, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
    aval = eqn.outvars[0].aval
    arithmetic = 2 * depth * math.prod(aval.shape) * aval.dtype.itemsize / 4 / OPERATIONS_PER_BYTE
    return arithmetic + sum(price(var.aval) for var in eqn.invars)


class Flow:
    """A network with capacities. Edmonds and Karp 1972: augment along shortest paths."""

    def __init__(self) -> None:
        self.rest: dict = {}  # node -> {node: capacity that is left}

    def add(self, tail, head, capacity: float) -> None:
        self.rest.setdefault(tail, {})
        self.rest[tail][head] = self.rest[tail].get(head, 0) + capacity
        self.rest.setdefault(head, {}).setdefault(tail, 0)

    def saturate(self) -> set:
        """Sends all the flow there can be; returns the nodes that the source still reaches."""
        while True:
            before = self.search()
            if SINK not in before:
                return set(before)
            path = list(self.path(before))
            amount = min(self.rest[source][target] for source, target in path)
            for tail, head in path:
                self.rest[tail][head] -= amount
                self.rest[head][tail] += amount

    def search(self) -> dict:
        """Reachable node -> its predecessor; the search stops at the sink."""
        before: dict = {SOURCE: None}
        waiting = deque([SOURCE])
        while waiting and SINK not in before:
            tail = waiting.popleft()
            for head, left in self.rest.get(tail, {}).items():
                if left > 0 and head not in before:
                    before[head] = tail
                    waiting.append(head)
        return before

    def path(self, before: dict) -> Iterator[tuple]:
        head = SINK
        while before[head] is not None:
            yield before[head], head
            head = before[head]
