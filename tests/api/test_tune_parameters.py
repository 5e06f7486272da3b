"""Tuning over parameters of what makes a kernel: what is tried, refused, kept and told."""

import functools
import math
import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern import tune
from pbkern.api.measured import tuned_parameters as parameters
from pbkern.api.measured.tuned_parameters import Making, _Search
from pbkern.core import config
from pbkern.core.errors import KernelError, OptionError
from pbkern.fuse.cost.hand_written import predicted_seconds
from pbkern.targets import get_target

X = jnp.asarray(np.random.default_rng(0).normal(size=(4096, 64)).astype("f"))


def below_largest(ROWS=32, FACTOR=2):
    """FACTOR * x minus the largest of all elements, which each program finds: few programs are much faster."""
    if ROWS == 13:
        raise ValueError("thirteen rows")
    rows = pbkern.BlockSpec((ROWS, 64), lambda i: (i, 0))

    @pbkern.kernel(
        grid=(pbkern.cdiv(4096, ROWS),),
        in_specs=[rows, pbkern.BlockSpec()],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct((4096, 64), "float32"),
    )
    def kernel(x, everything, o):
        o[...] = FACTOR * x[...] - everything[...].max()

    return kernel


@pytest.fixture(autouse=True)
def own_cache(tmp_path):
    with config.override(cache_dir=tmp_path, cache=True):
        yield


def test_the_fastest_is_found_and_printed_to_be_pasted(capsys):
    result = tune(below_largest, X, X, space={"ROWS": [32, 1024, 2048]}, budget=3)
    out = capsys.readouterr().out
    assert result.improved
    assert result.best["ROWS"] in (1024, 2048)
    assert result.after < result.before
    assert f"below_largest(ROWS={result.best['ROWS']})" in out
    assert out.count("us\n") >= 3
    assert re.search(r"^\[1/3\] ROWS=32: ", out)
    np.testing.assert_array_equal(result.kernel(X, X), 2 * np.asarray(X) - np.asarray(X).max())


def test_candidates_that_fail_or_differ_are_left_out(capsys):
    space = {"ROWS": [13, 1024, 5000, -1], "FACTOR": [3, 2]}
    result = tune(below_largest, X, X, space=space, budget=5)
    why = {tuple(c.parameters.values()): c.why for c in result.candidates}
    assert why[13, 2] == "ValueError: thirteen rows"
    assert "output 0 at [0, 0] is" in why[1024, 3]
    assert "KernelError" in why[-1, 2]
    assert "refused, ValueError" in capsys.readouterr().out
    assert result.best["FACTOR"] == 2
    assert result.best["ROWS"] in (32, 1024, 5000)


def test_fields_of_compiler_params_are_parameters_too(capsys):
    space = {"ROWS": [64], "num_threads": [1], "max_concurrent_steps": [2]}
    result = tune(below_largest, X, X, space=space, budget=2)
    assert {tuple(sorted(c.parameters)) for c in result.candidates} == {tuple(sorted(space))}
    (one,) = [c for c in result.candidates if list(c.parameters.values()) == [64, 1, 2]]
    assert one.seconds is not None
    making = Making.of(below_largest, space)
    point = (("ROWS", 64), ("num_threads", 1), ("max_concurrent_steps", None))
    kernel = making.kernel(point, (X, X))
    assert kernel.compiler_params["cpu"].num_threads == 1
    assert kernel.compiler_params["cpu"].max_concurrent_steps == 1
    assert (
        making.paste(point)
        == "below_largest(ROWS=64), compiler_params=pbkern.cpu.CompilerParams(num_threads=1)"
    )


def test_the_order_is_the_models_first_and_follows_from_the_seed():
    space = {"ROWS": [2**n for n in range(5, 12)], "FACTOR": list(range(20))}

    def order(seed):
        making = Making.of(below_largest, space)
        return list(_Search(making, making.points(space), (X, X), 0.0, 1.0, seed).order())

    first = order(0)
    assert first == order(0)
    assert first != order(1)
    assert sorted(first) == sorted(Making.of(below_largest, space).points(space)[1:])
    costs = get_target("cpu").costs()
    priced = {
        rows: predicted_seconds(below_largest(rows).trace(X, X), costs) for rows in space["ROWS"]
    }
    assert dict(first[0])["ROWS"] == min(priced, key=priced.__getitem__) == 2048
    assert priced[32] > 4 * priced[2048]


def test_a_later_search_starts_from_what_was_found(capsys):
    space = {"ROWS": [32, 1024]}
    first = tune(below_largest, X, X, space=space, budget=2)
    second = tune(below_largest, X, X, space=space, budget=2)
    assert not first.remembered
    assert second.remembered
    assert second.best == first.best == {"ROWS": 1024}
    more = tune(below_largest, X, X, space={"ROWS": [32, 512, 128, 1024]}, budget=2)
    assert [c.parameters["ROWS"] for c in more.candidates[:2]] == [32, 1024]
    assert len(more.candidates) == 4
    other = tune(lambda ROWS=32: below_largest(ROWS, 3), X, X, space=space, budget=2)
    assert not other.remembered


CHILD = """
    import sys
    sys.path.insert(0, {folder!r})
    from tests.api.test_tune_parameters import X, below_largest, tune
    print(tune(below_largest, X, X, space={{"ROWS": [32, 1024]}}, budget=2).remembered)
"""


def test_another_process_starts_from_it(tmp_path):
    tune(below_largest, X, X, space={"ROWS": [32, 1024]}, budget=2)
    env = os.environ | {"PBKERN_CACHE_DIR": str(tmp_path)}
    code = textwrap.dedent(CHILD).format(folder=os.getcwd())
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "True"


def test_a_slower_candidate_does_not_replace_the_default(monkeypatch):
    monkeypatch.setattr(
        parameters, "compared", lambda calls, *_: ([1.0] * len(calls), [False] * len(calls))
    )
    result = tune(below_largest, X, X, space={"ROWS": [32, 1024]}, budget=1)
    assert result.best == {"ROWS": 32}
    assert not result.improved


def test_what_has_nothing_to_vary_is_told_so(capsys):
    assert tune(below_largest(64), X, X).space_size == 1
    assert tune(below_largest, X, X, space={}).space_size == 1
    assert tune(below_largest, X, X, space={"ROWS": [32]}).space_size == 1
    assert capsys.readouterr().out.count("nothing to vary") == 3
    inside = pbkern.jit(lambda x: below_largest(64)(x, x))
    result = tune(inside, X)
    assert not result.kernels
    assert "nothing to vary" in capsys.readouterr().out


def test_constants_of_a_source_are_parameters():
    (kernel,) = pbkern.jit(lambda x: jnp.exp(x).sum(1)).kernels(X)
    maker = functools.partial(pbkern.rebuild, kernel.source())
    result = tune(maker, X, space={"ELEMENTS": [1, 128]}, budget=2)
    assert len(result.candidates) == 3
    assert all(candidate.seconds for candidate in result.candidates)
    np.testing.assert_allclose(
        result.kernel(X), np.exp(np.asarray(X, np.float64)).sum(1), rtol=1e-5
    )
    with pytest.raises(KernelError, match="no constant `COLUMNS`"):
        pbkern.rebuild(kernel.source(), COLUMNS=3)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"ROW": [1]}, "nothing has the parameter `ROW`"),
        ({"ROWS": []}, "has no values"),
        ({"ROWS": "12"}, "has no values"),
        ({"ROWS": [[8]]}, "cannot be told apart"),
        ([8], "by their names\n  why  space=.8."),
        ({8: [8]}, "by their names\n  why  space=.8: .8.."),
    ],
)
def test_spaces_that_mean_nothing_are_errors(space, message):
    with pytest.raises(OptionError, match=message):
        tune(below_largest, X, X, space=space)


def test_kernels_have_no_named_arguments_and_defaults_must_run():
    with pytest.raises(OptionError, match="no named arguments"):
        tune(below_largest, X, X, space={"ROWS": [1]}, scale=2)
    with pytest.raises(OptionError, match="is no kernel, and no function that makes one"):
        tune(3, X, space={"ROWS": [1]})
    with pytest.raises(OptionError, match="why  ROWS=0: ZeroDivisionError: ") as caught:
        tune(lambda ROWS: 100 // ROWS, X, space={"ROWS": [0, 8]})
    assert caught.value.at.startswith(__file__)
    assert caught.value.hint
    for budget in ("3", None, 0, -1.0, math.nan):
        with pytest.raises(OptionError, match="must be positive"):
            tune(below_largest, X, X, space={"ROWS": [1]}, budget=budget)
    with pytest.raises(KernelError, match="outside the array"):
        tune(below_largest, X[:100], X, space={"ROWS": [32, 64]})
    with pytest.raises(OptionError, match="those of a kernel"):
        making = Making.of(lambda ROWS=32: jnp.sin, {"num_threads": [1]})
        making.kernel((("num_threads", 1),), (X,))
