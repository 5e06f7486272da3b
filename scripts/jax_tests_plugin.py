"""pytest plugin of jax_tests.py: tests that call `jax.jit` get `pbkern.jit`, and checks of JAX's test class compile with it."""

from __future__ import annotations

import random
import sys

import jax
import pytest

import pbkern

TESTS = "_test"  # how the names of JAX's test modules end
original = jax.jit
_uses_jax = False  # while a test runs once more, to see whether its failure is jax.jit's as well


def _jit(*args, **options):
    """pbkern.jit where a test calls it with options that it takes, else jax.jit."""
    module = sys._getframe(1).f_globals.get("__name__", "")
    known = options.keys() <= {
        "static_argnums",
        "static_argnames",
        "donate_argnums",
        "donate_argnames",
    }
    if module.endswith(TESTS) and known and not _uses_jax:
        return pbkern.jit(*args, **options)
    return original(*args, **options)


def _compile_and_check(
    self, fun, args_maker, *, check_dtypes=True, tol=None, rtol=None, atol=None, **_
):
    """What is compiled equals what runs operation by operation."""
    args = args_maker()
    want = fun(*args)
    got = (original if _uses_jax else pbkern.jit)(fun)(*args)
    self.assertAllClose(got, want, check_dtypes=check_dtypes, atol=atol or tol, rtol=rtol or tol)


def pytest_addoption(parser):
    parser.addoption("--draw", type=int, help="tests to draw")
    parser.addoption("--seed", type=int)


def pytest_configure(config):
    from jax._src import test_util

    jax.jit = _jit
    test_util.JaxTestCase._CompileAndCheck = _compile_and_check


def pytest_collection_modifyitems(config, items):
    count, seed = config.getoption("draw"), config.getoption("seed")
    chosen = set(map(id, random.Random(seed).sample(items, min(count, len(items)))))
    config.hook.pytest_deselected(items=[i for i in items if id(i) not in chosen])
    items[:] = [i for i in items if id(i) in chosen]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test that fails with pbkern.jit and with jax.jit alike is skipped."""
    global _uses_jax
    try:
        return (yield)
    except pytest.skip.Exception:
        raise
    except Exception as error:
        _uses_jax = True
        try:
            pyfuncitem.obj()
        except Exception:
            pytest.skip("fails with jax.jit as well")
        finally:
            _uses_jax = False
        raise error
