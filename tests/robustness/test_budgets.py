"""Text that grows too long, or takes too long to write: a smaller tile, then scalar loops, then XLA. Results stay the same."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core import config
from pbkern.core.budget import Budget
from pbkern.core.process.fallback import Declined
from pbkern.targets.cpu.codegen import kernel as cpu_kernel
from pbkern.targets.cpu.emit import nests
from tests.lowered import lowered

X = np.linspace(-2, 2, 40 * 33, dtype=np.float32).reshape(40, 33)
FUNCTIONS = {
    "softmax": jax.nn.softmax, "product": lambda x: x @ x.T, "stencil": lambda x: x[1:-1] * 2 - x[:-2] - x[2:],
    "sort": lambda x: jnp.sort(x - x.mean(1, keepdims=True), axis=1), "sum": lambda x: x.sum(0) - x[0],
    "transpose": lambda x: jnp.sin(x.T),
}  # fmt: skip


def agreeing(f):
    """What pbkern made of a function that, compiled anew and without a word, returns what JAX does."""
    jax.clear_caches()
    ours = pbkern.jit(f)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = ours(X)
    np.testing.assert_allclose(got, jax.jit(f)(X), rtol=1e-5, atol=1e-5)
    return ours


@pytest.fixture(autouse=True)
def nothing_kept():
    with config.override(cache=False):
        yield


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_nest_with_a_long_text_gets_a_smaller_tile(name, monkeypatch):
    monkeypatch.setattr(nests, "NEST_LINES", 5)
    agreeing(lambda x, f=FUNCTIONS[name]: f(x + 0.25))


@pytest.mark.parametrize("name", ["softmax", "stencil"])
def test_smaller_tiles_have_shorter_texts(name, monkeypatch):
    usual = lowered(FUNCTIONS[name], X, stage="mlir")
    monkeypatch.setattr(nests, "NEST_LINES", 5)
    assert len(lowered(FUNCTIONS[name], X, stage="mlir")) < len(usual)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_kernel_with_a_long_text_is_left_to_xla(name, monkeypatch):
    monkeypatch.setattr(cpu_kernel, "KERNEL_LINES", 5)
    left = agreeing(lambda x, f=FUNCTIONS[name]: f(x + 0.5))
    assert "custom_call @pbkern" not in jax.jit(left).lower(X).as_text()


def test_kernels_by_hand_are_compiled_whatever_it_takes(monkeypatch):
    monkeypatch.setattr(cpu_kernel, "KERNEL_LINES", 5)

    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct(X.shape, "float32"))
    def kernel(x, o):
        o[...] = jax.nn.softmax(x[...] * 3, -1)

    np.testing.assert_allclose(kernel(X), jax.nn.softmax(X * 3, -1), rtol=1e-5)


def test_text_that_takes_too_long_declines():
    budget = Budget(seconds=0)
    with pytest.raises(Declined, match="took longer than 0 s"):
        for _ in range(5000):
            budget.spend()


def test_a_part_has_its_own_limit():
    budget = Budget(lines=100)
    with pytest.raises(Declined, match="longer than 40 lines"), budget.at_most(40):
        budget.spend(50)
    assert not budget.is_spent
    budget.spend(50)
    with pytest.raises(Declined):
        budget.spend(1)
