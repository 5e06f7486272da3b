"""Breakpoints in bodies, and files that repeat a failure."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core import config
from pbkern.core.errors import CheckError, OutOfBoundsError, PbkernError, RaceError, UnsupportedOp
from pbkern.dsl.printer import same_kernel
from pbkern.targets import mlir

X = np.arange(32, dtype="f4")
ROWS = pbkern.BlockSpec((8,), lambda i: (i,))
ROOT = pathlib.Path(pbkern.__file__).parents[1]


def make(body, x=X, **options):
    specs = {
        "grid": (4,),
        "in_specs": [ROWS],
        "out_specs": ROWS,
        "out_shape": jax.ShapeDtypeStruct(x.shape, x.dtype),
    }
    return pbkern.kernel(body, **(specs | options))


# --- breakpoints ---------------------------------------------------------------------------------------------------


def stopping(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2
    total = o_ref[...].sum()

    @pbkern.when(pbkern.program_id(0) == 2)
    def _():
        pbkern.breakpoint(total, first=x_ref[0])

    o_ref[0] += 1.0


@pytest.fixture
def stops(monkeypatch):
    """Local variables of the frame in which each breakpoint stopped."""
    found = []

    def hook(*_, **__):
        frame = sys._getframe(1)
        found.append(dict(frame.f_locals))
        found[-1]["refs"] = {k: v.copy() for k, v in frame.f_locals["refs"].items()}

    monkeypatch.setattr(sys, "breakpointhook", hook)
    return found


@pytest.mark.parametrize(
    "call", [lambda k: pbkern.interpret(k.trace(X), X), lambda k: make(stopping, interpret=True)(X)]
)
def test_a_breakpoint_shows_program_refs_and_values(stops, call):
    call(make(stopping))
    (seen,) = stops
    assert seen["program"] == (2,)
    assert "test_debugging.py" in seen["at"]
    assert seen["values"] == {0: (X[16:24] * 2).sum(), "first": 16.0}
    np.testing.assert_array_equal(seen["refs"]["x_ref"], X[16:24])
    np.testing.assert_array_equal(seen["refs"]["o_ref"], X[16:24] * 2)


def test_refs_can_be_changed_at_a_breakpoint(monkeypatch):
    monkeypatch.setattr(
        sys, "breakpointhook", lambda: sys._getframe(1).f_locals["refs"]["o_ref"].fill(5)
    )
    (got,) = pbkern.interpret(make(stopping).trace(X), X)
    np.testing.assert_array_equal(got[16:24], [6, 5, 5, 5, 5, 5, 5, 5])


def test_a_breakpoint_prints_and_is_refused_by_the_compiler():
    kernel = make(stopping)
    assert same_kernel(pbkern.rebuild(kernel.trace(X).source()), kernel.trace(X))
    with pytest.raises(
        UnsupportedOp, match=r"pbkern.breakpoint in a compiled kernel\n  at   .*test_debugging.py"
    ):
        kernel(X)


# --- files that repeat a failure -----------------------------------------------------------------------------------


def outside(x_ref, o_ref):
    at = x_ref[0].astype(jnp.int32) // 2
    o_ref[...] = x_ref[...] + x_ref[at]


def colliding(x_ref, o_ref):
    o_ref[pbkern.ds(8 * (pbkern.program_id(0) % 2), 8)] = x_ref[...]


def doubling(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def failing(x_ref, o_ref):
    pbkern.check((x_ref[...] < 20).all(), "{} is too large", x_ref[...].max())
    o_ref[...] = x_ref[...]


def unsupported(x_ref, o_ref):
    o_ref[...] = jnp.linalg.svd(x_ref[...])[0]


PARALLEL = pbkern.cpu.CompilerParams(dimension_semantics=("parallel",))
SAME = {"out_specs": pbkern.BlockSpec(), "compiler_params": PARALLEL}
SQUARE = {
    "grid": (),
    "in_specs": None,
    "out_specs": None,
    "out_shape": jax.ShapeDtypeStruct((4, 4), "f4"),
}


def interpreted(kernel, x):
    pbkern.interpret(kernel.trace(x), x)


def native(kernel, x):
    jax.block_until_ready(kernel(x))


FAILURES = {
    "out of bounds": (make(outside), X, interpreted, OutOfBoundsError),
    "race": (make(colliding, **SAME), X, interpreted, RaceError),
    "check": (make(failing), X, interpreted, CheckError),
    "native check": (make(failing), X, native, CheckError),
    "64 bits": (make(failing, X.astype("f8")), X.astype("f8"), interpreted, CheckError),
    "bfloat16": (
        make(failing, jnp.asarray(X, jnp.bfloat16)),
        jnp.asarray(X, jnp.bfloat16),
        native,
        CheckError,
    ),
    "compilation": (make(unsupported, **SQUARE), np.eye(4, dtype="f4"), native, UnsupportedOp),
    "breakpoint": (make(stopping), X, native, UnsupportedOp),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FAILURES)
def test_the_file_fails_the_same_way(name, tmp_path):
    kernel, x, run, kind = FAILURES[name]
    with config.override(dump=tmp_path / "dump"), pytest.raises(kind) as raised:
        run(kernel, x)
    path = re.search(r"\n  file (\S+\.py)$", str(raised.value))[1]
    assert path == str(raised.value.repro)
    assert pathlib.Path(path).parent == tmp_path / "dump"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PBKERN_DUMP": str(tmp_path / "again")}
    done = subprocess.run(
        [sys.executable, path],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert f"{kind.__name__}: {raised.value.what.splitlines()[0]}" in done.stderr


def test_a_compilation_that_fails_for_one_of_several_kernels_leaves_its_file(tmp_path):
    fine = make(colliding, name="fine")

    def f(x):
        return make(unsupported, **SQUARE)(fine(fine(x))[:16].reshape(4, 4))

    with config.override(dump=tmp_path), pytest.raises(UnsupportedOp) as raised:
        pbkern.jit(f)(X)
    assert "def unsupported(" in raised.value.repro.read_text()


def test_a_failure_of_code_generation_is_traced_to_its_kernel(tmp_path, monkeypatch):
    """MLIR and LLVM get all kernels of a program at once: the one at fault is found by compiling each by itself."""
    stock = mlir.run_passes

    def run_passes(module, passes):
        if passes is mlir.KERNEL_PASSES and "culprit" in str(module):
            raise ValueError("a pass failed")
        return stock(module, passes)

    monkeypatch.setattr(mlir, "run_passes", run_passes)
    apart = pbkern.cpu.CompilerParams(num_threads=1)
    fine, culprit = (
        make(colliding, name="fine"),
        make(doubling, name="culprit", compiler_params=apart),
    )
    with (
        config.override(dump=tmp_path, cache=False),
        pytest.raises(ValueError, match="a pass failed") as raised,
    ):
        pbkern.jit(lambda x: culprit(fine(x)))(X)
    assert "def culprit(" in raised.value.repro.read_text()


def test_the_same_failure_leaves_one_file(tmp_path):
    with config.override(dump=tmp_path):
        for _ in range(3):
            with pytest.raises(PbkernError):
                interpreted(make(outside), X)
    assert len(list(tmp_path.iterdir())) == 1


def test_large_operands_are_drawn_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("pbkern.dsl.text.repro.LARGEST_OPERANDS", 16)
    with config.override(dump=tmp_path), pytest.raises(CheckError) as raised:
        interpreted(make(failing), X)
    text = raised.value.repro.read_text()
    assert "too large, so these are random" in text
    assert 'operand_of_text("' not in text
