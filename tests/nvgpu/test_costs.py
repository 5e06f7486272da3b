"""Prices of a GPU's traffic, against sectors that are counted one by one."""

import itertools

import numpy as np
import pytest

from pbkern.core.affine import Affine
from pbkern.fuse.access.rules import Span
from pbkern.targets import get_target
from pbkern.targets.costs.kernel import _sector_waste

SECTOR, WARP_BYTES = 32, 128

# (shape of an array, shape of its blocks, halo along each dimension, bytes of an element)
BLOCKS = {
    "rows begin in the middle of a sector": ((640, 300), (64, 64), (0, 0), 4),
    "few columns": ((640, 700), (64, 8), (0, 0), 4),
    "rows of whole sectors": ((512, 1024), (64, 64), (0, 0), 4),
    "whole rows": ((512, 301), (32, 301), (0, 0), 4),
    "a halo": ((516, 1028), (16, 256), (4, 4), 4),
    "halves": ((640, 500), (64, 20), (0, 0), 2),
    "planes": ((16, 20, 36), (4, 20, 12), (0, 0, 0), 4),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_sectors_of_blocks(name):
    """Threads take long runs from the start of a sector on, and shorter ones a warp at a time."""
    shape, blocks, halo, size = BLOCKS[name]
    machine = get_target("nvgpu").machine("sm_90a")
    access = tuple(
        Span(Affine.symbol(axis, block) if block < extent else Affine(), block + more)
        for axis, (extent, block, more) in enumerate(zip(shape, blocks, halo))
    )
    strides = np.cumprod([1, *shape[:0:-1]])[::-1] * size
    found = used = 0
    counts = [(extent - more) // block for extent, block, more in zip(shape, blocks, halo)]
    for block in itertools.product(*map(range, counts)):
        starts = [number * length for number, length in zip(block, blocks)]
        places = [np.arange(span.size) + start for span, start in zip(access, starts)]
        addresses = sum(
            place.reshape([-1 if axis == at else 1 for axis in range(len(shape))]) * strides[at]
            for at, place in enumerate(places)
        ).ravel()
        ends = np.flatnonzero(np.diff(addresses) != size)
        for run in np.split(addresses, ends + 1):
            used += size * len(run)
            step = len(run) if size * len(run) >= 2 * WARP_BYTES else WARP_BYTES // size
            for piece in np.split(run, range(step, len(run), step)):
                found += (piece[-1] + size - 1) // SECTOR - piece[0] // SECTOR + 1
    waste = _sector_waste(access, shape, size, machine)
    assert waste == pytest.approx(found * SECTOR / used, rel=0.02)


def test_caches_of_cpus_hold_what_runs_leave_of_lines():
    machine = get_target("cpu").machine()
    access = (Span(Affine.symbol(0, 8), 8), Span(Affine.symbol(1, 3), 3))
    assert _sector_waste(access, (64, 30), 4, machine) == 1
