"""16-bit floats that are compared with the greatest of them: those that must be rounded where they are made.

Kernels hold float16 and bfloat16 in float32 registers, and round what they store. A maximum that was stored is then none of
the elements that it was found among, if those were not: `x == x.max()` is false everywhere, and so is `x - x.max() >= 0`.
Comparisons of 16-bit floats round what they read (lower/math/elementwise.py), and no more is needed for the first. Here are
values whose differences are compared, those that are compared as float32, and those among which a place is sought: the first
of equal ones must be that of elements that are equal once they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core as jex

from pbkern.core.jaxprs.calls import called_jaxpr, is_call
from pbkern.core.jaxprs.walks import equations, inner_jaxprs, types_at_any_depth

COMPARISONS = frozenset("eq ne lt le gt ge eq_to le_to lt_to".split())
EXTREMES = frozenset(
    "reduce_max reduce_min cummax cummin reduce_window_max reduce_window_min".split()
)
# They compare what they search.
SEARCHES = frozenset("argmax argmin sort first_sorted top_k select_and_gather_add".split())
# Results are elements of operands, with the other sign perhaps.
CHOICES = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims slice transpose rev neg abs copy stop_gradient dynamic_slice concatenate "
    "pad max min clamp select_n gather convert_element_type".split()
)
DIFFERENCES = frozenset("sub add add_any".split())
EXACT = CHOICES | EXTREMES | SEARCHES | {"reduce_precision", "bitcast_convert_type", "get", "sign"}


def ordered_values(jaxpr: jex.Jaxpr) -> frozenset[jex.Var]:
    """Values of float16 and bfloat16 that must be rounded; also those within calls, loops and branches."""
    if not any(map(_is_short_type, types_at_any_depth(jaxpr))) and not any(
        map(is_call, equations(jaxpr))
    ):
        return frozenset()
    rounded: set[jex.Var] = set()
    steps = [*_flat(jaxpr)]
    for step in steps:
        if step.eqn is not None and called_jaxpr(step.eqn) is None:
            for inner in inner_jaxprs(step.eqn):
                rounded |= ordered_values(inner.jaxpr)
    computed = {
        var for step in steps if step.name not in EXACT for var in step.results if _is_short(var)
    }
    if not computed:
        return frozenset(rounded)
    searched: set[jex.Var] = set()
    rounds: set[jex.Var] = set()  # what a comparison that reads it rounds
    compared: set[jex.Var] = set()  # what it does not
    for step in reversed(steps):
        name, results = step.name, step.results
        if name in COMPARISONS:
            for var in step.operands:
                (rounds if _is_short(var) else compared).add(var)
        if name in EXTREMES or name in SEARCHES:
            searched.update(step.operands)
        if name in SEARCHES:
            compared.update(step.operands)
        if name in CHOICES and not _narrows(step):
            for seen in (searched, rounds, compared):
                if not seen.isdisjoint(results):
                    seen.update(step.operands)
        if name in DIFFERENCES and not (rounds | compared).isdisjoint(results):
            compared.update(step.operands)
    return frozenset(rounded | (computed & searched & compared))


def _narrows(step: _Passage) -> bool:
    """Whether it rounds to 16 bits."""
    return step.name == "convert_element_type" and _is_short(step.results[0])


class _Passage(NamedTuple):
    """Way of values through an equation, into a call or out of it."""

    name: str
    operands: list[jex.Var]
    results: Sequence[jex.Var]
    eqn: Any = None


def _flat(jaxpr: jex.Jaxpr) -> Iterator[_Passage]:
    """The equations in order, those of calls where the call stands."""
    for eqn in jaxpr.eqns:
        called = called_jaxpr(eqn)
        if called is None:
            operands = [var for var in eqn.invars if isinstance(var, jex.Var)]
            yield _Passage(eqn.primitive.name, operands, eqn.outvars, eqn)
            continue
        yield from _passed(eqn.invars, called.jaxpr.invars)
        yield from _flat(called.jaxpr)
        yield from _passed(called.jaxpr.outvars, eqn.outvars)


def _passed(given: Sequence, taken: Sequence) -> Iterator[_Passage]:
    return (_Passage("copy", [x], [y]) for x, y in zip(given, taken) if isinstance(x, jex.Var))


def _is_short(var: jex.Var) -> bool:
    return _is_short_type(var.aval)


def _is_short_type(aval) -> bool:
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.name in ("float16", "bfloat16")
