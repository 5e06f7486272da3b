"""Products of many shapes in four orientations beside jax.jit, and in float32 beside eager PyTorch.

    python -m benchmarks.products [words in names] [--dtype float32] [--threads 1] [--seconds 1.0] [--below 0.9] [--core 0]

A row is a shape m x k x n and an orientation: `a @ b`, `a @ b.T`, `a.T @ b` or `a.T @ b.T` inside the function, of arrays that
are stored by rows. JAX's arrays on CPUs are; an array stored by columns is the transpose of one, and the same four functions.
With one thread, the process keeps to one core before JAX and PyTorch start their threads, and times are those of the processor;
with more, it keeps to as many cores, and times are those of the clock. Products of int8 are int32; others have their operands'
type. Each result is checked against NumPy in float64; then all are called in turn, and a row prints least and median
milliseconds and the ratio of the faster peer's least time to ours.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SHAPES = (
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (1000, 1000, 1000),
    (1024, 4096, 256),
    (1024, 8192, 256),
    (256, 8192, 1024),
    (512, 32000, 512),
    (32000, 512, 64),
    (64, 512, 4096),
    (8, 4096, 4096),
    (130, 77, 1000),
)
# Orientation -> whether each operand is stored transposed.
ORIENTATIONS = {
    "ab": (False, False),
    "abT": (False, True),
    "aTb": (True, False),
    "aTbT": (True, True),
}
ROUNDS = 5
# dtype -> largest error against float64, relative to the largest result: a few units in the last place of a result, or the
# rounding errors of its sums.
TOLERANCES = {"float32": 1e-4, "float64": 1e-12, "bfloat16": 2e-2, "float16": 2e-3, "int8": 0.0}


@dataclass(frozen=True)
class Case:
    """One product: result [m, n], operands as they are stored, and their type."""

    m: int
    k: int
    n: int
    orientation: str
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.m}x{self.k}x{self.n}.{self.orientation}"

    @property
    def function(self) -> Callable:
        return product(self.orientation, self.dtype)

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        left, right = ORIENTATIONS[self.orientation]
        return ((self.k, self.m) if left else (self.m, self.k)), (
            (self.n, self.k) if right else (self.k, self.n)
        )


@dataclass(frozen=True)
class Result:
    """Seconds of calls in turn, by implementation, and the largest error against float64."""

    case: Case
    times: dict[str, list[float]]
    error: float

    @property
    def ratio(self) -> float:
        """The faster peer's least time over pbkern's."""
        return min(min(t) for name, t in self.times.items() if name != "pbkern") / min(
            self.times["pbkern"]
        )

    def __str__(self) -> str:
        cells = "  ".join(
            f"{name} {min(t) * 1e3:8.3f} /{statistics.median(t) * 1e3:8.3f}"
            for name, t in self.times.items()
        )
        gflops = 2e-9 * self.case.m * self.case.k * self.case.n / min(self.times["pbkern"])
        return f"{self.case.name:22} {cells}  {gflops:5.0f} GFLOP/s  ratio {self.ratio:.2f}  error {self.error:.0e}"


def product(orientation: str, dtype: str = "float32") -> Callable:
    """The product of two matrices that are stored as an orientation says."""
    left, right = ORIENTATIONS[orientation]

    def multiplied(a, b):
        return (a.T if left else a) @ (b.T if right else b)

    def summed_in_words(a, b):
        import jax.numpy as jnp

        a, b = a.T if left else a, b.T if right else b
        return jnp.matmul(a, b, preferred_element_type=jnp.int32)

    return summed_in_words if dtype == "int8" else multiplied


def cases(words: Sequence[str] = (), dtype: str = "float32") -> list[Case]:
    """Every shape in every orientation; with words, those whose names contain one of them."""
    found = [Case(*shape, orientation, dtype) for shape in SHAPES for orientation in ORIENTATIONS]
    return [
        c for c in found if not words or any(w == c.name or w in c.name.split(".") for w in words)
    ]


def measure(case: Case, seconds: float, threads: int = 1) -> Result:
    """Checks one product and times it beside its peers."""
    import jax
    import numpy as np

    import pbkern

    rng = np.random.default_rng(0)
    if case.dtype == "int8":
        arrays = [rng.integers(-128, 128, shape, np.int8) for shape in case.shapes]
    else:
        arrays = [
            rng.standard_normal(shape, np.float32).astype(jax.numpy.dtype(case.dtype))
            for shape in case.shapes
        ]
    arguments = [jax.block_until_ready(jax.device_put(a)) for a in arrays]
    clock = time.process_time if threads == 1 else time.perf_counter

    def of_jax(f: Callable) -> Callable[[], object]:
        return lambda: jax.block_until_ready(f(*arguments))

    calls = {
        "pbkern": of_jax(pbkern.jit(case.function)),
        "jax": of_jax(jax.jit(case.function)),
        **(_of_torch(case, arrays, threads) if case.dtype == "float32" else {}),
    }
    wide = product(case.orientation)(*(a.astype(np.float64) for a in arrays))
    got = np.asarray(calls["pbkern"](), np.float64)
    error = float(np.max(np.abs(got - wide)) / np.max(np.abs(wide)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while len(times["pbkern"]) < ROUNDS or time.perf_counter() < end:
        for name, call in calls.items():
            begin = clock()
            call()
            times[name].append(clock() - begin)
    return Result(case, times, error)


def _of_torch(case: Case, arrays: Sequence, threads: int) -> dict[str, Callable[[], object]]:
    """Eager PyTorch, where it is installed."""
    try:
        # PyTorch's threads leave the cores to the next peer when their work is done; by default they spin there for a while.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        os.environ.setdefault("GOMP_SPINCOUNT", "0")
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(threads)
    tensors = [torch.from_numpy(a) for a in arrays]
    return {"torch": lambda: case.function(*tensors)}


def keep_to_cores(first: int | None, threads: int) -> None:
    """Lets this process, and threads that it will start, run on `threads` cores: from `first`, or the last that it may use."""
    if not hasattr(os, "sched_setaffinity"):
        print(
            "this system cannot keep a process to some cores: times are of all threads",
            file=sys.stderr,
        )
        return
    usable = sorted(os.sched_getaffinity(0))
    chosen = usable[-threads:] if first is None else [core for core in usable if core >= first]
    if len(chosen) < threads:
        raise SystemExit(f"there are {len(chosen)} cores to run on, not {threads}")
    os.sched_setaffinity(0, chosen[:threads])


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line per product and those below a ratio again; the status is 1 where a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.products", description=__doc__)
    parser.add_argument(
        "words",
        nargs="*",
        help="shapes such as 8x4096x4096, orientations such as aTb, or 8x4096x4096.aTb",
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="to spend on the calls of one product"
    )
    parser.add_argument(
        "--below", type=float, default=0.9, help="list the products whose ratio is less"
    )
    parser.add_argument("--core", type=int, help="the first core to run on")
    parser.add_argument("--threads", type=int, default=1, help="threads of each implementation")
    parser.add_argument(
        "--dtype", choices=TOLERANCES, default="float32", help="the type of operands"
    )
    chosen = parser.parse_args(arguments)
    keep_to_cores(chosen.core, chosen.threads)
    if chosen.dtype == "float64":
        import jax

        jax.config.update("jax_enable_x64", True)
    results = []
    for case in cases(chosen.words, chosen.dtype):
        results.append(measure(case, chosen.seconds, chosen.threads))
        print(results[-1], flush=True)
    wrong = [r for r in results if not r.error <= TOLERANCES[r.case.dtype]]
    slow = sorted((r for r in results if r.ratio < chosen.below), key=lambda r: r.ratio)
    for r in wrong:
        print(f"WRONG   {r.case.name}: error {r.error:.1e}")
    mean = math.exp(statistics.fmean(math.log(r.ratio) for r in results)) if results else 1.0
    print(
        f"{len(results)} products, {len(slow)} with a ratio below {chosen.below}; geometric mean {mean:.2f}"
    )
    for r in slow:
        print(f"{r.ratio:6.2f} {r.case.name}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
