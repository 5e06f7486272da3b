"""Rows of the table of reductions: what machine code combines is what NumPy combines, and identities change nothing."""

import numpy as np
import pytest
from jax import lax

from pbkern.lower.nest.ir import Reduction
from pbkern.lower.nest.reductions import REDUCTIONS, combine, identity, joined, start

from .harness import Compiled, same

WANTED = {
    "sum": np.add, "dot": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "maxnum": np.fmax,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "logaddexp": np.logaddexp,
}  # fmt: skip
BOOLS = {
    "sum": np.logical_or, "dot": np.logical_or, "prod": np.logical_and, "max": np.logical_or,
    "min": np.logical_and, "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
}  # fmt: skip
BITS = ("and", "or", "xor")


def dtypes(op: str) -> tuple[str, ...]:
    if op in ("maxnum", "logaddexp"):
        return ("f4", "f8")
    return ("i4", "u1", "?") if op in BITS else ("f4", "f8", "i4", "u1", "?")


CASES = [(op, dtype) for op in WANTED for dtype in dtypes(op)]


def numbers(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    if dtype == "?":
        return np.tile([False, True], 32), np.repeat([False, True], 32)
    if dtype in ("f4", "f8"):
        x, y = rng.standard_normal((2, 64)).astype(dtype) * 8
        x[:4], y[:4] = [np.inf, -np.inf, np.nan, 1], [1, -np.inf, 1, np.nan]
        return x, y
    info = np.iinfo(dtype)
    return tuple(rng.integers(info.min, info.max, (2, 64), dtype, endpoint=True))


def wanted(op: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return (BOOLS if x.dtype.kind == "b" else WANTED)[op](x, y)


def test_all_rows_are_tested():
    assert REDUCTIONS.keys() == {*WANTED, "argmax", "argmin"}


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_machine_code_and_numpy_combine_alike(op, dtype):
    (x, y), reduction = numbers(dtype), Reduction(op, (), np.dtype(dtype))
    if op == "maxnum":  # no accumulator is NaN: they start with a number, and keep it
        x[x != x] = 0
    want = wanted(op, x, y)
    compiled = Compiled(lambda b, x, y: combine(b, reduction, [x], [y])[0], [dtype] * 2, dtype)
    for got in (compiled(x, y), joined(reduction, x, y)):
        if op == "logaddexp":
            np.testing.assert_allclose(got, want, rtol=3e-6 if dtype == "f4" else 1e-14)
        else:
            assert same(got, want).all()


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_identities_change_nothing(op, dtype):
    x, _ = numbers(dtype)
    x = x[x == x]
    reduction = Reduction(op, (), np.dtype(dtype))
    np.testing.assert_array_equal(wanted(op, np.full_like(x, start(reduction)[()]), x), x)
    compiled = Compiled(
        lambda b, x: combine(b, reduction, identity(b, reduction), [x])[0], [dtype], dtype
    )
    np.testing.assert_array_equal(compiled(x), x)


@pytest.mark.parametrize("op", [op for op in WANTED if REDUCTIONS[op].primitive])
def test_primitives_combine_alike(op):
    x, y = numbers("i4")
    got = getattr(lax, f"{REDUCTIONS[op].primitive}_p").bind(x, y)
    np.testing.assert_array_equal(got, wanted(op, x, y))
