"""Operations of the nests' interpreter mean what JAX's primitives mean, for every dtype that they cover."""

import itertools

import jax
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from pbkern.core.errors import InternalError
from pbkern.core.ops.elementwise_row import rounded
from pbkern.lower.math import elementwise
from pbkern.lower.math.elementwise import EqnInfo
from pbkern.lower.nest.numpy_ops import apply, register_dtype

FLOATS = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
INTS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
BINARY = {
    "add": lax.add, "sub": lax.sub, "mul": lax.mul, "max": lax.max, "min": lax.min, "eq": lax.eq, "ne": lax.ne, "lt": lax.lt,
    "le": lax.le, "gt": lax.gt, "ge": lax.ge, "div": lax.div, "rem": lax.rem, "nextafter": lax.nextafter,
    "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor, "shift_left": lax.shift_left,
    "shift_right_logical": lax.shift_right_logical, "shift_right_arithmetic": lax.shift_right_arithmetic,
}  # fmt: skip
UNARY = {
    "neg": lax.neg, "abs": lax.abs, "sign": lax.sign, "sqrt": lax.sqrt, "floor": lax.floor, "ceil": lax.ceil,
    "square": lax.square, "not": lax.bitwise_not, "is_finite": lax.is_finite, "population_count": lax.population_count,
    "clz": lax.clz, "exp": lax.exp, "rsqrt": lax.rsqrt,
}  # fmt: skip


@pytest.fixture(autouse=True)
def wide_types():
    with jax.enable_x64(True):
        yield


def values(dtype) -> np.ndarray:
    """Numbers at which operations differ; no subnormal ones, which XLA may flush."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return np.array([info.min, info.max, 0, 1, 2, 3, 7, info.max - 1, info.max // 2 + 1], dtype)
    return np.array(
        [0.0, -0.0, 1, -1, 0.5, 2.5, -3.5, 100, np.inf, -np.inf, np.nan, 1 / 3], np.float64
    ).astype(dtype)


def same(got, want, dtype) -> None:
    got, want = rounded(got, np.dtype(dtype)), np.asarray(want)
    assert got.dtype == want.dtype
    if want.dtype.kind in "biu":
        np.testing.assert_array_equal(got, want)
        return
    got, want = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_array_equal(got, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(want)[numbers])


def run(name, arrays, out_dtype, **params):
    info = EqnInfo(name, params, tuple(np.dtype(a.dtype) for a in arrays), np.dtype(out_dtype))
    found = apply(info, [a.astype(register_dtype(np.dtype(a.dtype))) for a in arrays])
    assert found.dtype == register_dtype(np.dtype(out_dtype))
    return found


def covered(names, dtypes, count):
    return [(n, np.dtype(d)) for n, d in itertools.product(names, dtypes)
            if elementwise.supports(n, (d,) * count, d) and not (n == "abs" and np.dtype(d).kind == "u")]  # fmt: skip


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("name", "dtype"), covered(BINARY, (*FLOATS, *INTS, np.bool_), 2))
def test_operations_on_two(name, dtype):
    x, y = (a.reshape(-1) for a in np.meshgrid(values(dtype), values(dtype)))
    want = np.asarray(BINARY[name](x, y))
    same(run(name, [x, y], want.dtype), want, want.dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "dtype"), covered(UNARY, (*FLOATS, *INTS, np.bool_), 1))
def test_operations_on_one(name, dtype):
    x = values(dtype)
    want = np.asarray(UNARY[name](x))
    if (
        name in ("exp", "rsqrt") and dtype.itemsize < 4
    ):  # rounded once in float32, here after each step
        np.testing.assert_allclose(run(name, [x], dtype), want.astype("f"), rtol=2e-2)
    elif name == "rsqrt":  # XLA improves an estimate of AVX-512's: the last bit may differ
        np.testing.assert_array_max_ulp(run(name, [x], dtype), want, maxulp=1)
    else:
        same(run(name, [x], want.dtype), want, want.dtype)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("source", [*FLOATS, *INTS, np.bool_], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("target", [*FLOATS, *INTS, np.bool_], ids=lambda d: np.dtype(d).name)
def test_conversions(source, target):
    x = values(source)
    want = np.asarray(
        jax.jit(lambda x: lax.convert_element_type(x, target))(x)
    )  # eagerly, jax 0.11 leaves it to NumPy
    same(run("convert_element_type", [x], target, new_dtype=np.dtype(target)), want, target)


@pytest.mark.parametrize(
    ("source", "target"),
    [(np.float32, np.int32), (np.uint16, ml_dtypes.bfloat16), (np.float16, np.int16)],
)
def test_bits(source, target):
    x = values(source)
    want = np.asarray(lax.bitcast_convert_type(x, target))
    got = rounded(run("bitcast_convert_type", [x], target), np.dtype(target))
    assert got.tobytes() == want.tobytes()


def test_choices_of_many():
    which, cases = np.array([0, 1, 2, 1], np.int32), [np.full(4, k, "f") for k in range(3)]
    np.testing.assert_array_equal(run("select_n", [which, *cases], "f"), [0, 1, 2, 1])
    np.testing.assert_array_equal(
        run("select_n", [which == 1, cases[0], cases[2]], "f"), [0, 2, 0, 2]
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: np.dtype(d).name)
def test_total_order(dtype):
    """-NaN < -inf < ... < -0 < 0 < ... < inf < NaN."""
    ascending = np.array(
        [-np.nan, -np.inf, -3.5, -1, -0.0, 0.0, 0.5, 100, np.inf, np.nan], np.float64
    )
    ascending = np.where(
        np.isnan(ascending), np.copysign(np.nan, [-1] + [1] * 9), ascending
    ).astype(dtype)
    place = np.arange(len(ascending))
    for name, order in (("eq_to", np.equal), ("le_to", np.less_equal), ("lt_to", np.less)):
        got = run(name, list(np.meshgrid(ascending, ascending)), bool)
        np.testing.assert_array_equal(got, order(*np.meshgrid(place, place)))


def test_rounding_to_fewer_bits_rounds_what_is_carried():
    x = np.array([1 + 2**-9], "f")  # a bfloat16 that is carried in float32
    info = EqnInfo("reduce_precision", {"exponent_bits": 8, "mantissa_bits": 7}, (np.dtype(ml_dtypes.bfloat16),) * 1,
                   np.dtype(ml_dtypes.bfloat16))  # fmt: skip
    assert apply(info, [x])[0] == 1


def test_an_unknown_operation_is_an_error():
    with pytest.raises(InternalError, match="no operation `frobnicate`"):
        apply(EqnInfo("frobnicate", {}, (np.dtype("f"),), np.dtype("f")), [np.zeros(3, "f")])
