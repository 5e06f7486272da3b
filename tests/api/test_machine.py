"""What is known of the CPU: the texts of several processors, and this one."""

import pytest

import pbkern
from pbkern.core.machine import DEFAULT_MACHINE
from pbkern.targets.cpu import machine


def cpuinfo(vendor, family, flags, model="some CPU"):
    return f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel name\t: {model}\nflags\t\t: {flags}\n"


ZEN5 = cpuinfo("AuthenticAMD", 26, "fpu avx avx2 avx512f avx512_bf16 avx512vl")
ZEN4 = cpuinfo("AuthenticAMD", 25, "fpu avx avx2 avx512f avx512_bf16 avx512vl")
ZEN3 = cpuinfo("AuthenticAMD", 25, "fpu avx avx2")
INTEL = cpuinfo("GenuineIntel", 6, "fpu avx avx2 avx512f")


@pytest.fixture
def detected(monkeypatch):
    """detected_machine() for a /proc/cpuinfo of this text."""

    def detect(text):
        read = machine._read
        monkeypatch.setattr(machine, "_read", lambda path: text if path == machine.CPUINFO else read(path))
        monkeypatch.setattr(machine, "usable_cores", lambda: (2, "two"))
        return machine.detected_machine.__wrapped__()

    return detect


@pytest.mark.parametrize(
    "text, bits, share",
    [(ZEN5, 512, 1.0), (ZEN4, 512, 0.5), (ZEN3, 256, 0.5), (INTEL, 512, 1.0), ("", 128, 0.25)],
    ids=["zen5", "zen4", "zen3", "intel", "unknown"],
)
def test_peaks_follow_what_the_processor_executes(detected, text, bits, share):
    found = detected(text)
    assert found.vector_bits == bits and found.clock_hz == DEFAULT_MACHINE.clock_hz
    for dtype, peak in DEFAULT_MACHINE.peak_flops.items():
        assert found.flops(dtype) == pytest.approx(share * peak)
    assert ("halves" in found.source) == (text == ZEN4)


@pytest.mark.parametrize("text, registers", [(ZEN5, 32), (ZEN3, 16), (INTEL, 32), ("", 16), ("Features : fp asimd\n", 32)])
def test_registers_are_the_processor_s(detected, text, registers):
    """Source: Intel's manual volume 1, 15.1; Arm's Architecture Reference Manual, A1.4."""
    found = detected(text)
    assert found.registers == registers
    assert (found.bf16_pairs, found.avx512, found.vnni) == (text == ZEN5, False, False)


def test_the_peak_of_this_machine_is_one_that_a_chain_of_multiply_adds_reaches():
    """Not above what is measured by more than the disturbance of a busy machine explains, and not half of it."""
    from benchmarks import peaks

    stated = pbkern.cpu.machine()
    measured = max(peaks.giga_operations("fma", stated.vector_bits, "f32") for _ in range(2))
    assert 0.4 < measured * 1e9 * stated.cores / stated.flops("float32") < 1.9
