"""Object file -> shared library or archive, by the C compiler at hand; by zig where there is none, and for other systems."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

from pbkern.core.errors import TargetError
from pbkern.targets.cpu.machines.devices import CpuDevice

COMPILERS = ("cc", "gcc", "clang")
# (whether x86-64, system) -> as zig calls it.
ZIG_TARGETS = {
    (True, "linux"): "x86_64-linux-gnu",
    (True, "macos"): "x86_64-macos",
    (False, "linux"): "aarch64-linux-gnu",
    (False, "macos"): "aarch64-macos",
}
HINT = "install a C compiler, or pip install ziglang; an object file (.o) needs neither"


def link(
    target_file: pathlib.Path, objects: Sequence[pathlib.Path], device: CpuDevice, use_openmp: bool
) -> None:
    """Makes the shared library `target_file`. Raises TargetError without a linker, or with what it says."""
    compiler = _compiler(device)
    command = [*compiler, "-shared", "-o", str(target_file), *map(str, objects)]
    if device.system == "linux":
        command += ["-Wl,-z,noexecstack", f"-Wl,-soname,{target_file.name}"]
        command += ["-Wl,-z,text"] if len(compiler) == 1 else []  # zig knows no other way
    if use_openmp:
        if not device.is_here:
            raise TargetError(
                f"a shared library with OpenMP cannot be linked for {device.triple} here",
                why="that system's libgomp is not at hand",
                hint="an object file (.o), or openmp=False",
            )
        command.append("-lgomp")
    _run([*command, *(["-lm"] if device.system == "linux" else [])], "link")


def archive(target_file: pathlib.Path, objects: Sequence[pathlib.Path], device: CpuDevice) -> None:
    """Makes the static library `target_file`, the same bytes each time. Raises TargetError."""
    tool = shutil.which("ar")
    command = [tool] if tool and device.system == "linux" else [*_zig("archive"), "ar"]
    _run([*command, "rcsD", str(target_file), *map(str, objects)], "archive")


def _compiler(device: CpuDevice) -> list[str]:
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if device.is_here and compiler:
        return [compiler]
    target = ["-target", ZIG_TARGETS[device.is_x86, device.system]] if not device.is_here else []
    return [*_zig("link"), "cc", *target]


def _zig(what: str) -> list[str]:
    if importlib.util.find_spec("ziglang") is None:
        raise TargetError(
            f"nothing is installed that could {what} the library",
            why=f"no {', '.join(COMPILERS)}, no ziglang",
            hint=HINT,
        )
    return [sys.executable, "-m", "ziglang"]


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-1000:]
        raise TargetError(
            f"the library could not be made: {what}ing failed",
            why=said,
            hint=f"try: {' '.join(command)}",
        )
