"""Every exact elementwise primitive and dtype, scalar and vector, against plain JAX."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax._src.lax import lax as lax_internal  # total-order comparisons have no public name

import pbkern
from pbkern.core.errors import UnsupportedOp
from pbkern.lower.math.elementwise import RULES, EqnInfo, supports
from pbkern.lower.mlir.element_types import compute_el

from .harness import Compiled, bfloat16, same

FLOATS = tuple(np.dtype(d) for d in ("float64", "float32", "float16", bfloat16))
SIGNED = tuple(np.dtype(d) for d in ("int64", "int32", "int16", "int8"))
UNSIGNED = tuple(np.dtype(d) for d in ("uint64", "uint32", "uint16", "uint8"))
BOOL = (np.dtype(bool),)
INTEGERS = SIGNED + UNSIGNED
NUMBERS = FLOATS + INTEGERS
ALL = NUMBERS + BOOL


def specials(dtype) -> np.ndarray:
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.kind in "iu":
        i = np.iinfo(dtype)
        return np.unique(
            np.array([0, 1, 2, 3, 7, i.min, i.min + 1, i.max, i.max - 1, i.max // 2], dtype)
        )
    i = ml_dtypes.finfo(dtype)
    numbers = [
        0,
        0.5,
        1,
        1.5,
        2,
        2.5,
        3,
        0.49999997,
        1e3,
        1e9,
        2.0**31,
        2.0**63,
        i.max,
        i.tiny,
        i.smallest_subnormal,
        np.inf,
        np.nan,
    ]
    with np.errstate(over="ignore"):
        positive = np.array(numbers, np.float64).astype(dtype)
    return np.concatenate([positive, -positive])


def operands(dtypes, seed=0) -> list[np.ndarray]:
    """Every tuple of special values (up to three operands), then random bit patterns."""
    rng = np.random.default_rng(seed)
    grids = np.meshgrid(*[specials(d) for d in dtypes], indexing="ij")
    arrays = []
    for grid, dtype in zip(grids, dtypes):
        if dtype.kind == "b":
            noise = rng.integers(0, 2, 2000).astype(bool)
        else:
            noise = rng.integers(0, 256, 2000 * dtype.itemsize, dtype=np.uint8).view(dtype)
        if dtype.kind == "f" or dtype == bfloat16:
            noise[:500] = (rng.standard_normal(500) * 10).astype(dtype)
            noise[np.isnan(noise)] = np.nan  # one NaN: payloads do not survive conversions
        if dtype.kind in "iu":
            noise[:1000] %= 100
        arrays.append(np.concatenate([grid.ravel().astype(dtype), noise]))
    return arrays


def subnormal(a) -> np.ndarray:
    """XLA's CPU threads flush these to zero; ours depends on the caller. (f16 is computed in f32.)"""
    if a.dtype.kind in "iub" or a.dtype == np.float16:
        return np.zeros(a.shape, bool)
    return (a != 0) & (abs(a) < ml_dtypes.finfo(a.dtype).tiny)


def bound(eqn: EqnInfo):
    rule = RULES.lookup(eqn.primitive)
    return lambda b, *xs: rule(b, eqn, *xs)


def check(primitive, in_dtypes, function, arrays=None, expected=None, **params):
    """The rule against the JAX function (or what it returned), at scalar and vector lanes."""
    in_dtypes = tuple(np.dtype(d) for d in in_dtypes)
    arrays = operands(in_dtypes) if arrays is None else arrays
    if expected is None:
        with jax.enable_x64(True):
            expected = np.asarray(jax.jit(function)(*arrays))
    assert supports(primitive, in_dtypes, expected.dtype)
    eqn = EqnInfo(primitive, params, in_dtypes, expected.dtype)
    for lanes in (0, 16):
        level = (
            2 if lanes else 0
        )  # the same operations at both levels of optimisation, and half the time
        result = Compiled(bound(eqn), in_dtypes, expected.dtype, lanes, level)(*arrays)
        flushed = np.logical_or.reduce([subnormal(a) for a in (*arrays, result)])
        bad = np.flatnonzero(~same(result, expected) & ~flushed)
        rows = [(*(a[i] for a in arrays), result[i], expected[i]) for i in bad[:5]]
        assert not len(bad), (
            f"{primitive} {in_dtypes} lanes {lanes}: {len(bad)} wrong, (operands, result, expected): {rows}"
        )


def cases(table):
    return [
        pytest.param(name, d, id=f"{name}-{d.name}")
        for name, dtypes in table.items()
        for d in dtypes
    ]


UNARY = {
    "neg": NUMBERS, "abs": FLOATS + SIGNED, "sign": NUMBERS, "square": NUMBERS, "not": INTEGERS + BOOL,
    "floor": FLOATS, "ceil": FLOATS, "sqrt": FLOATS, "is_finite": FLOATS,
    "population_count": INTEGERS, "clz": INTEGERS,
}  # fmt: skip
LAX_NAME = {"not": "bitwise_not", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}


def lax_function(name):
    return getattr(lax, LAX_NAME.get(name, name), None) or getattr(lax, f"{name}_p").bind


@functools.cache
def jax_results(arity: int, dtype) -> dict[str, np.ndarray]:
    """Every function of UNARY or BINARY on a dtype's operands, in one compilation."""
    table = {1: UNARY, 2: BINARY}[arity]
    functions = {name: lax_function(name) for name, dtypes in table.items() if dtype in dtypes}
    with jax.enable_x64(True):
        results = jax.jit(lambda *xs: {name: f(*xs) for name, f in functions.items()})(
            *operands([dtype] * arity)
        )
        return {name: np.asarray(r) for name, r in results.items()}


@pytest.mark.parametrize(("name", "dtype"), cases(UNARY))
def test_unary(name, dtype):
    check(name, [dtype], None, expected=jax_results(1, dtype)[name])


BINARY = {
    "add": NUMBERS, "sub": NUMBERS, "mul": NUMBERS, "div": NUMBERS, "rem": NUMBERS,
    "max": ALL, "min": ALL, "eq": ALL, "ne": ALL, "lt": ALL, "le": ALL, "gt": ALL, "ge": ALL,
    "and": INTEGERS + BOOL, "or": INTEGERS + BOOL, "xor": INTEGERS + BOOL, "mulhi": INTEGERS,
    "shift_left": INTEGERS, "shift_right_logical": INTEGERS, "shift_right_arithmetic": INTEGERS,
    "nextafter": FLOATS,
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "dtype"), cases(BINARY))
def test_binary(name, dtype):
    check(name, [dtype, dtype], None, expected=jax_results(2, dtype)[name])


@pytest.mark.parametrize(
    ("name", "dtype"), cases(dict.fromkeys(("eq_to", "le_to", "lt_to"), FLOATS + INTEGERS))
)
def test_total_order(name, dtype):
    check(name, [dtype, dtype], getattr(lax_internal, f"{name}_p").bind)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 7, -1, -3])
@pytest.mark.parametrize(
    "dtype", [np.dtype("float64"), np.dtype("float32"), np.dtype("int32")], ids=str
)
def test_integer_pow(dtype, exponent):
    if dtype.kind == "i" and exponent < 0:
        pytest.skip("JAX has no negative powers of integers")
    arrays = operands([dtype])
    if dtype.kind == "f":  # powers that XLA flushes to zero on the way
        arrays = [arrays[0][(abs(arrays[0]) > 1e-12) | (arrays[0] == 0)]]
    check("integer_pow", [dtype], lambda x: lax.integer_pow(x, exponent), arrays, y=exponent)


@pytest.mark.parametrize(
    "method", [lax.RoundingMethod.AWAY_FROM_ZERO, lax.RoundingMethod.TO_NEAREST_EVEN], ids=str
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_round(dtype, method):
    check("round", [dtype], lambda x: lax.round(x, method), rounding_method=method)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source", ALL, ids=str)
def test_convert(source):
    (x,) = operands([source])
    with jax.enable_x64(True):
        expected = jax.jit(lambda x: [lax.convert_element_type(x, t) for t in ALL])(x)
    for e in expected:
        check("convert_element_type", [source], None, [x], np.asarray(e))


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_bitcast(dtype):
    for target in NUMBERS:
        if target.itemsize == dtype.itemsize:
            check(
                "bitcast_convert_type",
                [dtype],
                lambda x, to=target: lax.bitcast_convert_type(x, to),
            )


@pytest.mark.parametrize("bits", [(8, 7), (5, 10), (4, 3), (8, 23), (11, 52), (5, 2)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reduce_precision(dtype, bits):
    params = {"exponent_bits": bits[0], "mantissa_bits": bits[1]}
    check("reduce_precision", [dtype], lambda x: lax.reduce_precision(x, **params), **params)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_select_by_bool(dtype):
    check("select_n", [np.bool_, dtype, dtype], lax.select_n)


def test_select_by_integer():
    dtype = np.dtype("float32")
    arrays = operands([np.dtype("int32"), dtype, dtype])
    arrays = [arrays[0] % 3, *arrays[1:], arrays[1] + np.float32(1)]
    check("select_n", [np.int32, dtype, dtype, dtype], lax.select_n, arrays)


@pytest.mark.parametrize("cases", [1, 2, 3, 5])
def test_an_integer_outside_the_cases_means_the_nearest(cases):
    which = np.array([-(2**31), -7, -1, 0, 1, 2, 3, 4, 5, 11, 2**31 - 1], "i4")
    operands = [np.full(len(which), 10.0 + k, "f4") for k in range(cases)]
    want = 10.0 + np.clip(which, 0, cases - 1)
    choose = lambda which, *operands: lax.select_n(which, *operands) * 1
    np.testing.assert_array_equal(pbkern.jit(choose)(which, *operands), want)
    np.testing.assert_array_equal(pbkern.simulate(choose, which, *operands).results, want)
    for place in range(0, len(which), 3):  # a number that is known folds
        folded = pbkern.jit(lambda *operands: choose(np.int32(which[place]), *operands))  # noqa: B023
        np.testing.assert_array_equal(folded(*operands), np.full(len(which), want[place]))


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_clamp(dtype):
    check("clamp", [dtype] * 3, lax.clamp)


@pytest.mark.parametrize(
    "name", ["add", "subtract", "multiply", "divide", "floor", "ceil", "sqrt", "maximum", "minimum"]
)
@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_subnormals_are_kept(name, dtype):
    function = getattr(np, name)
    arrays = operands([dtype] * function.nin)
    primitive = {
        "subtract": "sub",
        "multiply": "mul",
        "divide": "div",
        "maximum": "max",
        "minimum": "min",
    }.get(name, name)
    eqn = EqnInfo(primitive, {}, (dtype,) * function.nin, dtype)
    with np.errstate(all="ignore"):
        expected = function(*arrays)
    wrong = ~same(Compiled(bound(eqn), eqn.in_dtypes, dtype)(*arrays), expected)
    if primitive in ("max", "min"):  # NumPy returns either zero
        wrong &= expected != 0
    assert not wrong.any()


@pytest.mark.parametrize("lanes", [8, 32, 64])
def test_other_lane_counts(lanes):
    arrays = operands([np.dtype("float32")] * 2)
    eqn = EqnInfo("add", {}, (np.dtype("float32"),) * 2, np.dtype("float32"))
    with np.errstate(all="ignore"):
        assert same(
            Compiled(bound(eqn), eqn.in_dtypes, eqn.out_dtype, lanes)(*arrays),
            arrays[0] + arrays[1],
        ).all()


def test_maximum_with_a_constant_matches_jax():
    (x,) = operands([np.dtype("float32")])
    x = x[~subnormal(x)]
    for k in (0.0, -0.0, 1.0, np.nan):
        for name in ("max", "min"):
            expected = np.asarray(getattr(lax, name)(x, np.float32(k)))
            expression = lambda b, v, name=name, k=k: getattr(b, name)(v, b.c(k, "f32"))
            result = Compiled(expression, [np.float32], np.float32)(x)
            assert same(result, expected).all(), (name, k)


def test_float16_keeps_f32_precision_between_operations():
    """(x * x) / x overflows float16 in between, and must not."""
    x = np.full(16, 1000.0, np.float16)
    kernel = Compiled(lambda b, v: b.div(b.mul(v, v), v), [np.float16], np.float16)
    assert (kernel(x) == x).all()


@pytest.mark.parametrize("dtype", [np.complex64, ml_dtypes.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    assert not supports("add", (dtype, dtype), dtype)
    with pytest.raises(UnsupportedOp, match=np.dtype(dtype).name):
        compute_el(dtype)
