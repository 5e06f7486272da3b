"""The recursion that `lax.associative_scan` traces -> a `lax.scan` with the same combining function.

    associative_scan(f, x)       log2(n) levels of slices, f and interleaved halves, each an array of its own
    scan(f, x[0], x[1:])         one loop that reads x once and writes the result once

recursion_reader.py finds recursions and what they combine with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import field

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.retracing import retrace
from pbkern.core.jaxprs.walks import equations, inner_jaxprs, primitive_names
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.cost.model import CostModel
from pbkern.fuse.options import FuseOptions

from .recursion_reader import Recursion, independent_axes, recursions


@dataclass(frozen=True)
class TreesToScans:
    """Replaces recursions along the leading dimension whose steps fill vectors, and that few programs end soon.

    A single line of numbers would wait for each sum in turn. A loop runs on as many cores as there are programs of independent
    elements in a step, the recursion's kernels on all.
    """

    fewest_step_elements: int = threshold(
        8,
        "elements of an array in one step of the loop. Linear recurrence 4096 x 8, two threads of Zen 4: 36 us, a loop 24",
    )
    most_elements: int = threshold(
        1 << 17,
        "elements of an array that one core combines while all cores start the recursion's kernels. Linear recurrence, two "
        "threads of Zen 4: 4096 x 16 76 us, a loop 29",
    )
    recursion_work: int = threshold(
        4,
        "cores that the recursion needs to be as fast as a loop on one. Linear recurrence 65536 x 16: 1.3 ms on two threads "
        "of Zen 4, a loop on one 0.23",
    )
    fewest_steps: int = threshold(
        16, "elements along the dimension; below, the levels are few and fuse. Source: not recorded"
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: FuseOptions) -> jex.ClosedJaxpr:
        """Needs loops inside kernels: none are replaced on targets that have none."""
        if not options.machine.sizes.loop_elements or not _may_interleave(closed):
            return closed
        inlined = retrace(closed)
        replacements = _Replacements(
            {
                result: recursion
                for jaxpr in _all_jaxprs(inlined.jaxpr)
                for recursion in recursions(jaxpr, self.fewest_steps)
                if self._pays(recursion, options.machine)
                for result in recursion.results
                if result is not None
            }
        )
        return retrace(inlined, replacements.rewrite) if replacements.recursions else closed

    def _pays(self, recursion: Recursion, machine: CostModel) -> bool:
        shapes = [x.aval.shape for x in recursion.operands]
        widest = max(math.prod(shape[1:]) for shape in shapes)
        independent = math.prod(shapes[0][axis] for axis in independent_axes(recursion))
        sizes = machine.sizes
        fits = widest <= sizes.loop_elements or (
            widest <= independent * sizes.shared_loop_elements and independent > 1
        )
        programs = min(max(independent // sizes.independent_elements, 1), machine.cores)
        return (
            recursion.axis == 0
            and widest >= self.fewest_step_elements
            and fits
            and (
                shapes[0][0] * widest <= self.most_elements
                or programs * self.recursion_work >= machine.cores
            )
        )


def _may_interleave(closed: jex.ClosedJaxpr) -> bool:
    return primitive_names(closed) >= {"pad", "concatenate", "slice"} and any(
        eqn.primitive.name == "pad" and any(inner for *_, inner in eqn.params["padding_config"])
        for eqn in equations(closed.jaxpr)
    )


def _all_jaxprs(jaxpr: jex.Jaxpr) -> Iterator[jex.Jaxpr]:
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            yield from _all_jaxprs(inner.jaxpr)


@dataclass
class _Replacements:
    """Puts loops in the place of recursions while equations are bound again."""

    recursions: dict  # result -> its recursion
    values: dict = field(default_factory=dict)
    pending: dict = field(default_factory=dict)  # result -> the loop's, until its equation is bound

    def __post_init__(self) -> None:
        self.wanted = {
            var
            for recursion in self.recursions.values()
            for var in (*recursion.operands, *recursion.combination.consts)
        }

    def rewrite(self, eqn, *operands):
        for var, value in zip(eqn.invars, operands):
            if isinstance(var, jex.Var) and var in self.wanted:
                self.values[var] = value
        recursion = self.recursions.get(eqn.outvars[0]) if eqn.outvars else None
        if recursion is None:
            return None
        result = eqn.outvars[0]
        if result not in self.pending:
            results = zip(recursion.results, _as_scan(recursion, self.values))
            self.pending.update((var, value) for var, value in results if var is not None)
        return [self.pending.pop(result)]


def _as_scan(recursion: Recursion, values: dict) -> list:
    """The results of a loop in a recursion's place. values: of its operands, and of what its combination reads beside them.

    The loop combines the elements of a chunk, and each result with what comes before the chunk. With chunks of about
    sqrt(n) elements, rounding errors of sums grow with twice that number; in one chain they would grow with n.
    """
    axis = recursion.axis
    along = tuple(jnp.moveaxis(values[x], axis, 0) for x in recursion.operands)
    chunk = 1 << round(math.log2(len(along[0])) / 2)

    def f(before, after):
        combined = recursion.combination(*(_with_axis(xs, axis) for xs in (before, after)), values)
        return [jnp.squeeze(x, axis) for x in combined]

    # What f makes of the zeros before the first element, and before the first chunk, is not used.
    def step(carry, element):
        number, before, within, last = carry
        begins = number % chunk == 0
        before = _either(begins, last, before)
        within = _either(begins, element, f(within, element))
        result = _either(number < chunk, within, f(before, within))
        read = [x for x, var in zip(result, recursion.results) if var is not None]
        return (number + 1, before, within, result), read

    zeros = [jnp.zeros(x.shape[1:], x.dtype) for x in along]
    _, stacked = lax.scan(
        step, (jnp.int32(0), zeros, zeros, zeros), along, reverse=recursion.is_reversed
    )
    ys = iter(stacked)
    return [None if var is None else jnp.moveaxis(next(ys), 0, axis) for var in recursion.results]


def _with_axis(xs: Sequence, axis: int) -> list:
    return [jnp.expand_dims(x, axis) for x in xs]


def _either(is_first: jax.Array, firsts: Sequence, seconds: Sequence) -> list:
    """`firsts` where a scalar is true, else `seconds`."""
    return [jnp.where(is_first, x, y) for x, y in zip(firsts, seconds)]
