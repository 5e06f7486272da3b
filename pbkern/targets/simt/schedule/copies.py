"""Copies to tiles: how many neighbours a thread copies at once."""

from __future__ import annotations

import math

from pbkern.core.affine import Affine
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.async_copies import copied
from pbkern.lower.nest.ir import Gather, InRange, Load, Nest

# Bytes of a thread's widest copy.
# Source: PTX ISA 8.7, section 9.7.9.25.3.1, cp.async: cp-size is 4, 8 or 16.
WIDEST_COPY_BYTES = 16
# Bytes of a thread's narrowest copy. Source: as WIDEST_COPY_BYTES.
NARROWEST_COPY_BYTES = 4


def copied_at_once(nest: Nest) -> int:
    """Neighbours that a thread copies by one instruction: all inside or none, at a multiple of their size; 0 if none may be.

    Zeros are stored for those outside, if tests say so.
    """
    source = copied(nest)
    if source is None or source[0].buf.root.arena:
        return 0
    count = computed_at_once(nest)
    return count if count * source[0].dtype.itemsize >= NARROWEST_COPY_BYTES else 0


def computed_at_once(nest: Nest) -> int:
    """Neighbours of which a thread loads all that a nest stores by whole vectors, under the same tests; 1 if it cannot."""
    along = list(nest.dims)[-1]
    varying = [node for node in nest.nodes() if along in node.symbols]
    loads = [node for node in varying if isinstance(node, Load | Gather)]
    # What is stored is one chunk too: a swizzle moves each by itself.
    sizes = [access.buf.dtype.itemsize for access in (*loads, *nest.stores)]
    numbers = [nest.dims[along]]
    for load in loads:
        if isinstance(load, Gather):
            return 1
        flat = flat_index(load.buf, load.index)
        if flat.coefficient(along) != 1:
            return 1
        # An array begins at a multiple of what divides its size.
        numbers += [load.buf.size, *_others(flat, along)]
        if load.guard:
            for place, size in zip(load.index, load.buf.shape):
                numbers += [size, *_others(place, along)] if along in place.symbols else []
    for test in varying:
        if isinstance(test, InRange):
            numbers += [test.low, test.high, *_others(test.affine, along)]
    return math.gcd(WIDEST_COPY_BYTES // max(sizes), *numbers)


def _others(place: Affine, along: str) -> list[int]:
    """The constant of a place, and the factors of all its symbols but one."""
    return [place.const, *(factor for symbol, factor in place.terms if symbol != along)]
