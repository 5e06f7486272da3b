"""The thin line: elementwise, broadcast and last-axis reductions become one kernel, equal to JAX."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import run_program

from pbkern import fuse
from pbkern.machine import DEFAULT_MACHINE


def planned(f, *args, supports=lambda eqn: None, **options):
    closed = jax.make_jaxpr(f)(*args)
    return fuse.plan(closed, name=f.__name__, options=SimpleNamespace(**options), machine=DEFAULT_MACHINE, supports=supports)


def check(f, *args, kernels=None, tolerance=1e-5, **options):
    plan = planned(f, *args, **options)
    want = [np.asarray(x) for x in jax.tree.leaves(f(*args))]
    got = [np.asarray(x) for x in plan.evaluate(jax.tree.leaves(args), run_program)]
    for w, g in zip(want, got):
        assert w.shape == g.shape and w.dtype == g.dtype
        if np.issubdtype(w.dtype, np.inexact) or w.dtype.name == "bfloat16":
            np.testing.assert_allclose(g.astype(np.float64), w.astype(np.float64), rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(g, w)
    if kernels is not None:
        assert len(plan.kernels()) == kernels, plan.explanation
        assert not plan.left_to_xla(), plan.explanation
    return plan


def rand(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(dtype)


def softmax(x):
    return jax.nn.softmax(x, -1)


def layer_norm(x, g, b):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * g + b


def bias_gelu(x, b):
    return jax.nn.gelu(x + b)


CASES = {
    "bias_gelu": (bias_gelu, (rand(37, 50), rand(50))),
    "softmax": (softmax, (rand(37, 50),)),
    "layer_norm": (layer_norm, (rand(37, 50), rand(50), rand(50))),
}


@pytest.mark.parametrize("case", CASES)
def test_one_kernel_equal_to_jax(case):
    f, args = CASES[case]
    check(f, *args, kernels=1)
