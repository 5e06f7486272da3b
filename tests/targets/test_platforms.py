"""Computers that programs are compiled for, and what happens on others: they are imitated, by what Python says there."""

import os
import platform
import subprocess
import sys

import pytest

from pbkern.core.errors import TargetError
from pbkern.targets.cpu.machines import calibration, detect, devices
from pbkern.targets.host import processor
from pbkern.targets.host.objects import cache_key
from pbkern.targets.host.runtime import xla

# Python without what Linux alone has, then a first import, a first compilation and an interpreted kernel.
ELSEWHERE = """
import ctypes, mmap, os, platform, sys
import jax, jax.numpy as jnp
x = jnp.ones((8, 8)) @ jnp.ones((8, 8))
platform.system, platform.machine = lambda: "Windows", lambda: "AMD64"
for module, names in {
    mmap: "MAP_PRIVATE MADV_HUGEPAGE",
    os: "sched_getaffinity register_at_fork fork RTLD_NOW RTLD_DEEPBIND",
    sys: "getdlopenflags setdlopenflags",
}.items():
    for name in names.split():
        delattr(module, name)
opened = ctypes.CDLL.__init__
def without_the_process(self, name, *args, **options):
    if name is None:
        raise TypeError("bad argument type for built-in operation")
    opened(self, name, *args, **options)
ctypes.CDLL.__init__ = without_the_process

import pbkern
@pbkern.kernel(out_shape=jax.ShapeDtypeStruct((8, 8), "f4"))
def plus_one(x, o):
    o[...] = x[...] + 1
print(pbkern.interpret(plus_one.trace(x), x)[0][0, 0])
for function in (plus_one, pbkern.jit(lambda x: x + 1)):
    try:
        function(x)
    except pbkern.errors.TargetError as e:
        print(e)
"""


def test_elsewhere_kernels_are_interpreted_and_compilation_says_where_it_works():
    command = [sys.executable, "-c", ELSEWHERE]
    environment = os.environ | {"PBKERN_FALLBACK": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    interpreted, _, messages = done.stdout.partition("\n")
    assert interpreted == "9.0"
    assert messages.count("nothing is compiled for this computer") == 2
    assert "programs run on Linux on x86_64 and aarch64; this is Windows on AMD64" in messages


@pytest.mark.parametrize(
    ("system", "kind"), [("Darwin", "arm64"), ("Darwin", "x86_64"), ("Linux", "riscv64")]
)
def test_computers_without_a_back_end(monkeypatch, system, kind):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: kind)
    with pytest.raises(TargetError, match=f"this is {system} on {kind}"):
        xla.runtime_module_text()


NEOVERSE = """processor	: 0
BogoMIPS	: 50.00
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x3
CPU part	: 0xd0c
CPU revision	: 1
"""


# Functions that remember what they have read of this computer's processor.
REMEMBERED = (
    cache_key.environment,
    calibration._read,
    detect._machine,
    devices._runnable,
    devices.device_of,
    processor.may_use_tiles,
)


def forget_the_processor():
    for function in REMEMBERED:
        function.cache_clear()


@pytest.fixture
def on_arm(monkeypatch):
    """Imitates Linux on AArch64 whose /proc/cpuinfo is this text."""
    forget_the_processor()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")

    def imitated(text: str) -> None:
        for module in (detect, cache_key, devices):
            monkeypatch.setattr(module, "cpuinfo", lambda: text)

    imitated(NEOVERSE)
    yield imitated
    forget_the_processor()


def test_the_runtime_holds_no_word_of_another_processor(on_arm):
    text = xla.runtime_module_text()
    assert text.count('"isb"') == 2
    assert "pause" not in text
    assert "arith.constant 98 : i64" in text  # futex


def test_machine_of_aarch64(on_arm):
    neon = detect._machine.__wrapped__(None)
    assert (neon.vector_bits, neon.registers) == (128, 28)
    assert not neon.stores_past_caches
    assert not neon.asymmetric_minima
    assert not any([neon.avx512, neon.vnni, neon.bf16_pairs, neon.amx_bf16, neon.amx_int8])
    assert neon.source.startswith("0xd0c")


def test_an_emulator_that_shows_its_own_processor_is_not_believed(on_arm):
    on_arm("flags\t\t: fpu sse2 avx avx2 fma avx512f avx512dq avx512vl avx512_bf16\n")
    neon = detect._machine.__wrapped__(None)
    assert (neon.vector_bits, neon.registers, neon.avx512) == (128, 28, False)
    assert processor.cpu_flags(detect.cpuinfo()) == {"asimd"}


def test_code_belongs_to_the_models_of_all_cores(on_arm):
    """big.LITTLE: cores of several models in one processor."""
    texts = [NEOVERSE, NEOVERSE.replace("0xd0c", "0xd40"), NEOVERSE.replace(" atomics", "")]
    texts += [NEOVERSE + NEOVERSE.replace("0xd0c", "0xd05")]
    keys = set()
    for text in texts:
        on_arm(text)
        keys.add(cache_key.processor())
    on_arm(NEOVERSE + NEOVERSE)
    assert cache_key.processor() in keys
    assert len(keys) == 4


def test_native_libraries_of_aarch64_use_what_the_processor_has(on_arm):
    device = devices._native("linux")
    assert device.triple == "aarch64-unknown-linux-gnu"
    assert device.needs == ("lse", "fullfp16", "dotprod")
    assert device.is_here
    assert not devices.device_of("x86-64-v3").is_here
    on_arm(NEOVERSE.replace("asimddp", "").replace("atomics", ""))
    assert devices._native("linux").needs == ("fullfp16",)


def test_no_imitated_processor_is_remembered():
    """Later tests of this process plan for the processor at hand."""
    assert detect.detected_machine() == detect._machine.__wrapped__(calibration.stored())
