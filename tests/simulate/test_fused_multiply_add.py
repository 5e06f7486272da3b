"""The simulator's fused multiply-add beside exact rational numbers."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from pbkern.simulate import ops

FORMATS = [
    (np.float64, 53, -1074),
    (np.float32, 24, -149),
    (ml_dtypes.bfloat16, 8, -133),
    (np.float16, 11, -24),
]


def nearest(exact: Fraction, bits: int, lowest: int) -> Fraction:
    """Of numbers with so many bits, multiples of 2**lowest, the nearest one; of two the even one."""
    if exact == 0:
        return exact
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - bits + 1, lowest)
    return round(exact / unit) * unit


def operands(dtype, bits: int, lowest: int) -> list[np.ndarray]:
    """Random numbers of all exponents, sums near the middle between two numbers, sums that cancel, and subnormal results."""
    rng = np.random.default_rng(bits)
    highest = float(ml_dtypes.finfo(dtype).maxexp)

    def numbers(low: float, high: float) -> np.ndarray:
        odd = rng.integers(2 ** (bits - 1), 2**bits, 400) * 2.0 ** (1 - bits)
        return odd * 2.0 ** np.floor(rng.uniform(low, high, 400)) * rng.choice([-1, 1], 400)

    wide, half = lowest + bits, highest / 2
    x, y = numbers(wide / 2, half - 1), numbers(wide / 2, half - 1)
    apart = 2.0 ** -rng.integers(bits - 2, 2 * bits + 3, 400).astype("f8")
    cases = [
        (x, y, numbers(wide, highest - 1)),
        (x, y, -x * y),
        (x, y, x * y * apart),
        (np.abs(x) * apart, y, x),
        (
            np.full(400, 2.0 ** (wide // 2)),
            numbers(wide // 2 - bits, wide // 2 - 1),
            numbers(lowest, wide),
        ),
        (numbers(-3, 3), numbers(-3, 3), numbers(-2 * bits, 4)),
        (numbers(highest - 2, highest - 1), numbers(wide, wide + 9), numbers(-9, 9)),
    ]
    with np.errstate(over="ignore"):
        return [np.concatenate(column).astype(dtype) for column in zip(*cases)]


@pytest.mark.parametrize(("dtype", "bits", "lowest"), FORMATS)
def test_results_are_rounded_once(dtype, bits, lowest):
    x, y, z = operands(dtype, bits, lowest)
    with np.errstate(all="ignore"):
        got = ops.fma(np.dtype(dtype))(x, y, z)
    assert got.dtype == dtype
    limit = Fraction(float(ml_dtypes.finfo(dtype).max))
    checked = 0
    for a, b, c, value in zip(*(v.astype("f8").tolist() for v in (x, y, z, got))):
        if not all(map(math.isfinite, (a, b, c))):
            continue
        want = nearest(Fraction(a) * Fraction(b) + Fraction(c), bits, lowest)
        expected = float(want) if abs(want) <= limit else math.copysign(math.inf, want)
        assert value == expected, (a.hex(), b.hex(), c.hex(), value, expected)
        checked += 1
    assert checked > 2000


@pytest.mark.parametrize("dtype", [dtype for dtype, *_ in FORMATS])
def test_special_values(dtype):
    values = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan]
    x, y, z = (v.ravel().astype(dtype) for v in np.meshgrid(values, values, values))
    with np.errstate(all="ignore"):
        got, want = ops.fma(np.dtype(dtype))(x, y, z), x * y + z
    np.testing.assert_array_equal(got.astype("f4"), want.astype("f4"))
    is_number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[is_number], np.signbit(want)[is_number])


@pytest.mark.parametrize("dtype", [dtype for dtype, *_ in FORMATS])
def test_operands_that_repeat(dtype):
    x, y, z = (
        np.arange(1, n + 1).reshape(shape) for n, shape in ((4, (4, 1)), (8, (4, 2)), (1, ()))
    )
    got = ops.fma(np.dtype(dtype))(x.astype(dtype), y.astype(dtype), z.astype(dtype)[()])
    np.testing.assert_array_equal(got.astype("f4"), x * y + z)
