"""Tuning beside an exhaustive search: for five kernels, how near the best of its space each search comes.

    python -m benchmarks.tune_kernels [--budget 30] [kernel ...]

For each kernel: the times of its default, of what `pbkern.tune` finds within the budget, and of the best of all
candidates, measured with alternating calls; then the seconds of a second search, which starts from the first.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import pbkern
from pbkern.api.measured.measure import alternating, drawn, typical_seconds
from pbkern.api.measured.tuned_parameters import Making
from pbkern.core import config

F32 = jnp.float32
# Seconds for which each candidate of the exhaustive search is measured.
CANDIDATE_SECONDS = 0.1
# The fastest candidates that are measured again, beside the default and what tuning found.
AGAIN = 4
# Seconds in which they are.
AGAIN_SECONDS = 4.0


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, F32)


@dataclass(frozen=True)
class Case:
    """A function that makes a kernel, the kernel's arguments, and values of the function's parameters."""

    maker: Callable
    args: Sequence[jax.ShapeDtypeStruct]
    space: Mapping[str, Sequence]


def matmul(ROWS=128, COLUMNS=128, DEPTH=256, size=512):
    """A product that sums over blocks of its depth."""

    def body(a, b, out, total):
        @pbkern.when(pbkern.program_id(2) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += a[...] @ b[...]

        @pbkern.when(pbkern.program_id(2) == pbkern.num_programs(2) - 1)
        def _():
            out[...] = total[...]

    return pbkern.kernel(
        body,
        name="matmul",
        grid=(size // ROWS, size // COLUMNS, size // DEPTH),
        in_specs=[
            pbkern.BlockSpec((ROWS, DEPTH), lambda i, j, k: (i, k)),
            pbkern.BlockSpec((DEPTH, COLUMNS), lambda i, j, k: (k, j)),
        ],
        out_specs=pbkern.BlockSpec((ROWS, COLUMNS), lambda i, j, k: (i, j)),
        out_shape=struct(size, size),
        scratch_shapes=[pbkern.Scratch((ROWS, COLUMNS), F32)],
        compiler_params=pbkern.cpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
    )


def by_rows(body: Callable, name: str, rows: int, columns: int, ROWS: int):
    """A kernel whose programs take blocks of whole rows."""
    block = pbkern.BlockSpec((ROWS, columns), lambda i: (i, 0))
    return pbkern.kernel(
        body,
        name=name,
        grid=(pbkern.cdiv(rows, ROWS),),
        in_specs=[block],
        out_specs=block,
        out_shape=struct(rows, columns),
    )


def softmax(ROWS=512):
    """Softmax of rows."""

    def body(x, out):
        weights = jnp.exp(x[...] - x[...].max(1, keepdims=True))
        out[...] = weights / weights.sum(1, keepdims=True)

    return by_rows(body, "softmax", 2048, 512, ROWS)


def layer_norm(ROWS=1024):
    """Rows minus their mean, over their deviation."""

    def body(x, out):
        centred = x[...] - x[...].mean(1, keepdims=True)
        out[...] = centred * jax.lax.rsqrt((centred * centred).mean(1, keepdims=True) + 1e-6)

    return by_rows(body, "layer_norm", 2048, 512, ROWS)


def transposed(ROWS=256, COLUMNS=256, size=1024):
    """A transpose by blocks."""

    def body(x, out):
        out[...] = x[...].T

    return pbkern.kernel(
        body,
        name="transposed",
        grid=(size // ROWS, size // COLUMNS),
        in_specs=[pbkern.BlockSpec((ROWS, COLUMNS), lambda i, j: (i, j))],
        out_specs=pbkern.BlockSpec((COLUMNS, ROWS), lambda i, j: (j, i)),
        out_shape=struct(size, size),
    )


def blurred(ROWS=8, size=1024):
    """Sums of five rows, by blocks with halos."""

    def body(x, out):
        out[...] = sum(x[n : n + ROWS] for n in range(5))

    return pbkern.kernel(
        body,
        name="blurred",
        grid=(size // ROWS,),
        in_specs=[pbkern.BlockSpec((pbkern.Element(ROWS + 4), size), lambda i: (i * ROWS, 0))],
        out_specs=pbkern.BlockSpec((ROWS, size), lambda i: (i, 0)),
        out_shape=struct(size, size),
    )


ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
TILES = [32, 64, 128, 256, 512]
THREADS = {"num_threads": [1]}
CASES = {
    "matmul": Case(
        matmul,
        [struct(512, 512)] * 2,
        {"ROWS": TILES, "COLUMNS": TILES, "DEPTH": [64, 256, 512]},
    ),
    "softmax": Case(softmax, [struct(2048, 512)], {"ROWS": ROWS, **THREADS}),
    "layer_norm": Case(layer_norm, [struct(2048, 512)], {"ROWS": ROWS, **THREADS}),
    "transposed": Case(
        transposed, [struct(1024, 1024)], {"ROWS": [8, 16, *TILES], "COLUMNS": [8, 16, *TILES]}
    ),
    "blurred": Case(blurred, [struct(1028, 1024)], {"ROWS": ROWS, **THREADS}),
}


def compare(case: Case, budget: float) -> dict[str, float]:
    """Seconds of the default, of what tuning finds, and of the best of all; of both searches."""
    with contextlib.redirect_stdout(io.StringIO()):
        tuned = pbkern.tune(case.maker, *case.args, space=case.space, budget=budget)
        second = pbkern.tune(case.maker, *case.args, space=case.space, budget=budget)
    making, operands = Making.of(case.maker, case.space), drawn(list(case.args))

    def call_of(point) -> Callable:
        return functools.partial(making.call(making.kernel(point, operands)), *operands)

    points = making.points(case.space)
    calls = {point: call_of(point) for point in points}
    seconds = typical_seconds(alternating(list(calls.values()), CANDIDATE_SECONDS * len(calls)))
    times = dict(zip(calls, seconds))
    fastest = sorted(times, key=times.__getitem__)[:AGAIN]
    found = next(point for point in points if making.paste(point) == tuned.paste)
    again = [points[0], found, *fastest]
    rounds = alternating([calls[point] for point in again], AGAIN_SECONDS)
    default, ours, *best = typical_seconds(rounds)
    return {
        "candidates": len(points),
        "tried": len(tuned.candidates),
        "default": default,
        "tuned": ours,
        "best": min(best),
        "first search": tuned.seconds,
        "second search": second.seconds,
        "remembered": second.remembered,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row per kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", help="of " + ", ".join(CASES))
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of each search")
    parsed = parser.parse_args(arguments)
    print("kernel      candidates  tried  default us  tuned us  best us  of the best  searches s")
    for name in parsed.kernels or CASES:
        with tempfile.TemporaryDirectory() as folder, config.override(cache_dir=folder, cache=True):
            row = compare(CASES[name], parsed.budget)
        default, tuned, best = (row[key] * 1e6 for key in ("default", "tuned", "best"))
        searches = f"{row['first search']:.1f}, {row['second search']:.1f}"
        print(
            f"{name:10}  {row['candidates']:10}  {row['tried']:5}  {default:10.1f}  {tuned:8.1f}  {best:7.1f}"
            f"  {best / tuned:11.1%}  {searches}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
