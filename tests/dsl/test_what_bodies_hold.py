"""Bodies of pbkern.kernel hold what imported Pallas bodies hold, Pallas's own names among it."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl

import pbkern
from pbkern.api import result_pool
from pbkern.dsl.trace import KernelFunction

X = np.random.default_rng(0).uniform(0.1, 0.9, (8, 16)).astype("f4")
VALUES = {
    "float8": lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32),
    "sum of float8": lambda x: (x.astype("float8_e5m2") + x.astype("float8_e5m2")).astype("f4"),
    "platform_dependent": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    "top_k": lambda x: lax.top_k(x, 4)[0],
    "places of top_k": lambda x: lax.top_k(x, 4)[1],
    "empty": lambda x: lax.empty((8, 16), jnp.float32) * 0 + x,
    "narrow bitcast": lambda x: lax.bitcast_convert_type(x, jnp.int8),
    "int4": lambda x: (x * 5).astype(jnp.int4).astype(jnp.int32),
}


def rows(size=8, columns=16):
    return pbkern.BlockSpec((size, columns), lambda i: (i, 0))


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    f = VALUES[name]
    kernel = pbkern.kernel(
        lambda x, o: o.__setitem__(..., f(x[...])), out_shape=jax.eval_shape(f, X), name="k"
    )
    want = jax.jit(f)(X)
    np.testing.assert_allclose(kernel(X), want, rtol=1e-6)
    np.testing.assert_allclose(pbkern.interpret(kernel.trace(X), X)[0], want, rtol=1e-6)
    namespace: dict = {}
    exec(kernel.trace(X).source(), namespace)  # the printed program rebuilds
    (again,) = pbkern.call_kernel(namespace["k"].trace(X), X)
    np.testing.assert_allclose(again, want, rtol=1e-6)


NARROW = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn", "int4", "uint4")


@pytest.mark.parametrize("dtype", NARROW)
@given(height=st.integers(1, 19), block=st.integers(1, 8), seed=st.integers(0, 99))
@settings(max_examples=3, deadline=None)
def test_operands_results_and_scratch_of_narrow_elements(dtype, height, block, seed):
    block = min(block, height)
    x = jnp.abs(3 * jax.random.normal(jax.random.key(seed), (height, 5))).astype(dtype)

    def body(a, o, t):
        t[...] = a[...]
        o[...] = (t[...].astype(jnp.float32) * 2).astype(o.dtype)

    kernel = pbkern.kernel(
        body,
        grid=(pbkern.cdiv(height, block),),
        in_specs=[rows(block, 5)],
        out_specs=rows(block, 5),
        scratch_shapes=[pbkern.Scratch((block, 5), jnp.dtype(dtype))],
        out_shape=jax.ShapeDtypeStruct(x.shape, dtype),
    )
    want = (x.astype(jnp.float32) * 2).astype(dtype).astype(jnp.float32)
    for call in (kernel, jax.jit(kernel)):
        got = call(x)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got.astype(jnp.float32), want)


def test_sums_into_narrow_elements_are_rounded():
    x = jnp.asarray(X).astype("float8_e5m2")

    def body(a, o):
        o[...] = a[...]
        o[0:2, 3:5] += a[0:2, 3:5]

    kernel = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
    want = x.at[0:2, 3:5].add(x[0:2, 3:5])
    np.testing.assert_array_equal(kernel(x).astype("f4"), want.astype("f4"))


def test_derivatives_by_narrow_floats_are_refused():
    kernel = pbkern.kernel(
        lambda x, o: o.__setitem__(..., x[...].astype(jnp.float32)),
        out_shape=jax.ShapeDtypeStruct(X.shape, "f4"),
    )
    with pytest.raises(pbkern.errors.UnsupportedKernel, match="narrow floats"):
        jax.grad(lambda x: kernel(x.astype("float8_e5m2")).sum())(jnp.asarray(X))


# --- Pallas's names


@pytest.mark.parametrize("spec", [pl.BlockSpec((2, 16), lambda i: (i, 0)), rows(2)])
def test_specs_and_grid_functions_of_pallas(spec):
    @pbkern.kernel(grid=(4,), in_specs=[spec], out_specs=spec, out_shape=X)
    def kernel(x, o):
        @pl.when(pl.program_id(0) < pl.num_programs(0) - 1)
        def _():
            o[...] = x[pl.ds(0, 2), :] * pl.program_id(0)

        @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
        def _():
            o[pl.ds(pl.multiple_of(2 * (pl.program_id(0) // 4), 2), 2), :] = -x[...]

    want = np.repeat([0, 1, 2, -1], 2)[:, None] * X
    np.testing.assert_array_equal(kernel(X), want)
    np.testing.assert_array_equal(pbkern.interpret(kernel.trace(X), X)[0], want)


@pytest.mark.parametrize(
    ("size", "index"),
    [
        (pl.Element(2), lambda i: (2 * i, 0)),
        (pl.Element(2, (0, 2)), lambda i: (2 * i, 0)),
        (pl.Blocked(2), lambda i: (i, 0)),
        (pl.BoundedSlice(2), lambda i: (pl.ds(2 * i, 2), 0)),
    ],
)
def test_block_dimensions_of_pallas(size, index):
    spec = pl.GridSpec(
        grid=(4,),
        in_specs=[pl.BlockSpec((size, 16), index), pl.no_block_spec],
        out_specs=pl.BlockSpec((pl.Blocked(2), 16), lambda i: (i, 0)),
    )
    kernel = pbkern.kernel(
        lambda x, y, o: o.__setitem__(..., x[...] + y[0, 0]), grid_spec=spec, out_shape=X
    )
    np.testing.assert_array_equal(kernel(X, X), X + X[0, 0])


def test_grids_with_names_are_refused():
    spec = pl.GridSpec(grid=(("rows", 4),))
    with pytest.raises(pbkern.errors.KernelError, match="grid with names"):
        pbkern.kernel(lambda x, o: None, grid_spec=spec, out_shape=X)


# --- kernels inside kernels


@pbkern.kernel(
    out_shape=jax.ShapeDtypeStruct((2, 16), "f4"), scratch_shapes=[pbkern.Scratch((2, 1), "f4")]
)
def softmax(x, o, total):
    weights = jnp.exp(x[...])
    total[...] = weights.sum(1, keepdims=True)
    o[...] = weights / total[...]


def test_a_kernel_is_called_inside_another():
    @pbkern.kernel(grid=(4,), in_specs=[rows(2)], out_specs=rows(2), out_shape=X)
    def outer(x, o):
        o[...] = 1 + softmax(2 * x[...])

    want = 1 + jax.nn.softmax(2 * X)
    np.testing.assert_allclose(outer(X), want, rtol=1e-6)
    np.testing.assert_allclose(pbkern.interpret(outer.trace(X), X)[0], want, rtol=1e-6)
    got = jax.grad(lambda x: (outer(x) * X).sum())(jnp.asarray(X))
    want = jax.grad(lambda x: ((1 + jax.nn.softmax(2 * x)) * X).sum())(jnp.asarray(X))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_inner_kernels_with_grids_are_refused():
    inner = pbkern.kernel(
        lambda x, o: o.__setitem__(..., x[...]),
        grid=(2,),
        in_specs=[rows(4)],
        out_specs=rows(4),
        out_shape=X,
        name="inner",
    )

    @pbkern.kernel(out_shape=X)
    def outer(x, o):
        o[...] = inner(x[...])

    with pytest.raises(pbkern.errors.UnsupportedOp, match=r"`inner`.* has a grid") as error:
        outer(X)
    assert "test_what_bodies_hold.py" in str(error.value)


# --- eager calls


def test_eager_calls_are_compiled_once(monkeypatch):
    calls = []
    bound = KernelFunction._bound
    monkeypatch.setattr(
        KernelFunction, "_bound", lambda self, *args: calls.append(1) or bound(self, *args)
    )
    x, kernel = (
        jnp.asarray(X),
        pbkern.kernel(lambda x, o: o.__setitem__(..., -x[...]), out_shape=X, name="k"),
    )
    for _ in range(3):
        np.testing.assert_array_equal(kernel(x), -X)
    assert len(calls) == 1
    np.testing.assert_array_equal(kernel(X), -X)  # an array of NumPy's
    with jax.disable_jit():
        np.testing.assert_array_equal(kernel(x), -X)


def test_large_results_of_eager_calls_are_in_the_pool(monkeypatch):
    pool = result_pool.ResultPool()
    monkeypatch.setattr(result_pool, "POOL", pool)
    x = jnp.ones((3072, 3072))
    kernel = pbkern.kernel(
        lambda x, o: o.__setitem__(..., -x[...]),
        grid=(384,),
        in_specs=[rows(8, 3072)],
        out_specs=rows(8, 3072),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )
    for _ in range(3):
        kernel(x)
    gc.collect()
    jax.device_put(np.zeros(64)).block_until_ready()  # JAX drops its references
    assert any(memory.size >= x.nbytes for memory in pool.unused)
