"""What to do when an NVIDIA GPU is at hand: conformance, sanitizer, bandwidth, and a dated table of it all.

    python scripts/gpu_check.py [--out docs/gpu.md] [--quick]

Needs jax with CUDA 13, llvmlite and MLIR's bindings in this environment, and no network. compute-sanitizer is used where it is
installed. Ends with 0 if everything passed, 1 if something failed, 2 without a device.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
# In the environment of tests: what they would simulate runs on the device (tests/nvgpu/simulated.py).
ON_DEVICE = {"TESTS_ON_DEVICE": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
CONFORMANCE = ("tests/nvgpu/test_conformance.py",)
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


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )


def conformance(quick: bool) -> tuple[bool, str]:
    """The CPU's cases on the device: all of them, or the sample that is simulated by default."""
    which = [] if quick else ["-m", "slow or not slow"]
    found = run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *which, *CONFORMANCE], **ON_DEVICE
    )
    last = found.stdout.strip().splitlines()[-1] if found.stdout.strip() else found.stderr[-500:]
    return found.returncode == 0, last


def sanitizer() -> tuple[bool, str]:
    """compute-sanitizer's tools on a sample of the workloads at small size."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.access(tool, os.X_OK):
        return True, "not run: compute-sanitizer is not installed"
    failed = []
    for name in SANITIZED:
        command = [
            tool,
            f"--tool={name}",
            "--error-exitcode=9",
            sys.executable,
            "-m",
            "benchmarks.gpu",
            "--device",
            "--small",
            *SAMPLE,
        ]
        if run(command, **ON_DEVICE).returncode:
            failed.append(name)
    return (
        not failed,
        f"{', '.join(failed)} found errors" if failed else f"{', '.join(SANITIZED)} found nothing",
    )


def bandwidth(quick: bool) -> tuple[bool, str]:
    """The table of benchmarks/gpu.py."""
    found = run(
        [sys.executable, "-m", "benchmarks.gpu", "--device", *(["--small"] if quick else [])]
    )
    return found.returncode == 0, found.stdout if found.returncode in (0, 1) else found.stderr[
        -2000:
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=ROOT / "docs" / "gpu.md",
        help="the table; default %(default)s",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a sample of the cases, workloads at small size"
    )
    options = parser.parse_args()
    name = device()
    if name is None:
        print(
            "there is no CUDA device that jax finds: nvidia-smi shows devices, `pip install 'jax[cuda13]'` is what jax needs",
            file=sys.stderr,
        )
        return 2
    parts, good = (
        [f"# Measured on {name}, {time.strftime('%d %B %Y')}", "", "Written by `make gpu-check`."],
        True,
    )
    for title, (passed, text) in (
        ("Conformance", conformance(options.quick)),
        ("compute-sanitizer", sanitizer()),
        ("Bandwidth", bandwidth(options.quick)),
    ):
        good &= passed
        parts += ["", f"## {title}{'' if passed else ': FAILED'}", "", text.strip()]
        print(f"{title}: {'passed' if passed else 'FAILED'}", flush=True)
    options.out.write_text("\n".join(parts) + "\n")
    print(f"{options.out} has the table")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
