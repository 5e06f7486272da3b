"""Traces of launches: names are the kernels', slices nest, times add up, and nothing remains when a profile has ended."""

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern import _jax
from pbkern.api.observed import profile
from pbkern.cli import main
from pbkern.core.errors import OptionError, TargetError
from pbkern.targets import get_target
from pbkern.targets.host import recording
from pbkern.targets.host.objects import elf_loader
from pbkern.targets.host.runtime import recorder

OWN = ("call", "program", "kernel", "share", "loop", "branch", "copy")


def softmax(x):
    weights = jnp.exp(x - x.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def kernel_names(function, *args):
    """Names of a function's kernels and of their last stages."""
    return {stage.name for kernel in function.kernels(*args) for stage in kernel.stages}


def names(trace, *kinds):
    return {one.name for one in trace.slices if one.kind in kinds}


def check(trace, calls=1):
    """Slices of a track nest; every step is in a program, every program and share in a call."""
    spans = [one for one in trace.slices if one.kind == "call"]
    assert len(spans) == calls
    for track in {one.track for one in trace.slices}:
        stack = []
        for one in (s for s in trace.slices if s.track == track):
            assert one.begin <= one.end
            while stack and stack[-1].end <= one.begin:
                stack.pop()
            assert not stack or one.end <= stack[-1].end, (stack[-1], one)
            stack.append(one)
    programs = [one for one in trace.slices if one.kind == "program"]
    for one in trace.slices:
        around = {"program": spans, "share": spans}.get(one.kind, programs)
        if one.kind in OWN[1:]:
            assert any(outer.begin <= one.begin and one.end <= outer.end for outer in around), one
    for call in spans:
        inside = [
            one
            for one in trace.slices
            if one.kind == "kernel" and call.begin <= one.begin <= call.end
        ]
        assert sum(one.end - one.begin for one in inside) <= call.end - call.begin
    launches = [one for one in trace.slices if one.kind == "kernel"]
    for share in (one for one in trace.slices if one.kind == "share"):
        name = share.name.removeprefix("share of ")
        (launch,) = [
            one
            for one in launches
            if one.name == name and one.begin <= share.begin and share.end <= one.end
        ]
        assert 0 < share.args["programs"] <= np.prod(launch.args["grid"])
        assert share.args["busy_us"] * 1e3 <= share.end - share.begin + share.args["tasks"]
    assert trace.missing == 0


def test_a_trace_names_the_kernels_with_grids_and_predictions():
    f, x = pbkern.jit(softmax), jnp.ones((64, 256))
    trace = pbkern.profile(f, x, calls=3)
    check(trace, calls=3)
    assert names(trace, "kernel") == kernel_names(f, x)
    report = f.explain(x)
    (kernel,) = report.kernels
    for one in (s for s in trace.slices if s.kind == "kernel"):
        assert one.args["grid"] == list(kernel.grid)
        assert one.args["predicted_bytes"] == kernel.cost.bytes_moved
        assert one.args["predicted_flops"] == kernel.cost.flops
    assert trace.seconds("kernel")[kernel.name][0] == 3
    assert names(trace, "call") == {"softmax"}


def test_threads_have_tracks_and_their_shares_are_all_programs():
    f, x = pbkern.jit(lambda x: jnp.tanh(x) @ x), jnp.ones((1024, 1024))
    trace = pbkern.profile(f, x, calls=5)
    check(trace, calls=5)
    for launch in (one for one in trace.slices if one.kind == "kernel"):
        shares = [
            one
            for one in trace.slices
            if one.kind == "share" and launch.begin <= one.begin <= launch.end
        ]
        assert len({one.track for one in shares}) == len(shares)
        if shares:
            programs = sum(one.args["programs"] for one in shares)
            assert programs == np.prod(launch.args["grid"])
    assert {one.track for one in trace.slices if one.kind == "call"} == {"calling thread"}


def test_on_one_thread_all_steps_have_one_track():
    with pbkern.config.override(num_threads=1):
        f, x = pbkern.jit(softmax), jnp.ones((512, 512))
        trace = pbkern.profile(f, x)
    check(trace)
    assert names(trace, "kernel") == kernel_names(f, x)
    assert not names(trace, "share")
    steps = {one.track for one in trace.slices if one.kind in OWN and one.kind != "call"}
    assert len(steps) == 1  # the caller's, or the one on which XLA runs large functions


def test_loops_enclose_their_launches():
    def f(x):
        total, steps = lax.scan(lambda c, _: (jnp.sin(c @ c), c.sum()), x, None, length=12)
        halved = lax.while_loop(lambda c: c.max() > 1e-3, lambda c: (c / 2) @ jnp.eye(64), x)
        return halved, total, steps

    f, x = pbkern.jit(f), jnp.full((64, 64), 0.01)
    trace = pbkern.profile(f, x)
    check(trace)
    assert names(trace, "kernel") == kernel_names(f, x)
    loops = {one.name: one for one in trace.slices if one.kind == "loop"}
    assert "while" in loops
    assert any(name.endswith("times") for name in loops)
    for loop in loops.values():
        inside = [
            one
            for one in trace.slices
            if one.kind == "kernel" and loop.begin <= one.begin and one.end <= loop.end
        ]
        assert len(inside) >= loop.args.get("trips", 2)


def test_a_branch_shows_what_ran():
    def f(x, number):
        one = lambda x: jnp.exp(x @ x)
        other = lambda x: jnp.cumsum(x @ x.T, 0)
        return lax.switch(number, (one, other), x) @ x

    f, x = pbkern.jit(f), jnp.ones((64, 64))
    traces = [pbkern.profile(f, x, np.int32(n)) for n in range(2)]
    for trace in traces:
        check(trace)
        assert names(trace, "branch") == {"one of 2 branches"}
        assert names(trace, "kernel") < kernel_names(f, x, np.int32(0))
    assert names(traces[0], "kernel") != names(traces[1], "kernel")


def test_operations_of_xla_are_slices_and_kernels_are_not_among_them():
    def f(x):
        y = jnp.exp(x) @ x
        return jnp.fft.fft(y).real @ y

    f, x = pbkern.jit(f), jnp.ones((64, 64))
    trace = pbkern.profile(f, x)
    check(trace)
    assert names(trace, "kernel") == kernel_names(f, x)
    assert len(names(trace, "program")) == 2
    assert any("fft" in name for name in names(trace, "xla"))
    assert not names(trace, "xla") & (names(trace, "kernel") | names(trace, "program"))
    (call,) = (one for one in trace.slices if one.kind == "call")
    slack = 100_000  # nanoseconds by which the two clocks may be apart
    for one in (s for s in trace.slices if s.kind == "xla"):
        assert call.begin - slack <= one.begin <= one.end <= call.end + slack
    assert "XLA: " in trace.summary()


def test_a_gradient_and_functions_around_decorated_ones():
    f, x = pbkern.jit(lambda x: (jnp.tanh(x) @ x).sum()), jnp.ones((128, 128))
    plain = {one.name for one in pbkern.profile(f, x).slices if one.kind == "kernel"}
    assert plain == kernel_names(f, x)
    gradient = jax.jit(jax.grad(f))
    want = gradient(x)
    trace = pbkern.profile(gradient, x)
    check(trace)
    assert names(trace, "kernel")
    assert not names(trace, "kernel") <= plain
    assert jnp.array_equal(gradient(x), want)


def test_a_kernel_that_is_written_by_hand():
    @pbkern.kernel(
        grid=(8,),
        in_specs=[pbkern.BlockSpec((8, 64), lambda i: (i, 0))],
        out_specs=pbkern.BlockSpec((8, 64), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((64, 64), jnp.float32),
    )
    def doubled(x, out):
        out[...] = x[...] * 2

    trace = pbkern.profile(doubled, jnp.ones((64, 64)))
    check(trace)
    assert names(trace, "kernel") == {"doubled"}
    trace = pbkern.profile(pbkern.jit(lambda x: doubled(x) @ x), jnp.ones((64, 64)))
    assert "doubled" in names(trace, "kernel")


def test_large_results_come_from_the_pool_as_ever():
    f, x = pbkern.jit(lambda x: x * 2), jnp.ones((3000, 3000))
    trace = pbkern.profile(f, x, calls=2)
    check(trace, calls=2)
    assert names(trace, "kernel") == kernel_names(f, x)
    assert float(f(x).sum()) == 2 * x.size


def test_without_kernels_and_without_elements():
    trace = pbkern.profile(pbkern.jit(lambda x: x), jnp.ones(3))
    assert not names(trace, "kernel", "program")
    trace = pbkern.profile(pbkern.jit(lambda x: jnp.exp(x)), jnp.ones((0, 4)))
    check(trace)
    trace = pbkern.profile(lambda: 3, calls=2)
    check(trace, calls=2)
    assert "all of <lambda>" in trace.summary()
    with pbkern.config.override(pool_megabytes=0), jax.disable_jit():
        assert not names(pbkern.profile(pbkern.jit(softmax), jnp.ones((4, 4))), "kernel")


def test_arguments_that_are_given_up_are_copied():
    f, x = pbkern.jit(lambda x: x + 1, donate_argnums=0), jnp.zeros(2000)
    trace = pbkern.profile(f, x, calls=3)
    check(trace, calls=3)
    assert not x.is_deleted()
    assert float(x.sum()) == 0


def test_events_are_those_of_the_format(tmp_path):
    f, x = pbkern.jit(softmax), jnp.ones((64, 256))
    trace = pbkern.profile(f, x, path=tmp_path / "trace.json")
    values = json.loads((tmp_path / "trace.json").read_text())
    assert values["traceEvents"] == trace.events
    tracks = {e["tid"]: e["args"]["name"] for e in trace.events if e["ph"] == "M"}
    slices = [e for e in trace.events if e["ph"] == "X"]
    assert len(slices) == len(trace.slices)
    for event, one in zip(slices, trace.slices):
        assert tracks[event["tid"]] == one.track
        assert event["ts"] >= 0
        assert event["dur"] == (one.end - one.begin) / 1e3
        assert (event["name"], event["cat"]) == (one.name, one.kind)
    lines = trace.summary().splitlines()
    assert lines[0].split() == ["kernel", "calls", "total", "ms", "share"]
    (kernel,) = f.kernels(x)
    count, seconds = trace.seconds("kernel")[kernel.name]
    assert lines[1].split()[:3] == [kernel.name, str(count), f"{seconds * 1e3:.3f}"]
    with pytest.raises(OptionError, match="cannot be written"):
        trace.save(tmp_path)


# --- what remains


def test_an_exception_ends_the_profile():
    f, x = pbkern.jit(softmax), jnp.ones((8, 8))
    fails = [False]

    def g(x):
        if fails[0]:
            raise ZeroDivisionError
        fails[0] = True
        return f(x)

    with pytest.raises(ZeroDivisionError):
        pbkern.profile(g, x)
    assert not _jax.is_recorded()
    check(pbkern.profile(f, x))


def test_calls_that_are_not_profiled_run_the_usual_program():
    f, x = pbkern.jit(softmax), jnp.ones((64, 256))
    want = f(x)
    before = f.as_text(x, stage="mlir")
    pbkern.profile(f, x)
    assert f._jitted._cache_size() == 2  # with marks, and without
    assert jnp.array_equal(f(x), want)
    assert f._jitted._cache_size() == 2
    assert f.as_text(x, stage="mlir") == before
    assert "pbk_open" not in before
    recording.begin()
    f(x)
    records, _ = recording.end()
    assert not records


def test_the_kernels_of_recorded_programs_are_the_same_code():
    f, x = pbkern.jit(lambda x: jnp.tanh(x) @ x), jnp.ones((256, 256))
    build, options = f.build((x,), {})
    target = get_target("cpu")
    (program,) = build.programs
    plain = target.compile(program, options)
    recorded = target.compile(program, options, recorded=True)
    assert recorded.lowered.kernels == plain.lowered.kernels
    assert "pbk_open" in recorded.lowered.host
    assert "pbk_open" not in plain.lowered.host
    for compiled, marked in ((plain, False), (recorded, True)):
        called = set().union(*map(elf_loader.undefined_symbols, compiled.code.objects))
        assert any("pbk_open" in name for name in called) == marked


def test_equal_functions_of_other_names_are_not_confused():
    def one(x):
        return jnp.exp(x) * 2

    def two(x):
        return jnp.exp(x) * 2

    x = jnp.ones(1000)
    for f in map(pbkern.jit, (one, two)):
        trace = pbkern.profile(f, x)
        assert names(trace, "kernel") == kernel_names(f, x)
        assert names(trace, "call") == {f.__name__}


def test_calls_in_other_threads_go_on():
    f, x = pbkern.jit(softmax), jnp.ones((64, 256))
    want, results, stop = np.asarray(f(x)), [], threading.Event()

    def work():
        while not stop.is_set():
            results.append(np.asarray(f(x)))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(3):
            check(pbkern.profile(f, x))
    finally:
        stop.set()
        thread.join()
    assert results
    assert all(np.array_equal(result, want) for result in results)


def test_more_records_than_there_is_place_for_are_counted(monkeypatch):
    monkeypatch.setattr(recording, "MOST_RECORDS", 10)
    f, x = pbkern.jit(softmax), jnp.ones((8, 8))
    trace = pbkern.profile(f, x, calls=20)
    count = len([one for one in trace.slices if one.kind in ("program", "kernel")])
    assert count == 10
    assert trace.missing == 20 * 2 - 10
    assert "found no place" in trace.summary()


def test_records_of_calls_that_are_under_way_are_left_out():
    """Another thread's, which began before the recording, or end behind it."""
    f, x = pbkern.jit(softmax), jnp.ones((64, 256))
    build, options = f.build((x,), {})
    compiled = get_target("cpu").compile(build.programs[0], options, recorded=True)
    none = recorder.NO_PARENT
    records = [
        recording.StepRecord(None, recorder.TASK_SITE, 1, 0, 4, 7, begin=10, end=20),
        recording.StepRecord(None, recorder.LOOP_SITE, none, 0, 8, 7, begin=11, end=30),
        recording.StepRecord(compiled, 0, none, 0, 0, 8, begin=40, end=0),
        recording.StepRecord(compiled, 1, none, 0, 0, 8, begin=41, end=0),
        recording.StepRecord(None, recorder.LOOP_SITE, none, 0, 8, 8, begin=42, end=0),
        recording.StepRecord(None, recorder.TASK_SITE, 4, 0, 4, 9, begin=43, end=50),
        recording.StepRecord(None, recorder.TASK_SITE, 4, 4, 8, 9, begin=51, end=0),
        recording.StepRecord(compiled, 0, none, 0, 0, 7, begin=60, end=70),
    ]
    share, program = profile._slices(records, profile._Tracks())[::-1]
    assert (program.kind, program.begin, program.end) == ("program", 60, 70)
    assert (share.kind, share.begin, share.end, share.args["tasks"]) == ("share", 43, 50, 1)


# --- mistakes


@pytest.mark.parametrize(
    ("f", "options", "message"),
    [
        (3, {}, "profile takes a function"),
        (softmax, {"calls": 0}, "calls= is a number of calls"),
        (softmax, {"calls": 1.5}, "calls= is a number of calls"),
    ],
)
def test_mistakes(f, options, message):
    with pytest.raises(OptionError, match=message):
        pbkern.profile(f, jnp.ones((2, 2)), **options)


def test_gpus_are_refused():
    f = pbkern.jit(softmax, compile_options={"target": "nvgpu"})
    message = "launches on target `nvgpu` are not recorded"
    with pytest.raises(TargetError, match=message):
        pbkern.profile(f, jnp.ones((2, 2)))
    build, options = f.build((jnp.ones((2, 2)),), {})
    with pytest.raises(TargetError, match=message):
        get_target("nvgpu").compile(build.programs[0], options, recorded=True)


def test_one_profile_at_a_time(tmp_path):
    f, x = pbkern.jit(softmax), jnp.ones((8, 8))
    with pytest.raises(OptionError, match="being recorded already"):
        pbkern.profile(lambda: pbkern.profile(f, x))
    assert pbkern.profile(f, x).slices
    with jax.profiler.trace(tmp_path), pytest.raises(OptionError, match="cannot be profiled here"):
        pbkern.profile(f, x)
    check(pbkern.profile(f, x))


def test_from_the_shell(tmp_path, capsys):
    model, target = tmp_path / "model.py", tmp_path / "trace.json"
    model.write_text("import jax.numpy as jnp\ndef f(x):\n    return jnp.exp(x).sum(0)\n")
    given = [f"{model}:f", "--args", "f32[400,500]"]
    assert main.main(["profile", *given, "-o", str(target), "--calls", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == str(target)
    assert lines[0].startswith("kernel")
    events = json.loads(target.read_text())["traceEvents"]
    assert sum(event.get("cat") == "call" for event in events) == 2
    assert main.main(["profile", *given, "-o", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


# --- JAX's own profiler


def profiled(call, folder):
    """Names of the slices in a profile of JAX's."""
    with jax.profiler.trace(folder):
        jax.block_until_ready(call())
    (file,) = folder.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(file))
    return {event.name for plane in data.planes for line in plane.lines for event in line.events}


def test_jaxs_profiler_shows_functions_and_kernels_by_name(tmp_path):
    f, x = pbkern.jit(softmax), jnp.ones((64, 256))
    f(x)
    (kernel,) = f.kernels(x)
    slices = profiled(lambda: f(x), tmp_path)
    assert "PjitFunction(softmax)" in slices
    assert any(name.partition(".")[0] == kernel.name for name in slices)
    assert not any("ffi_call" in name for name in slices)


def test_jaxs_profiler_shows_programs_of_several_kernels_and_large_results(tmp_path):
    f, x = pbkern.jit(lambda x: jnp.cumsum(x @ x, 0) @ x), jnp.ones((64, 64))
    f(x)
    (program,) = f.build((x,), {})[0].programs
    assert len(program.kernels()) > 1
    slices = profiled(lambda: f(x), tmp_path / "small")
    assert any(name.partition(".")[0] == program.name for name in slices)

    def large(x):
        return x * 2

    f, x = pbkern.jit(large), jnp.ones((3000, 3000))
    f(x)
    f(x)
    (kernel,) = f.kernels(x)
    slices = profiled(lambda: f(x), tmp_path / "large")
    assert "PjitFunction(large)" in slices
    assert any(name.partition(".")[0] == kernel.name for name in slices)


def test_arguments_that_an_inner_function_gives_up_stay():
    f, x = pbkern.jit(lambda x: x + 1, donate_argnums=0), jnp.zeros(2000)
    trace = pbkern.profile(lambda x: f(x), x, calls=2)
    assert trace.seconds("call")["<lambda>"][0] == 2
    assert not x.is_deleted()


def test_names_of_any_alphabet():
    @pbkern.jit
    def naïve(x):
        return x * 2 + x.T

    with pbkern.config.override(fallback=False):
        trace = pbkern.profile(naïve, jnp.ones((64, 64)))
    assert list(trace.seconds("kernel")) == ["naïve_map0"]
    assert not trace.seconds("xla")
