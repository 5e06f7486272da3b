"""The report of what was fused: rejected fusions first, accepted ones on request, times of kernels on request."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pbkern
from pbkern.api.measured import measure
from pbkern.cli import main
from pbkern.dsl.kernel import ArrayType
from pbkern.fuse.emit import explain as explain_module
from pbkern.fuse.emit.explain import Explanation
from pbkern.fuse.graph import Edge
from pbkern.targets.host import compile
from tests.lowered import on


@pbkern.jit
def mlp(x, w1, b1, w2):
    return jax.nn.gelu(x @ w1 + b1) @ w2


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


TYPES = (f32(512, 512), f32(512, 1024), f32(1024), f32(1024, 512))


def test_rejected_fusions_come_before_the_count_of_accepted_ones():
    lines = str(mlp.explain(*TYPES)).splitlines()
    rejected = [n for n, line in enumerate(lines) if line.startswith("  not fused: ")]
    (count,) = [n for n, line in enumerate(lines) if line.startswith("  fused: ")]
    kernels = [n for n, line in enumerate(lines) if line.startswith("  kernel ")]
    assert len(kernels) == 2
    assert rejected
    assert max(kernels) < min(rejected) <= max(rejected) < count
    number = int(lines[count].split()[1])
    full = str(mlp.explain(*TYPES, verbose=True)).splitlines()
    assert sum(line.startswith("  fused: ") for line in full) == number > 1
    assert [line for line in full if line.startswith("  not fused: ")] == [
        lines[n] for n in rejected
    ]


def attention_layer(x, ws):
    def norm(x):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    for q, k, v, up, down in ws:
        h = norm(x)
        x = x + jax.nn.softmax((h @ q) @ (h @ k).T) @ (h @ v)
        x = x + jax.nn.gelu(norm(x) @ up) @ down
    return (x**2).sum()


def softmax_layers(x, ws):
    for w in ws:
        x = jax.nn.softmax(x @ w)
    return x


def gated(x, g):
    y = jax.nn.softmax(x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g)
    return jnp.tanh(y.sum(0)), y


LAYERS = [(f32(64, 64), f32(64, 64), f32(64, 64), f32(64, 256), f32(256, 64))] * 2
EXPLAINED = {
    "training step": (jax.grad(attention_layer, (0, 1)), (f32(128, 64), LAYERS)),
    "gradient of layers": (
        jax.grad(lambda x, ws: softmax_layers(x, ws).sum(), 1),
        (f32(512, 256), [f32(256, 256)] * 3),
    ),
    "one kernel": (softmax_layers, (f32(256, 256), [f32(256, 256)] * 2)),
    "two results": (gated, (f32(4096, 512), f32(512))),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_refusals_agree_with_their_figures_and_with_the_kernels(name):
    f, types = EXPLAINED[name]
    with on():
        build, _ = pbkern.jit(f).build(types, {})
        found = pbkern.jit(f).explain(*types)
    groups = [
        {id(e) for e in (*n.eqns, *(n.finish.eqns if n.finish else ()))} for n in build.plan.nodes
    ]
    for edge in found.edges:
        if edge.fused:
            continue
        if edge.why == "separate kernels are faster":
            assert edge.after > edge.before
        if "has to gain" in edge.why:
            gain, least = (float(w) for w in re.findall(r"([0-9.]+) %", edge.why))
            assert edge.after <= edge.before
            assert gain <= least + 0.05
    shown = [line for line in str(found).splitlines() if line.startswith("  not fused")]
    assert len(shown) == len(set(shown))
    assert len(groups) > 1 or not shown


def test_what_was_refused_at_first_is_told_on_request():
    edges = (refused(fused_later=True), refused(fused_later=False))
    report = Explanation("f", (), edges, ())
    assert str(report).count("not fused: ") == 1
    assert "at first" not in str(report)
    assert str(dataclasses.replace(report, verbose=True)).count("not fused at first: ") == 1


def refused(fused_later):
    eqn = jax.make_jaxpr(jnp.exp)(1.0).eqns[0]
    return Edge(eqn, False, "a reason", before=1e-6, after=2e-6, superseded=fused_later)


def test_nothing_is_compiled_unless_it_is_to_be_measured():
    before = len(compile._resident)
    assert all(k.measured is None for k in mlp.explain(*TYPES).kernels)
    assert len(compile._resident) == before


def test_measured_times_stand_beside_the_predicted_ones():
    found = mlp.explain(*TYPES, measure=True)
    for k in found.kernels:
        # 134 Mflop and 67 Mflop: neither a microsecond nor a second on any machine.
        assert 1e-6 < k.measured < 1.0
        assert (
            f"{k.cost.seconds * 1e6:.1f} us predicted, {k.measured * 1e6:.1f} us measured" in str(k)
        )
    assert mlp.explain(*TYPES).kernels[0].measured is None


def test_larger_kernels_take_longer():
    f = pbkern.jit(lambda x: jnp.exp(jnp.sin(x)))
    small, large = (f.explain(f32(n, 1024), measure=True).kernels[0].measured for n in (64, 4096))
    assert large > 4 * small


def test_updates_in_place_are_priced_and_measured_by_what_they_touch():
    """A row of an array of 64 MB: a copy of it takes milliseconds, as does its price."""
    f = pbkern.jit(lambda x, row, at: lax.dynamic_update_slice(x, row, (at, 0)), donate_argnums=0)
    types = f32(16384, 1024), f32(1, 1024), jax.ShapeDtypeStruct((), jnp.int32)
    (update,) = f.explain(*types, measure=True).kernels
    assert update.cost.bytes_moved < 20_000
    assert update.cost.seconds < 1e-4
    assert update.measured < 2e-3


def test_the_command_measures(tmp_path, capsys):
    (tmp_path / "model.py").write_text(
        "import jax.numpy as jnp\ndef f(x):\n    return jnp.exp(x) * 2 + x\n"
    )
    where = f"{tmp_path}/model.py:f"
    assert main.main(["explain", where, "--args", "f32[64,64]", "--measure", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "us measured" in out
    assert "fused: exp" in out
    assert main.main(["explain", where, "--args", "f32[64,64]"]) == 0
    out = capsys.readouterr().out
    assert "measured" not in out
    assert "fused: exp" not in out


def test_the_command_refuses_what_is_no_python_file(tmp_path, capsys):
    (tmp_path / "model.txt").write_text("def f(x):\n    return x\n")
    assert main.main(["explain", f"{tmp_path}/model.txt:f", "--args", "f32[4]"]) != 0
    assert "model.txt is no Python file" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "float16"])
def test_random_operands_have_their_types(dtype):
    t = ArrayType((3, 5), jnp.dtype(dtype))
    (x,) = measure.random_operands([t])
    assert x.shape == t.shape
    assert x.dtype == t.dtype
    assert len(set(x.ravel().tolist())) > 1


def test_calls_take_turns():
    order = []
    times = measure.least_seconds([lambda: order.append("a"), lambda: order.append("b")], 0.0)
    assert all({*order[n : n + 2]} == {"a", "b"} for n in range(0, len(order), 2))
    assert len(order) == 2 * (1 + measure.MIN_CALLS)
    assert all(0 <= t < 1 for t in times)


# ---- numbers of the report ------------------------------------------------------------------------------------------

NUMBERS = {
    "from L2": (lambda x: jnp.tanh(x) + 1, f32(128, 128)),
    "from L3": (lambda x: x + 1, f32(512, 1024)),
    "around L3": (lambda x: x + 1, f32(2048, 1024)),
    "from memory": (lambda x: x + 1, f32(8192, 1024)),
    "a sum from L3": (lambda x: x.sum(), f32(2048, 1024)),
    "a product": (lambda x: x @ x, f32(512, 512)),
    "a slice of all": (lambda x: jnp.exp(x)[3:5], f32(512, 512)),
    "a row of all": (lambda x: jax.nn.softmax(x)[0], f32(512, 512)),
    "windows": (lambda x: sum(x[i : i + 500, j : j + 500] for i in range(3) for j in range(3)), f32(512, 512)),
    "steps of a stencil": (
        lambda x: jax.lax.fori_loop(0, 60, lambda i, c: c.at[1:-1].set((c[:-2] + c[2:]) * 0.5), x), f32(2048, 1024),
    ),
    "sums in a loop": (lambda x: jax.lax.fori_loop(0, 9, lambda i, c: c * c.sum(), x), f32(2048, 1024)),
}  # fmt: skip


@pytest.mark.parametrize("case", NUMBERS)
def test_no_kernel_is_faster_than_the_machine_or_computes_less_than_is_needed(case):
    f, x = NUMBERS[case]
    for k in pbkern.jit(f).explain(x).kernels:
        assert 0 <= k.cost.limit <= k.cost.seconds, str(k)
        assert k.cost.recompute >= 1, str(k)


def test_shares_of_measured_times_are_of_the_level_that_holds_the_data():
    f, x = NUMBERS["from L3"]
    (k,) = pbkern.jit(f).explain(x, measure=True).kernels
    assert 0 < k.cost.limit < k.measured


def test_kernels_in_loops_show_how_often_they_run():
    def f(x):
        twice = lambda i, c: jax.lax.fori_loop(0, 2, lambda j, d: jnp.tanh(d @ x) * d.sum(), c)
        return jax.lax.fori_loop(0, 30, twice, x).sum()

    found = pbkern.jit(f).explain(f32(64, 64))
    assert {60, 1} <= {k.launches for k in found.kernels}
    inner = next(k for k in found.kernels if k.launches == 60)
    total = 60 * inner.cost.seconds * 1e6
    assert (
        f"run 60 times in {total:.1f} us, each time {inner.cost.seconds * 1e6:.1f} us predicted"
        in str(found)
    )

    found = pbkern.jit(
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ x, x)
    ).explain(f32(64, 64))
    assert all(k.launches is None for k in found.kernels)
    assert "run as often as values say" in str(found)


COSTS = {
    "kernels": lambda x: (x @ x).sum(),
    "beside XLA's": lambda x: jnp.abs(jnp.fft.rfft(x @ x)).sum(),
    "beside a library's": lambda x: jnp.linalg.cholesky(x @ x + 64 * jnp.eye(64)) @ x,
}


@pytest.mark.parametrize("case", COSTS)
def test_cost_analysis_counts_kernels(case):
    x = jnp.ones((64, 64))
    for of in (lambda lowered: lowered, lambda lowered: lowered.compile()):
        ours, xla = (of(jit(COSTS[case]).lower(x)).cost_analysis() for jit in (pbkern.jit, jax.jit))
        assert ours["flops"] == pytest.approx(xla["flops"], rel=0.1)
        assert ours["bytes accessed"] > 0
    compiled = pbkern.jit(COSTS[case]).lower(x).compile()
    assert compiled.cost_analysis()["flops"] > 2 * 64**3 - 1
    assert isinstance(compiled, jax.stages.Compiled)
    assert jnp.allclose(compiled(x), jax.jit(COSTS[case])(x), rtol=1e-4)


def test_cost_analysis_multiplies_loops_and_leaves_out_what_values_decide():
    x = jnp.ones((64, 64))
    step = lambda i, c: jnp.tanh(c @ x)
    ten = pbkern.jit(lambda c: jax.lax.fori_loop(0, 10, step, c)).lower(x).cost_analysis()
    one = pbkern.jit(lambda c: step(0, c)).lower(x).cost_analysis()
    assert ten["flops"] == pytest.approx(10 * one["flops"])
    unknown = pbkern.jit(
        lambda c: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: step(0, c), c)
    ).lower(x)
    assert "flops" not in unknown.cost_analysis()


@pytest.mark.parametrize(
    ("step", "words"),
    [(lambda c: jnp.fft.fft(c).real, "fft in its body: no access rule"),
     (lambda c: jnp.arctan(c + 2j).imag, "atan in its body: "),
     (lambda c: jax.scipy.special.i1(jnp.flip(c)), "bessel_i1e in its body: ")],
)  # fmt: skip
def test_a_loop_names_the_operation_that_leaves_it_to_xla(step, words):
    loop = lambda x: jax.lax.fori_loop(0, 99, lambda _, c: step(c), x)
    assert words in str(pbkern.jit(loop).explain(jnp.ones(5)))


# --- the first page


def layer(x, w):
    return jax.nn.softmax(x @ w)


def stack_of_layers(x, weights):
    for n, w in enumerate(weights):
        with jax.named_scope(f"stage_{n}"):
            x = layer(x, w)
    return x.sum()


SQUARE = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def report_of_gradient(layers, **options):
    f = pbkern.jit(jax.grad(stack_of_layers, argnums=1))
    return f.explain(SQUARE, [SQUARE] * layers, **options)


def test_places_have_scopes_passes_and_callers():
    text = str(report_of_gradient(3, verbose=True))
    assert re.search(
        r"\(layer\), in stage_1, called from .*test_explain.py:\d+ \(stack_of_layers\)", text
    )
    assert re.search(r"\(layer\), in stage_2, backward, called from", text)


def test_equal_kernels_and_equal_refusals_are_told_once():
    few, many = (str(report_of_gradient(layers)).splitlines() for layers in (6, 24))
    assert len(few) == len(many) <= 60
    assert any(re.search(r"2\d equal kernels: ", line) for line in many)
    assert any(re.search(r"not fused, \d+ times: dot_general", line) for line in many)


def test_top_limits_kernels_and_refusals():
    whole, short = report_of_gradient(4), report_of_gradient(4, top=2)
    count = lambda report: sum(line.startswith("  kernel ") for line in str(report).splitlines())
    assert count(whole) > count(short) == 2
    assert "more kernel(s)" in str(short)
    assert "more kernel(s)" not in str(report_of_gradient(4, top=2, verbose=True))


def test_times_by_line_are_those_of_the_kernels():
    report = report_of_gradient(3)
    lines = report.by_line()
    assert sum(lines.values()) == pytest.approx(report.seconds)
    slowest = next(iter(lines))
    assert "(layer)" in slowest
    assert list(lines.values()) == sorted(lines.values(), reverse=True)
    assert f"{lines[slowest] * 1e6:.1f} us  {slowest}" in str(report)


def test_scopes_may_have_commas_in_their_names():
    @pbkern.jit
    def f(x, w):
        with jax.named_scope("ij, jk -> ik"):
            y = x @ w
        with jax.named_scope("ij, j -> i"):
            return jnp.sin(y).sum(1)

    report = f.explain(jnp.ones((64, 32)), jnp.ones((32, 48)))
    assert set(report.by_scope()) == {"ij, jk -> ik", "ij, j -> i"}
    assert sum(report.by_scope().values()) == pytest.approx(report.seconds)


def test_kernels_name_their_operations_when_they_are_asked(monkeypatch):
    named = []
    user_line = explain_module.user_line
    monkeypatch.setattr(
        explain_module, "user_line", lambda eqn: named.append(eqn) or user_line(eqn)
    )
    report = report_of_gradient(3)
    assert not named
    kernel = report.kernels[0]
    assert len(kernel.ops) == len(kernel.work) == len(kernel.contexts) == len(named) > 0


def test_the_report_as_data():
    report = report_of_gradient(3)
    data = json.loads(json.dumps(report.as_dict()))
    assert data["launches"] == len(data["kernels"]) == len(report.kernels)
    assert data["seconds"] == pytest.approx(sum(k["predicted_seconds"] for k in data["kernels"]))
    assert data["temporary_bytes"] >= 256 * 256 * 4
    assert {kernel["bound"] for kernel in data["kernels"]} <= {"memory", "arithmetic"}
    contexts = {o["context"] for kernel in data["kernels"] for o in kernel["operations"]}
    assert any("stage_0" in context for context in contexts)
    assert all(refusal["times"] >= 1 for refusal in data["not_fused"])


def test_nothing_to_compile_has_no_figures():
    report = pbkern.jit(lambda x: x).explain(SQUARE)
    assert str(report) == "<lambda>: 0 kernel(s), 0 operation(s) left to XLA"
    assert report.as_dict()["seconds"] == 0
