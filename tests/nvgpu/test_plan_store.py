"""Plans for GPUs on disk: another process launches a function's kernels without planning or lowering it."""

import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core import config
from pbkern.core.process import disk_cache
from pbkern.targets import get_target
from tests.api.test_plan_store import assert_same, planned, with_parts_of_xla

X = np.random.default_rng(0).normal(size=(24, 24)).astype("f4")
GPU = {"target": "nvgpu", "mm_conv_precision_mode": "fp32"}


@pytest.fixture
def store(tmp_path):
    """An empty store; kernels run in the simulator."""
    with config.override(cache_dir=tmp_path / "kept", cache=True, gpu_driver="simulator"):
        yield disk_cache.current()


def on_gpu(f, *args, **options):
    """(whether a new function with this body had to be planned, its results)."""
    return planned(f, *args, compile_options=GPU | options)


def with_a_loop(x):
    y = jax.lax.while_loop(
        lambda c: c[1] < 50,
        lambda c: (jnp.tanh(c[0] @ c[0].T) + 1, c[0].sum() + c[1] + 30),
        (x, 0.0),
    )[0]
    return jax.nn.softmax(y, -1), jnp.sort(x, 0), jnp.cumsum(x, 1), jnp.float32(3), x


def normed(x):
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True))


def entries(store, kind):
    return [path for path, _ in store.entries() if path.name.startswith(f"{kind}-")]


@pytest.mark.parametrize("f", [with_a_loop, with_parts_of_xla, lambda x: (x[:0] + 1, x * 2)])
def test_what_another_process_has_planned_is_launched(store, f):
    first, second = on_gpu(f, X), on_gpu(f, X)
    assert (first[0], second[0]) == (True, False)
    assert_same(first[1], second[1])
    for got, want in zip(second[1], f(X)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_devices_have_plans_of_their_own(store):
    for device in ("a100", "h100"):
        assert on_gpu(normed, X, device=device)[0]
        assert not on_gpu(normed, X, device=device)[0]


def test_arguments_that_are_given_up_are_updated_in_place(store):
    def update(cache, row):
        return jax.lax.dynamic_update_slice(cache, row[None], (3, 0)), row.sum()

    for n in range(2):
        was_planned, (cache, total) = planned(
            update, jnp.asarray(X), X[0] * 2, compile_options=GPU, donate_argnums=0
        )
        assert was_planned is (n == 0)
        np.testing.assert_array_equal(cache[3], X[0] * 2)
        np.testing.assert_array_equal(cache[4:], X[4:])
        np.testing.assert_allclose(total, 2 * X[0].sum(), rtol=1e-5)


@pytest.mark.parametrize("kind", ["nvgpu", "code"])
@pytest.mark.parametrize("damage", [None, b"\x07" * 100], ids=["gone", "damaged"])
def test_without_code_of_kernels_or_of_their_launches_a_function_is_planned(store, kind, damage):
    _, first = on_gpu(normed, X)
    assert entries(store, kind)
    for path in entries(store, kind):
        if damage is None:
            path.unlink()
        else:
            store.put(kind, path.stem.removeprefix(f"{kind}-"), damage)
    get_target("nvgpu")._codes.clear()  # as in a process that has compiled nothing yet
    was_planned, second = on_gpu(normed, X)
    assert was_planned
    assert_same(first, second)
    assert not on_gpu(normed, X)[0]


CHILD = """
    import json, sys
    import jax, jax.numpy as jnp, numpy as np
    import pbkern

    @pbkern.jit(compile_options={"target": "nvgpu"})
    def f(x, w):
        return jax.nn.softmax(jnp.tanh(x @ w), -1), jnp.cumsum(x, 0)

    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=shape).astype("f")) for shape in ((32, 16), (16, 24))]
    results = [np.asarray(a).tobytes().hex() for a in f(*args)]
    loaded = {m.split(".")[0] for m in sys.modules}
    modules = {"mlir": bool(loaded & {"mlir", "torch_mlir"}), "fuser": "pbkern.fuse.pipeline" in sys.modules}
    memory = f.memory_analysis(*args)
    print(json.dumps({
        "results": results, **modules,
        "memory": [memory.arena_size_in_bytes, memory.generated_code_size_in_bytes],
        "kernels": [kernel.name for kernel in f.kernels(*args)],
        "ptx": f.as_text(*args, stage="ptx"),
    }))
"""


def test_a_second_process_imports_neither_mlir_nor_the_fuser(tmp_path):
    def run():
        env = os.environ | {"PBKERN_CACHE_DIR": str(tmp_path), "PBKERN_GPU_DRIVER": "simulator"}
        command = [sys.executable, "-c", textwrap.dedent(CHILD)]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first = run()
    entries_before = sorted(path.name for path in tmp_path.rglob("*"))
    second = run()
    entries_behind = sorted(path.name for path in tmp_path.rglob("*"))
    assert entries_before == entries_behind
    assert [first.pop(what) for what in ("mlir", "fuser")] == [True] * 2
    assert [second.pop(what) for what in ("mlir", "fuser")] == [False] * 2
    assert first == second


def test_torch_functions_run_what_another_process_has_planned(store):
    torch = pytest.importorskip("torch")

    def run():
        torch._dynamo.reset()
        x = torch.from_numpy(X).clone().requires_grad_()
        y = pbkern.polyblocks_jit_torch(compile_options=GPU)(
            lambda x: torch.softmax(x @ x.T, -1)[:, 1:5]
        )(x)
        y.sin().sum().backward()
        return y.detach(), x.grad

    x = torch.from_numpy(X).clone().requires_grad_()
    expected = torch.softmax(x @ x.T, -1)[:, 1:5]
    expected.sin().sum().backward()
    before = len(entries(store, "plan"))
    for _ in range(2):
        for got, want in zip(run(), (expected.detach(), x.grad)):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert len(entries(store, "plan")) == before + 2  # forward and backward, once each
