"""Operators of single elements by the table beside eager Torch: special values, dtypes, promotion, empty and 0-d tensors."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from .comparing import by_table, check_close, tensor_of  # noqa: E402

INF, NAN = float("inf"), float("nan")
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    -1.5,
    2.5,
    -2.5,
    3.0,
    10.3,
    -10.7,
    88.0,
    -88.0,
    1e-30,
    -1e-30,
    INF,
    -INF,
    NAN,
]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def slow(case):
    return pytest.param(case, marks=pytest.mark.slow)


UNARY = (
    {
        name: getattr(torch, name)
        for name in (
            "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt tanh sigmoid erf erfc sin cos tan asin acos atan sinh cosh "
            "asinh acosh atanh neg floor ceil trunc reciprocal square isnan "
            "isinf isfinite logical_not signbit abs sign sgn relu round "
            "frac isposinf isneginf positive deg2rad rad2deg selu angle nan_to_num digamma"
        ).split()
    }
    | {
        name: getattr(F, name)
        for name in (
            "silu leaky_relu elu celu softplus relu6 hardtanh hardswish hardsigmoid mish logsigmoid tanhshrink softshrink "
            "hardshrink"
        ).split()
    }
    | {
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "softplus2": lambda x: F.softplus(x, 2.0, 5.0),
        "threshold": lambda x: F.threshold(x, 1, 7),
        "clamp": lambda x: x.clamp(-1, 2),
        "clamp_min": lambda x: x.clamp(min=0.5),
        "clamp_max": lambda x: x.clamp_max(0.5),
        "nan_to_num3": lambda x: torch.nan_to_num(x, 1.0, 2.0, 3.0),
        "pow2": lambda x: x**2,
        "pow3": lambda x: x**3,
        "pow_half": lambda x: x**0.5,
        "pow_minus": lambda x: x**-1,
        "two_to": lambda x: 2.0**x,
        "rsub": lambda x: 1 - x,
        "mul": lambda x: x * 3,
        "mul_float": lambda x: x * 0.7,
        "over": lambda x: x / 3,
        "over_float": lambda x: x / 0.7,
        "floor_div": lambda x: x // 3,
        "mod": lambda x: x % 3,
        "mod_minus": lambda x: x % -3,
        "fmod": lambda x: torch.fmod(x, 3),
        "trunc_div": lambda x: torch.div(x, 3, rounding_mode="trunc"),
        "to_double": lambda x: x.double(),
        "to_bool": lambda x: x.bool(),
        "to_half": lambda x: x.half(),
        "round1": lambda x: torch.round(x, decimals=1),
        "xlogy": lambda x: torch.xlogy(x, 2.0),
        "eq": lambda x: x == 1,
        "gt": lambda x: x > 0.5,
        "masked": lambda x: x.masked_fill(x > 1, 5),
        "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    }
)
BINARY = {
    name: getattr(torch, name) for name in
    "add sub mul div maximum minimum fmax fmin atan2 hypot logaddexp copysign eq ne lt le gt ge fmod remainder floor_divide "
    "logical_and logical_or logical_xor nextafter pow xlogy".split()
} | {
    "add_alpha": lambda x, y: torch.add(x, y, alpha=2), "sub_alpha": lambda x, y: torch.sub(x, y, alpha=0.5),
    "rsub": torch.rsub, "div_floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"), "where": lambda x, y: torch.where(x > y, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5), "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=2),
    "clamp": lambda x, y: torch.clamp(x, y), "lerp": lambda x, y: torch.lerp(x, y, 0.7), "heaviside": torch.heaviside,
}  # fmt: skip
# Which zero is the larger is nobody's promise.
ANY_ZERO = {
    "relu",
    "relu6",
    "softshrink",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "clamp",
    "hardtanh",
    "clamp_min",
    "clamp_max",
}
INEXACT = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def together(functions, *tensors):
    """Those of the functions that Torch has for tensors like these: (names, ours, Torch's)."""
    names, expected = [], []
    for name, f in functions.items():
        try:
            expected.append(f(*tensors))
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        names.append(name)
    made = by_table(lambda *t: [functions[n](*t) for n in names], *tensors, compiled=True)
    return names, [tensor_of(m) for m in made], expected


def check_each(functions, *tensors):
    names, made, expected = together(functions, *tensors)
    assert len(names) > len(functions) // 3
    wrong = []
    for name, m, e in zip(names, made, expected):
        if (m.dtype, m.shape) != (e.dtype, e.shape):
            wrong.append((name, m.dtype, e.dtype, m.shape, e.shape))
            continue
        try:
            tolerance = INEXACT.get(e.dtype, 0.0)
            for t in tensors:
                tolerance = (
                    max(tolerance, INEXACT.get(t.dtype, 0.0))
                    if e.dtype.is_floating_point
                    else tolerance
                )
            check_close(m, e, tolerance, 1e-30 if e.dtype is not torch.float16 else 1e-6)
            zero = (
                (e == 0)
                if e.dtype.is_floating_point and name not in ANY_ZERO
                else torch.zeros(e.shape, dtype=torch.bool)
            )
            if not zero.any():
                continue
            assert torch.equal(torch.signbit(m[zero]), torch.signbit(e[zero])), "signs of zeros"
        except AssertionError as error:
            at = ~torch.isclose(m, e, rtol=tolerance, equal_nan=True) if m.shape else ...
            wrong.append(
                (
                    name,
                    [t[at][:4].tolist() for t in tensors],
                    m[at][:4].tolist(),
                    e[at][:4].tolist(),
                    str(error)[:40],
                )
            )
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, slow(torch.float64), slow(torch.float16)], ids=str
)
def test_functions_of_special_values(dtype):
    left_out = (
        ("tanhshrink", "erf") if dtype in (torch.float16, torch.bfloat16) else ()
    )  # Torch's are inexact there
    functions = {n: f for n, f in UNARY.items() if n not in left_out}
    check_each(functions, torch.tensor(SPECIAL, dtype=torch.float64).to(dtype))


def test_gelu_of_infinity():
    """Torch's is NaN at infinity, and cancels where it is small."""
    x = torch.tensor([0.0, 1.0, -1.0, -9.0, INF, -INF, NAN])
    (made,) = by_table(F.gelu, x, compiled=True)
    exact = torch.tensor([0.0, 0.8413447, -0.1586553, -1.0157296e-18, INF, NAN, NAN])
    check_close(tensor_of(made), exact, 1e-5, 0.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [*INTS, torch.bool], ids=str)
def test_functions_of_integers(dtype):
    values = torch.tensor([0, 1, 2, 3, 5, 7, 100, 127] if dtype is not torch.bool else [0, 1, 1, 0])
    values = values if dtype in (torch.uint8, torch.bool) else torch.cat([values, -values])
    check_each(UNARY, values.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pairs_of_special_values(dtype):
    pairs = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)), dtype=torch.float64).to(dtype)
    check_each(BINARY, pairs[:, 0].contiguous(), pairs[:, 1].contiguous())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool], ids=str)
def test_pairs_of_integers(dtype):
    values = [1, 2, 3, 7, 100] + (
        [-1, -2, -3, -100] if dtype not in (torch.uint8, torch.bool) else []
    )
    pairs = torch.tensor(list(itertools.product(values, values))).to(dtype)
    exact = {n: f for n, f in BINARY.items() if n not in ("pow", "addcdiv")}
    exact |= {
        "and": torch.bitwise_and,
        "or": torch.bitwise_or,
        "xor": torch.bitwise_xor,
        "not": lambda x, y: ~x,
    }
    check_each(exact, pairs[:, 0].contiguous(), pairs[:, 1].contiguous())


SOME = {n: BINARY[n] for n in "add mul div lt maximum where pow sub".split()}


@pytest.mark.parametrize(
    "a",
    [torch.float32, torch.uint8, *map(slow, (torch.bfloat16, torch.int32, torch.bool))],
    ids=str,
)
def test_types_are_promoted_as_torch_does(a):
    for b in (torch.float64, torch.float16, torch.int64, torch.int8, torch.complex64):
        x, y = torch.tensor([1, 2, 3]).to(a), torch.tensor([2, 1, 2]).to(b)
        ops = {n: f for n, f in SOME.items() if not (n == "sub" and a is torch.bool)}
        check_each(ops, x, y)
        check_each(ops, x, y[0])  # a 0-d tensor promotes by its kind alone


@pytest.mark.parametrize("shape", [(), (3, 0), slow((0,)), slow((1, 1))], ids=str)
def test_shapes_of_one_and_of_no_elements(shape):
    check_each(UNARY, torch.rand(shape))
    check_each(BINARY, torch.rand(shape), torch.rand(1))


# Operators of a tensor and a number that 16-bit types do not hold.
WITH_NUMBERS = {
    "add": lambda x, n: x + n,
    "sub": lambda x, n: x - n,
    "rsub": lambda x, n: n - x,
    "mul": lambda x, n: x * n,
    "div": lambda x, n: x / n,
    "floor_div": lambda x, n: x // n,
    "remainder": torch.remainder,
    "rremainder": lambda x, n: n % x,
    "fmod": torch.fmod,
    "addcmul": lambda x, n: torch.addcmul(x, x, x.abs(), value=n),
    "lerp": lambda x, n: torch.lerp(x, x.abs(), n / 4),
    "greater": lambda x, n: x > n,
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", WITH_NUMBERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_beside_short_floats_are_rounded_where_torch_rounds_them(name, dtype):
    """Elements equal eager ones: a difference of one unit would be a number that was rounded, or was not."""
    x = torch.cat([torch.linspace(-3.4, 3.4, 999), torch.tensor([1.7, -1.7, 100.0])]).to(dtype)
    f = lambda x: WITH_NUMBERS[name](x, 1.7)
    (result,) = by_table(f, x)
    assert torch.equal(result, f(x))


def test_the_sum_of_one_negative_zero_is_positive():
    x = torch.full((3, 1), -0.0)
    for f in (lambda x: x.sum(-1), lambda x: x.sum(), lambda x: x.reshape(1, 3).sum(0)):
        (result,) = by_table(f, x, compiled=True)
        assert torch.equal(torch.signbit(result), torch.signbit(f(x)))
