"""Complex numbers in fused functions: compared with NumPy in the next wider type, and with what jax.jit makes of them."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern
from pbkern.testing import assert_fused, assert_kernels
from tests.lowered import on

WIDER = {"complex64": np.complex128, "complex128": np.clongdouble}


def numbers(*shape, seed=0, dtype="complex64"):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)


def agree(f, *args, tolerance=1e-5):
    """pbkern.jit and jax.jit give the same, up to a part of the largest modulus."""
    compiled = pbkern.jit(f)
    got, want = (jax.tree.leaves(jit(*args)) for jit in (compiled, jax.jit(f)))
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert g.dtype == w.dtype
        g, w = np.asarray(g), np.asarray(w)
        np.testing.assert_allclose(
            g, w, rtol=0, atol=tolerance * float(np.nanmax(np.abs(w), initial=0))
        )
    return compiled


def units(got, want):
    """Distances in units in the last place of the modulus, where that is a normal number."""
    info, size = np.finfo(got.dtype), np.abs(want)
    normal = (size < info.max * 0.9) & (size > info.tiny * 4)
    return (np.abs(got.astype(want.dtype) - want)[normal] / size[normal] / info.eps).astype(
        np.float64
    )


# ---- functions

FUNCTIONS = {
    "exp": np.exp, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": lambda z: 1 / np.sqrt(z),
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "abs": np.abs,
    "sign": lambda z: z / np.abs(z), "square": np.square, "exp2": np.exp2, "logistic": lambda z: 1 / (1 + np.exp(-z)),
    "conj": np.conj, "neg": np.negative, "real": np.real, "imag": np.imag,
}  # fmt: skip


def arguments(dtype):
    """Numbers of modulus about 1, close to 1, close to 0, on the unit circle and of any size."""
    rng, n = np.random.default_rng(1), 301
    turn, largest = np.exp(2j * np.pi * rng.random(n)), np.log10(np.finfo(dtype).max) - 1
    around = numbers(n, dtype="complex128")
    sizes = 10.0 ** rng.uniform(-largest, largest, n)
    near = [around, 1 + 1e-3 * around, 1e-3 * around, turn * (1 + 1e-4 * around.real)]
    return np.concatenate([*near, turn * sizes]).astype(dtype)


@pytest.mark.parametrize("dtype", ["complex64", pytest.param("complex128", marks=pytest.mark.slow)])
def test_functions_are_as_close_as_the_modulus_allows(dtype):
    with jax.enable_x64(True):
        z = arguments(dtype)
        f = lambda z: {name: getattr(lax, name)(z) for name in FUNCTIONS}
        got, other = pbkern.jit(f)(z), jax.jit(f)(z)
        assert_fused(pbkern.jit(f), (z,))
    for name, exact in FUNCTIONS.items():
        with np.errstate(all="ignore"):
            want = exact(z.astype(WIDER[dtype]))
            ours, theirs = (units(np.asarray(x[name]), want) for x in (got, other))
        assert np.max(ours) <= max(2 * np.max(theirs[np.isfinite(theirs)]), 8), name
        assert np.isfinite(ours).all()


@pytest.mark.parametrize("dtype", WIDER)
def test_operations_of_two(dtype):
    f = lambda x, y: [x + y, x - y, x * y, x / y, x**y, x**3, x**-2, x**2.5, x * 2, 1j * x, x / 3]
    with jax.enable_x64(True):
        x, y = numbers(1001, dtype=dtype), numbers(1001, seed=1, dtype=dtype)
        got = pbkern.jit(f)(x, y)
    for n, (g, w) in enumerate(
        zip(got, f(x.astype(WIDER[dtype]), y.astype(WIDER[dtype])), strict=True)
    ):
        assert np.max(units(np.asarray(g), w)) < (60 if n in (4, 7) else 5), (
            n
        )  # powers multiply the error of the logarithm


INF, NAN = np.inf, np.nan


@pytest.mark.parametrize(
    ("name", "z", "want"),
    [
        ("abs", complex(INF, NAN), INF), ("abs", 3e38 + 1e38j, np.hypot(3e38, 1e38)), ("abs", 3e-38j, 3e-38), ("abs", 0, 0),
        ("exp", complex(-INF, 1), 0), ("exp", complex(INF, 0), complex(INF, 0)), ("exp", 89 + 0.785j, np.exp(89 + 0.785j)),
        ("log", 0, -INF), ("log", complex(-INF, 0), complex(INF, np.pi)), ("log", 2e-38 + 2e-38j, np.log(2e-38 + 2e-38j)),
        ("sqrt", complex(-4, -0.0), -2j), ("sqrt", complex(-4, 0.0), 2j), ("sqrt", complex(NAN, INF), complex(INF, INF)),
        ("sqrt", 3e38 + 3e38j, np.sqrt(3e38 + 3e38j)), ("rsqrt", complex(INF, 1), 0), ("sign", 0, 0), ("tanh", 500 + 1j, 1),
        ("tanh", complex(-INF, 1), -1), ("sign", 3e38j, 1j), ("sinh", complex(INF, 0), complex(INF, 0)),
        ("cosh", complex(-INF, 0), complex(INF, 0)), ("expm1", 1e-30j, 1e-30j), ("log1p", 1e-20 + 1e-20j, 1e-20 + 1e-20j),
    ],
)  # fmt: skip
def test_special_values(name, z, want):
    got = np.asarray(SPECIAL(np.full(1, z, np.complex64))[name])[0]
    np.testing.assert_allclose(
        [got.real, got.imag], [np.real(want), np.imag(want)], rtol=1e-6, atol=1e-45
    )


def test_hyperbolic_functions_are_finite_where_only_one_factor_overflows():
    """e^|a| is beyond the largest number, its product with a sine or a cosine is not."""
    z = np.array([100 + 1e-20j, -100 + 1e-20j, -90 + 1j, 89.2 - 1.5j], np.complex64)
    got = pbkern.jit(
        lambda z: [jnp.sinh(z), jnp.cosh(z), jnp.sin(z * 1j), jnp.cos(lax.complex(-z.imag, z.real))]
    )(z)
    wide = z.astype(np.complex128)
    want = [np.sinh(wide), np.cosh(wide), np.sin(1j * wide), np.cos(1j * wide)]
    for g, w in zip(got, want, strict=True):
        with np.errstate(over="ignore"):
            w = w.astype(np.complex64)
        np.testing.assert_allclose(np.real(g), w.real, rtol=2e-5)
        np.testing.assert_allclose(np.imag(g), w.imag, rtol=2e-5)


ZEROS = {
    "square": [complex(-1, 1), complex(-1, -1), complex(2, -2), complex(-0.0, 0.0), complex(-0.0, -0.0), complex(0.5, 3)],
    "cosh": [complex(a, b) for a in (0.0, -0.0, 2, -2) for b in (0.0, -0.0, 4, -4, 1, -1)],
    "cos": [complex(a, b) for a in (0.0, -0.0, 4, -4, 1, -1) for b in (0.0, -0.0, 2, -2)],
    "sinh": [complex(a, b) for a in (0.0, -0.0, 4, -4) for b in (0.0, -0.0, 4)],
    "tanh": [complex(a, b) for a in (300, -300) for b in (2.5, -2.5, 1, -1, 0.0, -0.0)],
}  # fmt: skip


@pytest.mark.parametrize("name", ZEROS)
def test_signs_of_zeros_are_those_of_numpy(name):
    z = np.array(ZEROS[name], np.complex64)
    got = np.asarray(pbkern.jit(getattr(lax, name))(z))
    want = getattr(np, name)(z)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_array_equal(np.signbit(got.real), np.signbit(want.real))
    np.testing.assert_array_equal(np.signbit(got.imag), np.signbit(want.imag))


SPECIAL = pbkern.jit(lambda z: {name: getattr(lax, name)(z) for name in FUNCTIONS})


def test_division_by_zero_and_infinity():
    x = np.array(
        [1 + 2j, 1 + 2j, 0, INF, 3e38 + 3e38j, complex(INF, INF), 1e-30 + 1e-30j], np.complex64
    )
    y = np.array(
        [0, complex(INF, NAN), complex(INF, INF), 2, 3e38 + 1e38j, 2, 1e-30 - 1e-30j], np.complex64
    )
    want = [complex(INF, INF), 0, 0, INF, 1.2 + 0.6j, complex(INF, INF), 1j]
    got = np.asarray(pbkern.jit(lax.div)(x, y))
    np.testing.assert_allclose(
        [got.real, got.imag], [np.real(want), np.imag(want)], rtol=1e-6, atol=1e-6
    )


def test_a_real_operand_has_no_imaginary_part():
    """inf (1 + 2i) is infinite in both parts, while 0 times infinity would be NaN."""
    x = np.array([INF, 2.0], np.float32)
    np.testing.assert_array_equal(
        pbkern.jit(lambda x: x * (1 + 2j))(x), [complex(INF, INF), 2 + 4j]
    )
    np.testing.assert_array_equal(
        pbkern.jit(lambda x: jnp.exp(1j * x).imag)(x[1:]), pbkern.jit(jnp.sin)(x[1:])
    )


def test_numbers_on_one_axis_have_one_part():
    rng = np.random.default_rng(8)
    x, y = (rng.uniform(0.5, 2, (3, 5)).astype("f4") for _ in range(2))
    z = (x - 1j * y).astype("c8")
    n = np.arange(15, dtype="i4").reshape(3, 5) % 4

    def f(x, y, z, n):
        i, real = 1j * y, x.astype("c8")
        powers = (
            lax.pow(z, n),
            lax.integer_pow(i, 2),
            lax.integer_pow(i, 5),
            lax.integer_pow(z, 0),
            lax.integer_pow(z, -3),
        )
        return (
            *powers,
            i * i,
            z / i,
            real / i,
            jnp.exp(i),
            jnp.exp(real),
            jnp.conj(z).reshape(5, 3),
            jnp.prod(z[:, :0], 1),
        )

    wide = [z.astype("c16") ** n, -(y.astype("d") ** 2), 1j * y.astype("d") ** 5, np.ones((3, 5)), 1 / z.astype("c16") ** 3,
            -(y.astype("d") ** 2), z / (1j * y.astype("d")), x / (1j * y.astype("d")), np.exp(1j * y.astype("d")),
            np.exp(x.astype("d")), z.conj().reshape(5, 3), np.ones(3)]  # fmt: skip
    for got, want in zip(pbkern.jit(f)(x, y, z, n), wide, strict=True):
        assert got.dtype == "c8"
        assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()


def test_a_number_times_its_conjugate_is_real():
    z = numbers(1000)
    got = np.asarray(pbkern.jit(lambda z: z * jnp.conj(z) + jnp.conj(z.T) * z)(z))
    assert not got.imag.any()
    np.testing.assert_allclose(got.real, 2 * np.abs(z) ** 2, rtol=1e-6)


STEPS = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y * jnp.conj(y) + 1),
    "turn": lambda x, y: x * jnp.exp(1j * y.real), "conj": lambda x, y: jnp.conj(x), "tanh": lambda x, y: jnp.tanh(x / 4),
    # Moduli of turned numbers are equal but for rounding: they are not compared as they are.
    "where": lambda x, y: jnp.where(jnp.abs(x) < jnp.abs(y) + 0.3, x, y), "rebuild": lambda x, y: lax.complex(y.imag, x.real),
    "sqrt": lambda x, y: jnp.sqrt(x) * y, "same": lambda x, y: jnp.where(x == y, 1j, x), "real": lambda x, y: x.real + y,
    "log": lambda x, y: jnp.log(x * jnp.conj(x) + 2 + y * 0), "roll": lambda x, y: jnp.roll(x, 1) - y,
}  # fmt: skip


@settings(max_examples=4, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=5),
    st.sampled_from([1, 2, 17, 1000, 3001]),
)
def test_chains(steps, size):
    def f(x, y):
        for n, name in enumerate(steps):
            x, y = (STEPS[name](x, y), x) if n % 2 else (STEPS[name](x, y), y)
        return x, jnp.abs(y)

    agree(f, numbers(size), numbers(size, seed=1), tolerance=1e-4)


# ---- arrays


def test_moves_and_sums():
    def f(x, i):
        moved = [
            x.T,
            x[1:, ::2],
            x[::-1],
            jnp.pad(x, 1, constant_values=2j),
            jnp.roll(x, 3),
            jnp.stack([x, x]),
            x.ravel(),
        ]
        placed = [
            x[i],
            x.at[i].set(1j),
            x.at[i].add(x[0]),
            jnp.take(x, i * 3, axis=0, mode="fill"),
            jnp.split(x, [2, 5])[1],
        ]
        dynamic = [
            lax.dynamic_slice(x, (i[0], i[1]), (2, 3)),
            lax.dynamic_update_slice(x, x[:2, :2], (i[1], i[0])),
        ]
        sums = [
            x.sum(0),
            x.mean(),
            x.sum(1),
            jnp.cumsum(x, 1),
            jnp.prod(x, 0),
            x.prod(),
            jnp.cumprod(x, 0),
            x == x[0],
            x != 1,
        ]
        return (
            moved,
            placed,
            dynamic,
            sums,
            jnp.arange(5, dtype="complex64"),
            x[:0],
            x[:, :1] * 2j,
            x[0, 0] * 1j,
        )

    compiled = agree(f, numbers(7, 33), np.array([1, 5, 3]))
    assert all(
        x.why == "an empty array"
        for x in compiled.explain(numbers(7, 33), np.array([1, 5, 3])).left
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(0,), (1,), (), (3, 0), (1, 1, 5), (4099,)])
def test_shapes(shape):
    agree(
        lambda x, y: (x * y, jnp.exp(x).sum(), jnp.abs(y), x),
        numbers(*shape),
        numbers(*shape, seed=1),
    )


def test_operands_that_are_not_contiguous():
    x = numbers(40, 50)
    np.testing.assert_allclose(pbkern.jit(jnp.conj)(x[::2, 1::3]), x[::2, 1::3].conj())


def test_large_results():
    x = numbers(2100, 2001)
    np.testing.assert_array_equal(pbkern.jit(lambda z: z * 2j)(x), x * np.complex64(2j))


def test_donated_operands():
    x = jnp.asarray(numbers(300, 7))
    want = np.asarray(x) * 2j
    np.testing.assert_array_equal(
        pbkern.jit(compile_options={"donate_argnums": (0,)})(lambda z: z * 2j)(x), want
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("formula", "left", "right"),
    [
        ("ij,jk->ik", (33, 17), (17, 21)), ("ji,jk->ik", (40, 17), (40, 20)), ("ij,kj->ik", (3, 50), (90, 50)),
        ("ji,kj->ik", (50, 3), (40, 50)), ("ij,j->i", (30, 50), (50,)), ("i,ij->j", (70,), (70, 31)),
        ("ij,ij->", (20, 31), (20, 31)), ("bij,bjk->bik", (3, 4, 5), (3, 5, 6)), ("bij,bkj->kbi", (3, 4, 8), (3, 5, 8)),
        ("abij,cbi->acbj", (2, 3, 40, 5), (2, 3, 40)), ("ijk,kjl->il", (6, 7, 8), (8, 7, 5)), ("i,j->ij", (9,), (11,)),
        ("ij,jk->ik", (0, 4), (4, 3)), ("ij,jk->ik", (2, 0), (0, 3)),
    ],
)  # fmt: skip
def test_contractions(formula, left, right):
    x, y = numbers(*left), numbers(*right, seed=1)
    f = pbkern.jit(
        lambda x, y: [
            jnp.einsum(formula, a, b) for a, b in ((x, y), (x.conj(), y.real), (x.imag, y))
        ]
    )
    for got, (a, b) in zip(f(x, y), ((x, y), (x.conj(), y.real), (x.imag, y)), strict=True):
        want = np.einsum(formula, a.astype(np.complex128), b.astype(np.complex128))
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.sqrt(max(x.size, y.size)))


# ---- loops, derivatives, what XLA keeps


def test_loops():
    def f(x, y):
        def step(h, v):
            return h * 0.5j + v, (h * v, jnp.abs(h))

        last, rows = lax.scan(step, y, x)
        back = lax.scan(step, y, x, reverse=True)
        small = lax.while_loop(
            lambda s: jnp.abs(s[0]).sum() > 1, lambda s: (s[0] * 0.5j, s[1] + 1), (y, 0)
        )
        powers = lax.fori_loop(0, 3, lambda i, z: z * z, y)
        return (
            last,
            rows,
            back,
            small,
            powers,
            lax.cond(y[0].real > 0, lambda a: a * 2, jnp.conj, y),
        )

    x, y = numbers(7, 33), numbers(33, seed=1)
    assert_fused(agree(f, x, y), (x, y))


def test_mandelbrot_of_batched_loops():
    def escape(c):
        return lax.while_loop(
            lambda s: (jnp.abs(s[0]) < 2) & (s[1] < 20),
            lambda s: (s[0] * s[0] + c, s[1] + 1),
            (c * 0, 0),
        )[1]

    agree(jax.vmap(escape), numbers(500))


def test_linear_recurrence_by_associative_scan():
    def then(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    agree(lambda a, x: lax.associative_scan(then, (a, x)), numbers(9, 3) / 2, numbers(9, 3))


def test_derivatives():
    z = numbers(500)
    agree(jax.grad(lambda z: jnp.sum(jnp.abs(jnp.sin(z) * z) ** 2)), z)
    agree(jax.grad(lambda z: jnp.sum(jnp.exp(z) / (z + 3)), holomorphic=True), z)
    inside = jax.grad(
        lambda z: pbkern.jit(lambda z: jnp.sum(jnp.abs(z * jnp.exp(1j * z)) ** 2))(z)
    )(z)
    np.testing.assert_allclose(
        inside,
        jax.grad(lambda z: jnp.sum(jnp.abs(z * jnp.exp(1j * z)) ** 2))(z),
        rtol=1e-3,
        atol=1e-3,
    )


def test_transforms_are_left_and_read_and_write_the_kernels_memory():
    f = agree(
        lambda x, h: jnp.abs(jnp.fft.ifft(jnp.fft.fft(x) * h)) ** 2, numbers(8, 64), numbers(64)
    )
    plan = f.explain(
        jax.ShapeDtypeStruct((8, 64), jnp.complex64), jax.ShapeDtypeStruct((64,), jnp.complex64)
    )
    assert [x.op for x in plan.left] == ["fft", "fft"]
    assert len(plan.kernels) == 2
    text = jax.jit(f).lower(numbers(8, 64), numbers(64)).as_text()
    assert text.count("custom_call") == 2
    assert "stablehlo.real" not in text
    assert "stablehlo.complex" not in text


def test_loops_around_transforms_stay_whole():
    f = agree(
        lambda x: (
            lax.scan(lambda c, _: (jnp.fft.fft(c) * 0.1j, None), jnp.exp(x), None, length=3)[0] * 2
        ),
        numbers(5, 16),
    )
    assert [x.op for x in f.explain(numbers(5, 16)).left] == ["scan"]


def test_functions_without_a_rule_stay():
    f = agree(lambda x: (jnp.arcsin(x) * 2, jnp.sort(x * 1j), jnp.max(x)), numbers(100))
    assert [x.op for x in f.explain(numbers(100)).left] == ["asin", "sort", "reduce_max"]


def test_one_kernel():
    z, t = numbers(200, 30), np.ones((200, 30), np.float32)
    with on():
        assert_kernels(pbkern.jit(lambda z, t: z * jnp.exp(1j * t) / 2 + jnp.conj(z)), (z, t), 1)
        assert_kernels(pbkern.jit(lambda z: jnp.sum(jnp.abs(z) ** 2, 1)), (z,), 1)
        assert_kernels(pbkern.jit(lambda z, w: z @ w.conj()), (z, z.T), 1)


def test_a_sum_of_products_reads_each_number_once():
    wide = jax.ShapeDtypeStruct((1000, 1001), jnp.complex64)
    assert_kernels(pbkern.jit(lambda x, y: jnp.sum(x * y)), (wide, wide), 1)


def test_parts_of_different_shapes():
    """A real row and an imaginary column: each part of their sum is smaller than it."""

    def iterated(x, y):
        c = x[None] + 1j * y[:, None]
        step = lambda i, z: jnp.where(jnp.abs(z) < 2, z * z + c, z)
        return jax.lax.fori_loop(0, 4, step, c * 0), c - y[:, None], x[None] / (1j * y[:, None] + 1)

    x, y = jnp.linspace(-2, 0.6, 7), jnp.linspace(-1.2, 1.2, 5)
    for got, want in zip(pbkern.jit(iterated)(x, y), jax.jit(iterated)(x, y)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_largest_and_smallest_in_windows_and_reductions_of_any_start(rng):
    x = (rng.standard_normal((6, 4)) + 1j * rng.standard_normal((6, 4))).astype(np.complex64)
    start = np.complex64(-100)
    for f in (
        lambda x: jax.lax.reduce_window(x, start, jax.lax.max, (3, 1), (1, 1), "VALID"),
        lambda x: jax.lax.reduce_window(x, -start, jax.lax.min, (2, 2), (1, 1), "SAME"),
        lambda x: jax.lax.reduce(x, start, jax.lax.max, (0,)),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = pbkern.jit(f)(x)
        np.testing.assert_array_equal(result, jax.jit(f)(x))


# ---- conversions to real types, which gradients of conversions from them contain


def turned(angles, weights):
    """Sum of |z|^2 weighted, of states that rotations by real angles make; the matrices are converted to complex numbers."""
    c, s = jnp.cos(angles), jnp.sin(angles)
    matrices = jnp.array([[c, -s], [s, c]]).astype(
        "complex64" if c.dtype.itemsize < 8 else "complex128"
    )
    states = (
        jnp.einsum("ijn,j->ni", matrices, jnp.array([1, 0.5j], matrices.dtype))
        * jnp.exp(0.5j * angles)[:, None]
    )
    return (jnp.abs(states) ** 2 * weights).sum().astype(angles.dtype) + (
        states * states
    ).imag.sum().astype(angles.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_conversions_are_fused(dtype):
    angles = np.random.default_rng(3).standard_normal(37)
    weights = np.random.default_rng(4).standard_normal((37, 2))
    gradient = pbkern.jit(jax.grad(turned))
    operands = jnp.asarray(angles, dtype), jnp.asarray(weights, dtype)
    assert_fused(gradient, operands)
    with jax.enable_x64(True):
        exact = tuple(np.asarray(x, np.float64) for x in operands)
        want = np.asarray(jax.jit(jax.grad(turned))(*exact))
    error = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(
        np.asarray(gradient(*operands), np.float64),
        want,
        rtol=error,
        atol=error * np.abs(want).max(),
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8", "bool"])
def test_a_conversion_to_a_real_type_takes_the_real_part(dtype):
    x = np.array([[3 + 2j, 0 + 5j, 7.75 - 1j], [1, 0, 250.5 + 1j]], np.complex64)

    def convert(z):
        return lax.convert_element_type_p.bind(
            z * 1, new_dtype=np.dtype(dtype), weak_type=False, sharding=None
        )

    compiled = pbkern.jit(convert)
    assert_fused(compiled, (x,))
    np.testing.assert_array_equal(compiled(x), x.real.astype(dtype))


def test_loops_with_gradients_of_conversions_stay_native():
    def energy(angle):
        def step(state, _):
            return state * jnp.exp(1j * angle.astype("complex64")), None

        return jnp.abs(lax.scan(step, jnp.ones(5, "complex64"), None, length=6)[0].sum() + 1) ** 2

    gradient = pbkern.jit(jax.grad(energy))
    angle = jnp.float32(0.3)
    assert_fused(gradient, (angle,))
    # |5 exp(6 i a) + 1|^2 = 26 + 10 cos(6 a)
    np.testing.assert_allclose(gradient(angle), -60 * np.sin(1.8), rtol=1e-5)
