"""The commands for a machine with a GPU, as far as they run without one: with the simulator's driver in the place of CUDA's."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

import benchmarks.gpu
import pbkern

ROOT = pathlib.Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
gpu_check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_check)


def test_without_a_device_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "device", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 2
    assert "there is no CUDA device that jax finds" in capsys.readouterr().err


def test_rows_of_the_table_of_bandwidths(capsys):
    with pbkern.config.override(gpu_driver="simulator"):
        assert benchmarks.gpu.on_device(["softmax", "cross_entropy"], full=False, calls=1) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [r.split(" | ")[0] for r in rows] == [
        "| workload",
        "| ---",
        "| softmax",
        "| cross_entropy",
    ]


def test_wrong_results_are_counted(monkeypatch, capsys):
    monkeypatch.setattr(benchmarks.gpu, "error_of", lambda w, device: float("nan"))
    with pbkern.config.override(gpu_driver="simulator"):
        assert benchmarks.gpu.on_device(["softmax"], full=False, calls=1) == 1
    assert "WRONG" in capsys.readouterr().out


def test_the_document_has_all_parts_and_failures_count(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "device", lambda: "NVIDIA Test")
    for name, found in (
        ("conformance", (True, "9 passed")),
        ("sanitizer", (False, "racecheck found errors")),
        ("bandwidth", (True, "| softmax |")),
    ):
        monkeypatch.setattr(gpu_check, name, lambda *_, found=found: found)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "gpu.md")])
    assert gpu_check.main() == 1
    text = (tmp_path / "gpu.md").read_text()
    assert "Measured on NVIDIA Test" in text
    assert "## compute-sanitizer: FAILED" in text
    assert "9 passed" in text


@pytest.mark.slow
def test_conformance_runs_through_the_driver():
    environment = os.environ | {"TESTS_ON_DEVICE": "1", "PBKERN_GPU_DRIVER": "simulator"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:xdist",
        "-m",
        "slow or not slow",
        "tests/nvgpu/test_conformance.py",
        "-k",
        "integer_division or edges",
    ]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
