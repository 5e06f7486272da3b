"""The stated error bounds of the vector math library, its special values, and that no code calls libm.

References: NumPy in f64 for f32, in long double (64 bits of mantissa) for f64, SciPy for the error and gamma functions,
mpmath for those in f64.
"""

import functools

import numpy as np
import pytest
import scipy.special

from pbkern.lower.math.elementwise import RULES, EqnInfo, supports
from pbkern.lower.math.functions import APPROX_RELATIVE, BINARY, ERROR_ULP, UNARY
from pbkern.targets.cpu.machines.detect import detected_machine
from pbkern.targets.cpu.math.lookup_values import PIECES

from .harness import Compiled, bfloat16, same

F32, F64 = np.dtype("float32"), np.dtype("float64")
SPECIALS = np.array(
    [
        0,
        0.5,
        1,
        1.5,
        2,
        3,
        4,
        5,
        6,
        9,
        10,
        27,
        1e-30,
        1e-40,
        5e-324,
        1e-310,
        100000.0,
        10000000000.0,
        1e38,
        1e308,
        np.inf,
        np.nan,
        87.33,
        88.72283,
        88.72284,
        89.4,
        103.9,
        103.98,
        708.4,
        709.78,
        710.4,
        745.1,
        745.2,
    ]
)  # exp's and sinh's edges
SPECIALS = np.concatenate([SPECIALS, -SPECIALS])

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(
        np.finfo(np.longdouble).nmant < 63, reason="needs a long double wider than f64"
    ),
]


def logistic(x):
    e = np.exp(-abs(x))
    return np.where(x < 0, e, 1) / (1 + e)


NUMPY_NAME = {
    **{f"a{name}": f"arc{name}" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    "pow": "power", "atan2": "arctan2", "rem": "fmod",
}  # fmt: skip
OTHER = {
    "logistic": logistic,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": scipy.special.erf,
    "erfc": scipy.special.erfc,
    "erf_inv": lambda x: np.where(x == 0, x, scipy.special.erfinv(x)),
}


GAMMA_FUNCTIONS = {
    "lgamma": lambda x: np.where(np.isinf(x), np.inf, scipy.special.gammaln(x)),
    "digamma": lambda x: np.where((x <= 0) & (np.floor(x) == x), np.nan, scipy.special.digamma(x)),
}
OTHER |= GAMMA_FUNCTIONS


def reference(name, *xs):
    function = OTHER.get(name) or getattr(np, NUMPY_NAME.get(name, name))
    return function(*[x.astype(np.float64 if x.dtype == F32 else np.longdouble) for x in xs])


@functools.cache
def inputs(dtype, count) -> np.ndarray:
    """Special values, random bit patterns, and the ranges where the functions bend."""
    rng = np.random.default_rng(1)
    part = count // 4
    integer = np.dtype(f"uint{8 * dtype.itemsize}")
    bits = rng.integers(0, np.iinfo(integer).max, part, dtype=integer, endpoint=True).view(dtype)
    wide = rng.uniform(-110, 100, part) if dtype == F32 else rng.uniform(-800, 800, part)
    parts = [SPECIALS, bits, 10 * rng.standard_normal(part), rng.uniform(-1.2, 1.2, part), wide]
    return np.concatenate([p.astype(dtype) for p in parts])


def pairs(dtype, count) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    x = inputs(dtype, count)
    grid = [g.ravel().astype(dtype) for g in np.meshgrid(SPECIALS, SPECIALS)]
    shuffled = rng.permutation(x)
    mostly_positive = np.where(rng.random(len(x)) < 0.9, abs(x), x)
    small_integers = rng.integers(-20, 20, 2000).astype(dtype)
    bases = rng.uniform(-30, 30, 2000).astype(dtype)
    return [
        np.concatenate(parts)
        for parts in ((grid[0], mostly_positive, bases), (grid[1], shuffled, small_integers))
    ]


def least_unit(name, x) -> np.ndarray | float:
    """What errors are ULP of where the result is less: the terms that cancel in gamma functions below zero."""
    if name not in GAMMA_FUNCTIONS:
        return 0.0
    return np.where(x < 0, np.fmax(1, abs(GAMMA_FUNCTIONS[name](abs(x)))), 0)


def errors(result, expected, least=0.0) -> tuple[np.ndarray, np.ndarray]:
    """(ULP of finite results or of `least`, where a NaN, an infinity or a zero's sign differs)."""
    dtype = result.dtype
    rounded = expected.astype(dtype)
    finite = np.isfinite(rounded) & np.isfinite(result)
    size = np.maximum(abs(np.where(finite, rounded, 1)), np.where(finite, least, 0).astype(dtype))
    unit = np.spacing(size).astype(expected.dtype)
    ulp = np.where(
        finite, abs(result.astype(expected.dtype) - np.where(finite, expected, 0)) / unit, 0
    )
    both_zero = (result == 0) & (rounded == 0)
    special = ~finite | both_zero
    return ulp, special & ~same(result, rounded)


def check(name, dtype, arrays, expected, **options):
    function = {**UNARY, **BINARY}[name]
    el = f"f{8 * dtype.itemsize}"
    kernel = Compiled(lambda b, *xs: function(b, *xs), [dtype] * len(arrays), dtype, **options)
    result = kernel(*arrays)
    ulp, wrong = errors(result, expected, least_unit(name, arrays[0]))
    rows = [(*(a[i] for a in arrays), result[i], expected[i]) for i in np.flatnonzero(wrong)[:5]]
    assert not rows, rows
    worst = int(np.argmax(ulp))
    assert ulp[worst] <= ERROR_ULP[name, el], (
        [a[worst] for a in arrays],
        result[worst],
        expected[worst],
    )
    assert "call" not in kernel.assembly()
    return kernel, result


has_avx512 = pytest.mark.skipif(
    detected_machine().vector_bits < 512, reason="the processor has no AVX-512"
)
ERROR_FUNCTIONS = ("erf", "erfc", "erf_inv")


@pytest.mark.parametrize("name", UNARY)
def test_f32_bound_and_specials(name):
    x = inputs(F32, 1_000_000)
    check(name, F32, [x], reference(name, x))


@pytest.mark.parametrize(
    "name", [n for n in UNARY if n not in (*ERROR_FUNCTIONS, *GAMMA_FUNCTIONS)]
)
def test_f64_bound_and_specials(name):
    x = inputs(F64, 100_000)
    check(name, F64, [x], reference(name, x))


@pytest.mark.parametrize("name", ERROR_FUNCTIONS)
def test_f64_error_functions(name):
    mp = pytest.importorskip("mpmath")
    mp.mp.dps = 30
    rng = np.random.default_rng(3)
    x = np.concatenate(
        [
            rng.uniform(-1, 1, 300),
            rng.uniform(-7, 7, 300) if name == "erf" else rng.uniform(-1, 1, 300),
        ]
    )
    if name == "erfc":
        x = np.concatenate([x, rng.uniform(-6, 26.5, 600)])
    if name == "erf_inv":
        x = np.concatenate([x, 1 - 2.0 ** rng.uniform(-52, -1, 300)])
    function = {"erf_inv": mp.erfinv}.get(name) or getattr(mp, name)
    exact = [function(mp.mpf(float(v))) for v in x]
    expected = np.array(
        [np.longdouble(float(e)) + np.longdouble(float(e - mp.mpf(float(e)))) for e in exact]
    )
    for avx512 in {False, detected_machine().vector_bits >= 512}:
        check(name, F64, [x], expected, avx512=avx512)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 2, -2, 28, 1e300])
    result = Compiled(lambda b, v: UNARY[name](b, v), [F64], F64)(special)
    _, wrong = errors(result, OTHER[name](special))
    assert not wrong.any(), (result, OTHER[name](special))


def near(points, reach) -> np.ndarray:
    """Arguments on both sides of the points, from `reach` down to its 10**9th part, and the points."""
    steps = reach * 10.0 ** -np.arange(0, 9, 0.25)
    return np.concatenate([(np.asarray(points)[:, None] + [*steps, 0, *-steps]).ravel()])


@functools.cache
def gamma_inputs() -> np.ndarray:
    """Where the functions vanish, where the code changes its way, near poles, everywhere else."""
    rng = np.random.default_rng(4)
    points = [
        0.3,
        1,
        1.3,
        1.4616321449683622,
        2,
        2.3,
        3,
        3.3,
        *(-k for k in range(9)),
        -0.5040830083,
        -2.4570247382,
        -2.74768,
    ]
    sizes = 10.0 ** rng.uniform(-300, 300, 200)
    large = -(10.0 ** rng.uniform(0, 17, 100))
    parts = [
        near(points, 0.2),
        rng.uniform(-1, 4, 800),
        rng.uniform(-30, 60, 400),
        sizes,
        -sizes,
        large,
    ]
    return np.concatenate([*parts, 1 / np.float64([1e307, -1e307]), [2.5e305, 2.6e305]])


def to_longdouble(exact) -> np.ndarray:
    high = np.array([float(e) for e in exact])
    rest = [float(e - h) if np.isfinite(h) else 0.0 for e, h in zip(exact, high)]
    return high.astype(np.longdouble) + np.array(rest, np.longdouble)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("avx512", [False, pytest.param(True, marks=has_avx512)])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", GAMMA_FUNCTIONS)
def test_gamma_functions(name, dtype, avx512):
    mp = pytest.importorskip("mpmath")
    mp.mp.dps = 40
    x = np.unique(gamma_inputs().astype(dtype))
    x = x[np.isfinite(x) & ((x > 0) | (np.floor(x) != x))]
    function = mp.digamma if name == "digamma" else lambda v: mp.re(mp.loggamma(v))
    expected = to_longdouble([function(mp.mpf(float(v))) for v in x])
    check(name, dtype, [x], expected if dtype == F64 else expected.astype(F64), avx512=avx512)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, -1, -2, -7, -1e20], dtype)
    result = Compiled(lambda b, v: UNARY[name](b, v), [dtype], dtype, avx512=avx512)(special)
    infinite = special == np.inf if name == "digamma" else ~np.isnan(special)
    assert same(result, np.where(infinite, np.inf, np.nan)).all(), result


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_two_operands(name, dtype):
    arrays = pairs(dtype, 200_000 if dtype == F32 else 60_000)
    check(name, dtype, arrays, reference(name, *arrays))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("avx512", [False, pytest.param(True, marks=has_avx512)])
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_scalar_code_equals_vector_code(name, avx512):
    """Also where a scalar takes a branch and vectors select."""
    function = {**UNARY, **BINARY}[name]
    for dtype in (F32, F64):
        arrays = [inputs(dtype, 20_000)] if name in UNARY else pairs(dtype, 4_000)
        results = [
            Compiled(
                lambda b, *xs: function(b, *xs), [dtype] * len(arrays), dtype, n, avx512=avx512
            )(*arrays)
            for n in (0, 16)
        ]
        assert same(*results).all()


EXPONENTIALS = ("exp", "exp2", "logistic", "erfc")


@has_avx512
@pytest.mark.parametrize(("dtype", "lanes"), [(F32, 16), (F64, 8)], ids=["f32", "f64"])
@pytest.mark.parametrize("name", EXPONENTIALS)
def test_exponentials_by_table(name, dtype, lanes):
    if name == "erfc" and dtype == F64:
        pytest.skip("in test_f64_error_functions")
    x = inputs(dtype, 1_000_000)
    kernel, _ = check(name, dtype, [x], reference(name, x), lanes=lanes, avx512=True)
    assert all(word in kernel.assembly() for word in ("scalef", "vperm", "vrange"))


@pytest.mark.sampled(2)
@has_avx512
@pytest.mark.parametrize("approx", [False, True])
@pytest.mark.parametrize("name", EXPONENTIALS)
def test_exponentials_by_table_have_the_same_bits_in_any_lanes(name, approx):
    for dtype in (F32, F64):
        x = inputs(dtype, 20_000)
        results = [
            Compiled(UNARY[name], [dtype], dtype, n, approx=approx, avx512=True)(x)
            for n in (0, 2, 8, 16, 32, 48)
        ]
        assert all(same(results[0], r).all() for r in results[1:])


IN_F32 = ("log", "log1p", "tanh", "erf", "erfc")


@has_avx512
@pytest.mark.parametrize("name", [*IN_F32, "asinh", "acosh", "atanh", "erf_inv"])
def test_functions_by_table(name):
    """Also around the places where a piece may begin."""
    steps = np.outer(2.0 ** np.arange(-4, 4), 1 + np.arange(32) / 32).ravel()
    edges = np.concatenate([steps, *(steps - pieces.offset for pieces in PIECES.values())]).astype(
        F32
    )
    near = (edges.view(np.int32)[:, None] + np.arange(-4, 5, dtype=np.int32)).ravel().view(F32)
    x = np.concatenate([inputs(F32, 1_000_000), near, -near])
    x = x[: len(x) // 16 * 16]
    kernel, _ = check(name, F32, [x], reference(name, x), avx512=True)
    assert "vperm" in kernel.assembly()


@has_avx512
@pytest.mark.parametrize("name", IN_F32)
def test_functions_by_table_have_the_same_bits_in_any_lanes(name):
    x = inputs(F32, 20_000)
    results = [Compiled(UNARY[name], [F32], F32, n, avx512=True)(x) for n in (0, 2, 8, 16, 32, 48)]
    assert all(same(results[0], r).all() for r in results[1:])


@pytest.mark.parametrize("avx512", [False, pytest.param(True, marks=has_avx512)])
@pytest.mark.parametrize(("low", "high"), [(0.92, 1.08), (3.8, 4.2)])
def test_erf_where_polynomials_end(low, high, avx512):
    """Every float."""
    first, last = (int(np.float32(x).view(np.int32)) for x in (low, high))
    x = np.arange(first, last, dtype=np.int32).view(F32)
    x = x[: len(x) // 16 * 16]
    check("erf", F32, [x], reference("erf", x), avx512=avx512)
    check("erf", F32, [-x], reference("erf", -x), avx512=avx512)


def test_saturating_functions_stay_within_one():
    x = np.linspace(0, 12, 4_000_000, dtype=F32)
    for name in ("tanh", "erf"):
        for avx512 in {False, detected_machine().vector_bits >= 512}:
            y = Compiled(UNARY[name], [F32], F32, avx512=avx512)(x)
            assert y.max() == 1
            assert y[0] == 0


@pytest.mark.parametrize("lanes", [8, 32, 64])
def test_other_lane_counts(lanes):
    x = inputs(F32, 20_000)
    for name in ("exp", "sin", "tanh"):
        check(name, F32, [x], reference(name, x), lanes=lanes)


def test_sine_of_the_hardest_arguments():
    """Near multiples of pi / 2, up to the largest floats, the reduced argument needs the most digits."""
    n = np.arange(1, 200_001, dtype=np.float64)
    x = np.concatenate([n * np.pi / 2, 2.0 ** np.arange(0, 1024) * 1.1])
    for name in ("sin", "cos", "tan"):
        for dtype in (F32, F64):
            finite = x.astype(dtype)[np.isfinite(x.astype(dtype))]
            check(name, dtype, [finite], reference(name, finite))


@pytest.mark.parametrize(("name", "el"), APPROX_RELATIVE)
def test_approximate_versions(name, el):
    dtype = {"f32": F32, "f64": F64}[el]
    x = np.concatenate([np.linspace(-80, 80, 100_001), np.linspace(-1.1, 1.1, 20_001)])
    if name == "erfc":
        if dtype == F64:
            pytest.skip("SciPy's erfc is not the better one")
        x = np.clip(x, -9, 9)
    x = x[x != 0].astype(dtype)
    kernel = Compiled(lambda b, v: UNARY[name](b, v), [dtype], dtype, approx=True)
    error = abs(kernel(x) / reference(name, x) - 1)
    assert error.max() <= APPROX_RELATIVE[name, el], x[np.argmax(error)]


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_approximate_exp_at_the_edges(dtype):
    kernel = Compiled(lambda b, v: UNARY["exp"](b, v), [dtype], dtype, approx=True)
    edges = np.array([0, -0.0, -1e4, -np.inf, np.inf, 1e4, np.nan], dtype)
    assert same(kernel(edges), np.array([1, 1, 0, 0, np.inf, np.inf, np.nan])).all()


PRIMITIVES = [*UNARY, "pow", "atan2", "rem"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [np.dtype("float16"), bfloat16], ids=str)
@pytest.mark.parametrize("name", PRIMITIVES)
def test_narrow_floats(name, dtype):
    """Through the rule, every bit pattern, within one unit of the narrow type."""
    bits = np.arange(1 << 16).astype(np.uint16)
    arrays = (
        [bits.view(dtype)]
        if name in UNARY
        else [bits.view(dtype), np.random.default_rng(4).permutation(bits).view(dtype)]
    )
    eqn = EqnInfo(name, {}, (dtype,) * len(arrays), dtype)
    assert supports(name, eqn.in_dtypes, dtype)
    rule = RULES.lookup(name)
    result = Compiled(lambda b, *xs: rule(b, eqn, *xs), eqn.in_dtypes, dtype)(*arrays)
    with np.errstate(all="ignore"):
        exact = reference(name, *[a.astype(F32) for a in arrays])
        expected = exact.astype(F32).astype(dtype)
    close = same(result, expected)
    near = abs(result.view(np.int16).astype(int) - expected.view(np.int16).astype(int)) <= 1
    assert (close | near).all(), [
        (*(a[i] for a in arrays), result[i], expected[i])
        for i in np.flatnonzero(~(close | near))[:5]
    ]


def test_integer_exponents_of_pow():
    eqn = EqnInfo("pow", {}, (F32, np.dtype("int32")), F32)
    x = np.linspace(-3, 3, 64, dtype=F32)
    y = np.arange(-32, 32, dtype=np.int32)
    result = Compiled(lambda b, *xs: RULES.lookup("pow")(b, eqn, *xs), eqn.in_dtypes, F32)(x, y)
    assert np.allclose(result, np.power(x.astype(F64), y), rtol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("avx512", [False, pytest.param(True, marks=has_avx512)])
@pytest.mark.parametrize("name", UNARY)
def test_every_f32(name, avx512):
    """All 2**32 bit patterns."""
    kernel = Compiled(lambda b, v: UNARY[name](b, v), [F32], F32, avx512=avx512)
    for high in range(0, 1 << 32, 1 << 24):
        x = np.arange(high, high + (1 << 24), dtype=np.uint64).astype(np.uint32).view(F32)
        ulp, wrong = errors(kernel(x), reference(name, x), least_unit(name, x))
        assert not wrong.any(), (
            hex(high),
            x[np.argmax(ulp)],
            ulp.max(),
        )
        assert ulp.max() <= ERROR_ULP[name, "f32"], (
            hex(high),
            x[np.argmax(ulp)],
            ulp.max(),
        )
