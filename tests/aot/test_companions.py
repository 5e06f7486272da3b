"""Files that go with a library: CMake, pkg-config, C++20, and the program that times it."""

import shutil
import subprocess
import zlib

import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

from . import programs

KINDS = ["obj", "header", "static", "cmake", "pkgconfig", "cpp", "bench"]
needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A library with every companion; x is complex, and memory is the caller's."""
    folder = tmp_path_factory.mktemp("library")
    options = {"aot_name": "mixed", "user_device_memory": True, "openmp": False}

    def mixed(x, y):
        return jnp.sort(x, axis=-1), y * 2

    args = programs.numbers(9, 333), np.zeros((4, 3), np.complex64)
    return (
        folder,
        args,
        pbkern.polyblocks_aot_jax(compile_options=options, output=folder, emit=KINDS)(mixed)(*args),
    )


@needs_gcc
def test_the_program_that_times_a_library(made):
    """The checksums of results are those of Python."""
    folder, (x, y), library = made
    y = y + np.complex64(1 + 2j)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    source = library.paths["bench"].read_text()
    assert "libmixed.a" in source.split("*/")[0]
    assert "-lgomp" not in source
    program = programs.compile_c(source, folder, library.paths["static"], name="timed")
    done = subprocess.run(
        [program, "3", "x.npy", "y.npy"], cwd=folder, capture_output=True, text=True, check=True
    )
    first, *rows = done.stdout.splitlines()
    assert first.startswith("mixed  ")
    assert first.endswith(" ms at best of 3")
    wanted = {"out0": np.sort(x, axis=-1), "out1": y * 2}
    assert dict(row.split() for row in rows) == {
        k: f"{zlib.crc32(v.tobytes()):08x}" for k, v in wanted.items()
    }
    done = subprocess.run([program, "1", "y.npy"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2
    assert "y.npy holds 96 bytes, not 11988" in done.stderr
    assert subprocess.run([program], cwd=folder, capture_output=True).returncode == 0


@needs_gcc
def test_spans(made):
    folder, _, library = made
    source = """
#include <array>
#include <vector>
#include "mixed.hpp"
int main() {
  static std::array<float, 9 * 333> x{}, sorted{};
  std::array<std::complex<float>, 12> y{}, twice{};
  x[5] = -1.0f;
  y[2] = {1.0f, 2.0f};
  std::vector<std::int8_t> memory(MIXED_MEMORY_BYTES);
  int without = pbkern::mixed(x, y, sorted, twice, std::span(memory).first(0));
  if (without != (MIXED_MEMORY_BYTES ? MIXED_OUT_OF_MEMORY : MIXED_OK)) return 3;
  if (pbkern::mixed(x, y, sorted, twice, memory) != MIXED_OK) return 1;
  return sorted[0] == -1.0f && twice[2] == std::complex<float>(2.0f, 4.0f) ? 0 : 2;
}
"""
    program = programs.compile_c(
        source, folder, library.paths["obj"], compiler=("g++", "-std=c++20"), name="spans"
    )
    assert subprocess.run([program]).returncode == 0


@needs_gcc
@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="there is no pkg-config")
def test_pkg_config(made):
    folder, _, library = made
    command = ["pkg-config", "--cflags", "--libs", str(library.paths["pkgconfig"])]
    flags = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert f"-I{folder}" in flags
    assert f"{folder}/libmixed.a" in flags


@needs_gcc
@pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake")
@pytest.mark.parametrize(
    "languages",
    [
        "C",
        pytest.param("CXX", marks=needs_gcc),
        pytest.param("C CXX", marks=[needs_gcc, pytest.mark.slow]),
    ],
)
def test_cmake(tmp_path, languages):
    """A library on OpenMP's threads: CMake finds them in projects of C, of C++ and of both."""
    library, folder = tmp_path / "library", tmp_path / "program"
    library.mkdir()
    folder.mkdir()
    programs.library("softmax", library, ["static", "cmake"])
    main = '#include "softmax.h"\nstatic float x[300000], y[300000];\nint main(void) { return softmax_try(x, y); }\n'
    source = "main.c" if languages == "C" else "main.cpp"
    (folder / source).write_text(main)
    (folder / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.16)\nproject(program {languages})\n"
        "find_package(softmax REQUIRED PATHS ../library)\n"
        f"add_executable(program {source})\ntarget_link_libraries(program softmax::softmax)\n"
    )
    for command in (
        ["cmake", "-S", folder, "-B", folder / "build"],
        ["cmake", "--build", folder / "build"],
    ):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert subprocess.run([folder / "build" / "program"]).returncode == 0


@needs_gcc
def test_companions_of_a_file_of_weights(tmp_path):
    """The program that times the library loads the weights."""

    def f(w, x):
        return x @ w

    w, x = programs.numbers(5, 3), programs.numbers(4, 5)
    options = {"aot_name": "product", "weights": "file", "weights_argnums": 0, "openmp": False}
    made = pbkern.polyblocks_aot_jax(
        compile_options=options, output=tmp_path, emit=["static", "bench", "cpp"]
    )(f)(w, x)
    np.save(tmp_path / "x.npy", x)
    program = programs.compile_c(
        made.paths["bench"].read_text(), tmp_path, made.paths["static"], name="timed"
    )
    run = lambda: subprocess.run(
        [program, "1", "x.npy"], cwd=tmp_path, capture_output=True, text=True
    )
    want = made.load()(x)
    np.testing.assert_allclose(want, x @ w, rtol=1e-5, atol=1e-6)
    done = run()
    assert done.returncode == 0
    assert done.stdout.splitlines()[1] == f"out {zlib.crc32(want.tobytes()):08x}"
    made.paths["weights"].unlink()
    done = run()
    assert done.returncode == 1
    assert "the file of weights cannot be read" in done.stdout + done.stderr
