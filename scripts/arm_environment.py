"""Makes an AArch64 environment, Debian's with the wheels of JAX and MLIR, and runs the conformance tests in it under qemu.

    sudo python scripts/arm_environment.py [--every 3] FOLDER [-- pytest arguments]

FOLDER becomes a Debian system for AArch64 (debootstrap, 400 MB, and 1.1 GB of wheels), whose packages are unpacked and not set
up; what is there already is used again. The working tree is copied into it each time. The README's first program runs there,
then every n-th of the tests in TESTS. Needs root, `debootstrap`, `qemu-user-static`, and a kernel that lets root mount and has
binfmt_misc.

An emulated processor takes five to thirty times as long as a real one, and forgives what a real one does not: instructions
that a core has read before they changed, and words that threads exchange without saying so.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

from second_environment import ROOT, copy_tree, mounted, run

RELEASE, PYTHON = "bookworm", "3.11"
PACKAGES = "python3,ca-certificates,binutils,libstdc++6"
# glibc's versions, as names of wheels have them, up to that of the release.
PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in (35, 34, 31, 28, 27, 26, 24, 17)]
# Of the requirements of tests; the others are frameworks that are compared with, and linters.
TEST_PACKAGES = ("llvmlite", "pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "expecttest")
# The processor: with NEON, and without SVE, which code does not use.
CPU = "neoverse-n1"
# Linux's list of programs that run files of other processors, and the line for it of the package qemu-user-static.
PROGRAMS = pathlib.Path("/proc/sys/fs/binfmt_misc")
REGISTRATION = pathlib.Path("/usr/lib/binfmt.d/qemu-aarch64.conf")
TESTS = (
    "tests/targets/test_relocations.py",
    "tests/targets/test_platforms.py",
    "tests/api/test_machine.py",
    "tests/native",
)
LEFT_OUT = (
    "tests/native/test_beside_tensorflow.py",  # TensorFlow is not installed
    "tests/api/test_machine.py::test_the_peak_of_this_machine",  # an emulator has none
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--every", type=int, default=3, metavar="N", help="default %(default)s")
    parser.add_argument("--mirror", default=None, help="of Debian; default: debootstrap's")
    parser.add_argument(
        "pytest", nargs="*", help="arguments of pytest in place of the tests, after --"
    )
    options = parser.parse_args()
    folder = options.folder.resolve()
    if not (folder / "usr" / "bin" / "python3").exists():
        make_system(folder, options.mirror)
    install_wheels(folder / "wheels")
    copy_tree(folder / "checkout")
    arguments = options.pytest or chosen_tests(options.every)
    (folder / "tmp" / "arguments").write_text("\n".join(arguments))
    with mounted(folder, ["/proc", "/sys", "/dev", "/dev/shm"]), foreign_programs_run():
        print("the README's first program:", flush=True)
        printed = inside(folder, "python3", "-c", readme_block("python"), stdout=subprocess.PIPE)
        print(printed.stdout.decode())
        if readme_block("text").strip() not in printed.stdout.decode():
            sys.exit("the README says that it prints something else")
        return inside(folder, "python3", "-m", "pytest", "@/tmp/arguments").returncode


def make_system(folder: pathlib.Path, mirror: str | None) -> None:
    """Unpacks Debian's packages, without their scripts, each of which would run for minutes."""
    options = ["--foreign", "--arch=arm64", "--variant=minbase", f"--include={PACKAGES}"]
    run("debootstrap", *options, RELEASE, folder, *([mirror] if mirror else []))
    for package in sorted((folder / "var" / "cache" / "apt" / "archives").glob("*.deb")):
        run("dpkg-deb", "-x", package, folder)


def install_wheels(folder: pathlib.Path) -> None:
    """Downloads JAX, MLIR and what tests need, as pip here is configured to do."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tests = project["optional-dependencies"]["test"]
    wanted = project["dependencies"] + [
        line for line in tests if re.match(r"[\w-]+", line)[0] in TEST_PACKAGES
    ]
    installed = folder / "requirements.txt"
    if installed.exists() and installed.read_text().splitlines() == wanted:
        return
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    options = ["-q", "--only-binary=:all:", f"--python-version={PYTHON}", *platforms]
    run(sys.executable, "-m", "pip", "install", "--upgrade", "--target", folder, *options, *wanted)
    installed.write_text("\n".join(wanted))


@contextlib.contextmanager
def foreign_programs_run() -> Iterator[None]:
    """Linux runs programs of AArch64 by qemu in the block, those that tests start among them."""
    if not (PROGRAMS / "register").exists():
        run("mount", "-t", "binfmt_misc", "binfmt_misc", PROGRAMS)
    entry = PROGRAMS / "qemu-aarch64"
    is_known = entry.exists()
    if not is_known:
        (PROGRAMS / "register").write_text(REGISTRATION.read_text().strip())
    try:
        yield
    finally:
        if not is_known:
            entry.write_text("-1")


def inside(folder: pathlib.Path, *command: str, **options) -> subprocess.CompletedProcess[bytes]:
    """Runs a program in the AArch64 system, in the copy of the working tree."""
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PYTHONPATH": "/checkout:/wheels",
        "PBKERN_FALLBACK": "0",
        "QEMU_CPU": CPU,
    }
    script = ["chroot", str(folder), "/usr/bin/env", "-C", "/checkout", *command]
    return subprocess.run(script, env=environment, check=False, **options)


def readme_block(language: str) -> str:
    """The README's first block in a language."""
    text = (ROOT / "README.md").read_text()
    block = re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    return block[1]


def chosen_tests(every: int) -> list[str]:
    """Arguments for pytest: every n-th of the tests, in the order in which pytest here collects them."""
    ignored = [f"--deselect={name}" for name in LEFT_OUT]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *ignored, *TESTS]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = [line for line in listed.splitlines() if "::" in line]
    return ["-v", "--durations=20", "--timeout=1800", "-n2", *names[::every]]


if __name__ == "__main__":
    sys.exit(main())
