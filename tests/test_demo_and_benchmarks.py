"""The benchmark command checks, measures and reports; the demo's cases agree with jax.jit."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from skimage import io

from benchmarks import derived_kernels, products, report, run, survey
from benchmarks.report import KernelTime, Record, Row, Timing
from benchmarks.workloads import WORKLOADS
from pbkern.cli import demo, main


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_equals_numpy_in_float64(name):
    import pbkern

    w = WORKLOADS[name]
    assert run.check(w, pbkern.jit(w.function)) <= w.tolerance


@pytest.mark.parametrize("dtype", products.TOLERANCES)
@pytest.mark.parametrize("orientation", products.ORIENTATIONS)
def test_products_are_checked_and_timed_beside_jax(orientation, dtype):
    with jax.enable_x64(dtype == "float64"):
        result = products.measure(products.Case(9, 21, 13, orientation, dtype), seconds=0)
    assert result.error <= products.TOLERANCES[dtype]
    assert {"pbkern", "jax"} <= set(result.times)
    assert 0 < result.ratio < 1000
    assert len(products.cases([orientation])) == len(products.SHAPES)


def test_command_writes_what_it_measured(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert run.main(["rms_norm", "--quick", "--peers", "jax,numpy", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert set(row["timings"]) == {"pbkern", "jax", "numpy"}
    assert all(0 < t["minimum"] <= t["median"] for t in row["timings"].values())
    (kernel,) = row["each"]
    assert 0 < kernel["predicted"] < 1
    assert 0 < kernel["measured"] < 1
    assert "rms_norm" in capsys.readouterr().out


def record(name="m 1", minimum=1e-3, peer=2e-3, each=()):
    timings = {"pbkern": Timing(minimum, 2e-3, 5), "jax": Timing(peer, peer, 5)}
    row = Row("rms_norm", 1e-4, 0.0, 0.0, 0.1, 2, 0, timings, each)
    return Record({"cpu": f"AMD EPYC, as {name}", "cores": "2", "date": "2026-11-26"}, [row])


def test_a_page_has_every_kernel_with_both_times():
    each = (KernelTime("k0", 2e-6, 3e-6), KernelTime("k1", 1e-3, 5e-4))
    text = report.page(record(each=each))
    assert "| rms_norm | 0.10 | 1.00 / 2.00 | 2.00 / 2.00 | 10% | 2.00 | 2 |" in text
    assert "| rms_norm | k0 | 2 | 3 | 1.50 |" in text
    assert "| rms_norm | k1 | 1000 | 500 | 0.50 |" in text


def test_a_run_of_some_workloads_keeps_the_rows_of_the_rest():
    old, new = record(), record(peer=5e-4)
    other = dataclasses.replace(old.rows[0], name="softmax")
    stored = Record(old.versions, [*old.rows, other], ["blur", "rms_norm"])
    merged = new.over(stored)
    assert merged.rows == [new.rows[0], other]
    assert merged.failed == ["blur"]


def test_every_machine_has_a_page_and_a_line_of_the_index(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MEASURED", tmp_path / "measured")
    monkeypatch.setattr(report, "INDEX", tmp_path / "benchmarks.md")
    report.INDEX.write_text("# Benchmarks\n\n## Machines\n\nold\n\n## Compilation\n\ntimes\n")
    report.write(record("zen 3"))
    path = report.write(record("zen 3", peer=5e-4))
    report.write(record("zen 5", minimum=5e-4))
    assert path == tmp_path / "benchmarks" / "zen-3-2-cores.md"
    index = report.INDEX.read_text()
    assert "old" not in index
    assert index.endswith("## Compilation\n\ntimes\n")
    lines = [line for line in index.splitlines() if line.startswith("| [")]
    assert [line.split(" | ")[3:] for line in lines] == [
        ["0.50", "0.50", "0.50", "rms_norm 0.50 |"],
        ["4.00", "4.00", "4.00", " |"],
    ]


def test_records_survive_their_file():
    before = record(each=(KernelTime("k0", 2e-6, 3e-6),))
    assert Record.from_json(before.as_json()) == before


def test_pages_show_the_picture_where_there_is_one(tmp_path):
    pytest.importorskip("matplotlib")
    assert "m-1-2-cores.png" in report.page(record(), plotted=True)
    assert ".png" not in report.page(record())
    run.plot(record().rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("peer", "package"), [("iree", "iree.compiler"), ("halide", "halide")])
@pytest.mark.parametrize("name", ["blur", "unsharp", "harris"])
def test_optional_peers_compute_the_same(peer, package, name):
    if not run.available([peer]):
        pytest.skip(f"{package} is not installed")
    w = WORKLOADS[name]
    small = dataclasses.replace(
        w,
        full=tuple(
            dataclasses.replace(s, shape=tuple(max(n, 80) if n > 3 else n for n in s.shape))
            for s in w.small
        ),
    )
    assert set(run.implementations(small, [peer])) == {
        "pbkern",
        peer,
    }  # compared with jax.jit on the way


def test_peers_with_other_results_are_left_out(capsys):
    w = WORKLOADS["rms_norm"]
    arguments = w.arguments(w.small)
    right = np.asarray(w.function(*arguments))
    assert run._agrees(w, "iree", [right], arguments)
    assert not capsys.readouterr().out
    assert not run._agrees(w, "iree", [right * 1.01], arguments)
    assert "iree left out" in capsys.readouterr().out


def test_peers_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setattr(
        run, "PACKAGES", {"iree": "no_such_package.inner", "halide": "no_such_package"}
    )
    assert run.available(["jax", "iree", "halide"]) == ["jax"]


def test_pbkern_bench_passes_its_arguments_on(capsys):
    assert main.main(["bench", "rms_norm", "--quick", "--peers", ""]) == 0
    assert "rms_norm" in capsys.readouterr().out


def test_unknown_names_are_refused_with_the_known_ones(capsys):
    for arguments in (["rms_norn"], ["rms_norm", "--peers", "jaxx"]):
        with pytest.raises(SystemExit):
            run.main(arguments)
    assert "the workloads are blur" in capsys.readouterr().err


def test_wrong_results_fail(monkeypatch, capsys):
    w = WORKLOADS["rms_norm"]
    monkeypatch.setitem(WORKLOADS, "rms_norm", dataclasses.replace(w, numpy=lambda x, g: x * 2))
    assert run.main(["rms_norm", "--quick", "--peers", ""]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_the_limit_is_the_longest_of_arithmetic_memory_and_l3():
    import pbkern

    machine = pbkern.cpu.machine()
    w = WORKLOADS["sum_of_squares"]
    assert run.limit_seconds(w, machine) == pytest.approx((4 * 2**26 + 4) / machine.dram_bandwidth)
    busy = dataclasses.replace(w, flops=1e15)
    assert run.limit_seconds(busy, machine) == pytest.approx(1e15 / machine.flops("float32"))


def test_the_demo_on_a_small_picture(monkeypatch, tmp_path, capsys):
    for name, value in {
        "MOST_TIMED_CALLS": 3,
        "PHOTO_HEIGHT": 64,
        "PHOTO_WIDTH": 96,
        "FOLDER": tmp_path / "pictures",
    }.items():
        monkeypatch.setattr(demo, name, value)
    cases, outcomes, run_case = [], [], demo.run

    def recorded(case):
        cases.append(case)
        outcomes.append(run_case(case))
        return outcomes[-1]

    monkeypatch.setattr(demo, "run", recorded)
    assert demo.main() == 0
    lines = capsys.readouterr().out
    assert len(cases) == 5
    assert all(
        case.title in lines and o.error <= case.tolerance for case, o in zip(cases, outcomes)
    )
    pictures = sorted(p.name for p in demo.FOLDER.iterdir())
    assert pictures == ["0_photograph.png", "1_blur.png", "2_unsharp.png", "3_corners.png"]
    assert io.imread(demo.FOLDER / "2_unsharp.png").shape == (60, 92, 3)
    assert "2_unsharp.png" in lines

    monkeypatch.setattr(demo, "COLOUR", True)
    monkeypatch.setattr(demo, "cases", lambda image: cases)
    monkeypatch.setattr(
        demo, "run", lambda case: dataclasses.replace(outcomes[cases.index(case)], error=1.0)
    )
    assert demo.main() == 1
    assert "matmul by hand: pbkern and jax.jit disagree" in capsys.readouterr().out


def test_corners_are_marked_inside_the_picture(monkeypatch):
    monkeypatch.setattr(demo, "PHOTO_HEIGHT", 96)
    monkeypatch.setattr(demo, "PHOTO_WIDTH", 120)
    response = np.zeros((92, 116), np.float32)
    response[30, 40] = 1
    marked = demo.mark_corners(np.zeros((96, 120, 3), np.float32), response, count=1)
    ys, xs = np.nonzero(marked.any(-1))
    assert (ys.min(), ys.max(), xs.min(), xs.max()) == (25, 39, 35, 49)


def test_the_survey_draws_what_texts_say():
    rng = np.random.default_rng(0)
    assert survey.draw("bf16[3,4]", rng).dtype == "bfloat16"
    assert survey.draw("f32[]", rng).shape == ()
    assert int(survey.draw("i32[1000]<7", rng).max()) == 6
    assert float(survey.draw("f32[1000]>0.5", rng).min()) >= 0.5
    assert survey.draw("bool[5]", rng).dtype == bool
    with pytest.raises(ValueError, match="not an argument: 'f32 3'"):
        survey.draw("f32 3", rng)


def test_the_survey_compares_with_jax():
    x = np.array([1.0, np.nan, np.inf], np.float32)
    assert survey.difference([x], [x]) == 0
    assert 1 < survey.difference([x * np.float32(1.001)], [x]) < 10
    assert survey.difference([x], [x[:2]]) == float("inf")
    assert survey.difference([np.arange(3)], [np.array([0, 1, 3])]) > 1


def test_the_survey_reports_slow_wrong_and_failing_cases(monkeypatch, capsys):
    def fails(x):
        raise TypeError("no such thing")

    cases = {"fine": (jnp.add, "f32[8]", "f32[8]"), "bad": (fails, "f32[3]")}
    monkeypatch.setattr(survey, "cases", lambda words: cases)
    assert survey.main(["--below", "1000000", "--seconds", "0"]) == 1
    out = capsys.readouterr().out
    assert "FAILS   bad: TypeError: no such thing" in out
    assert "fine" in out
    assert "1 cases, least times: geometric mean" in out


def test_names_of_the_survey_choose_cases():
    found = survey.cases(["loops.jacobi"])
    assert "loops.jacobi_1000" in found
    assert all(name.startswith("loops.jacobi") for name in found)


SMALL_KERNELS = {
    "layer_norm": {"rows": 64, "columns": 32},
    "softmax": {"rows": 64, "columns": 40},
    "matmul": {"size": 64, "block": 32},
    "attention": {"tokens": 64, "columns": 16, "block": 16},
    "stencil": {"size": 256, "block": 64},
    "prefix_sum": {"rows": 64, "columns": 24, "block": 16},
    "segment_sum": {"rows": 64, "columns": 16, "segments": 8},
    "histogram": {"size": 256, "block": 64},
}


@pytest.mark.parametrize("name", derived_kernels.CASES)
def test_gradients_that_are_derived_and_by_hand_agree_with_the_plain_function(name):
    row = derived_kernels.measured(derived_kernels.CASES[name](**SMALL_KERNELS[name]), rounds=1)
    assert max(row.errors) < 3e-6
