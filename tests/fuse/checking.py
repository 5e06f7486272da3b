"""Plans a function, runs the plan on the oracle and compares with JAX."""

import dataclasses
import random
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from pbkern import fuse
from pbkern.core.machine import DEFAULT_MACHINE
from pbkern.core.passes import with_settings
from pbkern.dsl.body_checks.verify import verify
from pbkern.fuse.tiling import block_search
from pbkern.targets.costs import model
from pbkern.targets.cpu.costs import CpuCosts
from tests.arrays import array

from .oracle import run_program

COSTS = CpuCosts.of(DEFAULT_MACHINE)


def loops_stay_outside():
    """A `with` block in which no kernel has a loop of the function inside."""
    return with_settings("put loops in kernels", {"most_equations": 0})


def set_sizes(monkeypatch, **sizes):
    """Has the fuser choose by other sizes (fuse/cost/sizes.py), so that small arrays are treated as large ones are."""
    monkeypatch.setattr(model, "SIZES", dataclasses.replace(model.SIZES, **sizes))


def planned(f, *args, supports=lambda eqn: None, machine=COSTS, **options):
    closed = jax.make_jaxpr(f)(*args)
    name = getattr(f, "__name__", "f")
    made = fuse.plan(
        closed, name=name, options=SimpleNamespace(**options), machine=machine, supports=supports
    )
    for kernel in made.kernels():
        verify(kernel)
    return made


def compare(plan, f, args, tolerance, reference=None):
    """`reference`: f itself, operation by operation, where jax.jit's one program adds up long rows less accurately."""
    want = [np.asarray(x) for x in jax.tree.leaves((reference or jax.jit(f))(*args))]
    got = [np.asarray(x) for x in plan.evaluate(jax.tree.leaves(args), run_program)]
    assert len(want) == len(got)
    for w, g in zip(want, got):
        assert w.shape == g.shape, (w.shape, g.shape, w.dtype, g.dtype)
        assert w.dtype == g.dtype, (w.shape, g.shape, w.dtype, g.dtype)
        if jnp.issubdtype(w.dtype, jnp.floating):
            np.testing.assert_allclose(
                g.astype(np.float64), w.astype(np.float64), rtol=tolerance, atol=tolerance
            )
        else:
            np.testing.assert_array_equal(g, w)


def check(f, *args, kernels=None, tolerance=1e-4, left=False, **options):
    plan = planned(f, *args, **options)
    compare(plan, f, args, tolerance)
    if kernels is not None:
        assert len(plan.kernels()) == kernels, str(plan.explanation)
    if not left:
        assert not plan.left_to_xla(), str(plan.explanation)
    return plan


def random_blocks(seed):
    """A stand-in for the schedule's descent: any block sizes at all, multiples of nothing."""
    rng = random.Random(seed)

    def descend(at, options, target, inner_first=False):
        for _ in range(12):
            blocks = [
                rng.choice([1, o[-1], rng.randint(1, max(1, o[-1]))]) if len(o) > 1 else o[0]
                for o in options
            ]
            found = at(blocks)
            if found is not None:
                return found
        return at([o[-1] for o in options])

    return descend


def check_blocks(monkeypatch, f, *args, seeds=range(4), tolerance=1e-4, **options):
    """Like check, at random block sizes."""
    for seed in seeds:
        monkeypatch.setattr(block_search, "_descend", random_blocks(seed))
        check(f, *args, tolerance=tolerance, **options)


def rand(*shape, dtype="float32", seed=0):
    return array(np.random.default_rng(seed).normal(size=shape).astype(np.float32), dtype)


def ints(*shape, low=0, high=10, seed=0):
    return array(np.random.default_rng(seed).integers(low, high, size=shape), jnp.int32)
