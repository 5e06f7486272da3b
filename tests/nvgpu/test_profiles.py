"""Recorded times: a Chrome trace per launch, with a track per block, in which its steps follow one another."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import pbkern
from pbkern.api.pipeline import build_kernel
from pbkern.core.options import CompileOptions
from pbkern.errors import OptionError
from pbkern.targets import get_target
from pbkern.targets.simt.emit.recorder import RECORD_HEADER_WORDS, Profile
from pbkern.targets.simt.launch import trace
from pbkern.targets.simt.launch.driver import NOTED

from .simulated import reading

X = np.random.default_rng(0).standard_normal((6, 40)).astype("f4")


def running_sum(folder, space, name="running_sum", stages=1):
    """3 blocks of 2 x 4 steps; a step of the last column does more."""
    params = pbkern.nvgpu.CompilerParams(
        dimension_semantics=("parallel", "sequential", "sequential"),
        profile_space=space,
        profile_dir=str(folder),
        max_concurrent_steps=stages,
    )

    @pbkern.kernel(
        grid=(3, 2, 4),
        in_specs=[pbkern.BlockSpec((1, 10), lambda i, j, k: (2 * i + j, k))],
        out_specs=pbkern.BlockSpec((1, 10), lambda i, j, k: (2 * i + j, k)),
        name=name,
        out_shape=jax.ShapeDtypeStruct((6, 40), jnp.float32),
        scratch_shapes=[pbkern.Scratch((1, 1), jnp.float32)],
        compiler_params=params,
    )
    def body(x, o, total):
        @pbkern.when((pbkern.program_id(1) == 0) & (pbkern.program_id(2) == 0))
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += x[...].sum(keepdims=True)
        o[...] = total[...] + x[...] * 0

        @pbkern.when(pbkern.program_id(2) == 3)
        def _():
            o[...] = jax.lax.fori_loop(0, 20, lambda _, y: jnp.sin(y), o[...])

    return body


def expected():
    sums = np.cumsum(X.astype("f8").reshape(3, 8, 10).sum(-1), 1).repeat(10, 1).reshape(6, 40)
    last = sums[:, 30:]
    for _ in range(20):
        last = np.sin(last)
    return np.concatenate([sums[:, :30], last], 1)


def tracks(path):
    """(process, thread) -> events by time, of a file in Chrome's format."""
    found = {}
    for e in json.loads(path.read_text())["traceEvents"]:
        assert {"ph", "name", "pid"} <= e.keys()
        assert e["ph"] in "MX"
        if e["ph"] == "X":
            assert e["ts"] >= 0
            assert e["dur"] > 0
            found.setdefault((e["pid"], e["tid"]), []).append(e)
    return {k: sorted(events, key=lambda e: (e["ts"], -e["dur"])) for k, events in found.items()}


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(("space", "steps"), [(9, 8), (4, 3), (1, 0), (50, 8)])
def test_a_simulated_launch_writes_a_trace(tmp_path, space, steps, stages):
    found = pbkern.simulate(running_sum(tmp_path / "traces", space, stages=stages), X)
    np.testing.assert_allclose(found.results[0], expected(), rtol=1e-4, atol=1e-5)
    (path,) = (tmp_path / "traces").glob("*running_sum*.trace.json")
    found = tracks(path)
    assert len(found) == 3
    assert {thread for _, thread in found} == {0, 1, 2}
    for block, *inner in found.values():
        assert "running_sum" in block["name"]
        assert len(inner) == steps
        names = [f"step program_id(1) = {k // 4}, program_id(2) = {k % 4}" for k in range(steps)]
        assert [e["name"] for e in inner] == names
        ends = [block["ts"], *(e["ts"] + e["dur"] for e in inner)]
        assert all(before <= e["ts"] for before, e in zip(ends, inner)), "steps overlap"
        assert ends[-1] <= block["ts"] + block["dur"]
        if steps == 8:  # the clock of the simulator counts instructions
            assert inner[3]["args"]["cycles"] > 2 * inner[2]["args"]["cycles"]


def test_a_launch_under_jit_writes_a_trace(tmp_path):
    kernel = running_sum(tmp_path, 9)
    with pbkern.config.override(gpu_driver="simulator"):
        f = pbkern.jit(lambda x: kernel(x * 2) / 2, compile_options={"target": "nvgpu"})
        for _ in range(2):
            jax.block_until_ready(f(X))
    paths = list(tmp_path.glob("*.trace.json"))
    assert len(paths) == 2  # one a launch
    assert all(len(t) == 9 for p in paths for t in tracks(p).values())


def test_pallas_kernels_in_a_loop_write_a_trace_each_time(tmp_path):
    def doubled(x):
        spec = pl.BlockSpec((2, 40), lambda i: (i, 0))
        return pl.pallas_call(
            lambda x, o: o.__setitem__(..., x[...] * 2), grid=(3,), in_specs=[spec], out_specs=spec, name="doubled",
            out_shape=jax.ShapeDtypeStruct((6, 40), jnp.float32),
            compiler_params=plgpu.CompilerParams(dimension_semantics=("sequential",), profile_space=3,
                                                 profile_dir=str(tmp_path)),
        )(x)  # fmt: skip

    with pbkern.config.override(gpu_driver="simulator"), pbkern.pallas.installed("nvgpu"):
        found = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: doubled(y), x))(X)
    np.testing.assert_array_equal(found, X * 8)
    paths = list(tmp_path.glob("*doubled*.trace.json"))
    assert len(paths) == 3
    assert all(len(t) == 3 for p in paths for t in tracks(p).values())


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    kernel = running_sum(tmp_path / "file" / "traces", 2)
    with pytest.raises(OSError):
        pbkern.simulate(kernel, X)
    with (
        pbkern.config.override(gpu_driver="simulator"),
        pytest.raises(
            Exception, match=r"running_sum` has recorded could not be written.*Not a directory"
        ),
    ):
        jax.block_until_ready(
            pbkern.jit(lambda x: kernel(x), compile_options={"target": "nvgpu"})(X)
        )


@pytest.mark.parametrize("error", [0, 321])
def test_what_a_device_has_recorded_is_read_back(tmp_path, error):
    """The driver for a device, with a library in the place of libcuda."""
    (program,) = build_kernel(running_sum(tmp_path, 9).trace(X)).programs
    (code,) = get_target("nvgpu").compile(program, CompileOptions(target="nvgpu")).distinct()
    records = np.arange(code.function.record_bytes // 8)  # of the device
    cuda, row, calls = reading(code, error)
    assert cuda._callbacks["record"](row, records.ctypes.data, 0xABC) == (NOTED if error else 0)
    assert not error or f"error {error}" in cuda.described(row, NOTED, 0)
    assert calls == ([0xABC] if error else [0xABC, "waits"])
    found = [t for path in tmp_path.glob("*.trace.json") for t in tracks(path).values()]
    assert [len(t) for t in found] == ([] if error else [9, 9, 9])


def test_dynamic_grids_record_the_steps_that_they_take(tmp_path):
    params = pbkern.nvgpu.CompilerParams(
        dimension_semantics=("sequential",), profile_space=9, profile_dir=str(tmp_path)
    )

    @pbkern.kernel(
        grid=(4,),
        dynamic_grid={0: 1},
        in_specs=[pbkern.BlockSpec(), pbkern.BlockSpec()],
        out_shape=jax.ShapeDtypeStruct((4,), jnp.float32),
        compiler_params=params,
    )
    def body(x, count, o):
        o[...] = x[...] + count[...]

    np.testing.assert_array_equal(
        pbkern.simulate(body, X[0, :4], np.int32(3)).results[0], X[0, :4] + 3
    )
    (path,) = tmp_path.glob("*.trace.json")
    ((_, *steps),) = tracks(path).values()
    assert [e["name"] for e in steps] == [f"step program_id(0) = {k}" for k in range(3)]


def test_a_folder_is_needed():
    with pytest.raises(OptionError, match=re.escape("field `profile_dir` has a bad value")):
        pbkern.nvgpu.CompilerParams(profile_space=3)


def test_times_of_different_sms():
    """Cycles are those of one SM, nanoseconds those of all; a block may be shorter than a tick of the latter."""
    profile = Profile(3, "", ((1, 4),))
    rows = np.zeros((2, profile.words), np.int64)
    rows[0] = 7, 5000, 7000, 100, 1100, 100, 600, 600, 1000
    rows[1] = 9, 6000, 6000, 50, 90, 60, 80, 0, 0
    assert profile.words == RECORD_HEADER_WORDS + 4
    found = [e for e in trace.events("k", profile, rows.ravel()) if e["ph"] == "X"]
    a, b = ([e for e in found if e["tid"] == block] for block in (0, 1))
    assert [(e["pid"], e["ts"], e["dur"]) for e in a] == [(7, 0, 2), (7, 0, 1), (7, 1, 0.8)]
    assert [(e["pid"], e["ts"], e["dur"]) for e in b] == [(9, 1, 0.04), (9, 1.01, 0.02)]
