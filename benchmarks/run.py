"""Checks and measures the workloads: `python -m benchmarks.run [names] [--quick] [--peers jax,numpy] [--json out]`.

`pbkern bench` is the same command; benchmarks are part of a checkout and are not installed with the package.

Correctness comes first: small arguments against NumPy in float64, full-size results against jax.jit. Then every
implementation is called in turn, round after round, in one process, so that all of them see the same machine.
The machine's limit is max(flops / peak, bytes / bandwidth) with the rates of pbkern.cpu.machine(); arguments are
made beforehand and stay in place, results are new arrays as in any JAX program.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

import pbkern
from pbkern.core.errors import PbkernError

from .report import HOPELESS, PEERS, KernelTime, Record, Row, Timing, columns, versions, write
from .workloads import WORKLOADS, Workload

# The package that each peer needs, beside those that pbkern needs itself.
PACKAGES = {"torch": "torch", "torch.compile": "torch", "iree": "iree.compiler", "halide": "halide"}
ROUNDS, SECONDS = 30, 4.0
QUICK_ROUNDS, QUICK_SECONDS = 5, 0.5
# Seconds between calls: worker threads of one library spin for a while after a call and would slow the next one's down.
PAUSE = 0.003

# --- one workload ---------------------------------------------------------------------------------------------------


def limit_seconds(w: Workload, machine) -> float:
    """The least time that this machine needs for a workload's arithmetic and traffic."""
    return max(
        w.flops / machine.flops(w.dtype),
        w.compulsory_bytes / machine.dram_bandwidth,
        w.l3_bytes / machine.l3_bandwidth,
    )


def relative_error(got, want) -> float:
    """Largest difference between two pytrees of arrays, relative to the largest element of each leaf."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            return float("inf")
        worst = max(
            worst,
            float(
                np.nanmax(np.abs(a - b), initial=0) / max(np.nanmax(np.abs(b), initial=0), 1e-30)
            ),
        )
    return worst


def check(w: Workload, function: Callable) -> float:
    """Error at small shapes against NumPy in float64, or against JAX without jit where there is no NumPy function."""
    arguments = w.arguments(w.small)
    got = function(*arguments)
    if w.numpy is None:
        with jax.disable_jit():
            return relative_error(got, w.function(*arguments))
    wide = [
        np.asarray(a) if np.issubdtype(a.dtype, np.integer) else np.asarray(a, np.float64)
        for a in arguments
    ]
    return relative_error(got, w.numpy(*wide))


def implementations(w: Workload, peers: Iterable[str]) -> dict[str, Callable[[], object]]:
    """Name -> a call without arguments that returns when its result is there."""
    arguments = [jax.block_until_ready(a) for a in w.arguments(w.full)]

    def of_jax(f):
        return lambda: jax.block_until_ready(f(*arguments))

    calls = {"pbkern": of_jax(pbkern.jit(w.function))}
    for peer in peers:
        if peer == "jax":
            calls[peer] = of_jax(jax.jit(w.function))
        elif peer == "numpy" and w.numpy is not None and w.dtype == "float32":
            arrays = [np.asarray(a) for a in arguments]
            calls[peer] = lambda arrays=arrays: w.numpy(*arrays)
        elif peer.startswith("torch"):
            from . import torch_peers

            f = (torch_peers.compiled if peer == "torch.compile" else torch_peers.eager)(w.name)
            if f is not None:
                tensors = [torch_peers.tensor(a) for a in arguments]
                calls[peer] = lambda f=f, tensors=tensors: f(*tensors)
        elif peer in ("iree", "halide"):
            f = (_iree if peer == "iree" else _halide)(w, arguments)
            calls |= {peer: f} if f is not None else {}
    return calls


def _iree(w: Workload, arguments: list) -> Callable | None:
    """The workload in IREE; None where IREE cannot compile it, or computes something else."""
    from . import iree_peer

    call = iree_peer.compiled(w.function, arguments)
    return (
        call
        if call is not None and _agrees(w, "iree", iree_peer.arrays(call()), arguments)
        else None
    )


def _halide(w: Workload, arguments: list) -> Callable | None:
    """The pipeline of this name in Halide, if there is one."""
    from . import halide_peers

    if w.name not in halide_peers.PIPELINES:
        return None
    call = halide_peers.pipeline(
        w.name, np.asarray(arguments[0]), jax.eval_shape(w.function, *arguments).shape
    )
    return call if _agrees(w, "halide", [call()], arguments) else None


def _agrees(w: Workload, peer: str, got: list, arguments: list) -> bool:
    """Whether a peer's results are those of jax.jit; a peer whose results are not is left out, with a line that says so."""
    difference = relative_error(got, jax.tree.leaves(jax.jit(w.function)(*arguments)))
    if difference > 10 * w.tolerance:
        print(
            f"{w.name:24} {peer} left out: it differs from jax.jit by {difference:.1e}", flush=True
        )
    return difference <= 10 * w.tolerance


def interleaved(calls: dict[str, Callable], rounds: int, seconds: float) -> dict[str, Timing]:
    """Calls each in turn, at least three rounds and at most `rounds` or `seconds`, every second round in reverse.

    pbkern and jax.jit read the same arrays, other peers copies: always in one order, the one behind the other would find
    them in the caches, and the first never.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    begin, done = time.perf_counter(), 0
    while done < 3 or (done < rounds and time.perf_counter() - begin < seconds):
        in_order = list(calls.items())
        for name, call in reversed(in_order) if done % 2 else in_order:
            if done >= 2 and min(times[name]) > HOPELESS * min(times["pbkern"]):
                continue
            time.sleep(PAUSE)
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
        done += 1
    return {name: Timing(min(t), statistics.median(t), len(t)) for name, t in times.items()}


def measure(
    w: Workload, peers: Iterable[str], rounds: int = ROUNDS, seconds: float = SECONDS
) -> Row:
    """Checks and times one workload. Raises AssertionError where results disagree."""
    ours = pbkern.jit(w.function)
    error = check(w, ours)
    calls = implementations(w, peers)
    with pbkern.config.override(cache=False):  # the first call of all, not of this process
        start = time.perf_counter()
        result = calls["pbkern"]()
        first_call = time.perf_counter() - start
    difference = relative_error(result, calls["jax"]()) if "jax" in calls else 0.0
    del result
    assert error <= w.tolerance, (
        f"{w.name}: error {error:.2e} against float64, accepted {w.tolerance:.0e}"
    )
    assert difference <= 10 * w.tolerance, f"{w.name}: differs from jax.jit by {difference:.2e}"
    arguments = w.arguments(w.full)
    explanation = ours.explain(*arguments, measure=True)
    each = tuple(KernelTime(k.name, k.cost.seconds, k.measured) for k in explanation.kernels)
    kernels, left = len(ours.kernels(*arguments)), len(explanation.left)
    for call in calls.values():
        call()
    limit = limit_seconds(w, pbkern.cpu.machine())
    timings = interleaved(calls, rounds, seconds)
    return Row(w.name, limit, error, difference, first_call, kernels, left, timings, each)


# --- reports --------------------------------------------------------------------------------------------------------


def print_line(r: Row, names: list[str]) -> None:
    times = "  ".join(f"{n} {r.timings[n].minimum * 1e3:8.2f}" for n in names if n in r.timings)
    left = f", {r.left} operations left to XLA" if r.left else ""
    print(f"{r.name:24} limit {r.limit * 1e3:6.2f}  {times}  {r.fraction:4.0%} of the limit, "
          f"{r.kernels} kernel{'s' * (r.kernels != 1)}{left}, error {r.error:.0e}", flush=True)  # fmt: skip


def plot(rows: list[Row], path: pathlib.Path) -> None:
    """A bar per implementation: share of the machine's limit. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = columns(rows)
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(rows) + 1.2))
    height = 0.8 / len(names)
    for n, name in enumerate(names):
        shares = [r.limit / r.timings[name].minimum if name in r.timings else 0 for r in rows]
        axes.barh([i + n * height for i in range(len(rows))], shares, height, label=name)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(rows))], [r.name for r in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the machine's limit (1 = the hardware can do no more)")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


# --- the command ----------------------------------------------------------------------------------------------------


def available(peers: Iterable[str]) -> list[str]:
    """The peers that are installed."""
    return [p for p in peers if p not in PACKAGES or _is_installed(PACKAGES[p])]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Times pbkern beside its peers."
    )
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"workloads, default all: {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds at most")
    parser.add_argument(
        "--peers", default=",".join(PEERS[:2]), help=f"of {','.join(PEERS)}; default %(default)s"
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the measurements to this file")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write this machine's page below docs/benchmarks, and the index",
    )
    parser.add_argument(
        "--plot",
        action="store_true",
        help="with --write: a picture beside the page (needs matplotlib)",
    )
    arguments = parser.parse_args(argv)
    for name in arguments.names:
        if name not in WORKLOADS:
            parser.error(f"there is no workload {name}; the workloads are {', '.join(WORKLOADS)}")
    if arguments.plot and not arguments.write:
        parser.error("--plot goes with --write")
    arguments.peers = [p for p in arguments.peers.split(",") if p]
    for peer in arguments.peers:
        if peer not in PEERS:
            parser.error(f"there is no peer {peer}; the peers are {', '.join(PEERS)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 1 if a result was wrong or a workload did not compile."""
    arguments = parse(argv)
    peers = available(arguments.peers)
    rounds, seconds = (QUICK_ROUNDS, QUICK_SECONDS) if arguments.quick else (ROUNDS, SECONDS)
    print(f"{versions()['cpu']}, {os.cpu_count()} cores; least milliseconds of calls in turn")
    rows, failed = [], []
    for name in arguments.names or WORKLOADS:
        try:
            rows.append(measure(WORKLOADS[name], peers, rounds, seconds))
        except (AssertionError, RuntimeError, ValueError, PbkernError) as e:
            failed.append(name)
            print(f"{name:24} FAILED: {type(e).__name__}: {str(e).splitlines()[0]}", flush=True)
        else:
            print_line(rows[-1], columns(rows))
        jax.clear_caches()
    record = Record(versions(), rows, failed)
    if arguments.json:
        arguments.json.write_text(record.as_json())
    if arguments.write:
        path = write(record, plotted=arguments.plot)
        print(f"wrote {path}")
        if arguments.plot:
            plot(rows, path.with_suffix(".png"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
