"""Copies to tiles: how many neighbours a thread copies at once, and which threads copy what."""

from __future__ import annotations

import math

from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.async_copies import copied
from pbkern.lower.nest.ir import Nest
from pbkern.lower.nest.tiles.layout import Layout, steps

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
    load, tests = source
    along, size = list(nest.dims)[-1], load.dtype.itemsize
    numbers = [
        nest.dims[along],
        load.buf.size,
    ]  # an array begins at a multiple of what divides its size
    flat = flat_index(load.buf, load.index)
    if flat.coefficient(along) != 1:
        return 0
    for place in (flat, *(test.affine for test in tests if along in test.symbols)):
        numbers += [place.const, *(factor for symbol, factor in place.terms if symbol != along)]
    numbers += [bound for test in tests if along in test.symbols for bound in (test.low, test.high)]
    count = math.gcd(WIDEST_COPY_BYTES // size, *numbers)
    return count if count * size >= NARROWEST_COPY_BYTES else 0


def copy_layout(nest: Nest, count: int, threads: int) -> Layout:
    """(thread, step) -> (row, column) of the first of `count` neighbours: neighbouring threads copy along rows.

    Bits of threads beyond the tile's chunks are not there: such threads copy nothing.
    """
    rows, columns = nest.dims.values()
    vectors = (*steps(columns, count, 1), *steps(rows, 1, 0))
    bits = threads.bit_length() - 1
    return Layout.of(thread=vectors[:bits], step=vectors[bits:])
