"""An elementwise primitive is added by one row and one lowering function: everything else follows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex
from jax.interpreters import mlir

import pbkern
from pbkern._jax import set_eager_rule
from pbkern.core.machine import Machine
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.ops.elementwise_row import ElementwisePrimitive, Spelling
from pbkern.dsl import same_kernel
from pbkern.dsl.text import spelling
from pbkern.lower.kernel_nests import kernel_nests
from pbkern.lower.math import elementwise as lowering
from pbkern.targets import NAMES, get_target
from pbkern.targets.cpu.lower_options import LowerOptions
from tests.native.running import native

smoothstep_p = jex.Primitive("smoothstep")


@smoothstep_p.def_abstract_eval
def _type(x):
    return jax.core.ShapedArray(x.shape, x.dtype)


def smoothstep(x):
    """3 x**2 - 2 x**3."""
    return smoothstep_p.bind(x)


set_eager_rule(smoothstep_p)
mlir.register_lowering(
    smoothstep_p, mlir.lower_fun(lambda x: x * x * (3 - 2 * x), multiple_results=False)
)


def meaning(x):
    return x * x * (x.dtype.type(3) - x.dtype.type(2) * x)


def lowered(b, eqn, x):
    return b.mul(b.mul(x, x), b.sub(b.c(3, x.el), b.mul(b.c(2, x.el), x)))


@pytest.fixture
def added(monkeypatch):
    """The row and the lowering function; the public function and the primitive are put where lax has its own."""
    row = ElementwisePrimitive("smoothstep", "f", meaning, Spelling("lax.smoothstep"), price=5.0)
    monkeypatch.setitem(ELEMENTWISE, "smoothstep", row)
    monkeypatch.setitem(lowering.RULES._rules, "smoothstep", lowered)
    monkeypatch.setattr(lax, "smoothstep", smoothstep, raising=False)
    monkeypatch.setattr(lax, "smoothstep_p", smoothstep_p, raising=False)
    spelling._primitives.cache_clear()
    yield row
    monkeypatch.undo()
    spelling._primitives.cache_clear()


def expected(x):
    wide = np.asarray(x, np.float64)
    return wide * wide * (3 - 2 * wide)


X = np.random.default_rng(0).normal(size=(7, 33)).astype("f")


def body(x, out):
    out[...] = smoothstep(x[...]) + 1


def traced(x=X):
    return pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)).trace(x)


def test_it_is_interpreted(added):
    np.testing.assert_allclose(pbkern.interpret(traced(), X)[0], expected(X) + 1, 1e-5, 1e-5)


def test_a_half_is_rounded_once(added):
    x = X.astype(jnp.bfloat16)
    got = added.evaluated([x], {}, x.dtype)
    np.testing.assert_array_equal(got, meaning(x.astype("f")).astype(jnp.bfloat16))


def test_it_prints_as_source_that_rebuilds_it(added):
    text = str(traced())
    assert "lax.smoothstep(" in text
    assert same_kernel(traced(), pbkern.rebuild(text))


def test_its_nests_mean_the_same(added):
    made = kernel_nests(traced(), LowerOptions())
    assert "smoothstep(" in str(made)
    np.testing.assert_allclose(made.interpret(X)[0], expected(X) + 1, 1e-5, 1e-5)


@pytest.mark.parametrize("shape", [(7, 33), (1,), (0, 4), (64,)], ids=str)
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, jnp.bfloat16], ids=lambda d: np.dtype(d).name
)
def test_it_compiles_and_runs(added, shape, dtype):
    x = np.random.default_rng(1).normal(size=shape).astype(dtype)
    tolerance = {8: 1e-12, 4: 1e-5, 2: 5e-2}[x.dtype.itemsize]
    with jax.enable_x64(True):
        got = native(traced(x), x)[0]
    np.testing.assert_allclose(np.asarray(got, "d"), expected(x) + 1, tolerance, tolerance)


def test_it_is_fused(added):
    @pbkern.jit
    def f(x):
        return jnp.exp(-smoothstep(x)).sum(-1)

    np.testing.assert_allclose(f(X), np.exp(-expected(X)).sum(-1), 1e-4)
    assert "1 kernel(s), 0 operation(s) left to XLA" in str(f.explain(X))


def test_it_has_a_price_on_every_target(added):
    assert Machine().cycles("smoothstep") == 5.0
    for name in NAMES:
        assert get_target(name).machine().op_cycles["smoothstep"] == 5.0
    assert LowerOptions().op_cost("smoothstep") == 5.0


def test_without_its_row_it_is_left_to_xla():
    f = pbkern.jit(lambda x: smoothstep(x) + 1)
    np.testing.assert_allclose(f(X), expected(X) + 1, 1e-5, 1e-5)
    assert "1 operation(s) left to XLA" in str(f.explain(X))
