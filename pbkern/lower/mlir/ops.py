"""Typed SSA values -> MLIR operations (arith, math, vector), the same at every lane count.

A `Ssa` is an SSA name with its element type and lanes (0: a scalar). `Builder` turns one
operation on values into one or a few records (operation.py); where these go and how names are made
is the caller's choice. What an operation means follows XLA: NaN survives min and max, integers wrap,
conversions saturate, nothing traps. Functions such as exp are in lower/math/functions.py,
primitives in lower/math/elementwise.py.

Narrow types live in wider registers (element_types.py): loads extend, stores round. A 16-bit float
that is only moved is stored as it was loaded, so that every bit survives: those of a signalling NaN
would not, and people keep bytes in such arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field

import ml_dtypes
import numpy as np

from pbkern.core.errors import InternalError
from pbkern.core.lazy_dataclass import dataclass

from . import integer_division
from .element_types import (
    BITS,
    NUMPY_FLOAT,
    SUB_BYTE,
    compute_el,
    int_el,
    is_float,
    mlir_type,
    storage_el,
)
from .math_table import SHARED, MathTable
from .operation import Emit, OpenRegion, Operation, Region, for_syntax
from .range_reports import RangeReport
from .value import Ssa


@dataclass
class KnownValues:
    """Facts that are known of a function's values, by name.

    numbers: of constants.
    narrow: the 16-bit float that a wider value equals.
    divisors: integers that are not zero, or have been reported.
    """

    numbers: dict[str, float] = field(default_factory=dict)
    narrow: dict[str, Ssa] = field(default_factory=dict)
    divisors: set[str] = field(default_factory=set)


FLOAT_PREDICATES = {
    "eq": "oeq",
    "ne": "une",
    "lt": "olt",
    "le": "ole",
    "gt": "ogt",
    "ge": "oge",
    "uno": "uno",
    "ord": "ord",
}

CallRare = Callable[["Builder", Callable[..., "Ssa"], tuple["Ssa", ...], bool], "Ssa"]


class Builder:
    """Emits operations.

    Args:
      lanes: lanes of constants and of `broadcast` (0: scalar). Results take their operands' lanes.
      emit: appends an operation with one result where the caller is now.
      const: the same of a constant (literal, type) at the top of the function, once for each.
      open_region: begins a region of an operation that is emitted when the region is complete.
      approx: vector_math picks cheaper versions, with the bounds stated there.
      contract: mul followed by add may become one fma, as in XLA's CPU code.
      math: the target's own versions of functions.
      known: what is known of values of this function; its builders share it.
      live: lanes of elements that exist, where not all do.
      wrong: takes what `report` is given; None where nothing can be reported.
      call_rare: call_rare(builder, slow, operands, lanes_apart) calls a function that computes slow(builder, *operands), with
        lanes_apart one lane after the other; None: it is computed where it stands.
    """

    def __init__(
        self,
        lanes: int,
        emit: Emit,
        const: Emit,
        open_region: Callable[[], OpenRegion],
        *,
        approx: bool = False,
        contract: bool = True,
        math: MathTable = SHARED,
        known: KnownValues | None = None,
        live: Ssa | None = None,
        wrong: Callable[[RangeReport], None] | None = None,
        call_rare: CallRare | None = None,
    ):
        self.lanes, self.emit, self.const, self.open_region = lanes, emit, const, open_region
        self.approx, self.contract, self.math = approx, contract, math
        self.known = KnownValues() if known is None else known
        self.live, self.wrong, self.call_rare = live, wrong, call_rare
        self._syntax = " %s, %s fastmath<contract>" if contract else None

    def strict(self) -> Builder:
        """This builder without contraction, for code that depends on each rounding."""
        if not self.contract:
            return self
        return self._copy(self.emit, contract=False)

    def with_lanes(self, lanes: int) -> Builder:
        """This builder for values of other lanes."""
        return self if lanes == self.lanes else self._copy(self.emit, self.contract, lanes)

    def with_emit(self, emit: Emit) -> Builder:
        """This builder with another place for its operations."""
        return self._copy(emit, self.contract)

    def _copy(self, emit: Emit, contract: bool, lanes: int | None = None) -> Builder:
        return Builder(
            self.lanes if lanes is None else lanes,
            emit,
            self.const,
            self.open_region,
            approx=self.approx,
            contract=contract,
            math=self.math,
            known=self.known,
            live=self.live,
            wrong=self.wrong,
            call_rare=self.call_rare,
        )

    def of_lanes(self, live: Ssa) -> Builder:
        """This builder where elements exist in these lanes alone."""
        builder = self._copy(self.emit, self.contract)
        builder.live = live
        return builder

    # ------------------------------------------------------------------ constants

    def c(self, x, el: str) -> Ssa:
        """A constant in every lane, bit-exact. Integers wrap to the width of `el`."""
        if is_float(el):
            with np.errstate(over="ignore"):
                bits = np.asarray(x, NUMPY_FLOAT[el]).tobytes()[::-1].hex().upper()
            return self._constant(f"0x{bits}", float(x), el)
        if el == "i1":
            return self._constant("true" if x else "false", bool(x), el)
        width = BITS[el]
        wrapped = (int(x) + (1 << (width - 1))) % (1 << width) - (1 << (width - 1))
        return self._constant(str(wrapped), wrapped, el)

    def bits(self, pattern: int, el: str) -> Ssa:
        """The float constant with this bit pattern."""
        width = BITS[el]
        number = np.array(pattern, f"uint{width}").view(NUMPY_FLOAT[el])
        return self._constant(f"0x{pattern:0{width // 4}X}", float(number), el)

    def _constant(self, text: str, number, el: str) -> Ssa:
        if self.lanes:
            name = self.const(f"dense<{text}>", mlir_type(el, self.lanes))
        else:
            name = self.const(text, "" if el == "i1" else mlir_type(el))
        value = Ssa(name, el, self.lanes)
        self.known.numbers[value.name] = number
        return value

    def number(self, x: Ssa):
        """The number of a constant, else None."""
        return self.known.numbers.get(x.name)

    def broadcast(self, x: Ssa, lanes: int | None = None) -> Ssa:
        """A scalar in every lane. A vector stays as it is."""
        lanes = self.lanes if lanes is None else lanes
        if x.lanes or not lanes:
            return x
        out = Ssa("", x.el, lanes)
        out = out._replace(name=self.emit("vector.broadcast", (x.name,), f"{x.type} to {out.type}"))
        if (number := self.number(x)) is not None:
            self.known.numbers[out.name] = number
        if narrow := self.known.narrow.get(x.name):
            self.known.narrow[out.name] = self.broadcast(narrow, lanes)
        return out

    def shuffle(self, x: Ssa, y: Ssa, order: Sequence[int]) -> Ssa:
        """Lanes of x and of y behind it, by number. Both have one type."""
        syntax = f" %s, %s {list(order)}"
        name = self.emit("vector.shuffle", (x.name, y.name), f"{x.type}, {y.type}", syntax)
        return Ssa(name, x.el, len(order))

    def first_lane(self, x: Ssa) -> Ssa:
        """The first lane of a vector as a scalar."""
        types = f"{mlir_type(x.el)} from {x.type}"
        return Ssa(self.emit("vector.extract", (x.name,), types, " %s[0]"), x.el, 0)

    # ------------------------------------------------------------------ operations

    def same(self, op: str, *xs: Ssa) -> Ssa:
        """One operation whose result has its operands' type."""
        return xs[0]._replace(name=self.emit(op, tuple([x.name for x in xs]), xs[0].type))

    def cast(self, op: str, x: Ssa, el: str) -> Ssa:
        return x._replace(name=self.emit(op, (x.name,), f"{x.type} to {x.typed(el)}"), el=el)

    # ------------------------------------------------------------------ arithmetic

    def _arith(self, op: str, x: Ssa, y: Ssa) -> Ssa:
        if is_float(x.el):
            name = self.emit(f"arith.{op}f", (x.name, y.name), x.type, self._syntax)
            return x._replace(name=name)
        return self.same(f"arith.{op}i", x, y)

    def add(self, x: Ssa, y: Ssa) -> Ssa:
        return self._arith("add", x, y)

    def sub(self, x: Ssa, y: Ssa) -> Ssa:
        return self._arith("sub", x, y)

    def mul(self, x: Ssa, y: Ssa) -> Ssa:
        return self._arith("mul", x, y)

    def fma(self, x: Ssa, y: Ssa, z: Ssa) -> Ssa:
        """x * y + z, rounded once for floats."""
        return self.same("math.fma", x, y, z) if is_float(x.el) else self.add(self.mul(x, y), z)

    def neg(self, x: Ssa) -> Ssa:
        return self.same("arith.negf", x) if is_float(x.el) else self.sub(self.c(0, x.el), x)

    def div(self, x: Ssa, y: Ssa, *, unsigned: bool = False) -> Ssa:
        """Integers round to zero; x / 0 is all ones and the least integer / -1 is itself."""
        if is_float(x.el):
            return self.same("arith.divf", x, y)
        return integer_division.quotient(self, x, y, unsigned)[0]

    def rem(self, x: Ssa, y: Ssa, *, unsigned: bool = False) -> Ssa:
        """Remainder of integers with the sign of x; x rem 0 is x."""
        quotient, divisor, by_zero = integer_division.quotient(self, x, y, unsigned)
        rest = self.sub(x, self.mul(quotient, divisor))
        return rest if by_zero is None else self.select(by_zero, x, rest)

    def mul_high(self, x: Ssa, y: Ssa, *, unsigned: bool = False) -> Ssa:
        """The upper half of the double-width product."""
        return integer_division.upper_half(self, x, y, unsigned)

    # ------------------------------------------------------------------ one-instruction float
    # functions

    def abs(self, x: Ssa) -> Ssa:
        return self.same("math.absf" if is_float(x.el) else "math.absi", x)

    def sqrt(self, x: Ssa) -> Ssa:
        return self.same("math.sqrt", x)

    def roundeven(self, x: Ssa) -> Ssa:
        return self.same("math.roundeven", x)

    def floor(self, x: Ssa) -> Ssa:
        return self.same("math.floor", x)

    def ceil(self, x: Ssa) -> Ssa:
        return self.same("math.ceil", x)

    def trunc(self, x: Ssa) -> Ssa:
        return self.same("math.trunc", x)

    def copysign(self, x: Ssa, sign: Ssa) -> Ssa:
        return self.same("math.copysign", x, sign)

    # ------------------------------------------------------------------ comparison and choice

    def cmp(self, predicate: str, x: Ssa, y: Ssa, *, unsigned: bool = False) -> Ssa:
        """eq ne lt le gt ge (false with NaN, except ne), and for floats uno, ord -> i1."""
        if is_float(x.el):
            op, predicate = "arith.cmpf", FLOAT_PREDICATES[predicate]
        else:  # false < true, hence i1 is unsigned
            op = "arith.cmpi"
            if predicate not in ("eq", "ne"):
                predicate = f"{'u' if unsigned or x.el == 'i1' else 's'}{predicate}"
        name = self.emit(op, (x.name, y.name), x.type, f" {predicate}, %s, %s")
        return x._replace(name=name, el="i1")

    def is_nan(self, x: Ssa) -> Ssa:
        return self.cmp("uno", x, x)

    def select(self, mask: Ssa, x: Ssa, y: Ssa) -> Ssa:
        """x where the mask is true, else y. A scalar mask chooses whole vectors."""
        if x.name == y.name:
            return x
        types = f"{mask.type}, {x.type}" if mask.lanes else x.type
        out = x._replace(name=self.emit("arith.select", (mask.name, x.name, y.name), types))
        if one := self.known.narrow.get(x.name) or self.known.narrow.get(y.name):
            narrow_x, narrow_y = self._as_narrow(x, one.el), self._as_narrow(y, one.el)
            if (
                narrow_x is not None and narrow_y is not None
            ):  # chosen as integers: what LLVM makes of 16-bit floats may pass through f32
                bits_x, bits_y = self.bitcast(narrow_x, "i16"), self.bitcast(narrow_y, "i16")
                chosen = self.select(mask, bits_x, bits_y)
                self.known.narrow[out.name] = self.bitcast(chosen, one.el)
        return out

    def _as_narrow(self, x: Ssa, el: str) -> Ssa | None:
        """The 16-bit float of type `el` that x equals, if that is known."""
        number = self.number(x)
        if number is not None and x.lanes == self.lanes:
            with np.errstate(over="ignore"):
                return self.c(number, el) if number == NUMPY_FLOAT[el](number) else None
        narrow = self.known.narrow.get(x.name)
        return narrow if narrow and narrow.el == el else None

    def max(self, x: Ssa, y: Ssa, *, unsigned: bool = False) -> Ssa:
        """NaN if either is NaN, and -0 < +0, as in XLA."""
        return self._extreme("max", x, y, unsigned)

    def min(self, x: Ssa, y: Ssa, *, unsigned: bool = False) -> Ssa:
        """NaN if either is NaN, and -0 < +0, as in XLA."""
        return self._extreme("min", x, y, unsigned)

    def _extreme(self, op: str, x: Ssa, y: Ssa, unsigned: bool) -> Ssa:
        if not is_float(x.el):
            return self.same(f"arith.{op}{'u' if unsigned or x.el == 'i1' else 's'}i", x, y)
        if self.number(x) is not None:
            x, y = y, x
        bound = self.number(y)
        if bound is None or bound != bound:
            if op == "min" and x.lanes and self.math.asymmetric_minima:
                return self._union_of_minima(x, y)
            return self.same(f"arith.{op}imumf", x, y)
        # A constant that is a number wins or loses by one comparison, false for NaN; a zero of the
        # winning sign also wins ties, so that max(-0, +0) = +0 and min(+0, -0) = -0.
        wins_ties = bound == 0 and (np.signbit(bound) == (op == "min"))
        strict = "gt" if op == "max" else "lt"
        predicate = {"gt": "ge", "lt": "le"}[strict] if wins_ties else strict
        return self.select(self.cmp(predicate, y, x), y, x)

    def _union_of_minima(self, x: Ssa, y: Ssa) -> Ssa:
        """The smaller by two instructions, each of which returns its second operand where one is NaN or both are zeros."""
        el = int_el(x.el)
        one, other = (self.select(self.cmp("lt", a, b), a, b) for a, b in ((x, y), (y, x)))
        return self.bitcast(self.or_(self.bitcast(one, el), self.bitcast(other, el)), x.el)

    def at_least(self, x: Ssa, low: float) -> Ssa:
        """max(x, low) that keeps NaN: one instruction (low > x ? low : x)."""
        bound = self.c(low, x.el)
        return self.select(self.cmp("gt", bound, x), bound, x)

    def at_most(self, x: Ssa, high: float) -> Ssa:
        """min(x, high) that keeps NaN: one instruction."""
        bound = self.c(high, x.el)
        return self.select(self.cmp("lt", bound, x), bound, x)

    # ------------------------------------------------------------------ regions

    def any(self, mask: Ssa) -> Ssa:
        """Whether any lane is set, as a scalar."""
        return self._of_lanes("or", mask)

    def all(self, mask: Ssa) -> Ssa:
        """Whether every lane is set, as a scalar."""
        return self._of_lanes("and", mask)

    def _of_lanes(self, op: str, mask: Ssa) -> Ssa:
        if not mask.lanes:
            return mask
        types = f"{mask.type} into i1"
        return Ssa(self.emit("vector.reduction", (mask.name,), types, f" <{op}>, %s"), "i1", 0)

    def rare(
        self,
        mask: Ssa,
        usual: Ssa,
        slow: Callable[..., Ssa],
        *operands: Ssa,
        lanes_apart: bool = False,
    ) -> Ssa:
        """`usual`, but slow(builder, *operands) where the mask is set; skipped when no lane needs it.

        slow: uses no other values than its operands and constants.
        lanes_apart: whether a function for it takes one lane after the other, as suits products of 64 bits.
        """
        region = self.open_region()
        inner = self._inside(region)
        value = (
            slow(inner, *operands)
            if self.call_rare is None
            else self.call_rare(inner, slow, operands, lanes_apart)
        )
        chosen = inner.select(mask, value, usual)
        region.operations.append(Operation("scf.yield", (chosen.name,), chosen.type))
        otherwise = [Operation("scf.yield", (usual.name,), usual.type)]
        regions = Region(region.operations), Region(otherwise, "else")
        test = self.any(mask).name
        name = self.emit("scf.if", (test,), "", f" %s -> ({usual.type})", regions)
        return usual._replace(name=name)

    def either(
        self,
        test: Ssa,
        true: Callable[[Builder], Ssa],
        false: Callable[[Builder], Ssa],
    ) -> Ssa:
        """true(builder) where the test holds, else false(builder): of a scalar one alone is computed, if that is faster."""
        if not self._branches_pay(test):
            return self.select(test, true(self), false(self))
        regions, values = [], []
        for label, compute in (("", true), ("else", false)):
            region = self.open_region()
            values.append(compute(self._inside(region)))
            region.operations.append(Operation("scf.yield", (values[-1].name,), values[-1].type))
            regions.append(Region(region.operations, label))
        name = self.emit("scf.if", (test.name,), "", f" %s -> ({values[0].type})", tuple(regions))
        return values[0]._replace(name=name)

    def fast_path(
        self,
        x: Ssa,
        applies: Callable[[Builder], Ssa],
        fast: Callable[[Builder], Ssa],
        general: Callable[[Builder], Ssa],
    ) -> Ssa:
        """general(builder), which is right for every x; of a scalar x for which applies(builder) holds, fast(builder)."""
        return self.either(applies(self), fast, general) if self._branches_pay(x) else general(self)

    def _branches_pay(self, x: Ssa) -> bool:
        return not x.lanes and self.math.predicts_branches

    def report(self, wrong: RangeReport, x: Ssa) -> Ssa:
        """x, after this report, of lanes that count (range_reports.py).

        Its name is another: more is known of it.
        """
        if self.wrong is None:
            raise InternalError("a number out of its range cannot be reported from here")
        value = wrong.value
        if self.live is not None and value.lanes:
            value = self.select(self.live, value, self.c(0, value.el))
        self.wrong(wrong._replace(value=value))
        return self.same("arith.ori", x, x)  # MLIR folds it

    def repeat(self, count: int, start: Ssa, step: Callable[[Builder, Ssa], Ssa]) -> Ssa:
        """step(builder, value) applied `count` times, as a loop."""
        region = self.open_region()
        bounds = [self.const(str(i), "index") for i in (0, count, 1)]
        index, carried = region.name(), region.name()
        end = step(self._inside(region), start._replace(name=carried))
        region.operations.append(Operation("scf.yield", (end.name,), end.type))
        name = self.emit(
            "scf.for",
            (index, *bounds, carried, start.name),
            "",
            for_syntax([start.type]),
            (Region(region.operations),),
            (index, carried),
        )
        return start._replace(name=name)

    def lane_by_lane(self, function: Callable[..., Ssa], *operands: Ssa) -> Ssa:
        """function(builder of scalars, *elements) of each lane, one after the other; of scalars the function itself."""
        if not self.lanes:
            return function(self, *operands)
        region = self.open_region()
        inner = self._inside(region).with_lanes(0)
        lane, done = region.name(), region.name()

        def element(x: Ssa) -> Ssa:
            if not x.lanes:
                return x
            if self.number(x) is not None:
                return inner.c(self.number(x), x.el)
            types = f"{mlir_type(x.el)} from {x.type}"
            return Ssa(inner.emit("vector.extract", (x.name, lane), types, " %s[%s]"), x.el, 0)

        value = function(inner, *map(element, operands))
        start = self.c(0, value.el)
        types = f"{mlir_type(value.el)} into {start.type}"
        end = inner.emit("vector.insert", (value.name, done, lane), types, " %s, %s[%s]")
        region.operations.append(Operation("scf.yield", (end,), start.type))
        bounds = [self.const(str(i), "index") for i in (0, self.lanes, 1)]
        name = self.emit(
            "scf.for",
            (lane, *bounds, done, start.name),
            "",
            for_syntax([start.type]),
            (Region(region.operations),),
            (lane, done),
        )
        return start._replace(name=name)

    def _inside(self, region: OpenRegion) -> Builder:
        """This builder within a region, from which no range can be reported. Constants still go to the top."""
        inner = self.with_emit(region.emit)
        inner.wrong = None
        return inner

    # ------------------------------------------------------------------ bits

    def and_(self, x: Ssa, y: Ssa) -> Ssa:
        return self.same("arith.andi", x, y)

    def or_(self, x: Ssa, y: Ssa) -> Ssa:
        return self.same("arith.ori", x, y)

    def xor(self, x: Ssa, y: Ssa) -> Ssa:
        return self.same("arith.xori", x, y)

    def not_(self, x: Ssa) -> Ssa:
        return self.xor(x, self.c(-1, x.el))

    def shl(self, x: Ssa, n: Ssa) -> Ssa:
        """x << n for n below the width; other n are undefined (see `shift`)."""
        return self.same("arith.shli", x, n)

    def shr(self, x: Ssa, n: Ssa) -> Ssa:
        """Logical shift for n below the width."""
        return self.same("arith.shrui", x, n)

    def sar(self, x: Ssa, n: Ssa) -> Ssa:
        """Arithmetic shift for n below the width."""
        return self.same("arith.shrsi", x, n)

    def shift(self, op: str, x: Ssa, n: Ssa) -> Ssa:
        """op: shl, shr, sar. n taken as unsigned; at or above the width all bits are shifted out."""
        width = BITS[x.el]
        known = self.number(n)
        if known is not None and 0 <= known < width:
            return getattr(self, op)(x, n)
        if op == "sar":
            return self.sar(x, self.min(n, self.c(width - 1, n.el), unsigned=True))
        inside = self.cmp("lt", n, self.c(width, n.el), unsigned=True)
        shifted = getattr(self, op)(x, n)
        return self.select(inside, shifted, self.c(0, x.el))

    def population_count(self, x: Ssa) -> Ssa:
        return self.same("math.ctpop", x)

    def count_leading_zeros(self, x: Ssa) -> Ssa:
        return self.same("math.ctlz", x)

    def bitcast(self, x: Ssa, el: str) -> Ssa:
        """Takes the bits as another type of equal width."""
        if mlir_type(el) == mlir_type(x.el):
            return x if el == x.el else x._replace(el=el)
        return self.cast("arith.bitcast", x, el)

    # ------------------------------------------------------------------ conversions

    def int_resize(self, x: Ssa, el: str, *, unsigned: bool = False) -> Ssa:
        """Truncates (wraps), or extends with the sign, or with zeros where unsigned."""
        if BITS[el] == BITS[x.el]:
            return x
        if BITS[el] < BITS[x.el]:
            return self.cast("arith.trunci", x, el)
        return self.cast("arith.extui" if unsigned or x.el == "i1" else "arith.extsi", x, el)

    def int_to_float(self, x: Ssa, el: str, *, unsigned: bool = False) -> Ssa:
        return self.cast("arith.uitofp" if unsigned or x.el == "i1" else "arith.sitofp", x, el)

    def float_to_int(self, x: Ssa, el: str, *, unsigned: bool = False) -> Ssa:
        """Rounds to zero, saturates, NaN -> 0. arith.fptosi alone is undefined out of range."""
        width = BITS[el]
        low = 0 if unsigned else -(1 << (width - 1))
        high = (1 << width) - 1 if unsigned else (1 << (width - 1)) - 1
        float_of = NUMPY_FLOAT[x.el]
        top = float_of(high)
        if int(top) > high:
            top = np.nextafter(top, float_of(0))
        # The clamps also give a number for NaN: a comparison with NaN is false.
        low_c, top_c = self.c(low, x.el), self.c(top, x.el)
        inside = self.select(self.cmp("gt", x, low_c), x, low_c)
        inside = self.select(self.cmp("lt", inside, top_c), inside, top_c)
        wide = "i32" if width < 32 else el  # narrow conversions go through 32 bits
        op = "arith.fptoui" if unsigned and width >= 32 else "arith.fptosi"
        converted = self.int_resize(self.cast(op, inside, wide), el)
        if int(top) != high:
            converted = self.select(self.cmp("gt", x, top_c), self.c(high, el), converted)
        if unsigned:  # NaN was clamped to low = 0
            return converted
        return self.select(self.is_nan(x), self.c(0, el), converted)

    def float_resize(self, x: Ssa, el: str) -> Ssa:
        """Between f64, f32, f16 and bf16, to nearest even; NaN stays NaN, subnormals are kept."""
        if el == x.el:
            return x
        if (narrow := self.known.narrow.get(x.name)) and narrow.el == el:
            return narrow
        if x.el == "bf16":
            word = self.int_resize(self.bitcast(x, "i16"), "i32", unsigned=True)
            wide = self.bitcast(self.shl(word, self.c(16, "i32")), "f32")
            self.known.narrow[wide.name] = x
            return self.float_resize(wide, el)
        if BITS[el] > BITS[x.el]:
            wide = self.cast("arith.extf", x, el)
            if x.el == "f16":
                self.known.narrow[wide.name] = x
            return wide
        if x.el == "f64" and BITS[el] == 16:  # no instruction, and rounding twice would be wrong
            x = self._round_to_odd(x)
        if el == "bf16":
            rounding = self.math.lookup("bf16", "f32")
            return rounding(self, x) if rounding else self._to_bf16(x)
        return self.cast("arith.truncf", x, el)

    def _to_bf16(self, x: Ssa) -> Ssa:
        """f32 -> bf16 by integer arithmetic: vcvtneps2bf16 flushes subnormals."""
        word = self.bitcast(x, "i32")
        high = self.shr(word, self.c(16, "i32"))
        odd = self.and_(high, self.c(1, "i32"))
        rounded = self.shr(self.add(self.add(word, self.c(0x7FFF, "i32")), odd), self.c(16, "i32"))
        quiet = self.or_(high, self.c(0x40, "i32"))
        bits = self.select(self.is_nan(x), quiet, rounded)
        return self.bitcast(self.int_resize(bits, "i16"), "bf16")

    def _round_to_odd(self, x: Ssa) -> Ssa:
        """f64 -> f32 with the last bit set when inexact; rounding that again is rounding once.

        Source: S. Boldo, G. Melquiond, When double rounding is odd, 2005.
        """
        y = self.cast("arith.truncf", x, "f32")
        back = self.cast("arith.extf", y, "f64")
        word = self.bitcast(y, "i32")
        too_far = self.cmp("gt", self.abs(back), self.abs(x))
        down = self.select(too_far, self.sub(word, self.c(1, "i32")), word)
        inexact = self.and_(self.cmp("ne", back, x), self.cmp("ord", x, x))
        return self.bitcast(self.select(inexact, self.or_(down, self.c(1, "i32")), word), "f32")

    def from_storage(self, x: Ssa, dtype) -> Ssa:
        """A loaded value -> its register value."""
        el = compute_el(dtype)
        if el == "i1":
            return self.cmp("ne", x, self.c(0, x.el)) if x.el != "i1" else x
        if x.el == "f16" and not x.lanes and (loaded := self.math.lookup("loaded_f16", "f32")):
            x = loaded(self, x)
        return self.float_resize(x, el) if is_float(el) else x

    def to_storage(self, x: Ssa, dtype) -> Ssa:
        """A register value -> what is stored: bool as i8 0 or 1, narrow floats rounded."""
        el = storage_el(dtype)
        if x.el == "i1":
            return self.int_resize(x, el, unsigned=True)
        return self.float_resize(x, el) if is_float(el) else x

    def _to_sub_byte(self, x: Ssa, target: np.dtype) -> Ssa:
        """Floats saturate, integers keep their low bits, extended to a byte."""
        info = ml_dtypes.iinfo(target)
        if is_float(x.el):
            wide = self.float_to_int(x, "i8", unsigned=False)
            low, high = (self.c(int(bound), "i8") for bound in (info.min, info.max))
            return self.min(self.max(wide, low, unsigned=False), high, unsigned=False)
        byte = self.int_resize(x, "i8", unsigned=True)
        unused = self.c(8 - info.bits, "i8")
        shifted = self.shl(byte, unused)
        return (
            self.shr(shifted, unused) if target.name.startswith("u") else self.sar(shifted, unused)
        )

    def round_to(self, x: Ssa, dtype) -> Ssa:
        """A register value rounded to what `dtype` can hold."""
        return self.from_storage(self.to_storage(x, dtype), dtype) if is_float(x.el) else x

    def as_stored(self, x: Ssa, dtype) -> Ssa:
        """round_to where x may be something else: not of constants, nor of what was loaded."""
        narrow = self.known.narrow.get(x.name)
        if self.number(x) is not None or (narrow and narrow.el == storage_el(dtype)):
            return x
        return self.round_to(x, dtype)

    def convert(self, x: Ssa, source, target) -> Ssa:
        """convert_element_type on register values, rounded to `target` explicitly."""
        source, target = np.dtype(source), np.dtype(target)
        el = compute_el(target)
        if el == "i1":
            if x.el == "i1":
                return x
            if (
                is_float(x.el) and source.itemsize < 4
            ):  # as XLA: what is subnormal only in 16 bits is true on every thread
                whole = int_el(x.el)
                x = self.and_(self.bitcast(x, whole), self.c((1 << (BITS[whole] - 1)) - 1, whole))
            return self.cmp("ne", x, self.c(0, x.el))
        if is_float(x.el) and is_float(el):
            if source == target:
                return x
            return self.float_resize(self.float_resize(x, storage_el(target)), el)
        if target.name in SUB_BYTE:
            return self._to_sub_byte(x, target)
        if is_float(x.el):
            return self.float_to_int(x, el, unsigned=target.kind == "u")
        if is_float(el):
            y = self.int_to_float(x, el, unsigned=source.kind == "u")
            return self.round_to(y, target) if storage_el(target) != el else y
        return self.int_resize(x, el, unsigned=source.kind in "ub")
