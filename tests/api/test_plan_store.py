"""Plans on disk: another process calls a function without planning it, and nothing stale or damaged is believed."""

import functools
import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import define_prng_impl, threefry_prng_impl

import pbkern
from pbkern.api import pipeline, plan_store
from pbkern.core import config
from pbkern.core.process import disk_cache, fallback
from pbkern.core.process.jaxpr_digest import described

X = np.random.default_rng(0).normal(size=(64, 128)).astype("f")


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    with config.override(cache_dir=tmp_path / "kept", cache=True):
        yield disk_cache.current()


def plans(store):
    return [path for path, _ in store.entries() if path.name.startswith("plan-")]


def norm(x, scale=2.0):
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True)) * scale, jnp.float32(3), x.sum()


def planned(f, *args, **options):
    """(whether a new function with this body had to be planned, its results)."""
    count = []
    build_plan = pipeline.build_plan

    def counted(*arguments):
        count.append(arguments)
        return build_plan(*arguments)

    pipeline.build_plan = counted
    try:
        results = pbkern.jit(functools.wraps(f)(lambda *x: f(*x)), **options)(*args)
    finally:
        pipeline.build_plan = build_plan
    return bool(count), results


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


CHILD = """
    import json, sys
    import jax, jax.numpy as jnp, numpy as np
    import pbkern

    @pbkern.jit
    def f(p, x, key):
        h = jnp.tanh(x @ p["w"] + p["b"])
        noise = jax.random.uniform(key, x.shape)
        total, states = jax.lax.scan(lambda c, v: (c + v, c * v), jnp.zeros(128, "f"), h)
        back = jax.grad(lambda h: (jax.nn.softmax(h) ** 2).sum())(h)
        return back, jnp.sort(x + noise, axis=1), states, 5, x.astype("bfloat16"), x

    rng = np.random.default_rng(0)
    x, w, b = (jnp.asarray(rng.normal(size=shape).astype("f")) for shape in ((64, 128), (128, 128), (128,)))
    args = {"w": w, "b": b}, x, jax.random.key(7)
    results = [np.asarray(a).tobytes().hex() for a in f(*args)]
    loaded = {m.split(".")[0] for m in sys.modules}
    modules = {
        "mlir": bool(loaded & {"mlir", "torch_mlir"}),
        "fuser": "pbkern.fuse.pipeline" in sys.modules,
        "emitter": "pbkern.targets.cpu.codegen.compile" in sys.modules,
    }
    memory = f.memory_analysis(*args)
    report = f.explain(*args)
    print(json.dumps({
        "results": results, **modules,
        "memory": [memory.arena_size_in_bytes, memory.generated_code_size_in_bytes],
        "kernels": [kernel.name for kernel in f.kernels(*args)],
        "explained": [kernel.name for kernel in report.kernels],
        "asm": len(f.as_text(*args, stage="mlir")),
        "again": [np.asarray(a).tobytes().hex() for a in f(*args)] == results,
    }))
"""


def child(folder, source=CHILD, **environment):
    env = os.environ | {"PBKERN_CACHE_DIR": str(folder)} | environment
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# --- hits


def test_a_second_process_plans_nothing_and_imports_neither_mlir_nor_the_fuser(tmp_path):
    first, second = child(tmp_path), child(tmp_path)
    assert [first.pop(what) for what in ("mlir", "fuser", "emitter")] == [True] * 3
    assert [second.pop(what) for what in ("mlir", "fuser", "emitter")] == [False] * 3
    assert first == second
    assert first["kernels"]
    assert first["again"]


TORCH_CHILD = """
    import json, sys
    import torch
    import pbkern

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    x = torch.randn(16, 64)
    compiled = torch.compile(model, backend="pbkern")
    loss = compiled(x).square().sum()
    loss.backward()
    torch.testing.assert_close(loss, model(x).square().sum())
    grads = [p.grad.sum().item() for p in model.parameters()]
    print(json.dumps({"fuser": "pbkern.fuse.pipeline" in sys.modules, "grads": grads}))
"""


@pytest.mark.slow
def test_a_second_process_of_torch_plans_nothing(tmp_path):
    pytest.importorskip("torch")
    first, second = child(tmp_path, TORCH_CHILD), child(tmp_path, TORCH_CHILD)
    assert first["fuser"]
    assert not second["fuser"]
    assert first["grads"] == second["grads"]


def test_what_a_function_closes_over_may_change(store):
    def closing(values):
        return lambda x: x * values + 1

    for n, values in enumerate((X, X + 1)):
        was_planned, result = planned(closing(values), X)
        assert was_planned is (n == 0)
        np.testing.assert_allclose(result, X * values + 1, rtol=1e-6)


def test_derivatives_are_found(store):
    loss = lambda x: norm(x)[0][0].sum()
    first = jax.grad(pbkern.jit(loss))(X)
    count = len(plans(store))
    second = jax.grad(pbkern.jit(lambda x: loss(x)))(X)
    assert_same(first, second)
    assert len(plans(store)) > 0
    assert len(plans(store)) >= count


def test_large_results_have_places_of_their_own(store):
    x = jnp.ones((1 << 13, 1 << 10), "f") * 3
    for n in range(2):
        f = pbkern.jit(lambda x: (x + 1, x.sum()))
        for _ in range(3):
            added, total = f(x)
        assert float(added[5, 5]) == 4, n
        assert float(total) == 3 * (1 << 23)


def with_parts_of_xla(x):
    square = x @ x.T + jnp.eye(len(x))
    return jnp.tanh(jnp.linalg.cholesky(square * 2)) + 1, jnp.fft.fft(x).real


def test_parts_that_xla_runs_are_in_the_entry(store):
    first, second = planned(with_parts_of_xla, X), planned(with_parts_of_xla, X)
    assert (first[0], second[0]) == (True, False)
    assert_same(first[1], second[1])
    report = pbkern.jit(with_parts_of_xla).explain(X)
    assert {left.op for left in report.left} >= {"cholesky", "fft"}
    with jax.enable_x64(True):
        wide = X.astype("float64")
        first, second = planned(with_parts_of_xla, wide), planned(with_parts_of_xla, wide)
        assert (first[0], second[0]) == (True, False)
        assert_same(first[1], second[1])


# --- misses


def test_what_a_plan_depends_on_decides(store, monkeypatch):
    assert planned(norm, X)[0]
    assert not planned(norm, X)[0]
    assert planned(norm, X[:32])[0]
    assert planned(norm, X.astype("float16"))[0]
    assert planned(lambda x: norm(x, 3.0), X)[0]
    assert planned(norm, X, compile_options={"mlir_disable_fast_math": True})[0]
    assert planned(norm, jnp.asarray(X), donate_argnums=0)[0]
    with config.override(num_threads=1):
        assert planned(norm, X)[0]
    with jax.enable_x64(True):
        assert planned(norm, X)[0]
    assert not planned(norm, X)[0]
    monkeypatch.setattr(plan_store, "environment", lambda: "other sources")
    assert planned(norm, X)[0]
    assert not planned(norm, X)[0]


def test_results_of_a_hit_are_those_of_the_miss(store):
    (_, first), (again, second) = planned(norm, X), planned(norm, X)
    assert not again
    assert_same(first, second)


# --- entries that are not believed


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-7],
        lambda content: b"",
        lambda content: content[:60] + b"\x00" + content[61:],
        lambda content: content + b"x",
    ],
    ids=["cut", "empty", "changed", "longer"],
)
def test_damaged_entries_are_made_again(store, damage):
    _, first = planned(norm, X)
    (path,) = plans(store)
    path.write_bytes(damage(path.read_bytes()))
    was_planned, second = planned(norm, X)
    assert was_planned
    assert_same(first, second)
    assert not planned(norm, X)[0]


@pytest.mark.parametrize("content", [b"", b"{}\n", b"[1]\n", b'{"arrays": [[[4], "float32"]]}\n'])
def test_whole_entries_with_another_content_are_made_again(store, content):
    planned(norm, X)
    (path,) = plans(store)
    store.put("plan", path.stem.removeprefix("plan-"), content)
    assert planned(norm, X)[0]
    assert not planned(norm, X)[0]


def test_a_plan_whose_code_has_gone_is_made_again(store):
    _, first = planned(norm, X)
    for path, _ in store.entries():
        if path.name.startswith("code-"):
            path.unlink()
    was_planned, second = planned(norm, X)
    assert was_planned
    assert_same(first, second)


def test_an_entry_that_others_may_write_is_not_read(store):
    planned(norm, X)
    (path,) = plans(store)
    path.chmod(0o666)
    disk_cache._store.cache_clear()
    with pytest.warns(UserWarning, match="other users may have written"):
        assert planned(norm, X)[0]
    disk_cache._store.cache_clear()


SMALL_CHILD = """
    import json, jax.numpy as jnp, pbkern
    f = pbkern.jit(lambda x: jnp.sin(x) + x.sum())
    print(json.dumps(f(jnp.arange(12.0)).tolist()))
"""


def test_processes_may_write_at_the_same_time(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: child(tmp_path, SMALL_CHILD), range(2))
    assert first == second == child(tmp_path, SMALL_CHILD)


# --- functions that are not stored


def calls_python(x):
    return jax.pure_callback(
        lambda v: np.asarray(v) + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x * 2
    )


def prints(x):
    jax.debug.print("{}", x[0, 0])
    return x * 2


def test_functions_that_call_python_are_not_stored(store):
    for f in (calls_python, prints):
        for _ in range(2):
            assert planned(f, X)[0]
        assert "planned anew in each process" in str(pbkern.jit(f).explain(X))
    assert not plans(store)
    assert "anew" not in str(pbkern.jit(norm).explain(X))


def test_without_a_store_reports_look_at_no_contents(monkeypatch):
    looked_at = []
    monkeypatch.setattr(plan_store, "content", looked_at.append)
    with config.override(cache=False):
        report = pbkern.jit(calls_python).explain(X)
    assert not looked_at
    assert "anew" not in str(report)


def test_functions_in_kernels_that_check_are_not_stored(store):
    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct(X.shape, "float32"))
    def doubled(x, o):
        pbkern.check((x[...] < 100).all(), "large")
        o[...] = x[...] * 2

    assert planned(lambda x: doubled(x) + 1, X)[0]
    assert not plans(store)


def test_plans_after_a_failure_are_not_stored(store, monkeypatch):
    compile_programs = pipeline.compile_programs

    def failing(*args):
        fallback.warn("a pass failed", RuntimeError("why"), "without it")
        return compile_programs(*args)

    monkeypatch.setattr(pipeline, "compile_programs", failing)
    with pytest.warns(pbkern.errors.FallbackWarning):
        planned(norm, X)
    assert not plans(store)


def test_stages_that_are_shown_are_made(store, tmp_path, capsys):
    planned(norm, X)
    with config.override(dump=tmp_path / "dumped"):
        assert planned(norm, X)[0]
    assert list((tmp_path / "dumped").iterdir())
    assert planned(norm, X, compile_options={"debug": True})[0]
    assert "kernel" in capsys.readouterr().err


def test_without_a_store_nothing_is_kept(tmp_path):
    with config.override(cache=False, cache_dir=tmp_path):
        assert planned(norm, X)[0]
        assert planned(norm, X)[0]
    assert not list(tmp_path.iterdir())


# --- in one process


def test_explain_after_a_call_plans_nothing(store):
    f, count = pbkern.jit(lambda x: (norm(x)[0], jnp.sin(x) * 0)[0]), []
    f(X)
    partition = pbkern.fuse.plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.fuse, "plan", lambda *a, **k: count.append(1) or partition(*a, **k))
        assert len(f.explain(X).kernels) == 1
    assert not count


# --- digests


def digest(f, *args):
    return described(jax.make_jaxpr(f)(*args)).digest


def test_digests_name_what_a_function_computes():
    a, b = np.arange(3.0, dtype="f"), np.arange(3.0, dtype="f") + 1
    functions = [
        lambda x: x + 1,
        lambda x: x + 2,
        lambda x: x - 1,
        lambda x: jnp.sort(x),
        lambda x: jnp.sort(x, descending=True),
        lambda x: x + a,
        lambda x: x + b,
        lambda x: jax.lax.fori_loop(0, 3, lambda _, v: v * 2, x),
        lambda x: jax.lax.fori_loop(0, 3, lambda _, v: v * 3, x),
        lambda x: jax.lax.fori_loop(0, 4, lambda _, v: v * 2, x),
        lambda x: (x, x * 2),
        lambda x: (x * 2, x),
    ]
    digests = [digest(f, a) for f in functions]
    assert len(set(digests)) == len(functions)
    assert digests == [digest(f, b) for f in functions]
    assert digest(functions[0], a.astype("float16")) != digests[0]


def test_digests_tell_what_they_do_not_cover():
    closed = jax.make_jaxpr(calls_python)(X)
    assert described(closed).unnamed
    relu = jax.make_jaxpr(lambda x: jax.grad(lambda v: jax.nn.relu(v).sum())(x))(X)
    assert not described(relu).unnamed


def test_digests_tell_generators_of_random_numbers_apart():
    known, parts = threefry_prng_impl, ("key_shape", "seed", "split", "random_bits", "fold_in")

    def content(**changed):
        generator = define_prng_impl(**{part: getattr(known, part) for part in parts} | changed)
        return described(jax.make_jaxpr(jax.random.split)(jax.random.key(1, impl=generator)))

    same, other = content(), content(split=known.fold_in)
    assert not same.unnamed
    assert not other.unnamed
    assert same.digest == content().digest != other.digest
    assert len(content(split=lambda k, shape: known.split(k, shape)).unnamed) == 1
    seeding = described(jax.make_jaxpr(lambda: jax.random.bits(jax.random.key(1)))())
    assert not seeding.unnamed


def test_programs_that_share_code_keep_their_names(store):
    def one(x):
        return jnp.exp(x) * 2

    def two(x):
        return jnp.exp(x) * 2

    for f in (one, two):
        pbkern.jit(f)(X)
    entries = {
        step["name"]: step["label"]
        for path in plans(store)
        for step in json.loads(store.get("plan", path.stem.removeprefix("plan-")).split(b"\n")[0])[
            "segments"
        ]
    }
    assert entries == {"one": "one_map0", "two": "two_map0"}
    needed, _ = planned(two, X)
    assert not needed
    (kernel,) = pbkern.jit(two).kernels(X)
    assert kernel.name == entries["two"]
    names = {one.name for one in pbkern.profile(pbkern.jit(two), X).slices}
    assert kernel.name in names
