"""Every row of ELEMENTWISE: JAX's meaning, a lowering rule, a spelling that rebuilds, and a price on every target."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import mpmath
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.core.errors import InternalError
from pbkern.core.jaxprs.retracing import IDENTITIES
from pbkern.core.machine import Machine
from pbkern.core.ops.elementwise import ELEMENTWISE, ONE_EACH, UNMEASURED, PriceTable
from pbkern.core.ops.elementwise_row import FIRST, SECOND, STATED, TRUTH, is_evaluated, kind_of
from pbkern.dsl import same_kernel
from pbkern.dsl.text.spelling import _primitives
from pbkern.lower.build_options import BuildOptions
from pbkern.lower.math import elementwise as lowering
from pbkern.targets import NAMES, get_target
from pbkern.targets.cpu.lower_options import LowerOptions
from pbkern.targets.simt.options import ThreadOptions

FLOATS = tuple(np.dtype(d) for d in ("float64", "float32", "float16", ml_dtypes.bfloat16))
SIGNED = tuple(np.dtype(f"int{bits}") for bits in (64, 32, 16, 8))
UNSIGNED = tuple(np.dtype(f"uint{bits}") for bits in (64, 32, 16, 8))
OF_KIND = {"f": FLOATS, "i": SIGNED, "u": UNSIGNED, "b": (np.dtype(bool),)}
SUB_BYTE = (np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4))

LOWERED = [name for name, row in ELEMENTWISE.items() if not row.unlowered]
EXACT = [name for name in LOWERED if ELEMENTWISE[name].is_exact]
INEXACT = [name for name in LOWERED if not ELEMENTWISE[name].is_exact]


@pytest.fixture(autouse=True)
def wide_types():
    with jax.enable_x64(True):
        yield


def arity(name: str) -> int:
    """Operands of a primitive: those of the function of lax, or of a row's own meaning."""
    if name in ("select_n", "clamp"):
        return 3
    function = getattr(
        lax, {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}.get(name, name), None
    )
    if function is None:
        return 2 if name in ("eq_to", "le_to", "lt_to", "add_any") else 1
    names = [
        p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty
    ]
    own = ELEMENTWISE[name].parameters
    return len([n for n in names if n not in own])


def numbers(dtype: np.dtype, seed: int) -> np.ndarray:
    """Special values, then random ones: small numbers and random bits."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, 40).astype(bool)
    if kind_of(dtype) in "iu":
        info = ml_dtypes.iinfo(dtype)
        first = [info.min, info.max, 0, 1, 2, 3, info.max - 1, info.max // 2]
        wide = np.uint64 if dtype == np.uint64 else np.int64
        bits = rng.integers(info.min, info.max, 20, dtype=wide, endpoint=True)
        return np.concatenate(
            [np.array(first, wide), bits, rng.integers(0, 8, 12).astype(wide)]
        ).astype(dtype)
    first = [
        0,
        -0.0,
        0.5,
        1,
        1.5,
        2,
        2.5,
        -0.5,
        -1.5,
        -2.5,
        0.49999997,
        1000,
        np.inf,
        -np.inf,
        np.nan,
        -20.5,
        88,
        -88,
    ]
    return np.concatenate([first, 3 * rng.standard_normal(20), rng.uniform(-1, 1, 20)]).astype(
        dtype
    )


def operands(name: str, dtype: np.dtype) -> list[np.ndarray]:
    """Pairs of all numbers, or random triples."""
    count = arity(name)
    if name == "select_n":
        which = np.random.default_rng(3).integers(0, 2, 40).astype(bool)
        return [which, *(np.resize(numbers(dtype, seed), 40) for seed in (1, 2))]
    if count == 3:
        return [
            np.random.default_rng(k).permutation(np.resize(numbers(dtype, k), 500))
            for k in range(3)
        ]
    lists = [numbers(dtype, seed) for seed in range(count)]
    return [grid.reshape(-1) for grid in np.meshgrid(*lists)]


def parameters(name: str, dtype: np.dtype) -> list[dict]:
    """Values of the parameters that a row names."""
    is_float = kind_of(dtype) == "f"
    match name:
        case "integer_pow":
            return [{"y": y} for y in ((0, 1, 2, 3, 7, -1, -3) if is_float else (0, 1, 2, 3, 7))]
        case "round":
            return [{"rounding_method": method} for method in lax.RoundingMethod]
        case "reduce_precision":
            pairs = ((8, 7), (5, 10), (4, 3), (8, 23), (11, 52), (5, 2))
            return [
                {"exponent_bits": exponent, "mantissa_bits": mantissa}
                for exponent, mantissa in pairs
            ]
        case "convert_element_type":
            return [{"new_dtype": new} for new in itertools.chain(*OF_KIND.values())]
        case "bitcast_convert_type":
            return [
                {"new_dtype": new}
                for new in (*FLOATS, *SIGNED, *UNSIGNED)
                if new.itemsize == dtype.itemsize
            ]
        case "in_range":
            return [{"low": 0, "high": 3}]
    return [{}]


def bound(name: str, params: dict):
    """The primitive with these parameters, and the rest as lax binds them."""
    others = {"convert_element_type": {"weak_type": False, "sharding": None}}.get(name, {})
    takes_accuracy = (
        "accuracy" in inspect.signature(getattr(lax, name, len)).parameters
        if hasattr(lax, name)
        else False
    )
    given = {**params, **others, **({"accuracy": None} if takes_accuracy else {})}
    return lambda *xs: _primitives()[name].bind(*xs, **given)


def is_taken_by_jax(name: str, dtype: np.dtype) -> bool:
    """lax.abs does not take numbers without sign, of which lowering makes nothing."""
    return not (name == "abs" and dtype.kind == "u")


def cases(names):
    return [
        (name, dtype)
        for name in names
        for kind in ELEMENTWISE[name].kinds
        for dtype in (*OF_KIND[kind], *(SUB_BYTE if ELEMENTWISE[name].on_sub_byte and kind == "i" else ()))
        if is_taken_by_jax(name, dtype)
    ]  # fmt: skip


def agree(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    if kind_of(want.dtype) != "f":
        return got == want
    got, want = got.astype(np.float64), want.astype(np.float64)
    return ((got == want) & (np.signbit(got) == np.signbit(want))) | (
        np.isnan(got) & np.isnan(want)
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "dtype"), cases(EXACT), ids=str)
def test_the_meaning_of_an_exact_primitive_is_jaxs(name, dtype):
    row, arrays = ELEMENTWISE[name], operands(name, dtype)
    for params in parameters(name, dtype):
        want = np.asarray(jax.jit(bound(name, params))(*arrays))
        got = row.evaluated(arrays, params, want.dtype)
        assert got.dtype == want.dtype
        if name == "integer_pow" and dtype.itemsize == 2 and abs(params["y"]) > 2:
            continue  # XLA rounds each product to 16 bits: see the next test
        wrong = np.flatnonzero(~agree(got, want))
        assert not wrong.size, [(*(a[k] for a in arrays), got[k], want[k]) for k in wrong[:5]]


@pytest.mark.parametrize("dtype", FLOATS[2:], ids=str)
@pytest.mark.parametrize("exponent", [3, 7, -3])
def test_powers_of_halves_are_rounded_once(dtype, exponent):
    x = numbers(dtype, 0)
    got = ELEMENTWISE["integer_pow"].evaluated([x], {"y": exponent}, dtype)
    with np.errstate(all="ignore"):
        want = (x.astype(np.float64) ** exponent).astype(np.float32).astype(dtype)
    ulp = np.abs(got.view(np.int16).astype(int) - want.view(np.int16).astype(int))
    assert (agree(got, want) | (ulp <= 1)).all()


# References of functions that are not exact: NumPy in long double, and mpmath for those that it lacks.
NUMPY_NAME = {
    **{f"a{name}": f"arc{name}" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    "pow": "power",
    "atan2": "arctan2",
}


def logistic(x):
    small = np.exp(-abs(x))
    return np.where(x < 0, small, 1) / (1 + small)


def each(function):
    """A function of mpmath on an array, to more bits than a float64 has; NaN where it has no value."""

    def one(x):
        try:
            return float(function(mpmath.mpf(float(x)))) if np.isfinite(x) else function(float(x))
        except (ValueError, ZeroDivisionError):
            return np.nan

    def on_array(x):
        with mpmath.workprec(120):
            return np.array([one(element) for element in x.reshape(-1)]).reshape(x.shape)

    return on_array


def log_gamma(x):
    return mpmath.inf if x <= 0 and x == mpmath.floor(x) else mpmath.log(abs(mpmath.gamma(x)))


def digamma(x):
    return mpmath.nan if x <= 0 and x == mpmath.floor(x) else mpmath.digamma(x)


OTHER = {
    "logistic": logistic,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": each(mpmath.erf),
    "erfc": each(mpmath.erfc),
    "erf_inv": lambda x: np.where(abs(x) > 1, np.nan, each(mpmath.erfinv)(np.clip(x, -1, 1))),
    "lgamma": lambda x: np.where(np.isinf(x), np.inf, each(log_gamma)(x)),
    "digamma": lambda x: np.where(x == np.inf, x, each(digamma)(np.where(np.isinf(x), np.nan, x))),
}


@pytest.mark.parametrize(("name", "dtype"), cases(INEXACT), ids=str)
def test_the_meaning_of_a_function_is_as_exact_as_float64(name, dtype):
    """Functions of halves are rounded twice: to float32, and to 16 bits."""
    row, arrays = ELEMENTWISE[name], operands(name, dtype)
    got = row.evaluated(arrays, {}, dtype)
    function = OTHER.get(name) or getattr(np, NUMPY_NAME.get(name, name))
    wide = np.longdouble if dtype == np.float64 and name not in OTHER else np.float64
    with np.errstate(all="ignore"):
        exact = function(*(a.astype(wide) for a in arrays))
        rounded = (
            exact.astype(np.float32).astype(dtype) if dtype.itemsize == 2 else exact.astype(dtype)
        )
    finite = np.isfinite(rounded.astype(np.float64)) & np.isfinite(got.astype(np.float64))
    assert agree(got, rounded)[~finite].all()
    size = np.abs(rounded[finite].astype(np.float64))
    if name in ("lgamma", "digamma"):  # terms cancel
        least = np.abs(OTHER[name](np.abs(arrays[0][finite].astype(np.float64))))
        size = np.maximum(size, np.maximum(1, np.where(np.isfinite(least), least, 1)))
    tiny, eps = (float(getattr(ml_dtypes.finfo(dtype), what)) for what in ("tiny", "eps"))
    unit = np.maximum(2.0 ** np.floor(np.log2(np.maximum(size, tiny))), tiny) * eps
    error = np.abs(got[finite].astype(wide) - exact[finite]) / unit
    # NumPy's functions of float64 are the C library's, which round less well than once.
    assert error.max() <= (4.0 if dtype == np.float64 else 1.0), (name, error.max())


@pytest.mark.parametrize("name", LOWERED)
def test_the_type_of_a_result_is_as_the_row_says(name):
    row = ELEMENTWISE[name]
    for dtype in (d for _, d in cases([name]) if d not in SUB_BYTE):
        arrays = operands(name, dtype)
        for params in parameters(name, dtype):
            out = jax.eval_shape(bound(name, params), *arrays).dtype
            stated = {FIRST: arrays[0].dtype, SECOND: arrays[-1].dtype, TRUTH: np.dtype(bool)}
            assert out == (
                np.dtype(params["new_dtype"]) if row.result is STATED else stated[row.result]
            )


def test_choices_outside_mean_the_nearest_case():
    which = np.array([-7, 0, 1, 2, 99], np.int32)
    cases_ = [np.full(5, k, "f") for k in range(3)]
    got = ELEMENTWISE["select_n"].evaluated([which, *cases_], {}, np.dtype("f"))
    np.testing.assert_array_equal(got, lax.select_n(which, *cases_))
    many = [np.full(5, k, "f") for k in range(40)]  # NumPy's own choose takes 32
    np.testing.assert_array_equal(
        ELEMENTWISE["select_n"].evaluated([which, *many], {}, np.dtype("f")), [0, 0, 1, 2, 39]
    )
    one = ELEMENTWISE["select_n"].evaluated([which, cases_[1]], {}, np.dtype("f"))
    np.testing.assert_array_equal(one, cases_[1])


def test_kinds_of_types_that_numpy_lacks():
    kinds = {"bfloat16": "f", "float8_e5m2": "f", "int4": "i", "uint4": "u"}
    assert {name: kind_of(getattr(ml_dtypes, name)) for name in kinds} == kinds
    assert [kind_of(d) for d in ("f", "i", "u1", bool, "F")] == list("fiubc")


def test_what_a_meaning_does_not_cover():
    row = ELEMENTWISE["add"]
    assert is_evaluated(
        row, [np.dtype("f"), np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.int4)]
    )
    assert not is_evaluated(row, [np.dtype("F")])
    assert not is_evaluated(row, [np.dtype(ml_dtypes.float8_e5m2)])
    assert not is_evaluated(ELEMENTWISE["igamma"], [np.dtype("f")])
    with pytest.raises(TypeError, match="igamma has no meaning on NumPy arrays: its series"):
        ELEMENTWISE["igamma"].computed([1.0, 2.0], {}, np.dtype("f"))


# --- what every row has


def test_every_row_has_a_lowering_rule_or_says_why_not():
    for name, row in ELEMENTWISE.items():
        assert (name in lowering.RULES) == (not row.unlowered), name
        assert (row.meaning is None) == bool(row.unlowered), name
        assert set(row.kinds) <= set("fiub") or row.unlowered, name
    assert set(lowering.RULES) <= set(ELEMENTWISE)


def test_every_row_is_a_primitive_and_its_spelling_names_a_function():
    for name, row in ELEMENTWISE.items():
        assert name in _primitives(), name
        if row.spelling is not None:
            for text in (row.spelling.function, row.spelling.short):
                module, _, function = text.rpartition(".")
                assert not module or hasattr({"lax": lax, "jnp": jnp}[module], function), text


def kernel_of(name: str, dtype: np.dtype, params: dict):
    arrays = [a[:8] for a in operands(name, dtype)]
    function = bound(name, params)
    out = jax.eval_shape(function, *arrays)

    def body(*refs):
        refs[-1][...] = function(*(ref[...] for ref in refs[:-1]))

    return pbkern.kernel(body, out_shape=out).trace(*arrays), arrays


@pytest.mark.parametrize("name", LOWERED)
def test_every_row_prints_as_source_that_rebuilds_it(name):
    for kind in ELEMENTWISE[name].kinds:
        dtype = OF_KIND[kind][1 % len(OF_KIND[kind])]
        if not is_taken_by_jax(name, dtype):
            continue
        for params in parameters(name, dtype)[:2]:
            kernel, _ = kernel_of(name, dtype, params)
            text = str(kernel)
            assert same_kernel(kernel, pbkern.rebuild(text)), text
            renamed = (*IDENTITIES, "add_any")  # which bodies have as add
            is_bound = ELEMENTWISE[name].spelling is None and name not in renamed
            assert ("pbkern.bind(" in text) == is_bound, text


def tables() -> dict[str, PriceTable]:
    """Every price table that a target's planning, or its nests, read."""
    found = {f"{name} planning": get_target(name).machine().op_cycles for name in NAMES}
    nests = {
        "cpu": LowerOptions,
        "nvgpu": ThreadOptions,
        "amdgpu": ThreadOptions,
        "stub": BuildOptions,
    }
    return found | {f"{name} nests": options().op_costs for name, options in nests.items()}


def test_every_target_prices_every_row_and_nothing_else():
    assert {name.split()[0] for name in tables()} == {*NAMES, "stub"}
    for which, table in tables().items():
        assert set(table) == set(ELEMENTWISE), which
        assert set(table.measured) <= set(ELEMENTWISE), which
        assert all(table[name] >= 0 for name in ELEMENTWISE), which
        with pytest.raises(KeyError):
            table["frobnicate"]
    assert set(LowerOptions().op_costs.measured) == set(
        LOWERED
    )  # the CPU's nests are measured throughout
    with pytest.raises(KeyError):
        BuildOptions().op_cost("frobnicate")


def test_prices_are_measured_ones_then_the_rows():
    table = PriceTable({"exp": 3.0})
    assert table["exp"] == 3.0
    assert table["log"] == ELEMENTWISE["log"].price == UNMEASURED["log"]
    assert ONE_EACH["log"] == 1.0
    assert Machine().cycles("erf_inv") == ELEMENTWISE["erf_inv"].price
    assert (Machine().cycles("gather"), Machine().cycles("reduce_sum")) == (
        8,
        1.0,
    )  # not elementwise
    assert table == PriceTable({"exp": 3.0}) != UNMEASURED
    assert hash(table) == hash(PriceTable({"exp": 3.0}))


def test_no_row_is_unknown_to_the_interpreter_of_nests():
    from pbkern.lower.math.elementwise import EqnInfo
    from pbkern.lower.nest.numpy_ops import apply

    with pytest.raises(InternalError, match="no operation `igamma`"):
        apply(EqnInfo("igamma", {}, (np.dtype("f"),) * 2, np.dtype("f")), [np.ones(3, "f")] * 2)
