"""Rows that begin amid a sector of memory: the first threads take what lies in the sector at their end.

A warp that takes neighbours of such a row from its first element on touches a sector more with each access. Where threads
count from the start of that sector on, those in front of the row have its last elements, and each sector is touched once:

    sectors      |  0  1  2  3 |  4  5  6  7 |  8 ...       thread - skipped, and the row's length more where that is negative
    row          |        a  b |  c  d  e  f |  g  h         (skipped = 2)
    threads      |        2  3 |  4  5  6  7 |  0  1
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.ir import Load, Nest
from pbkern.simulate.counts import SECTOR_BYTES


@dataclass(frozen=True)
class WholeSectors:
    """Points along the dimension of lanes, counted from the start of a sector.

    Attributes:
      dim: the dimension.
      size: its points.
      places: places that threads count, as many or a few more.
      elements: of a sector.
      first: the row's first element, as far as it says where in a sector that lies.
    """

    dim: str
    size: int
    places: int
    elements: int
    first: Affine


def whole_sectors(
    nest: Nest, order: Mapping[str, int], warp: int, count: int = 1, is_reduced: bool = False
) -> WholeSectors | None:
    """The sectors of long rows that begin or end amid one; None where rows do not, or are short.

    order: the dimensions of which threads have places, with their sizes; the last one is along lanes. count: neighbours along
    it that are one place. Where rows of several arrays begin differently, most bytes decide. Of free dimensions, places are
    whole sectors, so that the next row begins with one; of reduced ones (is_reduced), each place is a point.
    """
    along = list(order)[-1] if order else ""
    size = order.get(along, 0)
    # Rows of up to two accesses of a warp are as many sectors either way; of equal values, searches take the first.
    if size * count < 2 * warp or nest.ordered or any(term.is_search for term in nest.reductions):
        return None
    accesses = {(load.buf, load.index) for load in nest.loads() if isinstance(load, Load)}
    accesses |= {(store.buf, tuple(store.index)) for store in nest.stores}
    far = [(buf, flat_index(buf, index)) for buf, index in accesses if not buf.root.arena]
    rows = [(buf, flat) for buf, flat in far if flat.coefficient(along) == 1 and buf.dtype.itemsize]
    if not rows:
        return None
    elements = SECTOR_BYTES // min(buf.dtype.itemsize for buf, _ in rows)
    moved: Counter[Affine] = Counter()
    for buf, flat in rows:
        moved[_within(flat, along, elements)] += buf.dtype.itemsize
    first = max(moved, key=lambda place: (moved[place], str(place)))
    is_known = is_reduced or first.symbols.isdisjoint(nest.rdims)
    has_next = not is_reduced and math.prod(order.values()) > size
    is_whole = first == Affine() and not (has_next and size * count % elements)
    if is_whole or not is_known or elements <= count:
        return None
    if count > 1:
        elements //= count
        first = Affine.make({dim: step // count for dim, step in first.terms}, first.const // count)
    places = size if is_reduced else -(-size // elements) * elements
    return WholeSectors(along, size, places, elements, first)


def _within(flat: Affine, along: str, elements: int) -> Affine:
    """The place in its sector of a row's first element."""
    terms = {dim: factor % elements for dim, factor in flat.terms if dim != along}
    return Affine.make(terms, flat.const % elements)
