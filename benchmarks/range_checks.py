"""What checks of indices and divisors cost functions of PyTorch: the same function with and without them, in turns.

    python -m benchmarks.range_checks [words in names] [--rounds 60] [--core 0]

Least processor time of one thread, in microseconds. The last row is the whole call of a small function.
"""

from __future__ import annotations

import argparse
import os
import time

ELEMENTS = 1 << 18
# Calls of a round: one takes microseconds, and the timer has about as many.
CALLS = 3
SMALL_CALLS = 200


def cases() -> dict:
    """Name -> (function, arguments)."""
    import torch
    import torch.nn.functional as F

    places = torch.randint(0, 5000, (ELEMENTS,))
    divisors = torch.randint(1, 50, (ELEMENTS,))
    table, rows, square = torch.randn(5000), torch.randn(5000, 64), torch.randn(512, 512)
    return {
        "embedding of rows of 64": (lambda i, w: F.embedding(i, w) * 2, (places[:8192], rows)),
        "embedding of rows of 8": (
            lambda i, w: F.embedding(i, w) * 2,
            (places[:32768], rows[:, :8].contiguous()),
        ),
        "x[i], int64": (lambda i, x: x[i] * 2, (places, table)),
        "x[i], int32": (lambda i, x: x[i] * 2, (places.int(), table)),
        "gather along rows": (
            lambda i, x: x.gather(1, i) * 2,
            (places.reshape(512, 512) % 512, square),
        ),
        "cross entropy": (
            lambda t, x: F.cross_entropy(x, t),
            (places[:512] % 1000, torch.randn(512, 1000)),
        ),
        "index_add": (
            lambda i, x: torch.zeros(5000, 32).index_add(0, i, x),
            (places[:8192], torch.randn(8192, 32)),
        ),
        "scatter_add": (
            lambda i, x: torch.zeros(5000).scatter_add(0, i, x),
            (places, torch.randn(ELEMENTS)),
        ),
        "int64 // int64": (lambda a, b: a // b, (places, divisors)),
        "int32 // int32": (lambda a, b: a // b, (places.int(), divisors.int())),
        "int32 % int32": (lambda a, b: a % b, (places.int(), divisors.int())),
        "small call": (lambda i, w: F.embedding(i, w) * 2, (places[:4] % 50, rows[:50, :8])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--core", type=int, default=0)
    parsed = parser.parse_args()
    os.sched_setaffinity(0, {parsed.core})  # before threads start
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    from pbkern.api.direct_plan import DirectPlan
    from pbkern.core.options import CompileOptions
    from pbkern.frontends.torch.capture import capture
    from pbkern.frontends.torch.decompositions import decompositions
    from pbkern.frontends.torch.memory import TorchMemory

    torch.set_num_threads(1)
    for name, (function, args) in cases().items():
        if not all(word in name for word in parsed.words):
            continue
        pure = torch.func.functionalize(function, remove="mutations")
        graph = make_fx(pure, decompositions(), tracing_mode="fake")(*args)
        plans = []
        for checked in (False, True):
            found = capture(graph, args, checked=checked)
            plans.append(
                DirectPlan(found.jaxpr, "f", CompileOptions(), TorchMemory(), found.checks)
            )
        calls, best = SMALL_CALLS if name == "small call" else CALLS, [float("inf")] * 2
        for _ in range(parsed.rounds):
            for k, plan in enumerate(plans):
                start = time.thread_time()
                for _ in range(calls):
                    plan(args)
                best[k] = min(best[k], (time.thread_time() - start) / calls * 1e6)
        plain, checked = best
        print(
            f"{name:24} {plain:9.1f} us -> {checked:9.1f} us  {100 * (checked / plain - 1):+.1f} %"
        )


if __name__ == "__main__":
    main()
