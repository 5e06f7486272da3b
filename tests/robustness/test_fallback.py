"""Whatever fails in the compiler, results stay right: pbkern falls back, with one warning, or an error if asked for."""

import functools
import warnings

import jax
import numpy as np
import pytest

import pbkern
from pbkern.core import config
from pbkern.core.errors import FallbackWarning, KernelError
from pbkern.core.process import fallback
from pbkern.fuse.pipeline import FUSE_PASSES
from pbkern.lower.passes.shared import SHARED_PASSES
from pbkern.targets.cpu.passes import CPU_PASSES

from .fifty_functions import FUNCTIONS, MORE, X, Y, attention

STAGES = ("plan", "kernels", "emission", "machine code")
PASSES = [p.name for p in (*FUSE_PASSES, *SHARED_PASSES, *CPU_PASSES)]
REQUIRED = {p.name for p in (*FUSE_PASSES, *SHARED_PASSES, *CPU_PASSES) if p.required}


@functools.cache
def reference(name):
    return jax.tree.leaves(jax.jit((FUNCTIONS | MORE)[name])(X, Y))


def compiled(name, stage, **options):
    """Results with a stage that fails, and the warnings."""
    f = (FUNCTIONS | MORE)[name]
    with (
        config.override(fallback=True, cache=False),
        fallback.failing(stage),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        got = jax.tree.leaves(pbkern.jit(lambda x, y: f(x, y), compile_options=options)(X, Y))
    return got, [str(w.message) for w in seen if issubclass(w.category, FallbackWarning)]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("stage", [*STAGES, *PASSES])
@pytest.mark.parametrize(
    "name", [*FUNCTIONS, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)]
)
def test_results_stay_right(name, stage):
    got, seen = compiled(name, stage)
    for g, w in zip(got, reference(name)):
        rtol = 2e-2 if g.dtype.itemsize == 2 else 2e-5
        np.testing.assert_allclose(
            np.asarray(g, np.float64), np.asarray(w, np.float64), rtol=rtol, atol=1e-5
        )
    assert len(seen) == len(set(seen))
    assert all(f"`{stage}` was made to fail" in text for text in seen)
    if stage in ("plan", "emission", "machine code"):
        assert seen


@pytest.mark.parametrize(
    "stage", ["plan", "emission", "machine code", "merge nests", "pack", "simplify", "pick early"]
)
def test_strict_target_and_the_variable_make_it_an_error(stage):
    with pytest.raises((fallback.InjectedFailure, fallback.PassFailed)):
        compiled("attention", stage, strict_target=True)
    with (
        config.override(fallback=False, cache=False),
        fallback.failing(stage),
        pytest.raises(fallback.InjectedFailure),
    ):
        pbkern.jit(lambda x, y: attention(x, y))(X, Y)


def test_the_warning_names_kernel_line_and_file():
    _, (text, *_) = compiled("attention", "emission")
    assert text.startswith("emission failed on kernel `")
    assert "fifty_functions.py:" in text
    assert "repro" in text
    assert "as plain code" in text
    assert "PBKERN_FALLBACK=0" in text


def test_mistakes_of_the_user_are_no_failures():
    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((4,), "float32"))
    def wrong(x, o):
        o[...] = x[...].reshape(2, 2)

    with config.override(fallback=True), warnings.catch_warnings(), pytest.raises(KernelError):
        warnings.simplefilter("error")
        wrong(np.ones(4, "f4"))


def test_all_kernels_the_plain_way():
    """Emission fails for every kernel, of hand-written ones too."""
    block = pbkern.BlockSpec((8,), lambda i: (i,))

    @pbkern.kernel(
        grid=(4,),
        in_specs=[block],
        out_specs=[block],
        out_shape=jax.ShapeDtypeStruct((30,), "float32"),
    )
    def doubled(x, o):
        o[...] = x[...] * 2 + x[...].sum() * 0

    x = np.arange(30, dtype=np.float32)
    with (
        config.override(fallback=True, cache=False),
        fallback.failing("emission"),
        pytest.warns(FallbackWarning),
    ):
        got = np.asarray(doubled(x))
    np.testing.assert_array_equal(got[:24], x[:24] * 2)
