"""The example folder: its Makefile makes a library, a program and a program that times."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("make") is None or shutil.which("gcc") is None, reason="there is no make or no gcc"
)
def test_the_makefile_of_the_example(tmp_path):
    folder = tmp_path / "aot"
    shutil.copytree(ROOT / "examples" / "aot", folder)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = ["make", "-s", "run", "bench", f"PBKERN={sys.executable} -m pbkern", "CC=gcc",
               "CFLAGS=-O1 -std=c99 -Wall -Werror"]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean 0.500" in done.stdout
    assert "sharpen  " in done.stdout
    assert "ms at best of 100" in done.stdout
