"""Arithmetic of scalar constants, and branches they choose, while a function is planned: as XLA does it, but without XLA."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.fuse.indexing.static_updates import UpdatesToSelects
from pbkern.fuse.simplify.driver import simplify

from .checking import check, planned, rand

FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = ("int32", "uint8", "int8")
COMPARISONS = (lax.gt, lax.lt, lax.ge, lax.le, lax.eq, lax.ne)
ARITHMETIC = (lax.add, lax.sub, lax.mul, lax.max, lax.min, lax.rem)


def values(dtype):
    if dtype in FLOATS:
        return [0.0, -0.0, 1.5, -3.25, np.inf, -np.inf, np.nan]
    if dtype == "bool":
        return [False, True]
    low, high = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    return [0, 1, 3, int(high), int(low)]


def operations(dtype):
    """(function, number of operands)"""
    if dtype == "bool":
        return [(f, 2) for f in (lax.bitwise_and, lax.bitwise_or, *COMPARISONS)] + [
            (lax.bitwise_not, 1)
        ]
    binary = [
        *ARITHMETIC,
        lax.div,
        *COMPARISONS,
        *(() if dtype in FLOATS else (lax.bitwise_and, lax.bitwise_or)),
    ]
    unary = [lax.neg, lax.floor, lax.ceil] if dtype in FLOATS else [lax.neg, lax.bitwise_not]
    return [(f, 2) for f in binary] + [(f, 1) for f in unary]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_constants_are_folded_as_xla_computes_them(dtype):
    for f, count in operations(dtype):
        for operands in itertools.product(
            [jnp.asarray(v, dtype) for v in values(dtype)], repeat=count
        ):
            scalars = [np.asarray(x) for x in operands]
            closed = jax.make_jaxpr(lambda f=f, scalars=scalars: f(*scalars))()
            if not closed.jaxpr.eqns:
                continue  # evaluated by JAX while it was traced
            simple = simplify(closed)
            if (f in (lax.max, lax.min) and not any(scalars)) or (
                f in (lax.div, lax.rem) and dtype in INTEGERS and not scalars[1]
            ):
                assert simple.jaxpr.eqns  # left alone
                continue
            assert not simple.jaxpr.eqns, simple
            (got,) = map(np.asarray, jax.core.eval_jaxpr(simple.jaxpr, simple.consts))
            want = np.asarray(f(*operands))
            assert got.dtype == want.dtype
            wide = np.float64 if dtype in FLOATS else got.dtype
            what = f"{f.__name__} of {scalars}"
            np.testing.assert_array_equal(got.astype(wide), want.astype(wide), err_msg=what)
            if got.dtype == scalars[0].dtype and dtype in FLOATS and not np.isnan(want):
                assert np.signbit(got) == np.signbit(want), what


def test_arrays_of_one_constant_are_scalars():
    """As in jax.random.randint, whose divisors are constants after this."""

    def f(x):
        span = jnp.full((1, 1), 500, jnp.int32) - jnp.zeros((1, 1), jnp.int32)
        scale = jnp.where(span > 3, jnp.ones((40, 30), jnp.int32), x)
        return x % jnp.broadcast_to(span, x.shape) * scale, jnp.full((2, 3), 4.0) * 2

    closed = jax.make_jaxpr(f)(jnp.zeros((40, 30), jnp.int32))
    simple = simplify(closed)
    text = str(simple.jaxpr)
    assert "rem a 500:i32[]" in text, text
    assert "full" not in text, text
    assert "f32[2,3] = broadcast_in_dim 8.0:f32[]" in text, text
    x = jnp.arange(-600, 600, dtype=jnp.int32).reshape(40, 30)
    for got, want in zip(jax.core.eval_jaxpr(simple.jaxpr, simple.consts, x), f(x), strict=True):
        np.testing.assert_array_equal(got, want)


def test_equations_without_operands_or_results_stay():
    closed = jax.make_jaxpr(lambda x: (jax.debug.callback(lambda: None), x + 1)[1])(1.0)
    assert [e.primitive.name for e in simplify(closed).jaxpr.eqns] == ["debug_callback", "add"]


def test_known_places_are_slices():
    """Also where their arithmetic is JAX's, as in medians."""

    def f(x):
        k = jnp.clip(jnp.floor(jnp.float32(2.5)), 0, 3).astype(int)
        return (
            x[k],
            x[jnp.asarray(9)],
            lax.dynamic_slice(x, (k, jnp.int32(7)), (2, 2)),
            x.at[7].get(mode="fill", fill_value=2),
        )

    x = jnp.arange(20.0).reshape(4, 5)
    simple = UpdatesToSelects()(simplify(jax.make_jaxpr(f)(x)), None)
    assert [e.primitive.name for e in simple.jaxpr.eqns if "slice" in e.primitive.name] == [
        "slice"
    ] * 3
    for got, want in zip(jax.core.eval_jaxpr(simple.jaxpr, simple.consts, x), f(x), strict=True):
        np.testing.assert_array_equal(got, want)


def test_planning_compiles_nothing_with_xla():
    compiled = []

    def listener(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    two, three = (
        np.int16(2),
        np.int16(3),
    )  # a type that no other test here uses: nothing is compiled already

    def f(x):
        k = lax.div(lax.sub(lax.mul(two, three), lax.neg(two)), lax.max(two, three))
        return x + lax.select(lax.gt(k, two), k, lax.add(two, three))

    x = np.arange(54, dtype=np.int16).reshape(6, 9)
    assert [e.primitive.name for e in jax.make_jaxpr(f)(x).jaxpr.eqns].count("mul") == 1
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        planned(f, x)
        assert not compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


BRANCHES = {
    "the platform's branch": lambda x: lax.platform_dependent(
        x, cpu=lambda x: x + 1, default=lambda x: x * 3
    ),
    "the default branch": lambda x: lax.platform_dependent(
        x, tpu=lambda x: x + 1, default=lambda x: x * 3
    ),
    "diagonal": lambda x: jnp.diagonal(x, 1) * 2,
    "a known branch": lambda x: lax.cond(False, lambda x: x + 1, lambda x: x * 3, x),
    "past the last branch": lambda x: lax.switch(7, [lambda x: x + 1, lambda x: x * 3], x),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_branches_that_are_known_are_taken(name):
    plan = check(BRANCHES[name], rand(5, 6), kernels=1)
    assert not any(e.primitive.name in ("cond", "platform_index") for e in plan.jaxpr.eqns)


def test_numbers_that_follow_each_other_in_products_are_one():
    """Steps of a linspace are whole numbers, as XLA's are, so that rounding them down finds the pixel that is meant."""
    steps = lambda x: jnp.floor(jnp.linspace(0.0, 100.0, 101)) + x
    assert list(pbkern.jit(steps)(jnp.zeros(()))) == list(range(101))
    products = lambda f: [
        e.primitive.name for e in simplify(jax.make_jaxpr(f)(jnp.ones(5))).jaxpr.eqns
    ].count("mul")
    assert products(lambda x: 3.0 * (x / 7.0) * 5.0) == 1
    assert products(lambda x: jnp.stack([x / 7.0 * 3.0, x / 7.0])) == 2


def test_numbers_in_products_keep_what_overflows():
    x = jnp.array([1e10, -1e-10, jnp.inf, jnp.nan, -0.0], jnp.float32)
    f = lambda x: (x * 1e30 * 1e-30, x * 1e-30 * 1e-30, x * 1e-30 * 1e30, x * 0.0 * 2.0, x * -0.0)
    for got, want in zip(
        pbkern.jit(f)(x),
        [x.at[0].set(jnp.inf), jnp.where(jnp.isinf(x), x, x * 0), x, x * 0.0, x * -0.0],
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-38)
        assert (np.signbit(got) == np.signbit(want))[[0, 1, 4]].all()


def test_remainders_of_unsigned_numbers_need_no_test_of_their_sign():
    x = jnp.arange(3000, dtype=jnp.uint32) * 1234567
    f = lambda x: (x % 65521, x // 7, jnp.where((x >= 0) | (x == 5), x, 1), (x < 0) & (x > 7))
    plan = planned(f, x)
    assert not {"lt", "ge", "select_n", "or", "and"} & {e.primitive.name for e in plan.jaxpr.eqns}
    check(f, x)
    check(lambda x: lax.fori_loop(0, 6, lambda i, c: c * c % 65521, x), x)


KINDS = ("bool", "int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32")


@pytest.mark.sampled(12)
@pytest.mark.parametrize("out", [kind for kind in KINDS if kind != "bool"])
@pytest.mark.parametrize("left", [kind for kind in KINDS if kind != "bool"])
def test_products_of_a_type_convert_their_operands(left, out):
    """int8 * int8 in int32 does not wrap around, and float32 * float32 in bfloat16 has rounded operands."""
    for right in (left, "int16", "float32"):
        x = np.array([1, 2, 3.25, -5, 100, 3.00390625, -7]).astype(
            np.int64 if left[0] == "u" else "f"
        )
        y = np.array([4, 2.5, 9, -5, 120, 3.00390625, 1])
        x, y = jnp.asarray(x).astype(left), jnp.asarray(y.astype("f")).astype(right)
        f = lambda x, y: lax.mul(x, y, out_dtype=out)
        plan = planned(f, x, y)
        assert {
            eqn.params["out_dtype"] for eqn in plan.jaxpr.eqns if eqn.primitive.name == "mul"
        } <= {None}
        got, want = pbkern.jit(f)(x, y), np.asarray(x.astype(out)) * np.asarray(y.astype(out))
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got), want)


def test_products_of_a_type_in_kernels_and_gradients():
    def body(x, out):
        out[...] = lax.mul(x[...], x[...], out_dtype=jnp.int32)

    x = np.arange(-64, 64, dtype=np.int8)
    kernel = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct(x.shape, np.int32))
    np.testing.assert_array_equal(kernel(x), x.astype(np.int32) ** 2)
    slope = jax.grad(pbkern.jit(lambda v: lax.mul(v, v, out_dtype=jnp.bfloat16).astype("f").sum()))
    np.testing.assert_array_equal(slope(x.astype("f")), 2 * x.astype("f"))


NOTHING_REDUCED = {
    "reduce": lambda x: lax.reduce(x, np.float32(2), lax.add, ()),
    "reduce with a number": lambda x: lax.reduce(x, np.float32(2), lambda a, b: a * b + 1, ()),
    "reduce two": lambda x: lax.reduce(
        (x, x * 2), (np.float32(2),) * 2, lambda a, b: (a[0] + b[0], a[1] * b[1]), ()
    ),
    "sum": lambda x: lax.reduce(x, np.float32(0), lax.add, ()),
    "largest": lambda x: lax.reduce(x, np.float32(-np.inf), lax.max, ()),
}
SCALAR_WINDOWS = {
    "start": lambda x: lax.reduce_window(x, np.float32(2), lax.add, (), (), ()),
    "sum": lambda x: lax.reduce_window(x, np.float32(0), lax.add, (), (), ()),
    "largest": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (), (), ()),
    "any": lambda x: lax.reduce_window(x, np.float32(2), lambda a, b: a * b + 1, (), (), ()),
}


@pytest.mark.parametrize("shape", [(), (2, 3)])
@pytest.mark.parametrize("name", NOTHING_REDUCED)
def test_reductions_over_no_dimension(name, shape):
    x, f = rand(*shape), NOTHING_REDUCED[name]
    g = lambda x: jax.tree.map(jnp.tanh, f(x * 1.5))
    for function in (f, g):
        got, want = pbkern.jit(function)(x), jax.jit(function)(x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


@pytest.mark.parametrize("name", SCALAR_WINDOWS)
def test_windows_of_scalars(name):
    x, f = np.float32(3), SCALAR_WINDOWS[name]
    np.testing.assert_array_equal(pbkern.jit(f)(x), jax.jit(f)(x))
    many = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(pbkern.jit(jax.vmap(f))(many), jax.jit(jax.vmap(f))(many))


def test_windows_of_scalars_in_kernels():
    def body(x, out):
        out[0] = lax.reduce_window(x[1], np.float32(0), lax.add, (), (), ())

    kernel = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct((1,), np.float32))
    np.testing.assert_array_equal(kernel(np.arange(3, dtype="f")), [1])


def test_windows_of_one_element_are_slices():
    x = rand(7, 9)
    f = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1), (2, 3), ((1, 0), (0, 2)))
    plan = planned(f, x)
    assert not any(eqn.primitive.name.startswith("reduce_window") for eqn in plan.jaxpr.eqns)
    np.testing.assert_array_equal(pbkern.jit(f)(x), jax.jit(f)(x))


def test_bodies_of_reductions_with_a_number():
    f = lambda x: lax.reduce(x, np.float32(1), lambda a, b: (a * b) + 0.5, (1,))
    x = rand(4, 3)
    np.testing.assert_allclose(pbkern.jit(f)(x), jax.jit(f)(x), rtol=1e-6)
