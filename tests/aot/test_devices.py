"""Libraries for other processors: what they hold, and what they compute under qemu."""

import importlib.util
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import pbkern
from pbkern.core.errors import OptionError
from pbkern.core.options import CompileOptions
from pbkern.targets.cpu.backend import CpuBackend
from pbkern.targets.cpu.machines import devices
from pbkern.targets.cpu.machines.machine import NEON_REGISTERS, Vectors

from . import programs

QEMU_X86, QEMU_ARM = shutil.which("qemu-x86_64-static"), shutil.which("qemu-aarch64-static")
has_zig = importlib.util.find_spec("ziglang") is not None
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
needs_qemu_x86 = pytest.mark.skipif(QEMU_X86 is None, reason="there is no qemu-x86_64-static")
needs_arm = pytest.mark.skipif(
    QEMU_ARM is None or not has_zig, reason="there is no qemu-aarch64-static or no ziglang"
)
# qemu has no AVX-512.
WITHOUT_AVX512 = (QEMU_X86, "-cpu", "max")


def close(found, expected) -> None:
    """Other processors have other schedules: sums are added up in another order."""
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * max(float(np.abs(b).max()), 1.0))


def test_every_device_is_described():
    for name in devices.names():
        d = devices.device_of(name)
        assert d.machine.source
        assert d.machine.cores > 0
        assert d.machine.vector_bits in (128, 256, 512)
        assert d.machine.registers == {128: NEON_REGISTERS, 256: 16, 512: 32}[d.machine.vector_bits]
        assert d.system == ("macos" if name.startswith("apple") else "linux")
        assert d.is_here == d.is_x86
    assert devices.device_of("neoverse-n1/macos").triple.startswith("arm64-apple")
    assert not devices.device_of("haswell").machine.avx512
    assert devices.device_of("znver4").machine.bf16_pairs


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x86-64-v2", "no libraries are made for `x86-64-v2`"),
        ("znver9", "did you mean `znver5`?"),
        ("x86-64-v3/windows", "libraries are not made for `windows`"),
        ("x86-64-v3,neoverse-n1", "one kind of processor and one system"),
        ("x86-64-v3,haswell", "need the same instruction sets"),
    ],
)
def test_devices_that_there_are_not(name, message):
    with pytest.raises(OptionError) as e:
        devices.devices_of(name)
    assert message in str(e.value)


def test_a_processor_without_multiply_adds_has_no_native_libraries(monkeypatch):
    monkeypatch.setattr(devices, "cpuinfo", lambda: "flags : fpu sse2 avx\n")
    with pytest.raises(OptionError, match="this computer's processor") as e:
        devices._native("linux")
    assert "it lacks avx2, fma" in e.value.why
    assert "x86-64-v3" in e.value.hint


def test_a_part_of_avx512_is_not_used_in_native_libraries(monkeypatch):
    flags = "avx2 fma f16c bmi1 bmi2 abm movbe avx512f avx512cd"
    monkeypatch.setattr(devices, "cpuinfo", lambda: f"flags : {flags}\n")
    found = devices._native("linux")
    assert found.cpu == "x86-64-v3"
    assert found.machine.vector_bits == 256
    assert not found.machine.avx512
    assert not any(f.startswith("avx512") for f in found.needs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [n for n in programs.CASES if n != "matmul_bf16"])
def test_avx2_computes_the_same(name, tmp_path):
    made, inputs, expected = programs.library(name, tmp_path, ["shared"], device="x86-64-v3")
    found = made.load()(*inputs)
    close(found if isinstance(found, tuple) else [found], expected)


@pytest.mark.parametrize(
    ("device", "vectors"),
    [
        ("x86-64-v3", Vectors(256, 16, 1, 2, 32 << 10, 8)),
        ("x86-64-v4", Vectors(512, 32, 1, 2, 32 << 10, 8)),
        ("znver5", Vectors(512, 32, 0.5, 1, 48 << 10, 12)),
        ("apple-m1", Vectors(128, 28, 0.25, 1, 128 << 10, 8)),
    ],
)
def test_passes_know_the_vectors_of_a_core(device, vectors):
    @pbkern.kernel(grid=(1,), out_shape=jax.ShapeDtypeStruct((8,), "f4"))
    def kernel(x, o):
        o[...] = x[...] + 1

    backend = CpuBackend(devices.device_of(device).machine)
    options = backend.build_options(kernel.trace(np.zeros(8, "f4")), CompileOptions())
    assert options.vectors == options.policy.vectors == vectors


def test_sixteen_registers_are_enough_for_avx2(tmp_path):
    """The innermost loop of a matrix product spills nothing."""
    x = np.zeros((256, 256), np.float32)
    options = {"aot_name": "product", "device": "x86-64-v3"}
    made = pbkern.polyblocks_aot_jax(compile_options=options, output=tmp_path, emit=["asm"])(
        lambda a, b: a @ b
    )(x, x)
    text = made.paths["asm"].read_text()
    assert "%zmm" not in text
    assert "%ymm16" not in text
    multiply = [line for line in text.splitlines() if "vfmadd" in line]
    assert len(multiply) >= 12
    assert sum("(%rsp)" in line for line in multiply) == 0


@needs_gcc
@needs_qemu_x86
def test_a_library_for_two_processors_takes_the_half_that_suits(tmp_path):
    made, inputs, expected = programs.library("attention", tmp_path, ["obj", "header"], device="x86-64-v3,x86-64-v4",
                                               num_threads=2)  # fmt: skip
    assert made.metadata["devices"] == ["x86-64-v4", "x86-64-v3"]
    program = programs.compile_c(
        programs.calling_program(made), tmp_path, made.paths["obj"], "-lgomp", "-static"
    )
    close(programs.run_c(program, made, inputs, tmp_path, before=WITHOUT_AVX512), expected)
    close(programs.run_c(program, made, inputs, tmp_path), expected)


@needs_gcc
@needs_qemu_x86
def test_a_library_says_what_the_processor_lacks(tmp_path):
    made, inputs, _ = programs.library(
        "softmax", tmp_path, ["obj", "header"], device="x86-64-v4", openmp=False
    )
    program = programs.compile_c(
        programs.calling_program(made), tmp_path, made.paths["obj"], "-static"
    )
    for a, x in zip(made.metadata["inputs"], inputs):
        (tmp_path / f"{a['name']}.bin").write_bytes(x.tobytes())
    done = subprocess.run(
        [*WITHOUT_AVX512, program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    lacking = "avx512f avx512bw avx512cd avx512dq avx512vl"
    assert done.stderr.startswith(f"softmax: made for x86-64-v4; this processor lacks {lacking}\n")


# A program for AArch64 Linux that needs no C library, which zig would take minutes to build: what the library asks for is here.
# System calls: include/uapi/asm-generic/unistd.h.
FREESTANDING = """
#include "{name}.h"
static long call(long number, long a, long b, long c, long d) {{
  register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
  register long x3 __asm__("x3") = d;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
  return x0;
}}
long write(int file, const void *text, unsigned long size) {{ return call(64, file, (long)text, (long)size, 0); }}
void abort(void) {{ call(94, 134, 0, 0, 0); for (;;) {{ }} }}
unsigned long getauxval(unsigned long kind) {{ return kind == 16 ? ~0ul : 0; }}
void *memcpy(void *to, const void *from, unsigned long size) {{
  for (unsigned long k = 0; k < size; k++) ((volatile char *)to)[k] = ((const char *)from)[k];
  return to;
}}
void *memset(void *to, int value, unsigned long size) {{
  for (unsigned long k = 0; k < size; k++) ((volatile char *)to)[k] = (char)value;
  return to;
}}
static void transfer(const char *path, void *memory, long size, int writes) {{
  long file = call(56, -100, (long)path, writes ? 01101 : 0, 0644);
  for (long done = 0, part; done < size; done += part)
    if ((part = call(writes ? 64 : 63, file, (long)memory + done, size - done, 0)) <= 0) call(94, 9, 0, 0, 0);
}}
{arrays}
void _start(void) {{
{body}
  call(94, 0, 0, 0, 0);
}}
"""


def freestanding_program(made) -> str:
    arguments = [*made.metadata["inputs"], *made.metadata["outputs"]]
    inputs = len(made.metadata["inputs"])
    arrays = [f"static _Alignas(64) char p{k}[{a['bytes']}];" for k, a in enumerate(arguments)]
    arrays.append(f"static _Alignas(64) char pool[{made.name.upper()}_MEMORY_BYTES + 1];")
    moves = [
        f'  transfer("{a["name"]}.bin", p{k}, {a["bytes"]}, {int(k >= inputs)});'
        for k, a in enumerate(arguments)
    ]
    passed = ", ".join([*(f"(void *)p{k}" for k in range(len(arguments))), "(void *)pool", "0"])
    body = [
        *moves[:inputs],
        f"  if ({made.name}_try({passed})) call(94, 7, 0, 0, 0);",
        *moves[inputs:],
    ]
    return FREESTANDING.format(name=made.name, arrays="\n".join(arrays), body="\n".join(body))


def linked_for_arm(source: str, made, folder):
    """A static program for AArch64 Linux."""
    (folder / "program.c").write_text(source)
    zig, program = [sys.executable, "-m", "ziglang"], folder / "program"
    target = [
        "-target",
        "aarch64-linux-none",
        "-O1",
        "-ffreestanding",
        "-fno-sanitize=all",
        "-fno-stack-protector",
    ]
    for command in (
        [*zig, "cc", *target, f"-I{folder}", "-c", folder / "program.c", "-o", folder / "main.o"],
        [
            *zig,
            "ld.lld",
            "-static",
            "-e",
            "_start",
            folder / "main.o",
            made.paths["obj"],
            "-o",
            program,
        ],
    ):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return program


ARM_CASES = ["unsharp", "attention", "softmax", "conv_bias_relu", "layer_norm", "descent", "mlp_gradient", "matmul_kernel",
             "cumulative", "sorted", "matmul_bf16", "integers"]  # fmt: skip


@needs_arm
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ARM_CASES)
def test_aarch64_computes_the_same(name, tmp_path):
    made, inputs, expected = programs.library(name, tmp_path, ["obj", "header"], device="neoverse-n1", openmp=False,
                                               user_device_memory=True)  # fmt: skip
    program = linked_for_arm(freestanding_program(made), made, tmp_path)
    found = programs.run_c(program, made, inputs, tmp_path, before=(QEMU_ARM,))
    close([x.astype(np.float64) for x in found], [x.astype(np.float64) for x in expected])


MACHO = b"\xcf\xfa\xed\xfe"


@pytest.mark.parametrize(
    ("device", "end"),
    [("apple-m1", MACHO), ("neoverse-v2", b"\x7fELF"), ("x86-64-v3/macos", MACHO)],
)
def test_objects_for_other_systems(device, end, tmp_path):
    made, _, _ = programs.library("softmax", tmp_path, ["obj", "header", "asm"], device=device)
    assert made.paths["obj"].read_bytes().startswith(end)
    text = made.paths["asm"].read_text()
    assert not re.search(r"\bsfence|\bpause", text) or "x86" in device
    with pytest.raises(pbkern.errors.TargetError):
        made.load()


WORKLOADS = __import__("benchmarks.workloads", fromlist=["WORKLOADS"]).WORKLOADS


@pytest.mark.slow
@pytest.mark.parametrize("device", ["x86-64-v3", "x86-64-v4", "neoverse-n1", "apple-m1"])
def test_every_workload_of_the_benchmarks_compiles(device, tmp_path):
    import jax

    for w in WORKLOADS.values():
        types = [jax.ShapeDtypeStruct(s.shape, np.int32 if s.high else s.dtype) for s in w.full]
        options = {"aot_name": f"w_{w.name}", "device": device}
        made = pbkern.polyblocks_aot_jax(
            compile_options=options, output=tmp_path, emit=["obj", "header"]
        )(w.function)(*types)
        assert made.paths["obj"].stat().st_size > 1000


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_libraries_for_amx_multiply_tiles_and_ask_for_their_registers(dtype, tmp_path):
    """Every register that a function uses is configured: LLVM forgets some where it unrolls loops of tiles."""
    out = "float32" if dtype == "bfloat16" else "int32"
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((200, 130), (130, 77))]
    options = {"aot_name": f"tiles_{dtype}", "device": "sapphirerapids", "openmp": False}
    made = pbkern.polyblocks_aot_jax(compile_options=options, output=tmp_path, emit=["obj", "asm"])(
        lambda a, b: jax.numpy.matmul(a, b, preferred_element_type=out)
    )(*types)
    text = made.paths["asm"].read_text()
    assert "syscall" in text
    functions = [part for part in re.split(r"\n(?=[^.\s]\S*:\s)", text) if "ldtilecfg" in part]
    assert functions
    for function in functions:
        before, _, after = function.partition("ldtilecfg")
        used = {int(number) for number in re.findall(r"%tmm(\d)", after)}
        configured = len(re.findall(r"movw\s+\$64, ", before))
        assert used == set(range(len(used)))
        assert len(used) <= configured <= 8
        assert len(re.findall("tdp", after)) >= 4


def test_processors_of_other_systems_have_no_tiles():
    assert devices.device_of("sapphirerapids").machine.amx_bf16
    assert not devices.device_of("sapphirerapids/macos").machine.amx_bf16
    assert not devices.device_of("sapphirerapids").machine.bf16_pairs
