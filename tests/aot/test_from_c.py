"""Libraries called from C: the bits of the JIT at any number of threads, and what their files hold."""

import os
import shutil
import subprocess

import numpy as np
import pytest

from . import programs

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
LIBC = {"memcpy", "memset", "memmove", "aligned_alloc", "free"}
OPENMP = {"GOMP_parallel", "omp_get_thread_num", "omp_get_max_threads", "omp_in_parallel"}


def undefined(path) -> set[str]:
    found = subprocess.run(["nm", "-u", path], capture_output=True, text=True, check=True).stdout.split()
    return set(found) - {"U"}


@pytest.mark.parametrize("name", programs.CASES)
def test_bits_of_the_jit(name, tmp_path):
    made, inputs, expected = programs.library(name, tmp_path, ["obj", "header"], num_threads=4)
    program = programs.compile_c(programs.calling_program(made), tmp_path, made.paths["obj"], "-lgomp")
    for threads in ("1", "2", "4"):
        got = programs.run_c(program, made, inputs, tmp_path, {**os.environ, "OMP_NUM_THREADS": threads})
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    assert undefined(made.paths["obj"]) <= LIBC | OPENMP
