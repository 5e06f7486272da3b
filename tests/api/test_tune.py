"""Tuning: what it tries, checks, keeps and forgets; and that it never keeps what was measured to be slower."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern import tune
from pbkern.api import tune as tuning
from pbkern.api.measured import measure, tuned_choices
from pbkern.cli import main
from pbkern.core import config
from pbkern.core.errors import OptionError, ScheduleError
from pbkern.core.process import disk_cache
from pbkern.fuse import Choice
from pbkern.fuse.emit import choices
from pbkern.targets import get_target

X = jnp.asarray(np.random.default_rng(0).normal(size=(512, 512)).astype("f"))


def softmax(x):
    return jax.nn.softmax(x * 2)


@pytest.fixture(autouse=True)
def forgetful(tmp_path):
    """Nothing is known before a test, or after it."""
    with config.override(cache_dir=tmp_path, cache=True):
        tuned_choices._found.clear()
        yield
        tuned_choices._found.clear()
    jax.clear_caches()


def groups(f, *args):
    return f.build(args, {})[0].groups()


def timed_by(monkeypatch, seconds_of):
    """Measurements are what `seconds_of(number of calls so far, calls)` says; every call is still made once."""
    turns = []

    def alternating(calls, seconds):
        for call in calls:
            jax.block_until_ready(call())
        turns.append(len(calls))
        return np.array([seconds_of(len(turns), calls)])

    monkeypatch.setattr(measure, "alternating", alternating)
    return turns


def later_is_faster(turn, calls):
    """Each measurement is faster than those before; of several, the last is the fastest."""
    return [1.0 / (turn + n) for n in range(len(calls))]


# --- candidates -----------------------------------------------------------------------------------------------------


def test_candidates_are_distinct_and_all_compute_the_same():
    f = pbkern.jit(softmax)
    (node,) = groups(f, X)
    machine, target = get_target("cpu").costs(), get_target("cpu")
    found = choices.candidates(node, machine, 6)
    assert found[0] == Choice()
    assert len({c.blocks for c in found}) == len(found) == 6
    grids = set()
    for c in found:
        kernel = choices.kernel_at(
            node, c, machine, lambda s, **kw: target.fused_params(s, pbkern.CompileOptions(), **kw)
        )
        grids.add(kernel.grid)
        (got,) = measure.kernel_call(kernel, pbkern.CompileOptions())(X)
        np.testing.assert_allclose(got, softmax(X), rtol=1e-5, atol=1e-7)
    assert len(grids) == 6


def test_choices_reach_the_kernels():
    f = pbkern.jit(softmax)
    chosen = Choice((16, 512), (("max_concurrent_steps", 3), ("num_threads", 1)))
    with tuned_choices.trial((chosen,)):
        (kernel,) = f.kernels(X)
    assert kernel.grid == (32,)
    assert kernel.compiler_params["cpu"].max_concurrent_steps == 3
    assert kernel.compiler_params["cpu"].num_threads == 1
    assert f.kernels(X)[0].compiler_params["cpu"].max_concurrent_steps == 1


@pytest.mark.parametrize("wrong", [(Choice((0, 3)),), (Choice((8,)),), (Choice(), Choice())])
def test_choices_that_do_not_fit_are_refused(wrong):
    with tuned_choices.trial(wrong), pytest.raises(ScheduleError):
        pbkern.jit(softmax).kernels(X)


# --- searching ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tuning_in_earnest_keeps_results_and_stays_within_its_budget(capsys):
    f = pbkern.jit(softmax)
    want = np.asarray(f(X))
    result = tune(f, X, budget=3.0)
    out = capsys.readouterr().out
    assert out.startswith("softmax: ")
    assert "candidate(s)" in out
    assert result.seconds < 15
    assert result.kernels[0].tried > 0
    assert not result.improved or result.after < result.before
    np.testing.assert_allclose(f(X), want, rtol=1e-5, atol=1e-7)


def test_what_is_faster_is_kept_and_used(monkeypatch):
    f = pbkern.jit(softmax)
    default = f.kernels(X)[0].grid
    timed_by(monkeypatch, later_is_faster)
    result = tune(f, X, budget=20.0)
    assert result.improved
    assert result.kernels[0].choice != Choice()
    assert result.kernels[0].differing == 0
    (kernel,) = f.kernels(X)
    p = kernel.compiler_params["cpu"]
    assert (kernel.grid, p.max_concurrent_steps, p.num_threads) != (default, 1, None)
    assert dict(result.kernels[0].choice.params).get("num_threads") == p.num_threads
    np.testing.assert_allclose(f(X), softmax(X), rtol=1e-5, atol=1e-7)
    assert (
        pbkern.jit(lambda x: jax.nn.softmax(x * 2)).kernels(X)[0].grid == kernel.grid
    )  # equal programs share it
    assert (
        pbkern.jit(softmax).kernels(X[:256])[0].compiler_params["cpu"].max_concurrent_steps == 1
    )  # others do not


def test_kernels_that_are_faster_alone_but_not_together_are_not_kept(monkeypatch):
    f = pbkern.jit(softmax)
    before = f.kernels(X)[0].source()

    def seconds_of(
        turn, calls
    ):  # of two, the second is slower: the last comparison, of the whole function
        return [1.0, 2.0] if len(calls) == 2 else later_is_faster(turn, calls)

    timed_by(monkeypatch, seconds_of)
    result = tune(f, X, budget=20.0)
    assert result.kernels[0].choice != Choice()
    assert not result.improved
    assert "not faster" in str(result)
    assert f.kernels(X)[0].source() == before


def test_what_is_faster_only_now_and_then_is_not_kept(monkeypatch):
    turns = iter([[[2.0, 1.0, 3.0]] * 3, [[2.0, 2.5, 1.0]] * 3])
    monkeypatch.setattr(measure, "alternating", lambda calls, seconds: np.array(next(turns)))
    assert tuning.compared([None] * 3, 1.0, 0.97)[1] == [False, False, False]
    turns = iter([[[2.0, 1.95, 1.5]] * 3, [[2.0, 1.9, 1.6]] * 3])
    seconds, faster = tuning.compared([None] * 3, 1.0, 0.97)
    assert faster == [False, False, True]
    assert seconds == pytest.approx([2.0, 1.925, 1.55], rel=0.01)


def test_other_work_that_slows_whole_rounds_does_not_decide():
    """The second call is the faster one in most rounds, and the slower one by its least time."""
    slow = np.array([[1.0, 2.0], [5.0, 4.5], [1.0, 2.0], [5.0, 4.5], [5.0, 4.5]])
    first, second = measure.typical_seconds(slow)
    assert second == pytest.approx(0.9 * first)


def test_equal_times_keep_the_models_choice(monkeypatch):
    timed_by(monkeypatch, lambda turn, calls: [1.0] * len(calls))
    result = tune(pbkern.jit(softmax), X, budget=10.0)
    assert not result.improved
    assert result.kernels[0].choice == Choice()
    assert "nothing better" in str(result)


def test_candidates_with_other_results_are_refused(monkeypatch):
    timed_by(monkeypatch, later_is_faster)
    monkeypatch.setattr(tuning, "agree", lambda got, want: False)
    result = tune(pbkern.jit(softmax), X, budget=5.0)
    assert result.kernels[0].tried == result.kernels[0].differing > 0
    assert result.kernels[0].choice == Choice()
    assert not result.improved


def test_several_kernels_and_plain_functions_and_types():
    def f(x, w):
        return jnp.sort(jnp.tanh(x @ w), axis=1).sum(0)

    types = (jax.ShapeDtypeStruct((256, 256), jnp.float32),) * 2
    result = tune(f, *types, budget=2.0)
    assert [k.name for k in result.kernels] == [n.kernel for n in groups(pbkern.jit(f), *types)]
    assert len(result.kernels) >= 2


def test_donated_arguments_survive():
    f = pbkern.jit(lambda x: x * 2 + 1, donate_argnums=0)
    x = jnp.ones((64, 64))
    tune(f, x, budget=1.0)
    np.testing.assert_array_equal(x, np.ones((64, 64)))


def test_the_command_tunes(tmp_path, capsys):
    (tmp_path / "model.py").write_text(
        "import jax.numpy as jnp\ndef f(x):\n    return jnp.exp(x) * 2 + x\n"
    )
    where = f"{tmp_path}/model.py:f"
    assert main.main(["tune", where, "--args", "f32[256,256]", "--budget", "1"]) == 0
    assert capsys.readouterr().out.startswith("f: ")
    assert main.main(["tune", where, "--args", "f32[256,256]", "--budget", "0"]) == 2


@pytest.mark.parametrize("budget", [0, -1.0, float("nan")])
def test_budgets_that_allow_nothing_are_refused(budget):
    with pytest.raises(OptionError, match="budget"):
        tune(softmax, X, budget=budget)


@pytest.mark.parametrize(
    ("got", "want", "same"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-5], True),
        ([1.0, 2.0], [1.0, 2.1], False),
        ([np.nan, 1e-9], [np.nan, 0.0], False),
        ([np.nan, 1.0], [np.nan, 1.0], True),
        ([np.inf, 1.0], [np.inf, 1.0], True),
        ([np.inf, 1.0], [1.0, 1.0], False),
    ],
)
def test_results_agree_up_to_rounding(got, want, same):
    assert tuning.agree(np.float32(got), np.float32(want)) == same


def test_integers_agree_exactly():
    assert tuning.agree(np.int32([1, 2]), np.int32([1, 2]))
    assert not tuning.agree(np.int32([1, 2]), np.int32([1, 3]))


# --- keeping --------------------------------------------------------------------------------------------------------

CHILD = """
    import jax, jax.numpy as jnp, pbkern
    f = pbkern.jit(lambda x: jax.nn.softmax(x * 2))
    print(f.kernels(jnp.zeros((512, 512)))[0].grid)
"""


def test_other_processes_use_what_was_found(tmp_path):
    jaxpr, _, options = pbkern.jit(softmax).call_of(X)
    default = pbkern.jit(softmax).kernels(X)[0].grid
    tuned_choices.remember(jaxpr, options, (Choice((2, 512)),))
    assert any(p.name.startswith("tuned-") for p, _ in disk_cache.current().entries())

    def child(**environment):
        env = os.environ | {"PBKERN_CACHE_DIR": str(tmp_path)} | environment
        command = [sys.executable, "-c", textwrap.dedent(CHILD)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert child() == "(256,)" != str(default)
    assert child(PBKERN_CACHE="0") == str(default)
    assert child(PBKERN_NUM_THREADS="1") != "(256,)"


def test_damaged_results_are_not_used():
    f = pbkern.jit(softmax)
    default = f.kernels(X)[0].grid
    jaxpr, _, options = f.call_of(X)
    tuned_choices.remember(jaxpr, options, (Choice((2, 512)),))
    assert f.kernels(X)[0].grid == (256,)
    tuned_choices._found.clear()
    assert tuned_choices.choices_for(jaxpr, options) == (Choice((2, 512)),)
    assert f.kernels(X)[0].grid == (256,)
    (path,) = [p for p, _ in disk_cache.current().entries() if p.name.startswith("tuned-")]
    path.write_bytes(path.read_bytes()[:-3])
    assert f.kernels(X)[0].grid == default


def test_without_a_disk_the_process_remembers():
    with config.override(cache=False):
        f = pbkern.jit(softmax)
        jaxpr, _, options = f.call_of(X)
        tuned_choices.remember(jaxpr, options, (Choice((2, 512)),))
        assert f.kernels(X)[0].grid == (256,)
    assert not disk_cache.current().entries()
