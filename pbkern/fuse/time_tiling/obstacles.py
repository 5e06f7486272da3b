"""Body of a stencil's loop -> the operation by which its steps cannot follow each other through the array.

A report names its line. Steps can follow each other where a few rows of a step need a few rows of
the one before. Borders may be set from rows near them (fuse/tiling/time_skewing.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core as jex

from pbkern._jax import user_line
from pbkern.core.errors import UnsupportedOp
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import leading_to
from pbkern.fuse.access.blocks import Step, Unfusable
from pbkern.fuse.access.rules import Access, NeedsWhole
from pbkern.fuse.tiling.decided_cases import DecidedCases
from pbkern.fuse.tiling.time_skewing import ALONG, MOST_BORDER_ROWS, ROW, Reads

from .limits import TimeTilingLimits
from .local_operations import is_local
from .periodic_borders import roll_p, with_periodic_halos
from .windows_as_slices import WINDOWS


def obstacle(body: jex.ClosedJaxpr, counts: tuple[int, int], limits: TimeTilingLimits) -> str:
    """Names the operation that keeps steps of a stencil's loop apart, with its line and the reason.

    Args:
      body: (*consts, *carries, *elements of xs) -> (*carries, *values).
      counts: numbers of consts and carries.
      limits: the pass's.

    Returns:
      "" where steps can share a kernel, and for loops that are no stencil's.
    """
    body = with_periodic_halos(body)
    jaxpr = body.jaxpr
    results = [var for var in jaxpr.outvars[: counts[1]] if not isinstance(var, jex.Literal)]
    needed = leading_to(jaxpr.eqns, results)
    carries = jaxpr.invars[counts[0] : sum(counts)]
    changing = _depending(needed, carries)
    ranks = [array_aval(var).ndim for var in (*results, *carries)]
    if min(ranks, default=0) < min(ALONG) or not _reads_neighbours(needed, changing):
        return ""
    for eqn in needed:
        if set(eqn.outvars) & changing and not is_local(eqn, limits):
            return _named(eqn, "needs more than the neighbours of an element")
    return _of_rows(jaxpr.replace(outvars=results), changing)


def _of_rows(jaxpr: jex.Jaxpr, changing: set) -> str:
    """The obstacle among operations that are local; `changing`: values that differ from step to step."""
    along = min(ALONG)  # wavefronts move along rows, the last dimension but one
    axes = [array_aval(var).ndim - along for var in jaxpr.outvars]
    extents = [array_aval(var).shape[axis] for var, axis in zip(jaxpr.outvars, axes)]
    most, last_eqn = MOST_BORDER_ROWS, None
    if min(extents) <= 2 * most:
        return ""
    between = (most, min(extents) - most - 1)
    decided = DecidedCases(jaxpr.eqns, between)

    def step(eqn, out: Access) -> Step:
        nonlocal last_eqn
        last_eqn = eqn
        return decided.step(eqn, out)

    try:
        inner = Reads.of(jaxpr, axes, 1, step_for=step)
    except NeedsWhole as problem:
        return _named(last_eqn, problem.why)
    except (Unfusable, UnsupportedOp, NotImplementedError):
        return ""
    for eqn, asked in _asks(inner, changing):
        if all(span.is_const for span in asked):
            return _named(eqn, "reads rows at a fixed place, far from those that it makes")
        if not any(span.start.terms == ROW.terms for span in asked):
            return _named(eqn, "reads rows in another order than it makes them")
    for start, end in ((0, most), (min(extents) - most, max(extents))):
        try:
            border = Reads.at(jaxpr, axes, start, end)
        except (NeedsWhole, Unfusable, UnsupportedOp, NotImplementedError):
            return ""
        for eqn, asked in _asks(border, changing):
            rows = asked[-along].start.const if len(asked) >= along else start
            if abs(rows - start) > min(extents) // 2:
                return _named(eqn, "sets a border from the array's other end")
    return ""


def _reads_neighbours(eqns: Sequence[jex.JaxprEqn], changing: set) -> bool:
    """Tells whether elements depend on their neighbours: by windows, rolls, or slices that overlap."""
    parts: dict[Any, list] = {}
    for eqn in eqns:
        if not changing.intersection(eqn.outvars):
            continue
        if eqn.primitive is roll_p or eqn.primitive.name in WINDOWS:
            return True
        if eqn.primitive.name == "slice":
            box = [*zip(eqn.params["start_indices"], eqn.params["limit_indices"])]
            earlier = parts.setdefault(eqn.invars[0], [])
            if any(box != other and _overlap(box, other) for other in earlier):
                return True
            earlier.append(box)
    return False


def _overlap(box: Sequence[tuple], other: Sequence[tuple]) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, other))


def _asks(reads: Reads, changing: set) -> Iterator[tuple[jex.JaxprEqn, Access]]:
    """(reader, block) of each read of a changing value, from the results backwards."""
    for step in reversed(reads.requests.steps):
        for var, access, _ in step.asks:
            if var in changing and access:
                yield step.eqn, access


def _depending(eqns: Sequence[jex.JaxprEqn], carries: Sequence[jex.Var]) -> set:
    changing: set = set(carries)
    for eqn in eqns:
        if any(not isinstance(var, jex.Literal) and var in changing for var in eqn.invars):
            changing.update(eqn.outvars)
    return changing


def _named(eqn, why: str) -> str:
    return f"{eqn.primitive.name} at {user_line(eqn) or 'unknown line'} {why}"
