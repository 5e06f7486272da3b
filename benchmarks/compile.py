"""Processor time of first calls, beside jax.jit's: families of functions from ten to some thousand operations.

    python -m benchmarks.compile [words in names] [--write] [--json file]

Each number is the least of two to eight processes of their own, as many as begin within twenty seconds. Those of pbkern
and of jax.jit take turns. Each has compiled a sum before: tracing, planning, compilation and one run on small arrays. "cold"
has an empty store, "warm" the store that the cold process left, as every later process has; "jax" is jax.jit without its own
store. "start" is that first function of one addition, in which modules are imported, MLIR's dialects loaded and LLVM started.
Seconds are those of all threads, which other work on the machine disturbs less than it disturbs the clock. `growth` is
the slope of log(seconds) over log(operations) between the two largest functions: 1 is linear. `--write` puts the table into
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import math
import operator
import os
import pathlib
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np

import pbkern
from pbkern.core.jaxprs.walks import equations

from .report import INDEX, replace_section

TITLE = "## Compilation"
# Calls whose median is the time of a call that compiles nothing.
CALLS = 20
# Processes per number: at least and at most this many. A neighbour on the machine may make any of them take half as much again,
# so that the least of two is no least yet.
LEAST_ROUNDS, MOST_ROUNDS = 2, 8
# Seconds of all processes of one function, after which no further round begins.
ENOUGH = 20.0
# Seconds until a process counts as hung.
PATIENCE = 1800
Function = Callable[..., object]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype("float32") * 0.1


def elementwise(size: int) -> tuple[Function, list]:
    steps = [
        jnp.sin,
        jnp.tanh,
        lambda x: x * 1.5,
        lambda x: x + 0.5,
        jnp.abs,
        jnp.exp,
        lambda x: 1 / x,
        jnp.sqrt,
    ]

    def f(x):
        for n in range(size):
            x = steps[n % len(steps)](x)
        return x

    return f, [np.abs(normal(64, 64))]


def mlp(size: int) -> tuple[Function, list]:
    def f(x, layers):
        for weights, bias in layers:
            x = jnp.tanh(x @ weights + bias)
        return x

    return f, [normal(32, 64), [(normal(64, 64), normal(64)) for _ in range(size)]]


def normalised(x, scale):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * scale


def attention_layer(x, p):
    heads = lambda y: y.reshape(*y.shape[:2], 4, -1).transpose(0, 2, 1, 3)
    h = normalised(x, p["scale1"])
    q, k, v = (heads(h @ p[name]) for name in ("q", "k", "v"))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    masked = jnp.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = (jax.nn.softmax(masked) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    x = x + mixed @ p["o"]
    return x + jax.nn.gelu(normalised(x, p["scale2"]) @ p["up"]) @ p["down"]


def attention_parameters() -> dict:
    square = {name: normal(64, 64) for name in ("q", "k", "v", "o")}
    return square | {
        "up": normal(64, 256),
        "down": normal(256, 64),
        "scale1": normal(64),
        "scale2": normal(64),
    }


def transformer(size: int) -> tuple[Function, list]:
    def f(x, layers):
        for p in layers:
            x = attention_layer(x, p)
        return x

    return f, [normal(2, 32, 64), [attention_parameters() for _ in range(size)]]


def transformer_gradient(size: int) -> tuple[Function, list]:
    f, (x, layers) = transformer(size)
    return jax.grad(lambda layers, x: (f(x, layers) ** 2).mean()), [layers, x]


def resnet(size: int) -> tuple[Function, list]:
    conv = lambda x, w: jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )

    def f(x, blocks):
        for first, second, scale in blocks:
            x = jax.nn.relu(x + conv(jax.nn.relu(conv(x, first) * scale), second) * scale)
        return x.mean((1, 2))

    weights = normal(3, 3, 16, 16)
    return f, [normal(1, 16, 16, 16), [(weights, weights, normal(16)) for _ in range(size)]]


def scan_of_layers(size: int) -> tuple[Function, list]:
    """A loop of eight steps, each of which takes `size` layers."""

    def f(x, stacked):
        def step(x, p):
            for n in range(size):
                x = attention_layer(x, jax.tree.map(operator.itemgetter(n), p))
            return x, x.sum()

        return jax.lax.scan(step, x, stacked)

    stacked = jax.tree.map(
        lambda leaf: np.broadcast_to(leaf, (8, size, *leaf.shape)) * 1, attention_parameters()
    )
    return f, [normal(2, 32, 64), stacked]


# Family -> its function by size, and sizes.
FAMILIES: dict[str, tuple[Callable[[int], tuple[Function, list]], Sequence[int]]] = {
    "elementwise": (elementwise, (10, 100, 1000, 4000)),
    "mlp": (mlp, (3, 30, 300)),
    "transformer": (transformer, (1, 4, 16, 32)),
    "transformer gradient": (transformer_gradient, (1, 4, 8, 16)),
    "resnet": (resnet, (2, 8, 32, 100)),
    "scan of layers": (scan_of_layers, (1, 4, 8)),
}


@dataclass(frozen=True)
class FirstCall:
    """Processor seconds of the start, of tracing alone and of a first call, seconds of a later call, the sum of the results."""

    start: float
    trace: float
    first: float
    later: float
    checksum: float
    operations: int


@dataclass(frozen=True)
class Row:
    family: str
    size: int
    jax: FirstCall
    cold: FirstCall
    warm: FirstCall

    @property
    def cold_ratio(self) -> float:
        return self.cold.first / self.jax.first

    @property
    def warm_ratio(self) -> float:
        return self.warm.first / self.jax.first


def processor_seconds() -> float:
    """Seconds of this process and of those that it waited for, finer than the hundredths of os.times."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def first_call(family: str, size: int, backend: str) -> FirstCall:
    """Measures in this process, which has compiled nothing yet."""
    make, _ = FAMILIES[family]
    f, arguments = make(size)
    arguments = jax.tree.map(jnp.asarray, arguments)
    jit, ones = (jax.jit if backend == "jax" else pbkern.jit), jnp.ones(3)
    before = processor_seconds()
    jax.block_until_ready(jit(lambda x: x + 1)(ones))
    started = processor_seconds() - before
    start = processor_seconds()
    traced = jax.jit(lambda *a: f(*a)).trace(*arguments)
    trace = processor_seconds() - start
    jax.clear_caches()
    compiled = jit(f)
    start = processor_seconds()
    results = jax.block_until_ready(compiled(*arguments))
    first = processor_seconds() - start
    later = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        later.append(time.perf_counter() - begin)
    checksum = sum(
        float(np.abs(np.asarray(leaf, "float64")).sum()) for leaf in jax.tree.leaves(results)
    )
    operations = sum(1 for _ in equations(traced.jaxpr.jaxpr))
    return FirstCall(started, trace, first, statistics.median(later), checksum, operations)


def in_child(family: str, size: int, backend: str, store: str) -> FirstCall:
    command = [sys.executable, "-m", "benchmarks.compile", "--child", family, str(size), backend]
    environment = os.environ | {"PBKERN_CACHE_DIR": store, "PBKERN_PROGRESS": "0"} | bytecode()
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if run.returncode:
        raise RuntimeError(f"{family} {size} {backend}: {run.stderr}")
    return FirstCall(**json.loads(run.stdout.splitlines()[-1]))


@functools.cache
def bytecode() -> dict[str, str]:
    """Variables of the environment with which modules are loaded from bytecode, as those of an installed package are."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}


def in_turn(family: str, size: int) -> list[FirstCall]:
    """First calls by jax.jit, with an empty store, and with the store that this left."""
    with tempfile.TemporaryDirectory() as store:
        return [in_child(family, size, backend, store) for backend in ("jax", "pbkern", "pbkern")]


def measure(family: str, size: int) -> Row:
    """The quickest of some first calls each. Raises RuntimeError where results differ."""
    rounds: list[list[FirstCall]] = []
    end = time.perf_counter() + ENOUGH
    while len(rounds) < LEAST_ROUNDS or (len(rounds) < MOST_ROUNDS and time.perf_counter() < end):
        rounds.append(in_turn(family, size))
    row = Row(family, size, *(min(calls, key=lambda call: call.first) for calls in zip(*rounds)))
    sums = [call.checksum for call in (row.jax, row.cold, row.warm)]
    if not np.allclose(sums, sums[0], rtol=1e-3):
        raise RuntimeError(f"{family} {size}: results differ: {sums}")
    return row


def growth(rows: Sequence[Row], seconds: Callable[[Row], float]) -> float:
    """Slope of log(seconds) over log(operations) between the two largest functions."""
    smaller, larger = sorted(rows, key=lambda row: row.jax.operations)[-2:]
    operations = larger.jax.operations / smaller.jax.operations
    return math.log(seconds(larger) / seconds(smaller)) / math.log(operations)


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| family | operations | trace | jax.jit | cold | warm | cold / jax | warm / jax | later call, jax / pbkern |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {row.family} | {row.jax.operations} | {row.jax.trace:.2f} | {row.jax.first:.2f} | {row.cold.first:.2f} | "
            f"{row.warm.first:.2f} | {row.cold_ratio:.2f} | {row.warm_ratio:.2f} | {row.jax.later / row.warm.later:.1f} |"
            for row in rows
        ),
        "",
        "| growth | jax.jit | cold | warm |",
        "| --- | ---: | ---: | ---: |",
    ]
    for family in dict.fromkeys(row.family for row in rows):
        of_family = [row for row in rows if row.family == family]
        if len(of_family) > 1:
            slopes = (
                growth(of_family, lambda row, which=which: getattr(row, which).first)
                for which in ("jax", "cold", "warm")
            )
            lines.append(f"| {family} | {' | '.join(f'{slope:.2f}' for slope in slopes)} |")
    cold, warm = ([getattr(row, which) for row in rows] for which in ("cold_ratio", "warm_ratio"))
    summary = ", ".join(
        f"{name}: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}"
        for name, ratios in (("cold", cold), ("warm", warm))
    )
    starts = ", ".join(
        f"{which} {min(getattr(row, which).start for row in rows):.2f}"
        for which in ("jax", "cold", "warm")
    )
    return "\n".join(
        [*lines, "", f"Ratios to jax.jit: {summary}.", "", f"Seconds of the start: {starts}."]
    )


def write(text: str) -> None:
    """Replaces the section of the document."""
    INDEX.write_text(replace_section(INDEX.read_text(), TITLE, text))


def note() -> str:
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return (
        "Written by `python -m benchmarks.compile --write`. Processor seconds of first calls, each the least of two to eight "
        "processes of their own, in turn, that have compiled a sum before (the start), from bytecode: `cold` with an empty "
        "store, `warm` in the process after that, `jax.jit` without a store; each of them traces, for the seconds of `trace`. "
        f"{model[1] if model else 'Unknown processor'}, {os.cpu_count()} cores. "
        "Growth is the slope of log(seconds) over log(operations) between the two largest functions of a family: 1 is linear."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="families whose names have one of these")
    parser.add_argument(
        "--largest", type=int, default=sys.maxsize, help="no larger sizes than this"
    )
    parser.add_argument("--json", type=pathlib.Path, help="file for all numbers")
    parser.add_argument(
        "--write", action="store_true", help="writes the table into docs/benchmarks.md"
    )
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        family, size, backend = options.child
        print(json.dumps(asdict(first_call(family, int(size), backend))))
        return
    rows = []
    measure("elementwise", 10)  # writes bytecode
    for family, (_, sizes) in FAMILIES.items():
        for size in sizes:
            if size <= options.largest and (
                not options.words or any(word in family for word in options.words)
            ):
                rows.append(measure(family, size))
                print(table(rows[-1:]).splitlines()[2], flush=True)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if options.write:
        write(f"{note()}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
