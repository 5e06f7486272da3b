"""The promised fusions: kernel counts at full size (planning only), values at odd sizes and blocks."""

import time

import pytest

from .checking import check, check_blocks, planned
from .workloads import WORKLOADS


@pytest.mark.parametrize("name", WORKLOADS)
def test_kernel_count_at_full_size(name):
    f, _, types, kernels = WORKLOADS[name]
    plan = planned(f, *types)
    assert not plan.left_to_xla()
    assert len(plan.kernels()) == kernels, str(plan.explanation)


@pytest.mark.apart
@pytest.mark.parametrize("name", WORKLOADS)
def test_equals_jax(name):
    f, args, _, _ = WORKLOADS[name]
    check(f, *args, tolerance=1e-3 if "sum" in name else 1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [n for n in WORKLOADS if "sum" not in n])
def test_equals_jax_at_odd_blocks(name, monkeypatch):
    f, args, _, _ = WORKLOADS[name]
    check_blocks(monkeypatch, f, *args, seeds=range(3))


def test_planning_ten_ops_is_quick():
    f, _, types, _ = WORKLOADS["bias_gelu"]
    planned(f, *types)
    begin = time.process_time()
    planned(f, *types)
    assert time.process_time() - begin < 0.1
