"""What to do when an NVIDIA GPU is at hand: bandwidth, conformance, sanitizer, and a dated table of it all.

    python scripts/gpu_check.py [--out build/gpu.md] [--quick] [--limit 240]

Needs jax with CUDA 13, llvmlite and MLIR's bindings in this environment, and no network. compute-sanitizer is used where it is
installed, pytest-xdist too. The table is written after each part. Ends with 0 if everything passed, 1 if something failed, 2
without a device.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
# In the environment of tests: what they would simulate runs on the device (tests/nvgpu/simulated.py).
ON_DEVICE = {"TESTS_ON_DEVICE": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
CONFORMANCE = (
    "tests/nvgpu/test_device.py",
    "tests/nvgpu/test_conformance.py",
    "tests/nvgpu/test_handwritten.py",
    "tests/nvgpu/test_pallas.py",
    "tests/nvgpu/test_random_graphs.py",
    "tests/nvgpu/test_random_scratch.py",
)
# Processes that share the GPU in conformance tests: each takes about half a gigabyte of its memory.
MOST_PROCESSES = 12
# Lines of a part's failures in the table.
MOST_FAILURES = 60
SANITIZED = ("memcheck", "racecheck", "synccheck", "initcheck")
SAMPLE = ("softmax", "blur_slices", "cross_entropy")


def device() -> str | None:
    """The first CUDA device's name, None without one."""
    program = "import jax; print(jax.devices('cuda')[0].device_kind)"
    found = run([sys.executable, "-c", program])
    return (
        found.stdout.strip().splitlines()[-1]
        if found.returncode == 0 and found.stdout.strip()
        else None
    )


def run(
    command: list[str], limit: float | None = None, **environment: str
) -> subprocess.CompletedProcess:
    """A command's output and exit status; 124 where it took more than `limit` seconds and was ended."""
    try:
        return subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired as late:
        out, errors = (
            x.decode(errors="replace") if isinstance(x, bytes) else x or ""
            for x in (late.stdout, late.stderr)
        )
        return subprocess.CompletedProcess(command, 124, out, f"{errors}\nended after {limit:g} s")


def conformance(quick: bool, limit: float) -> tuple[bool, str]:
    """The CPU's cases on the device: all of them, or the sample that is simulated by default."""
    which = [] if quick else ["-m", "slow or not slow"]
    processes = min(os.cpu_count() or 1, MOST_PROCESSES)
    spread = (
        ["-n", str(processes), "--dist", "worksteal"]
        if importlib.util.find_spec("xdist")
        else ["-p", "no:xdist"]
    )
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *spread, *which, *CONFORMANCE]
    found = run(command, limit, **ON_DEVICE)
    lines = found.stdout.strip().splitlines() or found.stderr.strip().splitlines()[-8:]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))][:MOST_FAILURES]
    late = [found.stderr.strip().splitlines()[-1]] if found.returncode == 124 else []
    return found.returncode == 0, "\n".join([*failures, *lines[-1:], *late])


def sanitizer(limit: float) -> tuple[bool, str]:
    """compute-sanitizer's tools on a sample of the workloads at small size, beside one another."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.access(tool, os.X_OK):
        return True, "not run: compute-sanitizer is not installed"
    program = [sys.executable, "-m", "benchmarks.gpu", "--device", "--small", "--ours", *SAMPLE]
    started = {
        name: subprocess.Popen(
            [tool, f"--tool={name}", "--error-exitcode=9", *program],
            cwd=ROOT,
            env=os.environ | ON_DEVICE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in SANITIZED
    }
    last, end, texts, good = "", time.monotonic() + limit, [], True
    for name, process in started.items():
        try:
            last, _ = process.communicate(timeout=max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            process.kill()
            last, _ = process.communicate()
            last += f"\nended after {limit:g} s"
        good &= process.returncode == 0
        said = [line for line in last.splitlines() if line.startswith("=========")][:12]
        texts.append(
            f"{name}: nothing found"
            if process.returncode == 0
            else "\n".join([f"{name}: exit status {process.returncode}", *said, last[-300:]])
        )
    return good, "\n".join(texts)


def bandwidth(quick: bool, limit: float) -> tuple[bool, str]:
    """The table of benchmarks/gpu.py."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", *(["--small"] if quick else [])]
    found = run(command, limit)
    text = found.stdout if found.returncode == 0 else f"{found.stdout}\n{found.stderr[-2000:]}"
    return found.returncode == 0, text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=ROOT / "build" / "gpu.md",
        help="the table; default %(default)s",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a sample of the cases, workloads at small size"
    )
    parser.add_argument(
        "--limit", type=float, default=1800, help="seconds for each part; default %(default)s"
    )
    options = parser.parse_args()
    name = device()
    if name is None:
        print(
            "there is no CUDA device that jax finds: nvidia-smi shows devices, `pip install 'jax[cuda13]'` is what jax needs",
            file=sys.stderr,
        )
        return 2
    parts = [
        f"# Measured on {name}, {time.strftime('%d %B %Y')}",
        "",
        "Written by `make gpu-check`.",
    ]
    good = True
    for title, part in (
        ("Bandwidth", lambda: bandwidth(options.quick, options.limit)),
        ("Conformance", lambda: conformance(options.quick, options.limit)),
        ("compute-sanitizer", lambda: sanitizer(options.limit)),
    ):
        start = time.monotonic()
        passed, text = part()
        good &= passed
        parts += ["", f"## {title}{'' if passed else ': FAILED'}", "", text.strip()]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(parts) + "\n")
        print(
            f"{title}: {'passed' if passed else 'FAILED'} ({time.monotonic() - start:.0f} s)",
            flush=True,
        )
    print(f"{options.out} has the table")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
