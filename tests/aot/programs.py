"""Functions that tests make libraries of, and C programs that call them."""

import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pbkern
from pbkern.aot.loaded import dtype_of

RNG = np.random.default_rng(0)


def unsharp(img):
    taps = jnp.array([1, 4, 6, 4, 1], jnp.float32) / 16
    down = sum(img[i : img.shape[0] - 4 + i] * taps[i] for i in range(5))
    blurred = sum(down[:, i : down.shape[1] - 4 + i] * taps[i] for i in range(5))
    center = img[2:-2, 2:-2]
    return jnp.where(jnp.abs(center - blurred) < 0.001, center, center * 3 - blurred * 2)


def attention(q, k, v):
    scores = jnp.einsum("hqd,hkd->hqk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores), v)


def softmax(x):
    return jax.nn.softmax(x)


def conv_bias_relu(x, w, b):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y + b)


def layer_norm(x, scale, bias):
    centered = x - x.mean(-1, keepdims=True)
    return centered * lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def descent(x, d):
    def step(_, w):
        return w - 0.1 / x.shape[0] * (x.T @ (x @ w - d))

    return lax.fori_loop(0, 20, step, jnp.zeros(x.shape[1]))


def mlp_gradient(params, x, y):
    def loss(params):
        hidden = jax.nn.gelu(x @ params["w1"] + params["b1"])
        return ((hidden @ params["w2"] - y) ** 2).mean()

    return jax.grad(loss)(params)


@pbkern.kernel(
    grid=(4, 3, 4),
    in_specs=[
        pbkern.BlockSpec((64, 32), lambda i, j, k: (i, k)),
        pbkern.BlockSpec((32, 64), lambda i, j, k: (k, j)),
    ],
    out_specs=pbkern.BlockSpec((64, 64), lambda i, j, k: (i, j)),
    out_shape=jax.ShapeDtypeStruct((200, 150), jnp.float32),
    in_types=[
        jax.ShapeDtypeStruct((200, 100), jnp.float32),
        jax.ShapeDtypeStruct((100, 150), jnp.float32),
    ],
    scratch_shapes=[pbkern.Scratch((64, 64), jnp.float32)],
    compiler_params=pbkern.cpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary")
    ),
)
def matmul_kernel(a, b, out, total):
    @pbkern.when(pbkern.program_id(2) == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    inside = pbkern.in_bounds(a, 1)
    total[...] += jnp.where(inside, a[...], 0) @ jnp.where(inside[:, None], b[...], 0)

    @pbkern.when(pbkern.program_id(2) == pbkern.num_programs(2) - 1)
    def _():
        out[...] = total[...]


def numbers(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def _params():
    return {"w1": numbers(64, 200), "b1": numbers(200), "w2": numbers(200, 10)}


def cumulative(x):
    return jnp.cumsum(x, axis=1), jnp.argmax(x, axis=0)


def sort_rows(x):
    return jnp.sort(x, axis=-1)


def matmul_bf16(a, b):
    return (a @ b).astype(jnp.float32)


def integers(x, y):
    return x // y, x % y, (x << 2) ^ y, jnp.clip(x, -5, 5).astype(jnp.int8)


# name -> (function, arguments)
CASES = {
    "unsharp": (unsharp, (numbers(270, 333, 3),)),
    "attention": (attention, tuple(numbers(4, 200, 64) for _ in range(3))),
    "softmax": (softmax, (numbers(300, 1000),)),
    "conv_bias_relu": (
        conv_bias_relu,
        (numbers(2, 28, 28, 32), numbers(3, 3, 32, 64), numbers(64)),
    ),
    "layer_norm": (layer_norm, (numbers(333, 500), numbers(500), numbers(500))),
    "descent": (descent, (numbers(2000, 50), numbers(2000))),
    "mlp_gradient": (mlp_gradient, (_params(), numbers(300, 64), numbers(300, 10))),
    "cumulative": (cumulative, (numbers(50, 77),)),
    "sorted": (sort_rows, (numbers(20, 300),)),
    "matmul_bf16": (
        matmul_bf16,
        (numbers(64, 96).astype(jnp.bfloat16), numbers(96, 80).astype(jnp.bfloat16)),
    ),
    "integers": (
        integers,
        (RNG.integers(-1000, 1000, (30, 41), np.int32), RNG.integers(1, 50, (30, 41), np.int32)),
    ),
    "matmul_kernel": (matmul_kernel, (numbers(200, 100), numbers(100, 150))),
}


def library(name: str, folder: pathlib.Path, emit=("obj", "header", "shared"), **options):
    """(library, arguments as flat arrays, results just in time as flat arrays) of a case."""
    fn, args = CASES[name]
    made = pbkern.polyblocks_aot_jax(
        compile_options={"aot_name": name, **options}, output=folder, emit=emit
    )(fn)(*args)
    return made, jax.tree.leaves(args), expected(name)


def expected(name: str) -> list:
    """Results just in time."""
    fn, args = CASES[name]
    jitted = fn if fn is matmul_kernel else pbkern.jit(fn)
    return [np.asarray(x) for x in jax.tree.leaves(jitted(*args))]


def compile_c(
    source: str, folder: pathlib.Path, *extra, compiler=("gcc", "-std=c99"), name="program"
) -> pathlib.Path:
    """A C program that was compiled without a warning."""
    suffix = ".cpp" if "++" in compiler[0] else ".c"
    path, program = folder / f"{name}{suffix}", folder / name
    path.write_text(source)
    command = [
        *compiler,
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pedantic",
        f"-I{folder}",
        path,
        *extra,
        "-o",
        program,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


FILES = """
#include <stdio.h>
#include <stdlib.h>
#include "{name}.h"
static void *array(const char *path, size_t bytes, int at) {{
  char *memory = malloc(bytes + 128);
  memory += (64 - (size_t)memory % 64) % 64 + at;
  FILE *f = path ? fopen(path, "rb") : NULL;
  if (f && fread(memory, 1, bytes, f) != bytes) exit(9);
  if (f) fclose(f);
  return memory;
}}
"""


SAVE = """
static void save(const char *path, const void *memory, size_t bytes) {
  FILE *f = fopen(path, "wb");
  if (fwrite(memory, 1, bytes, f) != bytes) exit(9);
  fclose(f);
}
"""

GUARDED = """
#include <sys/mman.h>
static void *guarded(const char *path, size_t bytes) {
  size_t pages = (bytes + 4095) / 4096 * 4096;
  char *memory = mmap(NULL, pages + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mprotect(memory + pages, 4096, PROT_NONE)) exit(8);
  void *from = array(path, bytes, 0);
  memcpy(memory + pages - bytes, from, path ? bytes : 0);
  return memory + pages - bytes;
}
"""


def calling_program(made, at: int = 0, guarded: bool = False) -> str:
    """C that reads the inputs from files, calls the library and writes the results.

    at: bytes from a cache line's start; guarded: arrays and memory end where a page begins that cannot be touched.
    """
    head = FILES.format(name=made.name) + SAVE
    if guarded:
        head = "#define _GNU_SOURCE\n#include <string.h>\n" + head + GUARDED
    lines = [head, "int main(void) {"]
    place = lambda path, size: (
        f"guarded({path}, {size})" if guarded else f"array({path}, {size}, {at})"
    )
    arguments = [*made.metadata["inputs"], *made.metadata["outputs"]]
    for k, a in enumerate(arguments):
        path = f'"{a["name"]}.bin"' if k < len(made.metadata["inputs"]) else "NULL"
        lines.append(f"  void *p{k} = {place(path, a['bytes'])};")
    passed = [f"p{k}" for k in range(len(arguments))]
    if made.metadata["user_device_memory"]:
        lines.append(f"  int8_t *pool = {place('NULL', f'{made.name.upper()}_MEMORY_BYTES')};")
        passed += ["pool", "NULL"]
    lines.append(f"  {made.name}({', '.join(passed)});")
    for k, a in list(enumerate(arguments))[len(made.metadata["inputs"]) :]:
        lines.append(f'  save("{a["name"]}.bin", p{k}, {a["bytes"]});')
    return "\n".join([*lines, "  return 0;", "}", ""])


def run_c(program, made, inputs, folder, environment=None, before=()) -> list:
    """Results of a program of `calling_program`."""
    for a, x in zip(made.metadata["inputs"], inputs):
        (folder / f"{a['name']}.bin").write_bytes(np.ascontiguousarray(x).tobytes())
    done = subprocess.run(
        [*before, program], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return [np.frombuffer((folder / f"{a['name']}.bin").read_bytes(), dtype_of(a["dtype"])).reshape(a["shape"])
            for a in made.metadata["outputs"]]  # fmt: skip
