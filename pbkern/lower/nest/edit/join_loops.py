"""Loops around a loop -> one loop over all of their turns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pbkern.core.affine import Affine
from pbkern.lower.nest.ir import INT32, Expr, For, Let, Nest, Stmt

from .rename import renamed


def joined_loops(around: Mapping[str, int], loop: For, context: Any) -> For:
    """One loop in place of `loop` and loops around it, by counter, the outermost first, with their trips.

        for %y < 3:                            for %o < 12:
          for %x < 4:                            let %q = shift_right_logical(mul(%o, 64), 8)
            nest [i<8]                  ->       nest [i<8]
              t[i] = a[%y, %x, i]                  t[i] = a[%q, %o - 4*%q, i]

    Quotients are products and shifts, which are the same up to twice the number of turns.

    Legal where the bodies of the outer loops are the loop inside alone, whose body is nests.
    """
    assert isinstance(loop.trips, int)
    trips = {**around, loop.counter: loop.trips}
    counter = context.names("%o")
    lets, places = counters(counter, trips, context)
    body: list[Stmt] = [*lets]
    for stmt in loop.body:
        assert isinstance(stmt, Nest), "the loop copies and computes"
        body.append(renamed(stmt, places, stmt.dims, context.pool))
    return For(counter, math.prod(trips.values()), tuple(body))


def counters(
    whole: str, trips: Mapping[str, int], context: Any
) -> tuple[list[Let], dict[str, Affine]]:
    """(quotients, counters of loops inside one another) at a turn of the one loop in their place; `trips`: by counter."""
    sizes, turns = list(trips.values()), Affine.symbol(whole)
    lets: list[Let] = []
    places: dict[str, Affine] = {}
    outer: Affine = Affine()
    for at, (name, size) in enumerate(trips.items()):
        inside, number = math.prod(sizes[at + 1 :]), turns
        if inside > 1:
            quotient = context.names("%q")
            lets.append(Let(quotient, _quotient(turns, inside, 2 * math.prod(sizes), context)))
            number = Affine.symbol(quotient)
        places[name] = number - outer * size
        outer = number
    return lets, places


def _quotient(place: Affine, divisor: int, most: int, context: Any) -> Expr:
    """`place / divisor` for places from 0 to `most`, which is above the divisor."""
    shift, index = 0, context.pool.index(INT32, place)
    while any(
        number * (-(-(1 << shift) // divisor)) >> shift != number // divisor
        for number in range(divisor - 1, most + 1, divisor)
    ):
        shift += 1
    factor = -(-(1 << shift) // divisor)
    if factor * most > np.iinfo(INT32).max:
        return context.op("div", INT32, index, context.const(divisor, INT32))
    product = context.op("mul", INT32, index, context.const(factor, INT32))
    return context.op("shift_right_logical", INT32, product, context.const(shift, INT32))
