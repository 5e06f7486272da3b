"""Predicted against measured time of fused kernels, to set the constants of
pbkern/targets/costs/kernel.py, pbkern/targets/costs/step.py and pbkern/targets/cpu/machines/machine.py.

    python -m benchmarks.calibrate [workload ...]

A program is compiled alone and called from one thread, so that the time is its own whatever else the computer does. The
prediction is therefore made for a machine of one core, with its share of the bandwidths that all cores have together.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pbkern import fuse
from pbkern.core.machine import Machine
from pbkern.core.options import CompileOptions
from pbkern.targets import get_target
from pbkern.targets.cpu.costs import CpuCosts
from tests.fuse.workloads import WORKLOADS

SECONDS_PER_WORKLOAD = 0.7


def one_core(machine: Machine) -> Machine:
    """The machine as a single thread sees it. One core alone draws more than its share of memory bandwidth."""
    share = 1 / machine.cores
    return dataclasses.replace(
        machine,
        cores=1,
        dram_bandwidth=machine.dram_bandwidth * max(share, 0.6),
        l3_bandwidth=machine.l3_bandwidth * share,
        l2_bandwidth=machine.l2_bandwidth * share,
        peak_flops={k: v * share for k, v in machine.peak_flops.items()},
    )


def random_array(t: jax.ShapeDtypeStruct, rng: np.random.Generator) -> np.ndarray:
    if jnp.issubdtype(t.dtype, jnp.floating):
        return rng.normal(size=t.shape).astype(t.dtype)
    return rng.integers(0, min(t.shape[0], 100), t.shape).astype(t.dtype)


def thread_seconds(run, args) -> float:
    """The least time of one call, on this thread's clock."""
    best, end = float("inf"), time.monotonic() + SECONDS_PER_WORKLOAD
    while time.monotonic() < end:
        begin = time.thread_time()
        run(*args)
        best = min(best, time.thread_time() - begin)
    return best


def rows(names: list[str]) -> Iterator[str]:
    options = CompileOptions.from_dict({})
    target, rng = get_target(options.target), np.random.default_rng(0)
    yield f"{'workload':18} {'plan ms':>8} {'predicted':>10} {'measured':>9} {'ratio':>6}  grids"
    for name in names:
        f, _, types, _ = WORKLOADS[name]
        closed = jax.make_jaxpr(f)(*types)
        begin = time.perf_counter()
        plan = fuse.plan(
            closed, name=name, options=options, machine=CpuCosts.of(one_core(target.machine())), supports=target.supports,
            params_for=lambda semantics: target.fused_params(semantics, options),
        )  # fmt: skip
        planned = (time.perf_counter() - begin) * 1e3
        predicted = sum(k.cost.seconds for k in plan.explanation.kernels) * 1e3
        (segment,) = plan.segments
        values = dict(zip(plan.jaxpr.constvars, map(np.asarray, plan.consts)))
        values |= {v: random_array(t, rng) for v, t in zip(plan.jaxpr.invars, types)}
        run = target.compile(segment.body, options)
        measured = thread_seconds(run, [values[v] for v in segment.reads]) * 1e3
        grids = ", ".join(str(list(k.grid)) for k in plan.kernels())
        yield f"{name:18} {planned:8.1f} {predicted:10.2f} {measured:9.2f} {measured / predicted:6.2f}  {grids}"


if __name__ == "__main__":
    for row in rows(sys.argv[1:] or list(WORKLOADS)):
        print(row, flush=True)
