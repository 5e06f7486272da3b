"""Libraries called from C: the bits of the JIT at any number of threads, and what their files hold."""

import os
import shutil
import subprocess

import numpy as np
import pytest

import pbkern

from . import programs

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
LIBC = {"memcpy", "memset", "memmove", "aligned_alloc", "free"}
OPENMP = {"GOMP_parallel", "omp_get_thread_num", "omp_get_max_threads", "omp_in_parallel"}


def threads(n: int) -> dict:
    return {**os.environ, "OMP_NUM_THREADS": str(n)}


def undefined(path) -> set[str]:
    found = subprocess.run(
        ["nm", "-u", path], capture_output=True, text=True, check=True
    ).stdout.split()
    return set(found) - {"U"}


@pytest.mark.parametrize("name", programs.CASES)
def test_bits_of_the_jit(name, tmp_path):
    made, inputs, expected = programs.library(name, tmp_path, ["obj", "header"], num_threads=4)
    program = programs.compile_c(
        programs.calling_program(made), tmp_path, made.paths["obj"], "-lgomp"
    )
    for n in (1, 2, 4):
        got = programs.run_c(program, made, inputs, tmp_path, threads(n))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    assert undefined(made.paths["obj"]) <= LIBC | OPENMP


@pytest.mark.parametrize(
    "name", ["attention", pytest.param("mlp_gradient", marks=pytest.mark.slow), "descent"]
)
def test_a_library_without_openmp_and_with_a_pool_needs_nothing(name, tmp_path):
    """The pool has just the header's bytes; one byte behind them is a page that cannot be touched."""
    made, inputs, expected = programs.library(
        name, tmp_path, ["obj", "header"], openmp=False, user_device_memory=True
    )
    assert undefined(made.paths["obj"]) <= {"memcpy"}
    assert made.metadata["memory_bytes"] > 0
    assert made.metadata["threads"] == 1
    program = programs.compile_c(
        programs.calling_program(made, guarded=True), tmp_path, made.paths["obj"]
    )
    for a, b in zip(programs.run_c(program, made, inputs, tmp_path), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_arrays_that_end_at_a_page_are_not_overrun(tmp_path):
    made, inputs, (expected,) = programs.library("unsharp", tmp_path, ["obj", "header"])
    program = programs.compile_c(
        programs.calling_program(made, guarded=True), tmp_path, made.paths["obj"], "-lgomp"
    )
    (got,) = programs.run_c(program, made, inputs, tmp_path, threads(2))
    np.testing.assert_array_equal(got, expected)


CONCURRENT = """
#include <pthread.h>
#include <string.h>
static float *q, *k, *v, *want;
static int bad;
static void *caller(void *unused) {{
  float *out = malloc(BYTES);
  for (int r = 0; r < 10; r++) {{
    memset(out, 0, BYTES);
    attention(q, k, v, out);
    if (memcmp(out, want, BYTES)) __atomic_add_fetch(&bad, 1, __ATOMIC_SEQ_CST);
  }}
  free(out);
  return unused;
}}
int main(void) {{
  q = array("q.bin", BYTES, 0); k = array("k.bin", BYTES, 0); v = array("v.bin", BYTES, 4); want = array("want.bin", BYTES, 0);
  pthread_t threads[8];
  for (int t = 0; t < 8; t++) if (pthread_create(&threads[t], NULL, caller, NULL)) return 3;
  for (int t = 0; t < 8; t++) pthread_join(threads[t], NULL);
  int inside = 0;
#pragma omp parallel num_threads(4) reduction(+ : inside)
  {{
    float *out = malloc(BYTES);
    attention(q, k, v, out);
    inside += memcmp(out, want, BYTES) != 0;
    free(out);
  }}
  return bad ? 1 : inside ? 2 : 0;
}}
"""


def test_eight_threads_at_the_same_time_and_calls_inside_a_parallel_region(tmp_path):
    made, inputs, (expected,) = programs.library("attention", tmp_path, ["obj", "header"])
    (tmp_path / "want.bin").write_bytes(expected.tobytes())
    for a, x in zip(made.metadata["inputs"], inputs):
        (tmp_path / f"{a['name']}.bin").write_bytes(x.tobytes())
    source = programs.FILES.format(name="attention") + CONCURRENT.replace("{{", "{").replace(
        "}}", "}"
    )
    program = programs.compile_c(source, tmp_path, made.paths["obj"], f"-DBYTES={expected.nbytes}", "-fopenmp", "-pthread",
                                 compiler=("gcc", "-std=gnu99"))  # fmt: skip
    done = subprocess.run([program], cwd=tmp_path, env=threads(2), timeout=120)
    assert done.returncode == 0


ERRORS = """
#include <stdio.h>
#include <string.h>
#include "softmax.h"
static float x[300000], out[300000];
int main(int count, char **words) {
  if (softmax_try(NULL, out) != SOFTMAX_NULL_POINTER || softmax_try(x, NULL) != SOFTMAX_NULL_POINTER) return 1;
  if (softmax_try(x, out) != SOFTMAX_OK) return 2;
  if (softmax_memory_bytes(2) != SOFTMAX_MEMORY_BYTES || softmax_memory_bytes(1) > softmax_memory_bytes(2)) return 3;
  if (strncmp(softmax_metadata, "{", 1)) return 4;
  if (count > 1) softmax(x, strcmp(words[1], "null") ? out : NULL);
  return 0;
}
"""


def test_errors_are_codes_or_one_line_and_the_end(tmp_path):
    made, _, _ = programs.library("softmax", tmp_path, ["obj", "header", "static"], num_threads=2)
    program = programs.compile_c(ERRORS, tmp_path, made.paths["static"], "-lgomp")
    assert subprocess.run([program], timeout=60).returncode == 0
    done = subprocess.run([program, "null"], capture_output=True, text=True, timeout=60)
    assert done.returncode == -6  # SIGABRT
    assert done.stderr == "softmax: argument `out` is a null pointer\n"


def test_memory_that_there_is_not_is_a_code(tmp_path):
    """An allocator that gives nothing takes the place of the C library's."""
    made, _, _ = programs.library("attention", tmp_path, ["obj", "header"])
    source = """
#include <stddef.h>
#include "attention.h"
static float a[51200], b[51200], c[51200], out[51200];
void *aligned_alloc(size_t alignment, size_t bytes) { return alignment > bytes ? out : NULL; }
int main(int count, char **words) {
  if (count > 1) attention(a, b, c, (float *)words);
  return attention_try(a, b, c, out) == ATTENTION_OUT_OF_MEMORY ? 0 : 1;
}
"""
    program = programs.compile_c(
        source, tmp_path, made.paths["obj"], "-lgomp", compiler=("gcc", "-std=c11", "-fno-builtin")
    )
    assert subprocess.run([program], timeout=60).returncode == 0
    done = subprocess.run([program, "x"], capture_output=True, text=True, timeout=60)
    assert done.returncode == -6
    assert "bytes of memory cannot be allocated" in done.stderr
    assert done.stderr.count("\n") == 1


def test_files_are_the_same_each_time_and_hold_no_paths(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    made = []
    for folder in (first, second):
        folder.mkdir()
        made.append(
            programs.library(
                "softmax", folder, ["obj", "header", "shared", "static", "asm", "metadata"]
            )[0]
        )
    for kind, path in made[0].paths.items():
        assert path.read_bytes() == made[1].paths[kind].read_bytes(), kind
        if kind != "shared":  # the C compiler's start files are in it
            assert str(tmp_path).encode() not in path.read_bytes(), kind
            assert b"/pbkern" not in path.read_bytes(), kind


def test_a_shared_library_is_one_that_systems_take(tmp_path):
    made, _, _ = programs.library("softmax", tmp_path, ["shared"])
    path = made.paths["shared"]
    needed = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0].split("/")[-1].split(".")[0] for line in needed.splitlines()}
    assert names <= {"libc", "libm", "libgomp", "linux-vdso", "ld-linux-x86-64"}, needed
    segments = subprocess.run(
        ["readelf", "-lWd", path], capture_output=True, text=True, check=True
    ).stdout
    assert "TEXTREL" not in segments
    stack = next(line for line in segments.splitlines() if "GNU_STACK" in line)
    assert " RW " in stack
    assert "E" not in stack.split("RW")[1]
    shown = subprocess.run(
        ["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[-1] for line in shown.splitlines()} == {
        "softmax", "softmax_try", "softmax_memory_bytes", "softmax_metadata", "softmax_message"}  # fmt: skip


@pytest.mark.parametrize(
    "compiler",
    [("gcc", "-std=c99"), ("gcc", "-std=c17"), ("g++", "-std=c++11"), ("g++", "-std=c++20")],
)
def test_headers_of_every_type_are_valid(compiler, tmp_path):
    import jax.numpy as jnp

    kinds = [
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "float32",
        "float16",
        "bfloat16",
        "complex64",
    ]
    args = {k: np.zeros((3, 5), jnp.dtype(k)) for k in kinds}
    made = pbkern.polyblocks_aot_jax(
        compile_options={"aot_name": "all_types"}, output=tmp_path, emit=["header"]
    )(lambda a: {k: x[:2] for k, x in a.items()})(args)
    for kind in kinds:
        assert f"*a_{kind}" in made.header
        assert f"*out_{kind}" in made.header
    assert "/// Type/shape of a_int8 is memref<3x5xi8>." in made.header
    assert "const uint16_t *a_bfloat16" in made.header
    assert "const float *a_complex64" in made.header
    programs.compile_c(
        '#include "all_types.h"\nint main(void) { return 0; }\n', tmp_path, compiler=compiler
    )


def test_results_that_start_anywhere(tmp_path):
    """The kernel writes past the caches where results start at a cache line, which is not asked of C's arrays."""
    import jax

    def f(x):
        return x * 2 + 1, x - 3

    x = np.arange(1500 * 4096, dtype=np.float32).reshape(1500, 4096)
    options = {"aot_name": "streams"}
    made = pbkern.polyblocks_aot_jax(
        compile_options=options, output=tmp_path, emit=["obj", "header", "mlir"]
    )(f)(x)
    text = made.paths["mlir"].read_text()
    if "nontemporal" not in text:
        pytest.skip("this processor's caches hold such a result")
    expected = [np.asarray(y) for y in jax.jit(f)(x)]
    for at in (0, 4, 16):
        program = programs.compile_c(
            programs.calling_program(made, at), tmp_path, made.paths["obj"], "-lgomp"
        )
        for a, b in zip(programs.run_c(program, made, [x], tmp_path), expected, strict=True):
            np.testing.assert_array_equal(a, b)
