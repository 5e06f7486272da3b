"""Makes an environment with the next Python and JAX, Debian trixie's 3.13 and jax 0.11, and runs the default tests in it.

    sudo python scripts/second_environment.py FOLDER [--jax 0.11.2] [-- pytest arguments]

FOLDER becomes a Debian system of its own (debootstrap, 400 MB, and 2 GB of packages); what is there already is used again. The
working tree is copied into it each time. What pip on this machine is configured to use, from its files and PIP_ variables,
is handed on to pip there as variables of that call; files and folders that it names are mounted at the same place.
Needs root, `debootstrap`, and a kernel that lets root mount.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
RELEASE = "trixie"
PACKAGES = "python3,python3-venv,python3-dev,ca-certificates,binutils,g++,libgl1,libglib2.0-0t64"
SYSTEM = ("/proc", "/sys", "/dev", "/dev/shm")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--jax", default="0.11.2", metavar="VERSION", help="default %(default)s")
    parser.add_argument("--mirror", default=None, help="of Debian; default: debootstrap's")
    parser.add_argument(
        "pytest", nargs="*", help="arguments of pytest, after --; default: -n 2 --dist worksteal -q"
    )
    options = parser.parse_args()
    folder = options.folder.resolve()
    if not (folder / "usr" / "bin" / "python3").exists():
        mirror = [options.mirror] if options.mirror else []
        run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", RELEASE, folder, *mirror)
    copy_tree(folder / "checkout")
    settings = pip_settings()
    with mounted(folder, [*SYSTEM, *paths_in(settings.values())]):
        inside(folder, settings, "test -x /env/bin/python || python3 -m venv /env")
        inside(
            folder,
            settings,
            f"/env/bin/python -m pip install -q -e '/checkout[test,demo]' 'jax=={options.jax}'",
        )
        versions = "import sys, jax, jaxlib; print(sys.version.split()[0], jax.__version__, jaxlib.__version__)"
        inside(folder, {}, f'/env/bin/python -c "{versions}"')
        arguments = options.pytest or ["-n", "2", "--dist", "worksteal", "-q"]
        return inside(folder, {}, f"/env/bin/python -m pytest {' '.join(arguments)}", check=False)


def run(*command, **options) -> int:
    return subprocess.run([*map(str, command)], check=True, **options).returncode


def inside(folder: pathlib.Path, settings: dict[str, str], command: str, check: bool = True) -> int:
    """Runs a shell command in the Debian system, in the copy of the working tree."""
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        **settings,
    }
    resolver = pathlib.Path("/etc/resolv.conf")
    if resolver.exists():
        (folder / "etc" / "resolv.conf").write_text(resolver.read_text())
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        if name in os.environ:
            environment[name] = os.environ[name]
    script = ["chroot", str(folder), "/bin/bash", "-c", f"cd /checkout && {command}"]
    return subprocess.run(script, env=environment, check=check).returncode


def copy_tree(target: pathlib.Path) -> None:
    """Copies the files of the working tree that git knows or would add; what is gone here goes there."""
    target.mkdir(parents=True, exist_ok=True)
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    names = [n for n in listed.stdout.decode().split("\0") if n and (ROOT / n).exists()]
    for name in {pathlib.Path(n).parts[0] for n in names} - {".git"}:
        run("rm", "-rf", target / name)
    archive = subprocess.run(
        ["tar", "-c", "--null", "-T", "-"],
        cwd=ROOT,
        input="\0".join(names).encode(),
        check=True,
        stdout=subprocess.PIPE,
    )
    subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)


def pip_settings() -> dict[str, str]:
    """What pip is configured to do here, as PIP_ variables."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    found = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        if key.startswith(("global.", "install.", ":env:.")):
            found[f"PIP_{key.rpartition('.')[2].upper().replace('-', '_')}"] = str(
                ast.literal_eval(value)
            )
    found.pop("PIP_CONSTRAINT", None)  # of this Python's packages
    return found


def paths_in(values) -> list[str]:
    """Files and folders of this machine that settings name."""
    words = [w for v in values for w in v.split()]
    paths = [re.sub(r"^file://", "", w) for w in words if w.startswith(("/", "file:///"))]
    paths = [
        str(pathlib.Path(p).parent) if p.rstrip("/").endswith("/simple") else p for p in paths
    ]  # an index, and its files
    return list(dict.fromkeys(p for p in paths if pathlib.Path(p).exists()))


@contextlib.contextmanager
def mounted(folder: pathlib.Path, paths: list[str]) -> Iterator[None]:
    done = []
    try:
        for path in paths:
            target = folder / path.lstrip("/")
            if os.path.ismount(target):
                continue
            if pathlib.Path(path).is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            run("mount", "--bind", path, target)
            done.append(target)
        yield
    finally:
        for target in reversed(done):
            subprocess.run(["umount", "-l", str(target)], check=False)


if __name__ == "__main__":
    sys.exit(main())
