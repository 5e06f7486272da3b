"""Long chains, sums of many arguments, deep callers: nothing depends on the depth of Python's stack."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core.process import recursion

X = np.linspace(0.5, 1.5, 100, dtype=np.float32)


def alternating(n):
    def f(x):
        for k in range(n):
            x = (x + 1, x * 0.99, jnp.maximum(x, 0.1))[k % 3]
        return x

    return f


def deep(frames, f):
    return f() if frames == 0 else deep(frames - 1, f)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "length", [400, pytest.param(2000, marks=SLOW), pytest.param(20000, marks=SLOW)]
)
def test_chains(length):
    f = alternating(length)
    np.testing.assert_allclose(pbkern.jit(f)(X), jax.jit(f)(X), rtol=1e-4)


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_sums_of_scalar_arguments(count):
    numbers = [np.float32(k % 7) for k in range(count)]
    assert pbkern.jit(lambda *xs: sum(xs[1:], xs[0]))(*numbers) == sum(numbers)


def test_deep_callers():
    limit, here = sys.getrecursionlimit(), len(_frames())
    frames = limit - here - 80  # JAX itself needs some of them
    f = alternating(120)
    np.testing.assert_allclose(deep(frames, lambda: pbkern.jit(f)(X)), jax.jit(f)(X), rtol=1e-4)
    assert sys.getrecursionlimit() == limit


def test_deep_first_call_of_a_process():
    """What a process imports when it first compiles is imported from there."""
    program = """
import sys, numpy as np, pbkern
def deep(frames, f):
    return f() if frames == 0 else deep(frames - 1, f)
print(deep(sys.getrecursionlimit() - 90, lambda: float(pbkern.jit(lambda x: (x * 2).sum())(np.ones(4, "f")))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "8.0\n", done.stderr


def test_the_limit_is_what_it_was_after_an_error():
    limit = sys.getrecursionlimit()
    with pytest.raises(ZeroDivisionError), recursion.headroom():
        assert sys.getrecursionlimit() > limit
        _ = 1 // 0
    assert sys.getrecursionlimit() == limit


def _frames():
    found, frame = [], sys._getframe()
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found
