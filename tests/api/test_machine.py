"""What is known of the CPU: the texts of several processors, the table, calibrations, and this one."""

import dataclasses
import json
import os
import platform
import subprocess
import sys

import jax
import numpy as np
import pytest

import pbkern
from pbkern import config
from pbkern.core.errors import OptionError, TargetError
from pbkern.core.machine import DEFAULT_MACHINE
from pbkern.core.process import disk_cache
from pbkern.targets import get_target
from pbkern.targets.costs import caches
from pbkern.targets.cpu.machines import calibration, cores, detect, devices
from pbkern.targets.cpu.machines.calibration import Calibration
from pbkern.targets.cpu.machines.figures import figures


def cpuinfo(vendor, family, flags, model=None):
    number = "" if model is None else f"model\t\t: {model}\n"
    head = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\n"
    return f"{head}{number}model name\t: some CPU\nflags\t\t: {flags}\n"


WIDE = "fpu avx avx2 avx512f avx512dq avx512vl"
ZEN5 = cpuinfo("AuthenticAMD", 26, f"{WIDE} avx512_bf16 avx512_vnni")
ZEN4 = cpuinfo("AuthenticAMD", 25, f"{WIDE} avx512_bf16 avx512_vnni")
ZEN3 = cpuinfo("AuthenticAMD", 25, "fpu avx avx2")
INTEL = cpuinfo("GenuineIntel", 6, "fpu avx avx2 avx512f")
# A virtual machine on a Granite Rapids that shows the number of a Rocket Lake, 167.
DISGUISED = cpuinfo("GenuineIntel", 6, f"{WIDE} gfni avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_int8", 167)  # fmt: skip


@pytest.fixture
def detected(monkeypatch):
    """The machine of a /proc/cpuinfo of this text."""

    def machine_of(text, calibrated=None):
        kind = "aarch64" if "Features" in text else "x86_64"
        monkeypatch.setattr(platform, "machine", lambda: kind)
        monkeypatch.setattr(detect, "cpuinfo", lambda: text)
        monkeypatch.setattr(detect, "usable_cores", lambda: (2, "two"))
        monkeypatch.setattr(detect, "may_use_tiles", lambda: True)
        return detect._machine.__wrapped__(calibrated)

    return machine_of


@pytest.mark.parametrize(
    ("text", "bits", "share"),
    [(ZEN5, 512, 1.0), (ZEN4, 512, 0.5), (ZEN3, 256, 0.5), (INTEL, 512, 1.0), ("", 128, 0.25)],
    ids=["zen5", "zen4", "zen3", "intel", "unknown"],
)
def test_peaks_follow_what_the_processor_executes(detected, text, bits, share):
    """Zen 4 executes vectors of 512 bits in halves. Of narrow types, pairs and words of four count."""
    found = detected(text)
    assert found.vector_bits == bits
    assert found.clock_hz == DEFAULT_MACHINE.clock_hz
    single = share * DEFAULT_MACHINE.flops("float32")
    narrow = text in (ZEN5, ZEN4)
    bytes_at_once = 4 if narrow else 2 if text == ZEN3 else 1
    assert found.flops("float32") == found.flops("float16") == pytest.approx(single)
    assert found.flops("float64") == pytest.approx(single / 2, rel=0.01)
    assert found.flops("bfloat16") == pytest.approx(single * (2 if narrow else 1))
    assert found.flops("int8") == found.flops("uint8") == pytest.approx(single * bytes_at_once)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (ZEN5, "znver5"),
        (ZEN4, "znver4"),
        (ZEN3, "znver3"),
        (cpuinfo("AuthenticAMD", 23, "avx2", 0x31), "znver2"),
        (cpuinfo("AuthenticAMD", 23, "avx2", 1), "znver1"),
        (cpuinfo("AuthenticAMD", 25, "avx2", 1), "znver3"),
        (cpuinfo("GenuineIntel", 6, "avx2", 0x5E), "skylake"),
        (cpuinfo("GenuineIntel", 6, "avx2 gfni avx_vnni", 0xB7), "raptorlake"),
        (cpuinfo("GenuineIntel", 6, f"{WIDE} avx512_vnni", 0x55), "cascadelake"),
        (cpuinfo("GenuineIntel", 6, f"{WIDE} gfni avx512_vnni", 0xA7), "rocketlake"),
        (DISGUISED, "sapphirerapids"),
        (cpuinfo("GenuineIntel", 6, f"{WIDE} avx512_bf16 amx_tile amx_bf16 amx_int8", 0xAD), "graniterapids"),
        (cpuinfo("AuthenticAMD", 25, "avx2", 0x11), "znver3"),  # a Zen 4 without AVX-512
        (cpuinfo("Someone", 1, "avx2", 1), "x86-64-v3"),
        (cpuinfo("Someone", 1, WIDE, 1), "x86-64-v4"),
        ("", "unknown"),
    ],
)  # fmt: skip
def test_flags_overrule_numbers(detected, text, name):
    found = detected(text)
    assert f", as {name};" in found.source
    if text == DISGUISED:
        assert found.tile_flops["int8"] == 2 * 2.5e12
        assert not found.bf16_pairs


def test_prices_of_one_instruction_are_the_core_s(detected):
    """In additions: Zen 4 and Zen 5 divide in about as many cycles, but Zen 5 begins two additions in each."""
    prices = {text: detected(text).op_cycles for text in (ZEN3, ZEN4, ZEN5, INTEL)}
    assert [prices[text]["div"] for text in prices] == [6, 6, 10, 20]
    assert [prices[text]["sqrt"] for text in prices] == [10, 10, 10, 24]
    assert {prices[text]["exp"] for text in prices} == {8}
    target = dataclasses.replace(detected(INTEL))
    costs = get_target("cpu").costs().of(target)
    assert costs.cycles("div") == 20


def test_every_figure_has_a_source():
    machines = [devices.device_of(name).machine for name in devices.names()]
    for machine in [*machines, detect.detected_machine()]:
        for row in figures(machine):
            assert row.source, (machine.name, row)
            may_be_none = row.unit == "0 or 1" or row.name.endswith("0: none")
            assert row.value > 0 or may_be_none, (machine.name, row)


def test_bandwidths_are_classes():
    for row in (*cores.X86.values(), *cores.AARCH64.values(), cores.UNKNOWN):
        assert row.l3_class in cores.L3_CLASSES
        assert row.dram_class in cores.DRAM_CLASSES
        assert row.kind.l2_class in (100, 200)
    server = devices.device_of("graniterapids").machine
    assert server.dram_bandwidth == cores.SERVER_MEMORY * 1e9  # not 32 times 20
    assert server.l3_bandwidth == 32 * 25e9


def test_ways_of_the_first_cache_decide_which_rows_fit():
    """Rows of a power of two apart share a set: as many stay as it has ways. Zen 5 and Golden Cove have twelve."""
    eight, twelve = (devices.device_of(name).machine for name in ("znver4", "znver5"))
    assert caches.fit(8, 4096, eight)
    assert not caches.fit(9, 4096, eight)
    assert caches.fit(12, 4096, twelve)
    assert not caches.fit(13, 4096, twelve)
    assert caches.fit(16, 2048, eight)  # two sets
    assert caches.fit(1000, 0, eight)


@pytest.mark.parametrize(
    ("text", "registers"),
    [(ZEN5, 32), (ZEN3, 16), (INTEL, 32), ("", 16), ("Features : fp asimd\n", 28)],
)
def test_registers_are_the_processor_s(detected, text, registers):
    """Source: Intel's manual volume 1, 15.1; Arm's Architecture Reference Manual, A1.4, less four for operands."""
    found = detected(text)
    assert found.registers == registers
    assert (found.bf16_pairs, found.avx512, found.vnni) == (
        text == ZEN5,
        text == ZEN5,
        text == ZEN5,
    )


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
    monkeypatch.setattr(detect, "CACHES", tmp_path)
    assert detected(ZEN5).l3_bytes == believed


def test_ways_are_those_that_the_system_reports(detected, monkeypatch, tmp_path):
    (tmp_path / "index0").mkdir()
    for name, text in (
        ("level", "1"),
        ("type", "Data"),
        ("size", "64K"),
        ("ways_of_associativity", "16"),
    ):
        (tmp_path / "index0" / name).write_text(text)
    monkeypatch.setattr(detect, "CACHES", tmp_path)
    found = detected(ZEN3)
    assert (found.l1_bytes, found.l1_ways, found.vectors().l1_ways) == (64 << 10, 16, 16)
    assert found.sources["l1_ways"] == str(tmp_path)
    (tmp_path / "index0" / "ways_of_associativity").write_text("0")  # as virtual machines have it
    assert detected(ZEN3).l1_ways == 8


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
    monkeypatch.setattr(detect, "PROCESS_CGROUPS", tmp_path / "self")
    monkeypatch.setattr(detect, "CGROUP_V2", (tmp_path / "v2",))
    monkeypatch.setattr(detect, "CGROUP_V1", tmp_path / "v1")
    monkeypatch.setattr(detect.os, "sched_getaffinity", lambda process: set(range(8)))
    assert detect.usable_cores()[0] == cores


# --- calibration


CALIBRATED = Calibration(50, 20, 47.5, 21.25)


@pytest.fixture
def store(tmp_path):
    with config.override(cache_dir=tmp_path / "kept", cache=True):
        yield disk_cache.current()
    calibration._read.cache_clear()


def test_a_calibration_is_kept_by_processor_and_forgotten(store, monkeypatch):
    usual = detect.detected_machine()
    calibration.keep(CALIBRATED)
    found = detect.detected_machine()
    assert found.l3_bandwidth == 50e9 * found.cores
    assert found.dram_bandwidth == 20e9 * found.cores
    assert found.sources["dram_bandwidth"] == "class by calibration, 21 GB/s per core measured"
    calibration._read.cache_clear()  # as in a later process
    assert detect.detected_machine() == found
    monkeypatch.setattr(calibration, "processor", lambda: "another one")
    calibration._read.cache_clear()
    assert detect.detected_machine() == usual
    monkeypatch.undo()
    calibration.forget()
    assert detect.detected_machine() == usual


def test_a_calibration_changes_the_keys_of_plans_and_is_explained(store):
    from pbkern.api import plan_store

    f, x = pbkern.jit(lambda x: (x + 1).sum()), np.ones((8, 16), np.float32)

    def key():
        closed = jax.make_jaxpr(lambda x: x + 1)(x)
        return plan_store.key(closed, "f", pbkern.CompileOptions(), (), (False,))

    before = key()
    assert "machine:" not in str(f.explain(x))
    calibration.keep(CALIBRATED)
    after = key()
    assert before != after
    f.clear_cache()
    report = f.explain(x)
    assert "machine: calibrated: L3 50 and memory 20 GB/s per core" in str(report)
    assert report.as_dict()["machine_note"] == report.machine_note
    calibration.keep(dataclasses.replace(CALIBRATED, l3_measured=24.0))
    assert key() == after  # the class is the same
    calibration.forget()
    assert key() == before


def test_calibrations_that_cannot_be_kept_are_refused():
    with config.override(cache=False), pytest.raises(OptionError, match="cannot be kept") as e:
        calibration.keep(CALIBRATED)
    assert "PBKERN_CACHE" in e.value.hint


def test_measurements_must_repeat():
    rounds = iter([10.0, 20.0, 40.0, 41.0])
    assert calibration.repeated("L3", lambda: next(rounds)) == 41.0
    rounds = iter(float(2**k) for k in range(20))
    with pytest.raises(TargetError, match="bandwidth of the memory cannot be measured") as e:
        calibration.repeated("memory", lambda: next(rounds))
    assert "1.0, 2.0, 4.0, 8.0, 16.0, 32.0 GB/s" in e.value.why


@pytest.mark.parametrize(
    ("rate", "l3", "dram"),
    [(27, 25, 20), (71, 100, 40), (70, 50, 40), (12, 25, 10), (1000, 100, 40)],
)
def test_figures_are_rounded_to_the_nearest_class(rate, l3, dram):
    assert calibration.nearest_class(rate, cores.L3_CLASSES) == l3
    assert calibration.nearest_class(rate, cores.DRAM_CLASSES) == dram


def test_this_computer_is_measured():
    """The loop reads what it is told to: its rates are those of caches and memory, in their order."""
    machine = detect.detected_machine()
    read = calibration._reader(machine.vector_bits)
    near = max(calibration.round_rate(read, [np.ones(1 << 15)], 1 << 18) for _ in range(3))
    far = calibration.round_rate(read, [np.ones(1 << 24)], 1 << 27)
    assert 1 < far < near < 1000


def test_machine_and_calibrate_are_commands(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PBKERN_")}
    environment |= {"PBKERN_CACHE_DIR": str(tmp_path)}

    def run(*words, **variables):
        command = [sys.executable, "-m", "pbkern", *words]
        return subprocess.run(command, env=environment | variables, capture_output=True, text=True)

    described = json.loads(run("machine", "--json").stdout)
    assert {"cores", "memory, all cores"} <= {row["name"] for row in described["figures"]}
    assert not described["note"]
    done = run("calibrate")
    if "cannot be measured" not in done.stderr:  # the computer may have other things to do
        assert done.stdout.startswith("calibrated: L3 ")
        assert "class by calibration" in run("machine").stdout
        assert run("calibrate", "--forget").stdout.startswith("not calibrated")
    assert "class by kind" in run("machine").stdout
    refused = run("machine", PBKERN_MACHINE="znver9")
    assert refused.returncode == 2
    assert "did you mean `znver5`?" in refused.stderr
