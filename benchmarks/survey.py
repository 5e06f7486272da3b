"""Hundreds of functions beside jax.jit, to find what pbkern makes slow or wrong.

    python -m benchmarks.survey [words in names] [--below 0.95] [--seconds 0.3]

A case is a name, a function and its arguments as text such as `f32[1000,20]` or `i32[100]<7` (drawn below 7);
benchmarks/surveyed/ holds them by subject. Each is compared with jax.jit first, then both are called in turn, and
every case whose ratio (jax's least time over pbkern's) is under `--below` is printed, worst first, beside the ratio of
medians, with the geometric mean of all. Large ratios that do not belong to a workload's kind are as suspicious as small ones.

For machines with AVX2: PBKERN_MACHINE=x86-64-v3, and XLA_FLAGS=--xla_cpu_max_isa=AVX2. That limits the code that XLA
makes, but not its library for reductions, products and convolutions, YNNPACK, which goes by the processor: `perf report`
shows ynn::max_kn_fp32_avx512 and ynn::dot_fp32_5x64x1_1x16x1_avx512. The library is left out with
--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INVALID. Products then go to oneDNN, which makes code for the
processor as well, unless ONEDNN_MAX_CPU_ISA=AVX2: without it, 16 x 768 x 3072 takes 0.71 ms on Zen 4, with it 1.5.
"""

from __future__ import annotations

import argparse
import importlib
import math
import pkgutil
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import pbkern

from . import surveyed

DTYPES = {"f32": "float32", "f64": "float64", "bf16": "bfloat16", "f16": "float16", "i32": "int32", "i8": "int8",
          "u8": "uint8", "u32": "uint32", "i64": "int64", "i16": "int16", "bool": "bool", "c64": "complex64"}  # fmt: skip
SPEC = re.compile(r"(\w+)\[([\d,]*)\](?:<(\d+))?(?:>(\S+))?")
Cases = Mapping[str, tuple]
# Largest difference from jax.jit that counts as agreement, relative to the largest element of a result.
TOLERANCES = {
    "bfloat16": 4e-2,
    "float16": 5e-3,
    "float32": 3e-4,
    "complex64": 3e-4,
    "int8": 1e-2,
}  # int8: of rounded floats
ROUNDS = 3


@dataclass(frozen=True)
class Result:
    """One case: times of calls in seconds, which took turns, and the largest relative difference of results."""

    name: str
    ours: Sequence[float]
    jax: Sequence[float]
    difference: float

    @property
    def ratio(self) -> float:
        """jax's least time over pbkern's."""
        return min(self.jax) / min(self.ours)

    @property
    def of_medians(self) -> float:
        return statistics.median(self.jax) / statistics.median(self.ours)


def draw(spec: str, rng: np.random.Generator) -> jax.Array:
    """The array that a text stands for: integers below `<high`, floats above `>low` where given, else normal."""
    match = SPEC.fullmatch(spec)
    if match is None:
        raise ValueError(f"not an argument: {spec!r}; write f32[20,30], i32[20]<7 or f32[20]>0.1")
    name, sizes, high, low = match.groups()
    shape = tuple(int(s) for s in sizes.split(",") if s)
    dtype = DTYPES[name]
    if dtype == "bool":
        return jnp.asarray(rng.random(shape) < 0.5)
    if name[0] in "iu":
        return jnp.asarray(rng.integers(0, int(high or 100), shape), dtype)
    values = rng.standard_normal(shape, np.float32)
    if dtype == "complex64":
        return jnp.asarray(values + 1j * rng.standard_normal(shape, np.float32), dtype)
    return jnp.asarray(values if low is None else np.abs(values) + np.float32(low), dtype)


def difference(got, want) -> float:
    """Largest difference of two pytrees over TOLERANCES, relative to the largest finite element of each leaf."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return math.inf
        tolerance = TOLERANCES.get(str(b.dtype), 1e-9)
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        x, y = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        if same.all():
            continue
        scale = max(np.max(np.abs(y), where=np.isfinite(y), initial=0), 1e-30)
        with np.errstate(invalid="ignore"):
            worst = max(worst, float(np.max(np.where(same, 0, np.abs(x - y)))) / scale / tolerance)
    return worst


def measure(name: str, function: Callable, specs: Sequence[str], seconds: float) -> Result:
    with jax.enable_x64(any(spec.startswith(("f64", "i64")) for spec in specs)):
        return compare(name, function, specs, seconds)


def compare(name: str, function: Callable, specs: Sequence[str], seconds: float) -> Result:
    rng = np.random.default_rng(0)
    arguments = [draw(spec, rng) for spec in specs]
    ours, theirs = pbkern.jit(function), jax.jit(function)
    apart = difference(
        jax.block_until_ready(ours(*arguments)), jax.block_until_ready(theirs(*arguments))
    )
    times: dict[Callable, list[float]] = {ours: [], theirs: []}
    end = time.perf_counter() + seconds
    while len(times[theirs]) < ROUNDS or time.perf_counter() < end:
        for f, found in times.items():
            begin = time.perf_counter()
            jax.block_until_ready(f(*arguments))
            found.append(time.perf_counter() - begin)
    return Result(name, times[ours], times[theirs], apart)


def cases(words: Sequence[str]) -> dict[str, tuple]:
    """Every case whose name, `subject.name`, contains one of the words; all of them without words."""
    found = {}
    for module in pkgutil.iter_modules(surveyed.__path__):
        listed: Cases = importlib.import_module(f"{surveyed.__name__}.{module.name}").CASES
        found |= {f"{module.name}.{name}": case for name, case in listed.items()}
    return {
        name: case for name, case in found.items() if not words or any(w in name for w in words)
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the slow, the failing and the differing cases; the status is 1 where a result differs or a case fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.survey", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument(
        "--below", type=float, default=0.95, help="print the cases whose ratio is less"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="to spend on the calls of one case"
    )
    chosen = parser.parse_args(arguments)
    results, wrong = [], 0
    for number, (name, (function, *specs)) in enumerate(listed := cases(chosen.words).items()):
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {len(listed)}: {name:60}", end="", file=sys.stderr)
        try:
            result = measure(name, function, specs, chosen.seconds)
        except Exception as e:
            wrong += 1
            print(f"FAILS   {name}: {type(e).__name__}: {str(e).splitlines()[0]}", flush=True)
            continue
        results.append(result)
        if result.difference > 1:
            wrong += 1
            print(f"DIFFERS {name}: {result.difference:.1f} times the tolerance", flush=True)
    for r in sorted((r for r in results if r.ratio < chosen.below), key=lambda r: r.ratio):
        least, medians = (
            (f"{min(t) * 1e3:9.3f}" for t in (r.ours, r.jax)),
            f"{r.of_medians:6.2f} of medians",
        )
        print(f"{r.ratio:6.2f} {medians} {' ms, jax '.join(least)} ms  {r.name}")
    for what, ratios in (
        ("least times", [r.ratio for r in results]),
        ("medians", [r.of_medians for r in results]),
    ):
        if ratios:
            mean = statistics.geometric_mean(ratios)
            print(
                f"{len(ratios)} cases, {what}: geometric mean {mean:.2f}, least {min(ratios):.2f}"
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
