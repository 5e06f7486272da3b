"""Seconds of a kernel from its terms, against sums by hand."""

import dataclasses

import pytest

from pbkern.fuse.cost.roofline import Spread, Terms, overlapped, predicted
from pbkern.targets import get_target

TERMS = Terms(
    arithmetic=1e-3, repeated=0.0, reads=2e-3, stores=1e-3, rereads=0.5e-3, trips=0.25e-3,
    bytes_moved=1000, flops=10.0, recompute=1.0, working_set=64, scratch=32, programs=8, limit=1e-3,
)  # fmt: skip


@pytest.mark.parametrize("target", ["cpu", "nvgpu", "amdgpu"])
def test_sum_of_the_terms(target):
    costs = get_target(target).costs()
    spread = Spread(rounds=4, starts=3, bandwidth=0.5, store_passes=2, stalls=1.0)
    cost = predicted(TERMS, spread, costs)
    compute, memory = 4e-3, (2e-3 + 2e-3 + 0.5e-3 + 0.25e-3) / 0.5
    assert cost.compute == pytest.approx(compute)
    assert cost.memory == pytest.approx(memory)
    overhead = costs.launch_seconds + 3 * costs.program_seconds
    assert cost.seconds == pytest.approx(memory + 0.25 * compute + overhead + 1.0)
    assert (cost.bytes_moved, cost.scratch, cost.programs) == (1000, 32, 8)


def test_the_shorter_part_overlaps():
    assert overlapped(3.0, 2.0) == overlapped(2.0, 3.0) == 3.5


def test_a_store_reads_its_line_on_a_cpu_only():
    assert get_target("cpu").costs().spread(TERMS).store_passes == 2
    assert get_target("nvgpu").costs().spread(TERMS).store_passes == 1


def test_blocks_with_much_scratch_leave_multiprocessors_idle():
    costs = get_target("nvgpu").costs()
    many = dataclasses.replace(TERMS, programs=100 * costs.cores)
    large = dataclasses.replace(many, scratch=costs.near_bytes)
    assert costs.spread(large).rounds > 2 * costs.spread(many).rounds
    assert costs.spread(large).bandwidth < costs.spread(many).bandwidth
    assert costs.spread(large).stalls > 0
