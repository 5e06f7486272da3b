"""Chains of reductions are one kernel each, and as accurate as JAX."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern

from .checking import check, compare, planned, rand
from .reduction_forms import FORMS


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMS)
def test_equals_jax(name):
    f, args, _, _ = FORMS[name]
    check(f, *args, kernels=1, tolerance=2e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMS)
def test_kernel_count_at_full_size(name):
    f, _, types, kernels = FORMS[name]
    plan = planned(f, *types)
    assert len(plan.kernels()) == kernels, str(plan.explanation)
    assert not plan.left_to_xla(), str(plan.explanation)


def logsumexp(x):
    m = x.max(-1, keepdims=True)
    return m[..., 0] + np.log(np.exp(x - m).sum(-1))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


# name -> (JAX, NumPy in greater precision)
ACCURATE = {
    "sum": (lambda x: x.sum(-1), lambda x: x.sum(-1)),
    "mean": (lambda x: x.mean(-1), lambda x: x.mean(-1)),
    "variance": (lambda x: x.var(-1), lambda x: x.var(-1)),
    "norm": (lambda x: jnp.linalg.norm(x, axis=-1), lambda x: np.sqrt((x * x).sum(-1))),
    "softmax": (jax.nn.softmax, softmax),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, -1), logsumexp),
    "layer norm": (
        lambda x: (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5),
        layer_norm,
    ),
    "product": (lambda x: x @ x.T, lambda x: x @ x.T),
}
SIZES = (1, 3, 1000, 4097, 100001, 1000000)
SQUARES = ("sum", "norm", "product", "variance", "layer norm")  # overflow float16 sooner


def is_luck(name: str, offset: float, size: int) -> bool:
    """Does the worst of a few rows say nothing? A long sum of numbers of either sign is small beside what was added up, and
    x - mean(x) of numbers that are nearly equal is little but the rounding of the mean: JAX's error is more than twice ours
    about as often as ours is more than twice JAX's, for one draw of numbers in twenty.
    """
    return (name == "layer norm" and offset > 0) or (
        name in ("sum", "mean") and offset == 0 and size > 4097
    )


def units(got, want, dtype) -> float:
    """Greatest error of a few rows in units in the last place of the greatest result."""
    error, largest = (
        float(np.abs(x).max()) for x in (np.asarray(got).astype(want.dtype) - want, want)
    )
    return error / (largest * float(jnp.finfo(dtype).eps)) if error else 0.0


def errors(f, exact, draw, dtype, seeds):
    """(ours, JAX's), each per seed."""
    found = []
    compiled = pbkern.jit(f), jax.jit(f)
    for seed in seeds:
        args = [jnp.asarray(x).astype(dtype) for x in draw(np.random.default_rng(seed))]
        want = exact(
            *[
                np.asarray(x).astype(np.longdouble if dtype == "float64" else np.float64)
                for x in args
            ]
        )
        found.append([units(g(*args), want, dtype) for g in compiled])
    return np.transpose(found)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", ACCURATE)
@pytest.mark.parametrize(("dtype", "offset"), [
    ("float32", 0), ("float32", 1000), ("bfloat16", 0),
    *(pytest.param(name, k, marks=pytest.mark.slow) for name in ("float64", "float16", "bfloat16")
      for k in (0, 1000) if (name, k) != ("bfloat16", 0)),
])  # fmt: skip
def test_as_accurate_as_jax(name, offset, dtype):
    offset = 8 if offset and dtype == "float16" and name in SQUARES else offset
    with jax.enable_x64(dtype == "float64"):
        for size in SIZES:
            if (
                dtype == "float16"
                and name in ("norm", "product")
                and size * (1 + offset**2) > 60000
            ):
                continue
            luck = is_luck(name, offset, size)
            draw = lambda rng, n=size: [rng.normal(offset, 1, (3, n))]
            ours, theirs = errors(*ACCURATE[name], draw, dtype, range(31) if luck else range(1))
            assert np.median(ours) <= max(2 * np.median(theirs), 2), (size, ours, theirs)


FAR = {
    "one": lambda z: np.where(np.arange(z.shape[-1]) == z.shape[-1] // 3, 1e4, z),
    "the first": lambda z: np.where(np.arange(z.shape[-1]) == 0, 1e4, z),
    "all": lambda z: z + 1e4,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "far"), [  # of variances of "all", the rounding of the mean decides
    *itertools.product(["sum", "mean", "norm"], FAR), ("variance", "one"), ("variance", "the first"),
])  # fmt: skip
def test_far_elements_leave_long_rows_as_exact(name, far):
    """What is added to a large number is rounded to its last place."""
    for size in (100001, 1000000):
        draw = lambda rng, n=size: [FAR[far](rng.normal(size=(3, n)))]
        ours, theirs = errors(*ACCURATE[name], draw, "float32", range(1))
        assert ours.max() <= max(2 * theirs.max(), 2), (size, ours, theirs)


# name -> (function, shapes): sums over rows, whose chains are as long as there are rows, and products.
DEEP = {
    "columns": (lambda x: x.sum(0), [(4097, 64)]),
    "many columns": (lambda x: x.sum(0), [(4097, 1031)]),
    "three columns": (lambda x: x.sum(0), [(100001, 3)]),
    "image": (lambda x: x.sum((0, 1, 2)), [(8, 56, 56, 33)]),
    "product": (lambda x, y: x @ y, [(64, 1000), (1000, 64)]),
    "deep product": (lambda x, y: x @ y, [(256, 4097), (4097, 256)]),
    "small product": (lambda x, y: x @ y, [(16, 1000), (1000, 16)]),
    "few rows": (lambda x, y: x @ y, [(16, 4097), (4097, 16)]),
    "gram": (lambda x, y: x.T @ y, [(100001, 16), (100001, 16)]),
    "row": (lambda x, y: x @ y, [(4097,), (4097, 256)]),
    "column": (lambda x, y: x @ y, [(256, 4097), (4097,)]),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("offset", [0, 1000])
def test_long_chains_are_as_accurate_as_jax(name, offset):
    f, shapes = DEEP[name]
    ours, theirs = errors(
        f, f, lambda rng: [rng.normal(offset, 1, s) for s in shapes], "float32", range(3)
    )
    assert np.median(ours) <= max(2 * np.median(theirs), 2), (ours, theirs)


@pytest.mark.parametrize(
    ("shape", "axis"), [((4, 100001), 1), ((4097, 1031), 0)], ids=["rows", "columns"]
)
def test_infinite_sums(shape, axis):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    first = (slice(None), 0) if axis else (0, slice(None))
    for special in (np.inf, -np.inf, np.nan, 3e38):
        x[first] = special
        got = np.asarray(pbkern.jit(lambda x: x.sum(axis))(x))
        np.testing.assert_array_equal(got, np.full_like(got, special))
    x[:] = 3e38
    assert np.isposinf(np.asarray(pbkern.jit(lambda x: x.sum(axis))(x))).all()


@pytest.mark.parametrize(
    "f",
    [jnp.sum, jnp.var, lambda x: jax.nn.softmax(x @ x.T)],
    ids=["sum", "var", "softmax of product"],
)
def test_every_call_gives_the_same_bits(f):
    x, f = rand(301, 2003), pbkern.jit(f)
    first = np.asarray(f(x)).tobytes()
    assert all(np.asarray(f(x)).tobytes() == first for _ in range(50))


@pytest.mark.parametrize("rows", [9, 300, 4097])
def test_several_reductions_of_columns_share_a_pass(rows):
    """Sums start their accumulators anew, extrema beside them do not."""
    x = np.random.default_rng(8).normal(size=(rows, 256)).astype(np.float32)
    f = lambda x: (x.sum(0), (x * x).sum(0), x.max(0), x.min(0), x.argmax(0))
    for got, want in zip(pbkern.jit(f)(x), f(x.astype(np.float64))):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.sqrt(rows))


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_the_place_in_rows_of_one_element_is_zero(dtype):
    """Classes of which there is one: the place of the greatest was that element where nests share strips of rows."""
    rng = np.random.default_rng(0)
    x, w = rng.integers(-4, 5, (112, 37)).astype(dtype), rng.integers(-4, 5, (37, 1)).astype(dtype)
    y = np.zeros(112, np.int32)

    def f(x, w, y):
        z, u = x @ w, (x * x + 3) @ w
        s = z * 3 - z * u
        places = lax.argmax(z, 1, jnp.int32) + y, lax.argmin(z, 1, jnp.int32) + y
        return (
            places[0].sum(),
            places[1].max(),
            jnp.take_along_axis(s, y[:, None], 1).sum(),
            (s * z).sum(),
        )

    for got, want in zip(pbkern.jit(f)(x, w, y), jax.jit(f)(x, w, y), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("shape", [(1, 30), (1, 0), (1,)])
def test_indices_along_one_element_are_zero(shape):
    f = lambda x: (jnp.argmax(x, 0), jnp.argmin(x, 0))
    plan = planned(f, rand(*shape))
    assert not any("arg" in e.primitive.name for e in plan.jaxpr.eqns)
    compare(plan, f, (rand(*shape),), 0)
