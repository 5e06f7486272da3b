"""Deep contractions are split into partial results, and a matrix that two products read is passed over once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
import pbkern.cpu
from pbkern.core.passes import with_settings

from .checking import check, check_blocks, planned, rand, set_sizes
from .workloads import f32


def descent(x, y, w):
    return lax.fori_loop(0, 3, lambda _, w: w - 1e-3 * (x.T @ (x @ w - y)), w)


DEEP = {
    "X^T Y": (lambda x, y: x.T @ y, (400, 5), (400, 3)),
    "ragged runs": (lambda x, y: x.T @ y, (397, 5), (397, 3)),
    "rows": (lambda x, y: x @ y, (3, 401), (401, 2)),
    "vectors": (lambda x, y: x @ y, (501,), (501,)),
    "three dimensions turned": (
        lambda x, y: jnp.einsum("abk,kc->abc", x.transpose(1, 2, 0), y),
        (397, 2, 3),
        (397, 3),
    ),
    "columns before rows": (
        lambda x, y: jnp.einsum("bak,kc->bac", x.transpose(2, 1, 0), y),
        (397, 2, 3),
        (397, 3),
    ),
    "producers": (lambda x, y: (jnp.tanh(x) * 2).T @ jnp.exp(-y * y), (397, 5), (397, 3)),
    "two products": (lambda x, w: x.T @ (x @ w), (397, 6), (6,)),
    "gradient descent": (descent, (397, 6), (397,), (6,)),
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_contractions_equal_jax(name, monkeypatch):
    set_sizes(monkeypatch, split_operand_bytes=1)
    f, *shapes = DEEP[name]
    args = [rand(*s, seed=n) for n, s in enumerate(shapes)]
    with with_settings("split reductions", {"depth_per_width": 1}):
        check(f, *args, tolerance=1e-3)
        check_blocks(monkeypatch, f, *args, seeds=range(2), tolerance=1e-3)


def test_half_precision_adds_partial_results_in_single(monkeypatch):
    set_sizes(monkeypatch, split_operand_bytes=1)
    x = rand(640, 6, dtype="bfloat16")
    with with_settings("split reductions", {"depth_per_width": 1}):
        plan = check(lambda x: x.T @ x, x, tolerance=2e-2)
    assert any(e.params.get("preferred_element_type") == jnp.float32 for e in plan.jaxpr.eqns)


@pytest.mark.parametrize(("rows", "columns"), [(10000, 200), (20011, 64)])
def test_gradient_descent_reads_its_matrix_once_per_step(rows, columns):
    plan = planned(descent, f32(rows, columns), f32(rows), f32(columns))
    assert len(plan.kernels()) == 1, str(plan.explanation)


def depth_of_runs(f, x, y):
    (run,) = (
        eqn.invars[0].aval.shape[eqn.params["dimension_numbers"][0][0][0]]
        for eqn in planned(f, x, y).jaxpr.eqns
        if eqn.primitive.name == "dot_general"
    )
    return run


DEEP_PRODUCTS = [
    (lambda x, y: x @ y, f32(300, 20000), f32(20000, 8), 1024),
    (lambda y, x: y.T @ x.T, f32(20000, 8), f32(300, 20000), 1024),
    (lambda x, y: x @ y.T, f32(40, 100000), f32(8, 100000), 1024),
    (lambda x, y: x @ y, f32(50, 20000), f32(20000, 200), 200),  # of y, a run stays near
]


@pytest.mark.parametrize(("f", "x", "y", "fewest"), DEEP_PRODUCTS)
def test_runs_take_long_parts_of_rows_along_the_depth(f, x, y, fewest):
    """Of operands that others read as well."""
    run = depth_of_runs(lambda x, y: (f(x, y), x.sum(), y.sum()), x, y)
    for_each_core = max(x.shape + y.shape) // (8 * pbkern.cpu.machine().cores)
    assert min(fewest, for_each_core) <= run <= 2 * fewest + 1024


@pytest.mark.parametrize(("f", "x", "y", "fewest"), DEEP_PRODUCTS)
def test_arguments_that_nothing_else_reads_have_few_runs(f, x, y, fewest):
    run = depth_of_runs(f, x, y)
    depth, cores = max(x.shape + y.shape), pbkern.cpu.machine().cores
    assert depth // (8 * cores) <= run <= -(-depth // (4 * cores))


def test_transposed_matrices_are_read_as_they_are():
    plan = planned(lambda x, v: x.T @ v, f32(9001, 1003), f32(9001))
    assert not any(e.primitive.name == "transpose" for k in plan.kernels() for e in k.body.eqns)


def test_wide_results_are_not_split():
    plan = planned(lambda x, y: x.T @ y, f32(4096, 512), f32(4096, 512))
    assert len(plan.kernels()) == 1


@pytest.mark.parametrize("outside", [lambda x: x * x.sum(), lambda x: x - x.mean()])
def test_reductions_in_bodies_that_xla_keeps(outside):
    """A body holds a reduction in chunks, beside an operation that no kernel has."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2048, 64)), jnp.float32)

    def looped(x):
        step = lambda i, x: jnp.fft.fft(x).real / (jnp.abs(x).max() + 1)
        return jax.lax.fori_loop(0, 3, step, outside(x))

    def branched(x):
        other = lambda x: jnp.fft.fft(x).real - x.mean()
        return jax.lax.cond(x[0, 0] > -9, other, lambda x: x, outside(x))

    for f in (looped, branched):
        want = jax.jit(f)(x)
        np.testing.assert_allclose(
            pbkern.jit(f)(x), want, rtol=1e-4, atol=1e-5 * np.abs(want).max()
        )
