"""Rules: one elementwise JAX equation on register values -> one register value.

A rule gets a Builder, the equation's facts and its operands, already broadcast to common lanes.
Families come first, as data; exceptions after them, as functions. Meanings follow XLA on CPU.
Between the operations of one expression float16 and bfloat16 keep f32 precision; only
convert_element_type, reduce_precision and comparisons round. Functions with polynomials are in functions.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.ops.elementwise_row import kind_of
from pbkern.core.rules import RuleTable
from pbkern.lower.mlir.element_types import BITS, ELEMENTS, SUB_BYTE, is_float, storage_el
from pbkern.lower.mlir.ops import Builder, Ssa
from pbkern.lower.mlir.range_reports import RangeReport, is_comparable

from . import functions

__all__ = ["RULES", "EqnInfo", "supports"]


@dataclass(frozen=True, slots=True)
class EqnInfo:
    """Facts that a rule may know of an equation besides its operands. `at` is the user's line."""

    primitive: str
    params: dict
    in_dtypes: tuple[np.dtype, ...]
    out_dtype: np.dtype
    at: str | None = None

    @property
    def unsigned(self) -> bool:
        return self.in_dtypes[0].kind in "ub"


RULES: RuleTable[Callable[..., Ssa]] = RuleTable("elementwise")


def supports(primitive: str, in_dtypes, out_dtype) -> bool:
    """Whether a rule covers these dtypes (complex and fp8 have none, int4 few)."""
    return _supports(primitive, tuple(map(np.dtype, (*in_dtypes, out_dtype))))


@functools.cache
def _supports(primitive: str, dtypes: tuple[np.dtype, ...]) -> bool:
    if primitive not in RULES or any(dtype.name not in ELEMENTS for dtype in dtypes):
        return False
    row = ELEMENTWISE[primitive]
    if any(dtype.name in SUB_BYTE for dtype in dtypes) and not row.on_sub_byte:
        return False
    if primitive == "bitcast_convert_type":
        bits = {BITS[storage_el(dtype)] for dtype in dtypes}
        return len(bits) == 1 and not any(dtype.kind == "b" for dtype in dtypes)
    return kind_of(dtypes[row.deciding_operand]) in row.kinds


# ---------------------------------------------------------------------- families

for _name, _op in {
    "add": "add",
    "add_any": "add",
    "sub": "sub",
    "mul": "mul",
    "and": "and_",
    "or": "or_",
    "xor": "xor",
}.items():
    RULES.register(_name)(lambda b, eqn, x, y, _op=_op: getattr(b, _op)(x, y))

for _name, _op in {"max": "max", "min": "min", "mulhi": "mul_high"}.items():
    RULES.register(_name)(
        lambda b, eqn, x, y, _op=_op: getattr(b, _op)(x, y, unsigned=eqn.unsigned)
    )


def _compared(b: Builder, eqn: EqnInfo, predicate: str, x: Ssa, y: Ssa) -> Ssa:
    """16-bit floats are compared as they are in memory: an element and the greatest of its row, whichever was stored."""
    if x.name != y.name:
        exact = predicate in ("eq", "ne")
        x, y = _as_compared(b, eqn, x, y, exact), _as_compared(b, eqn, y, x, exact)
    return b.cmp(predicate, x, y, unsigned=eqn.unsigned)


def _as_compared(b: Builder, eqn: EqnInfo, x: Ssa, other: Ssa, exact: bool) -> Ssa:
    """x, rounded to the type of the comparison's operands where what the comparison says may depend on it.

    Which side of a constant x is on may depend on its last bit, but nothing that was stored; zero is one that small numbers
    become.
    """
    dtype, number = eqn.in_dtypes[0], b.number(other)
    if not is_float(x.el) or storage_el(dtype) == x.el:
        return x
    if number == 0 and dtype.name == "bfloat16":  # its numbers are as small as those of float32
        return x
    return x if number is not None and number != 0 and not exact else b.as_stored(x, dtype)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    RULES.register(_name)(lambda b, eqn, x, y, _op=_name: _compared(b, eqn, _op, x, y))

for _name, _op in {
    "shift_left": "shl",
    "shift_right_logical": "shr",
    "shift_right_arithmetic": "sar",
}.items():
    RULES.register(_name)(lambda b, eqn, x, n, _op=_op: b.shift(_op, x, n))

for _name, _op in {
    "neg": "neg",
    "floor": "floor",
    "ceil": "ceil",
    "sqrt": "sqrt",
    "not": "not_",
    "population_count": "population_count",
    "clz": "count_leading_zeros",
}.items():
    RULES.register(_name)(lambda b, eqn, x, _op=_op: getattr(b, _op)(x))


@RULES.register("in_range")
def _in_range(b: Builder, eqn: EqnInfo, x: Ssa) -> Ssa:
    """One comparison of numbers without signs: y - low is less than high - low exactly for those in the range."""
    low, high = eqn.params["low"], eqn.params["high"]
    first, count = min(low, high), abs(high - low)
    moved = b.sub(x, b.c(first, x.el)) if first else x
    if x.lanes and low < high and is_comparable(x.el, count):
        return b.report(RangeReport(moved, count), x)
    if low > high and count == 1:
        wrong = b.cmp("eq", x, b.c(high, x.el))
    else:
        wrong = b.cmp("ge" if low < high else "lt", moved, b.c(count, x.el), unsigned=True)
    index = b.report(RangeReport(b.cast("arith.extsi", wrong, x.el) if x.lanes else wrong), x)
    if high <= 0 < low:
        b.known.divisors.add(index.name)
    return index


RULES.register("copy", "stop_gradient")(lambda b, eqn, x: x)
RULES.register("square")(lambda b, eqn, x: b.mul(x, x))


# ---------------------------------------------------------------------- arithmetic


@RULES.register("div")
def _div(b: Builder, eqn: EqnInfo, x: Ssa, y: Ssa) -> Ssa:
    return b.div(x, y, unsigned=eqn.unsigned)


@RULES.register("rem")
def _rem(b: Builder, eqn: EqnInfo, x: Ssa, y: Ssa) -> Ssa:
    if is_float(x.el):
        return functions.BINARY["rem"](b, x, y)
    return b.rem(x, y, unsigned=eqn.unsigned)


@RULES.register("abs")
def _abs(b: Builder, eqn: EqnInfo, x: Ssa) -> Ssa:
    return x if eqn.unsigned else b.abs(x)


@RULES.register("sign")
def _sign(b: Builder, eqn: EqnInfo, x: Ssa) -> Ssa:
    """-1, 0 or 1; NaN and both float zeros are their own sign.

    Bits tell subnormal numbers from zeros, which comparisons take them for on XLA's threads.
    """
    zero = b.c(0, x.el)
    if is_float(x.el):
        el, infinity = f"i{BITS[x.el]}", b.bitcast(b.c(np.inf, x.el), f"i{BITS[x.el]}")
        bits = b.and_(b.bitcast(x, el), b.c((1 << (BITS[x.el] - 1)) - 1, el))
        is_number = b.cmp("lt", b.sub(bits, b.c(1, el)), infinity, unsigned=True)
        return b.select(is_number, b.copysign(b.c(1, x.el), x), x)
    positive = b.int_resize(b.cmp("ne" if eqn.unsigned else "gt", x, zero), x.el)
    return positive if eqn.unsigned else b.or_(positive, b.sar(x, b.c(BITS[x.el] - 1, x.el)))


@RULES.register("integer_pow")
def _integer_pow(b: Builder, eqn: EqnInfo, x: Ssa) -> Ssa:
    """Square and multiply; a negative exponent inverts the result, as XLA does."""
    exponent = eqn.params["y"]
    result, power, bits = None, x, abs(exponent)
    while bits:
        if bits & 1:
            result = power if result is None else b.mul(result, power)
        bits >>= 1
        if bits:
            power = b.mul(power, power)
    if result is None:
        return b.c(1, x.el)
    return b.div(b.c(1, x.el), result) if exponent < 0 else result


@RULES.register("round")
def _round(b: Builder, eqn: EqnInfo, x: Ssa) -> Ssa:
    """Ties away from zero (0) or to even (1)."""
    if int(eqn.params["rounding_method"]) == 1:
        return b.roundeven(x)
    # Adding the number just below a half cannot lift a number below a tie over it.
    half = np.nextafter(0.5, 0, dtype=np.dtype(f"f{BITS[x.el] // 8}"))
    return b.trunc(b.add(x, b.copysign(b.c(half, x.el), x)))


# ---------------------------------------------------------------------- comparison and choice


@RULES.register("select_n")
def _select_n(b: Builder, eqn: EqnInfo, which: Ssa, *cases: Ssa) -> Ssa:
    """The case numbered `which`: false, true, or an integer, of which those outside mean the nearest case."""
    if which.el == "i1":
        return b.select(which, cases[1], cases[0]) if len(cases) > 1 else cases[0]
    result = cases[-1]
    for i in reversed(range(len(cases) - 1)):
        result = b.select(b.cmp("le", which, b.c(i, which.el)), cases[i], result)
    return result


@RULES.register("clamp")
def _clamp(b: Builder, eqn: EqnInfo, low: Ssa, x: Ssa, high: Ssa) -> Ssa:
    """min(max(x, low), high); NaN anywhere gives NaN."""
    unsigned = eqn.in_dtypes[1].kind == "u"
    return b.min(b.max(x, low, unsigned=unsigned), high, unsigned=unsigned)


def _total_order(predicate: str):
    """Floats by sign, then magnitude: -NaN < -inf < ... < -0 < +0 < ... < NaN."""

    def rule(b: Builder, eqn: EqnInfo, x: Ssa, y: Ssa) -> Ssa:
        if is_float(x.el):
            el, width = f"i{BITS[x.el]}", BITS[x.el]
            top, magnitude = b.c(width - 1, el), b.c((1 << (width - 1)) - 1, el)
            x, y = (b.bitcast(b.as_stored(operand, eqn.in_dtypes[0]), el) for operand in (x, y))
            x, y = (b.xor(bits, b.and_(b.sar(bits, top), magnitude)) for bits in (x, y))
        return b.cmp(predicate, x, y, unsigned=eqn.unsigned)

    return rule


for _name in ("eq", "le", "lt"):
    RULES.register(f"{_name}_to")(_total_order(_name))


@RULES.register("is_finite")
def _is_finite(b: Builder, eqn: EqnInfo, x: Ssa) -> Ssa:
    """For float16 and bfloat16: whether rounding to them stays finite."""
    bound = {"float16": 65520.0, "bfloat16": float.fromhex("0x1.FFp127")}.get(
        eqn.in_dtypes[0].name, np.inf
    )
    return b.cmp("lt", b.abs(x), b.c(bound, x.el))


# ---------------------------------------------------------------------- bits and conversions


@RULES.register("convert_element_type")
def _convert(b: Builder, eqn: EqnInfo, x: Ssa) -> Ssa:
    return b.convert(x, eqn.in_dtypes[0], eqn.out_dtype)


@RULES.register("bitcast_convert_type")
def _bitcast(b: Builder, eqn: EqnInfo, x: Ssa) -> Ssa:
    stored = b.to_storage(x, eqn.in_dtypes[0])
    return b.from_storage(b.bitcast(stored, storage_el(eqn.out_dtype)), eqn.out_dtype)


# dtype -> (exponent bits, mantissa bits)
_FORMATS = {"float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}


def _as_rounded(b: Builder, x: Ssa) -> Ssa:
    """x as it is, rounded: what reads a product does not become a fused multiply-add, which would not round it."""
    name = f"llvm.arithmetic.fence.{f'v{x.lanes}' if x.lanes else ''}{x.el}"
    return x._replace(
        name=b.emit("llvm.call_intrinsic", (x.name,), f"({x.type}) -> {x.type}", f' "{name}"(%s)')
    )


@RULES.register("reduce_precision")
def _reduce_precision(b: Builder, eqn: EqnInfo, x: Ssa) -> Ssa:
    """Rounds to fewer exponent and mantissa bits; what is subnormal in the smaller format becomes zero."""
    dtype = eqn.in_dtypes[0]
    exponent_bits, mantissa_bits = _FORMATS[dtype.name]
    exponent = min(eqn.params["exponent_bits"], exponent_bits)
    drop = mantissa_bits - min(eqn.params["mantissa_bits"], mantissa_bits)
    if x.el in ("f32", "f64") and dtype.itemsize >= 4 and not drop and exponent == exponent_bits:
        return _as_rounded(b, x)
    stored = b.to_storage(x, dtype)
    el = f"i{BITS[stored.el]}"
    bits = b.bitcast(stored, el)
    sign = b.and_(bits, b.c(1 << (BITS[el] - 1), el))
    if drop:
        odd = b.and_(b.shr(bits, b.c(drop, el)), b.c(1, el))
        bits = b.add(bits, b.add(odd, b.c((1 << (drop - 1)) - 1, el)))
        bits = b.and_(bits, b.c(-1 << drop, el))
    if exponent < exponent_bits:
        bias, small = (1 << (exponent_bits - 1)) - 1, (1 << (exponent - 1)) - 1
        infinity = b.c(((1 << exponent_bits) - 1) << mantissa_bits, el)
        size = b.and_(bits, infinity)  # the exponent field in place
        overflow = b.cmp("gt", size, b.c((bias + small) << mantissa_bits, el))
        underflow = b.cmp("le", size, b.c((bias - small) << mantissa_bits, el))
        bits = b.select(overflow, b.or_(sign, infinity), b.select(underflow, sign, bits))
    rounded = b.from_storage(b.bitcast(bits, stored.el), dtype)
    return b.select(b.is_nan(x), x, rounded)


@RULES.register("nextafter")
def _nextafter(b: Builder, eqn: EqnInfo, x: Ssa, y: Ssa) -> Ssa:
    """The neighbour of x towards y: bits + 1 away from zero, bits - 1 towards it.

    All of it on bits: comparisons of floats may take subnormal numbers for zeros.
    """
    dtype = eqn.out_dtype
    stored = [b.to_storage(b.round_to(operand, dtype), dtype) for operand in (x, y)]
    el = f"i{BITS[stored[0].el]}"
    size = b.c((1 << (BITS[el] - 1)) - 1, el)
    from_bits, to_bits = (b.bitcast(word, el) for word in stored)
    zero, last = b.c(0, el), b.c(BITS[el] - 1, el)
    before, after = (
        b.xor(pattern, b.and_(b.sar(pattern, last), size)) for pattern in (from_bits, to_bits)
    )  # rise as the numbers do
    is_zero = b.cmp("eq", b.and_(from_bits, size), zero)
    equal = b.or_(
        b.cmp("eq", from_bits, to_bits), b.and_(is_zero, b.cmp("eq", b.and_(to_bits, size), zero))
    )
    towards_zero = b.xor(b.cmp("gt", after, before), b.cmp("gt", from_bits, zero))
    moved = b.add(from_bits, b.select(towards_zero, b.c(-1, el), b.c(1, el)))
    smallest = b.or_(b.c(1, el), b.and_(to_bits, b.c(-1 << (BITS[el] - 1), el)))
    result = b.select(equal, to_bits, b.select(is_zero, smallest, moved))
    neighbour = b.from_storage(b.bitcast(result, stored[0].el), dtype)
    return b.select(b.cmp("uno", x, y), b.add(x, y), neighbour)


# ---------------------------------------------------------------------- functions of vector_math

for _name, _function in functions.UNARY.items():
    RULES.register(_name)(lambda b, eqn, x, _f=_function: _f(b, x))


@RULES.register("atan2")
def _atan2(b: Builder, eqn: EqnInfo, y: Ssa, x: Ssa) -> Ssa:
    return functions.BINARY["atan2"](b, y, x)


@RULES.register("pow")
def _pow(b: Builder, eqn: EqnInfo, x: Ssa, y: Ssa) -> Ssa:
    if not is_float(y.el):  # as JAX: the exponent becomes a float of x's type
        y = b.int_to_float(y, x.el, unsigned=eqn.in_dtypes[1].kind in "ub")
    return functions.BINARY["pow"](b, x, y)
