"""Files that go with a library: for CMake and pkg-config, a header for C++20, and a C program that times it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from .arguments import Argument
from .c_types import element_type, elements, written
from .header import POOL, Interface

Files = Mapping[str, str]  # kind -> name of the file


def linked(files: Files) -> str:
    """The file that programs link, of those that are written: the most complete."""
    return next(files[kind] for kind in ("static", "shared", "obj") if kind in files)


# The target of OpenMP, of the first language of C and C++ that the project has.
_FIND_OPENMP = """get_property(NAME_LANGUAGES GLOBAL PROPERTY ENABLED_LANGUAGES)
if("C" IN_LIST NAME_LANGUAGES)
  set(NAME_LANGUAGE C)
else()
  set(NAME_LANGUAGE CXX)
endif()
find_package(OpenMP REQUIRED COMPONENTS ${NAME_LANGUAGE})
set(NAME_OPENMP OpenMP::OpenMP_${NAME_LANGUAGE})"""


def cmake(of: Interface, files: Files, use_openmp: bool) -> str:
    """find_package(NAME) gives the target NAME::NAME."""
    links = f"${{CMAKE_CURRENT_LIST_DIR}}/{linked(files)}"
    links += f";${{{of.name}_OPENMP}}" if use_openmp else ""
    target = f"{of.name}::{of.name}"
    return "\n".join(
        [
            f"# find_package({of.name} REQUIRED PATHS <this folder>), then target_link_libraries(program {target}).",
            *(_FIND_OPENMP.replace("NAME", of.name).splitlines() if use_openmp else []),
            f"if(NOT TARGET {target})",
            f"  add_library({target} INTERFACE IMPORTED)",
            f"  set_target_properties({target} PROPERTIES",
            '    INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_CURRENT_LIST_DIR}"',
            f'    INTERFACE_LINK_LIBRARIES "{links}")',
            "endif()",
            "",
        ]
    )


def pkgconfig(of: Interface, files: Files, use_openmp: bool, version: str) -> str:
    """For `pkg-config --cflags --libs NAME`."""
    return "\n".join(
        [
            f"Name: {of.name}",
            f"Description: {of.name}({', '.join(argument.name for argument in of.arguments)}), compiled by pbkern",
            f"Version: {version}",
            "Cflags: -I${pcfiledir}",
            f"Libs: ${{pcfiledir}}/{linked(files)}{' -lgomp' if use_openmp else ''}",
            "",
        ]
    )


def cpp(of: Interface, files: Files) -> str:
    """pbkern::NAME on spans, whose sizes the compiler checks; those that the caller says are checked by each call."""
    guard = f"{of.name.upper()}_HPP"
    parameters = [
        f"std::span<{'const ' if argument in of.inputs else ''}{_cpp_type(argument)}{_extent(argument)}> {argument.name}"
        for argument in of.arguments
    ]
    parameters += [f"std::int64_t {symbol.name}" for symbol in of.sizes.symbols]
    passed = [_cpp_passed(argument, argument in of.inputs) for argument in of.arguments]
    passed += [symbol.name for symbol in of.sizes.symbols]
    if of.user_memory:
        parameters.append(f"std::span<std::int8_t> {POOL}")
        passed += [f"{POOL}.data()", "nullptr"]
    upper = of.name.upper()
    test = [
        f"  if (static_cast<std::int64_t>({argument.name}.size()) != {_product(argument)}) return {upper}_UNSUITABLE_SIZE;"
        for argument in of.arguments
        if argument.dimensions
    ]
    if of.user_memory:
        test += [f"  if ({POOL}.size() < {upper}_MEMORY_BYTES) return {upper}_OUT_OF_MEMORY;"]
    uses_complex = any(argument.type.dtype.kind == "c" for argument in of.arguments)
    return "\n".join(
        [
            f"#ifndef {guard}",
            f"#define {guard}",
            "",
            *(["#include <complex>"] if uses_complex else []),
            "#include <cstdint>",
            "#include <span>",
            "",
            f'#include "{files["header"]}"',
            "",
            "namespace pbkern {",
            "",
            f"/// The same as ::{of.name}_try, on spans of the right sizes.",
            f"[[nodiscard]] inline int {of.name}({', '.join(parameters)}) {{",
            *test,
            f"  return ::{of.name}_try({', '.join(passed)});",
            "}",
            "",
            "}  // namespace pbkern",
            "",
            f"#endif  // {guard}",
            "",
        ]
    )


def _extent(argument: Argument) -> str:
    """The extent of a span's type; none where the caller says it."""
    return "" if argument.dimensions else f", {_count(argument)}"


def _product(argument: Argument) -> str:
    """The number of elements for sizes that the caller says, as C++ writes it."""
    return " * ".join(f"({written(dimension)})" for dimension in argument.dimensions)


def _count(argument: Argument) -> int:
    """Elements of a span; complex ones count once."""
    return elements(argument.type) // (2 if argument.type.dtype.kind == "c" else 1)


def _cpp_type(argument: Argument) -> str:
    c_type = element_type(argument.type.dtype, argument.path).c
    if argument.type.dtype.kind == "c":
        return f"std::complex<{c_type}>"
    return f"std::{c_type}" if c_type.endswith("_t") else c_type


def _cpp_passed(argument: Argument, is_input: bool) -> str:
    if argument.type.dtype.kind != "c":
        return f"{argument.name}.data()"
    return (
        f"reinterpret_cast<{'const ' if is_input else ''}{element_type(argument.type.dtype, argument.path).c} "
        f"*>({argument.name}.data())"
    )


# --- the program that times a library
# -------------------------------------------------------------------------------

_BENCH = r"""/* Times NAME on random inputs or on .npy files, and prints a checksum (CRC-32) of each result.
 *
 *   cc -O2 BENCH LINKED FLAGS -o NAME_bench
 *   ./NAME_bench [CALLS [INPUT.npy ...]]
 */
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "HEADER"

static uint32_t state = 1;

static uint32_t draw(void) {
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  return state;
}

static void *array(size_t bytes) {
  char *memory = malloc(bytes + 64);
  if (!memory) exit(1);
  return memory + (64 - (size_t)memory % 64) % 64;
}

static void from_file(const char *path, void *to, size_t bytes) {
  unsigned char head[12];
  FILE *f = fopen(path, "rb");
  if (!f || fread(head, 1, 12, f) != 12 || memcmp(head, "\x93NUMPY", 6)) {
    fprintf(stderr, "%s is no .npy file\n", path);
    exit(2);
  }
  long start = head[6] == 1 ? 10 + head[8] + 256L * head[9] : 12 + head[8] + 256L * head[9] + 65536L * head[10];
  fseek(f, 0, SEEK_END);
  if (ftell(f) - start != (long)bytes) {
    fprintf(stderr, "%s holds %ld bytes, not %ld\n", path, ftell(f) - start, (long)bytes);
    exit(2);
  }
  fseek(f, start, SEEK_SET);
  if (fread(to, 1, bytes, f) != bytes) exit(2);
  fclose(f);
}

static uint32_t checksum(const void *of, size_t bytes) {
  const unsigned char *p = of;
  uint32_t crc = 0xFFFFFFFFu;
  for (size_t k = 0; k < bytes; k++) {
    crc ^= p[k];
    for (int b = 0; b < 8; b++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
  }
  return ~crc;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

int main(int count, char **words) {
  int calls = count > 1 ? atoi(words[1]) : 20;
  double best = 1e30;
  (void)draw;
  (void)from_file;
BODY
  for (int k = 0; k < calls || !k; k++) {
    double start = now();
    int code = NAME_try(PASSED);
    double taken = now() - start;
    if (code) {
      fprintf(stderr, "NAME_try returned %d\n", code);
      return 1;
    }
    if (taken < best) best = taken;
  }
  printf("NAME  %.3f ms at best of %d\n", best, calls > 0 ? calls : 1);
RESULTS
  return 0;
}
"""
# How one random element of each kind of type is made of draw().
_DRAWN: list[tuple[Callable[[str], bool], str]] = [
    (lambda dtype: dtype == "bool", "draw() >> 31"),
    (lambda dtype: dtype == "float16", "(uint16_t)(0x3800 | (draw() >> 22))"),
    (lambda dtype: dtype == "bfloat16", "(uint16_t)(0x3F00 | (draw() >> 25))"),
    (lambda dtype: dtype.startswith("float8"), "(uint8_t)(0x30 | (draw() >> 29))"),
    (lambda dtype: dtype.startswith(("float", "complex")), "({c})(draw() >> 8) / 8388608 - 1"),
    (lambda dtype: True, "({c})(draw() % 100)"),
]


def bench(of: Interface, files: Files, use_openmp: bool) -> str:
    """A C99 program for POSIX systems."""
    lines, results = [], []
    for k, argument in enumerate(of.arguments):
        c_type = element_type(argument.type.dtype, argument.path).c
        lines.append(f"  {c_type} *p{k} = array({max(argument.type.nbytes, 1)});")
        if k < len(of.inputs):
            drawn = next(text for test, text in _DRAWN if test(argument.type.dtype.name)).format(
                c=c_type
            )
            lines += [
                f"  for (size_t k = 0; k < {elements(argument.type)}; k++) p{k}[k] = {drawn};",
                f"  if (count > {k + 2}) from_file(words[{k + 2}], p{k}, {argument.type.nbytes});",
            ]
        else:
            results.append(
                f'  printf("{argument.name} %08x\\n", (unsigned)checksum(p{k}, {argument.type.nbytes}));'
            )
    if of.file:
        load = f'  int loaded = {of.name}_load("{files["weights"]}");'
        lines += [load, f"  if (loaded) puts({of.name}_message(loaded));"]
    passed = [f"p{k}" for k in range(len(of.arguments))]
    passed += [str(symbol.high) for symbol in of.sizes.symbols]
    if of.user_memory:
        lines.append(f"  int8_t *memory = array({max(of.memory_bytes, 1)});")
        passed += ["memory", "NULL"]
    words = {
        "BODY": "\n".join(lines),
        "RESULTS": "\n".join(results),
        "PASSED": ", ".join(passed),
        "HEADER": files["header"],
        "BENCH": files["bench"],
        "LINKED": linked(files),
        "FLAGS": "-lgomp" if use_openmp else "",
    }
    return re.sub(
        r"\b(BODY|RESULTS|PASSED|HEADER|BENCH|LINKED|FLAGS)\b|NAME(?!_|\w)|NAME(?=_try|_bench)",
        lambda match: words.get(match[0], of.name),
        _BENCH,
    )
