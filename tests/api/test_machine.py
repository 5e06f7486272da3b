"""What is known of the CPU: the texts of several processors, and this one."""

import platform

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
        kind = "aarch64" if "Features" in text else "x86_64"
        monkeypatch.setattr(platform, "machine", lambda: kind)
        monkeypatch.setattr(machine, "cpuinfo", lambda: text)
        monkeypatch.setattr(machine, "usable_cores", lambda: (2, "two"))
        return machine.detected_machine.__wrapped__()

    return detect


@pytest.mark.parametrize(
    ("text", "bits", "share"),
    [(ZEN5, 512, 1.0), (ZEN4, 512, 0.5), (ZEN3, 256, 0.5), (INTEL, 512, 1.0), ("", 128, 0.25)],
    ids=["zen5", "zen4", "zen3", "intel", "unknown"],
)
def test_peaks_follow_what_the_processor_executes(detected, text, bits, share):
    found = detected(text)
    assert found.vector_bits == bits
    assert found.clock_hz == DEFAULT_MACHINE.clock_hz
    for dtype, peak in DEFAULT_MACHINE.peak_flops.items():
        if dtype == "bfloat16" and text not in (ZEN5, ZEN4):  # converted to float32
            peak = DEFAULT_MACHINE.peak_flops["float32"]
        assert found.flops(dtype) == pytest.approx(share * peak)
    assert ("halves" in found.source) == (text == ZEN4)


@pytest.mark.parametrize(
    ("text", "registers"),
    [(ZEN5, 32), (ZEN3, 16), (INTEL, 32), ("", 16), ("Features : fp asimd\n", 28)],
)
def test_registers_are_the_processor_s(detected, text, registers):
    """Source: Intel's manual volume 1, 15.1; Arm's Architecture Reference Manual, A1.4, less four for operands."""
    found = detected(text)
    assert found.registers == registers
    assert (found.bf16_pairs, found.avx512, found.vnni) == (text == ZEN5, False, False)


def test_the_peak_of_this_machine_is_one_that_a_chain_of_multiply_adds_reaches():
    """Not above what is measured by more than the disturbance of a busy machine explains, and not half of it."""
    from benchmarks import peaks

    stated = pbkern.cpu.machine()
    measured = max(peaks.giga_operations("fma", stated.vector_bits, "f32") for _ in range(2))
    assert 0.4 < measured * 1e9 * stated.cores / stated.flops("float32") < 1.9


@pytest.mark.parametrize(("reported", "believed"), [("491520K", 64 << 20), ("16M", 16 << 20)])
def test_the_last_cache_is_bounded_by_usable_cores(
    detected, monkeypatch, tmp_path, reported, believed
):
    """A virtual machine of two cores reports the cache of its host."""
    (tmp_path / "index3").mkdir()
    for name, text in (("level", "3"), ("type", "Unified"), ("size", reported)):
        (tmp_path / "index3" / name).write_text(text)
    monkeypatch.setattr(machine, "CACHES", tmp_path)
    assert detected(ZEN5).l3_bytes == believed


GROUPS = {
    "systemd, a slice above the unit has the limit": ("0::/app.slice/job\n", {"v2/app.slice/cpu.max": "150000 100000"}, 2),
    "kubelet, version 1": ("4:memory:/x\n3:cpu,cpuacct:/pods/c1\n",
                           {"v1/pods/c1/cpu.cfs_quota_us": "250000", "v1/pods/c1/cpu.cfs_period_us": "100000"}, 3),
    "the nearest of several": ("0::/a/b\n", {"v2/a/cpu.max": "400000 100000", "v2/a/b/cpu.max": "200000 100000"}, 2),
    "a farther one": ("0::/a/b\n", {"v2/a/cpu.max": "100000 100000", "v2/a/b/cpu.max": "200000 100000"}, 1),
    "a container's own root": ("0::/\n", {"v2/cpu.max": "300000 100000"}, 3),
    "the host's path, of which a container sees the root alone": ("0::/../../pod\n", {"v2/cpu.max": "300000 100000"}, 3),
    "no limit": ("0::/a\n", {"v2/a/cpu.max": "max 100000"}, 8),
    "unlimited, version 1": ("3:cpu:/\n", {"v1/cpu.cfs_quota_us": "-1", "v1/cpu.cfs_period_us": "100000"}, 8),
    "less than one": ("0::/a\n", {"v2/a/cpu.max": "20000 100000"}, 1),
    "no such files": ("", {}, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_cores_are_those_of_the_control_groups(monkeypatch, tmp_path, name):
    groups, files, cores = GROUPS[name]
    (tmp_path / "self").write_text(groups)
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(machine, "PROCESS_CGROUPS", tmp_path / "self")
    monkeypatch.setattr(machine, "CGROUP_V2", (tmp_path / "v2",))
    monkeypatch.setattr(machine, "CGROUP_V1", tmp_path / "v1")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: set(range(8)))
    assert machine.usable_cores()[0] == cores
