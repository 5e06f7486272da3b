"""Long compilations say what they are at; short ones are silent."""

import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core import config
from pbkern.core.errors import OptionError
from pbkern.core.process import progress

X = np.linspace(0, 1, 64 * 64, dtype="f").reshape(64, 64)


@pytest.fixture
def seconds(monkeypatch):
    """A clock that stands still; add to seconds[0]."""
    now = [100.0]
    monkeypatch.setattr(progress, "clock", lambda: now[0])
    return now


def test_lines_begin_after_the_limit_and_keep_their_distance(seconds, capsys):
    with config.override(progress=2.0), progress.compiling("f"):
        for at in (0.0, 1.9, 2.0, 2.5, 3.0):
            seconds[0] = 100 + at
            progress.step(f"stage {at}")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "pbkern: compiling `f`: 2.0 s, stage 2.0",
        "pbkern: compiling `f`: 3.0 s, stage 3.0",
        "pbkern: compiling `f`: done after 3.0 s",
    ]


def test_inner_compilations_belong_to_the_outer_one(seconds, capsys):
    with config.override(progress=2.0):
        with progress.compiling("outer"):
            seconds[0] += 5
            with progress.compiling("inner"):
                progress.step("a stage")
        with progress.compiling("next"):  # counts anew
            progress.step("a stage")
    progress.step("outside")
    err = capsys.readouterr().err
    assert "inner" not in err
    assert "next" not in err
    assert "outside" not in err
    assert err.splitlines() == [
        "pbkern: compiling `outer`: 5.0 s, a stage",
        "pbkern: compiling `outer`: done after 5.0 s",
    ]


def test_failures_leave_nothing_behind(seconds, capsys):
    with pytest.raises(ValueError), progress.compiling("f"):
        raise ValueError
    with config.override(progress=2.0), progress.compiling("g"):
        seconds[0] += 3
        progress.step("a stage")
    assert "`g`: 3.0 s" in capsys.readouterr().err


def compile_something(monkeypatch, limit):
    """A function of two kernels, on a clock by which every look takes a second."""
    now = iter(range(10_000))
    monkeypatch.setattr(progress, "clock", lambda: float(next(now)))
    with config.override(progress=limit, cache=False):
        slow = pbkern.jit(
            lambda x: jnp.tanh(x @ x) @ x,
            compile_options={"polyblocks_disable_affine_fusion": True},
        )
        slow(X + limit)


def test_kernels_and_stages_are_named(monkeypatch, capsys):
    compile_something(monkeypatch, 1.0)
    err = capsys.readouterr().err
    for part in (
        "plan",
        "kernel 1 of 3",
        "kernel 3 of 3",
        "lowering",
        "MLIR passes",
        "LLVM code generation",
        "done after",
    ):
        assert part in err, err


def test_zero_is_silence(monkeypatch, capsys):
    compile_something(monkeypatch, 0.0)
    assert "compiling" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["-1", "soon", "inf", "nan"])
def test_bad_limits_are_refused(text):
    with pytest.raises(OptionError, match="PBKERN_PROGRESS"):
        config.read({"PBKERN_PROGRESS": text})
