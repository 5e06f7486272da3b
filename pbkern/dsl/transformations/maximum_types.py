"""Types of values by how they depend on a running maximum, and a rule for each primitive.

    m' = max(m, x)           a maximum, whose symbol is new: any number, as far as these types go
    x - m'                   a sum with the term -m'
    exp(x - m')              a product with the factor exp(-m')
    l * exp(m - m')          the same, if `l` is a product with the factor exp(-m)
    acc / l                  independent, if both are products with one factor

A value of which the types say that it is independent of the symbols is the same whatever they stand for.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jex

from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import literal_value
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.views import SHAPE_VIEWS

# Coefficients below this are rounding of constants such as log2(e) * ln(2).
SMALLEST_COEFFICIENT = 1e-6

# (symbol of a maximum, its coefficient), by rising symbol.
Terms = tuple[tuple[int, float], ...]


class Dependence(enum.Enum):
    """The types of values that are of none of the classes below."""

    INDEPENDENT = "independent"
    ZERO = "zero"
    NOTHING = "nothing so far: zero, until the types of states have settled"
    UNKNOWN = "unknown"


INDEPENDENT = Dependence.INDEPENDENT
ZERO = Dependence.ZERO
UNKNOWN = Dependence.UNKNOWN
NOTHING = Dependence.NOTHING


@dataclass(frozen=True)
class PlaceInGrid:
    """The program's number along a grid dimension."""

    axis: int


@dataclass(frozen=True)
class FirstAlong:
    """True only in programs that are the first along these grid dimensions."""

    axes: frozenset[int]


@dataclass(frozen=True)
class MaximumSum:
    """Independent of the maxima, plus these terms.

    Attributes:
      terms: of the sum.
      axes: the value's axis along each axis of the maxima.
      exact: whether the value is the sum of the terms alone.
    """

    terms: Terms
    axes: tuple[int, ...]
    exact: bool = False

    @property
    def symbol(self) -> int | None:
        """The maximum that the value is, if it is one."""
        is_maximum = self.exact and len(self.terms) == 1 and self.terms[0][1] == 1
        return self.terms[0][0] if is_maximum else None


@dataclass(frozen=True)
class MaximumProduct:
    """Independent of the maxima, times exp(the sum of these terms).

    Attributes:
      terms: of the exponent.
      axes: the value's axis along each axis of the maxima.
      exact: whether the value is the exponential alone.
      even: axes along which all elements are equal, beside those of size 1.
      implies: keys of values that are zero in a maximum's row, all of it, where this value is. If there are some,
        this value is not negative.
      vanishes_with: keys of values. Where any of them is zero in a maximum's row, all of it, this value is.
      or_where_zero: whether the value may be another where those of `implies` are zero.
    """

    terms: Terms
    axes: tuple[int, ...]
    exact: bool = False
    even: frozenset[int] = frozenset()
    implies: frozenset[Hashable] = frozenset()
    vanishes_with: frozenset[Hashable] = frozenset()
    or_where_zero: bool = False


@dataclass(frozen=True)
class AsksForZero:
    """Whether a product is zero, or is not.

    Attributes:
      axes: of the product.
      implies: of the product.
      negated: whether it is true where the product is not zero.
    """

    axes: tuple[int, ...]
    implies: frozenset[Hashable]
    negated: bool = False


ValueType = Dependence | PlaceInGrid | FirstAlong | MaximumSum | MaximumProduct | AsksForZero


def is_independent(type_: ValueType) -> bool:
    return isinstance(type_, (PlaceInGrid, FirstAlong, AsksForZero)) or (
        isinstance(type_, Dependence) and type_ is not UNKNOWN
    )


def is_zero(type_: ValueType) -> bool:
    return type_ is ZERO or type_ is NOTHING


def maximum(symbol: int, axes: tuple[int, ...]) -> MaximumSum:
    return MaximumSum(((symbol, 1.0),), axes, exact=True)


def renamed(type_: ValueType, names: dict[int, int]) -> ValueType:
    """The type with other symbols."""
    if isinstance(type_, (MaximumSum, MaximumProduct)):
        terms = _sum_of([(names.get(symbol, symbol), c) for symbol, c in type_.terms])
        return dataclasses.replace(type_, terms=terms)
    return type_


def cancels(type_: ValueType) -> bool:
    """Whether a value is zero, or exp(zero), if all symbols stand for one number."""
    if not isinstance(type_, (MaximumSum, MaximumProduct)) or not type_.exact:
        return False
    return abs(sum(coefficient for _, coefficient in type_.terms)) < SMALLEST_COEFFICIENT


def alternatives(types: Sequence[ValueType], is_start: Sequence[bool]) -> ValueType:
    """The type of a value that is one of several.

    `is_start`: which of them are what a line of programs starts with, so that nothing that was added is lost.
    """
    begun = [NOTHING if start and type_ is ZERO else type_ for type_, start in zip(types, is_start)]
    types = [type_ for type_ in begun if type_ is not NOTHING]
    if not types:
        return NOTHING
    if len(set(types)) == 1:
        return types[0]
    if all(map(is_independent, types)):
        return INDEPENDENT
    rest = [type_ for type_ in types if isinstance(type_, MaximumProduct)]
    if len(rest) < sum(type_ is not ZERO for type_ in types):
        return UNKNOWN
    first = rest[0]
    if not all(_agree(first, type_) for type_ in rest):
        return UNKNOWN
    implies = frozenset.intersection(*(type_.implies for type_ in rest))
    return MaximumProduct(
        first.terms,
        first.axes,
        even=frozenset.intersection(*(type_.even for type_ in rest)),
        implies=frozenset() if ZERO in types else implies,
        vanishes_with=frozenset.intersection(*(type_.vanishes_with for type_ in rest)),
    )


# --- rules
# ------------------------------------------------------------------------------------------------


def type_of_literal(atom: jex.Literal) -> ValueType:
    value = literal_value(atom)
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    return ZERO if is_float and value == 0 else INDEPENDENT


def type_of_result(eqn, types: Sequence[ValueType], key: Hashable) -> ValueType:
    """The type of the result of an equation that is no control flow, and has one.

    Args:
      eqn: the equation.
      types: of its operands.
      key: a name of the result.
    """
    name = eqn.primitive.name
    rule = _RULES.get(name)
    if rule is not None:
        result = rule(eqn, types, key)
        if result is not None:
            return result
    return INDEPENDENT if all(map(is_independent, types)) else UNKNOWN


def _sum_of(pairs) -> Terms:
    total: dict[int, float] = {}
    for symbol, coefficient in pairs:
        total[symbol] = total.get(symbol, 0.0) + coefficient
    return tuple(
        (symbol, c) for symbol, c in sorted(total.items()) if abs(c) >= SMALLEST_COEFFICIENT
    )


def _scaled(terms: Terms, factor: float) -> Terms:
    return _sum_of([(symbol, c * factor) for symbol, c in terms])


def _same_terms(a: Terms, b: Terms) -> bool:
    return not _sum_of([*a, *_scaled(b, -1)])


def _agree(a: MaximumProduct, b: MaximumProduct) -> bool:
    """Whether a sum of both is a product with their factor."""
    plain = not (a.or_where_zero or b.or_where_zero)
    return plain and a.axes == b.axes and _same_terms(a.terms, b.terms)


def _product(terms: Terms, axes: tuple[int, ...], **rest) -> ValueType:
    return MaximumProduct(terms, axes, **rest) if terms else INDEPENDENT


def _other_axes(eqn, axes: Sequence[int]) -> frozenset[int]:
    """Axes of an equation's first operand that are longer than 1, beside these."""
    shape = array_aval(eqn.invars[0]).shape
    return frozenset(axis for axis, size in enumerate(shape) if size > 1 and axis not in axes)


def _constant(eqn, operand: int) -> float | None:
    atom = eqn.invars[operand]
    return float(literal_value(atom)) if isinstance(atom, jex.Literal) else None


def _exp(eqn, types, key):
    (of,) = types
    if not isinstance(of, MaximumSum):
        return None
    factor = math.log(2) if eqn.primitive.name == "exp2" else 1.0
    keys = frozenset({key})
    return _product(
        _scaled(of.terms, factor),
        of.axes,
        exact=of.exact,
        even=_other_axes(eqn, of.axes) if of.exact else frozenset(),
        implies=keys,
        vanishes_with=keys,
    )


def _log(eqn, types, key):
    (of,) = types
    if not isinstance(of, MaximumProduct) or of.or_where_zero:
        return None
    factor = 1 / math.log(2) if eqn.primitive.name == "log2" else 1.0
    return MaximumSum(_scaled(of.terms, factor), of.axes, exact=of.exact)


def _neg(eqn, types, key):
    (of,) = types
    if isinstance(of, MaximumSum):
        return dataclasses.replace(of, terms=_scaled(of.terms, -1))
    if isinstance(of, MaximumProduct) and not of.or_where_zero:
        return dataclasses.replace(of, exact=False, implies=frozenset())
    return of if is_zero(of) else None


def _add(eqn, types, key):
    return _sum(types, 1)


def _sub(eqn, types, key):
    return _sum(types, -1)


def _sum(types, sign: int):
    a, b = types
    if is_zero(a) and is_zero(b):
        return b if a is NOTHING else a
    if isinstance(a, MaximumProduct) or isinstance(b, MaximumProduct):
        return _sum_of_products(a, b, sign)
    if isinstance(a, MaximumSum) and isinstance(b, MaximumSum):
        if a.axes != b.axes:
            return None
        terms = _sum_of([*a.terms, *_scaled(b.terms, sign)])
        exact = a.exact and b.exact
        return MaximumSum(terms, a.axes, exact) if terms or exact else INDEPENDENT
    if isinstance(a, MaximumSum) and is_independent(b):
        return a if is_zero(b) else dataclasses.replace(a, exact=False)
    if is_independent(a) and isinstance(b, MaximumSum):
        return MaximumSum(_scaled(b.terms, sign), b.axes, exact=b.exact and is_zero(a))
    return None


def _sum_of_products(a, b, sign: int):
    if is_zero(a) and isinstance(b, MaximumProduct) and not b.or_where_zero:
        return b if sign > 0 else dataclasses.replace(b, exact=False, implies=frozenset())
    if is_zero(b):
        return a
    if not isinstance(a, MaximumProduct) or not isinstance(b, MaximumProduct) or not _agree(a, b):
        return None
    positive = sign > 0 and a.implies and b.implies
    return MaximumProduct(
        a.terms,
        a.axes,
        even=a.even & b.even,
        implies=a.implies | b.implies if positive else frozenset(),
        vanishes_with=a.vanishes_with & b.vanishes_with,
    )


def _mul(eqn, types, key):
    a, b = types
    if is_zero(a) or is_zero(b):
        return a if is_zero(a) else b
    for one, other, position in ((a, b, 1), (b, a, 0)):
        if isinstance(one, MaximumSum):
            constant = _constant(eqn, position)
            if constant is None:
                return None
            return dataclasses.replace(one, terms=_scaled(one.terms, constant))
        if isinstance(one, MaximumProduct) and is_independent(other):
            return _times_independent(one)
    if isinstance(a, MaximumProduct) and isinstance(b, MaximumProduct):
        return _times(a, b, 1)
    return None


def _times_independent(of: MaximumProduct):
    if of.or_where_zero:
        return None
    return MaximumProduct(of.terms, of.axes, vanishes_with=of.vanishes_with)


def _times(a: MaximumProduct, b: MaximumProduct, power: int):
    """a * b, or a / b."""
    if a.axes != b.axes or (a.or_where_zero and (b.or_where_zero or power < 0)):
        return None
    for one, other in ((a, b), (b, a)):
        if one.or_where_zero and not one.implies & other.vanishes_with:
            return None  # the other one may be anything but zero where this one may
    terms = _sum_of([*a.terms, *_scaled(b.terms, power)])
    exact = a.exact and b.exact
    if not terms and not exact:
        return INDEPENDENT
    implies = a.implies if b.exact else b.implies if a.exact and power > 0 else frozenset()
    return MaximumProduct(
        terms,
        a.axes,
        exact=exact,
        even=a.even & b.even,
        implies=frozenset() if a.or_where_zero or b.or_where_zero else implies,
        vanishes_with=a.vanishes_with | b.vanishes_with if power > 0 else a.vanishes_with,
    )


def _div(eqn, types, key):
    a, b = types
    if is_zero(a):
        return a
    if isinstance(a, MaximumSum) and _constant(eqn, 1) is not None:
        return dataclasses.replace(a, terms=_scaled(a.terms, 1 / _constant(eqn, 1)))
    if isinstance(a, MaximumProduct) and is_independent(b):
        return _times_independent(a)
    if is_independent(a) and isinstance(b, MaximumProduct):
        return MaximumProduct(
            _scaled(b.terms, -1),
            b.axes,
            even=b.even if isinstance(eqn.invars[0], jex.Literal) else frozenset(),
            implies=b.implies if b.or_where_zero else frozenset(),
            or_where_zero=b.or_where_zero,
        )
    if isinstance(a, MaximumProduct) and isinstance(b, MaximumProduct):
        return _times(a, b, -1)
    return None


def _integer_pow(eqn, types, key):
    (of,) = types
    if not isinstance(of, MaximumProduct) or of.or_where_zero or eqn.params["y"] == 0:
        return None
    return _product(_scaled(of.terms, eqn.params["y"]), of.axes, exact=of.exact)


def _reduced(eqn, types, key):
    (of,) = types
    if is_zero(of):
        return of
    takes_sums = eqn.primitive.name in ("reduce_max", "reduce_min")
    if not isinstance(of, MaximumSum if takes_sums else MaximumProduct):
        return None
    axes, rank = eqn.params["axes"], len(array_aval(eqn.invars[0]).shape)
    rest = [axis for axis in range(rank) if axis not in axes]
    if not set(of.axes) <= set(rest) or getattr(of, "or_where_zero", False):
        return None
    places = tuple(map(rest.index, of.axes))
    if isinstance(of, MaximumSum):
        return dataclasses.replace(of, axes=places)
    even = frozenset(rest.index(axis) for axis in of.even if axis in rest)
    return dataclasses.replace(of, axes=places, exact=False, even=even)


def _dot_general(eqn, types, key):
    a, b = types
    if is_zero(a) or is_zero(b):
        return a if is_zero(a) else b
    number = 0 if isinstance(a, MaximumProduct) else 1
    of, other = types[number], types[1 - number]
    if not isinstance(of, MaximumProduct) or not is_independent(other) or of.or_where_zero:
        return None
    order = axes_in_product(eqn, number)
    if not set(of.axes) <= set(order):
        return None
    return MaximumProduct(
        of.terms, tuple(map(order.index, of.axes)), vanishes_with=of.vanishes_with
    )


def axes_in_product(eqn, number: int) -> list[int | None]:
    """Which axis of an operand lies along each axis of a dot_general's result, as far as those of operands before it."""
    contracted, batch = eqn.params["dimension_numbers"]
    shapes = [array_aval(atom).shape for atom in eqn.invars]
    free = [
        [axis for axis in range(len(shape)) if axis not in (*contracted[n], *batch[n])]
        for n, shape in enumerate(shapes)
    ]
    return [*batch[number], *((None,) * len(free[0]) if number else ()), *free[number]]


def _moved(eqn, types, key):
    """Operations that give elements other places, or another type."""
    of, *rest = types
    if isinstance(of, Dependence) and of is not UNKNOWN and all(map(is_independent, rest)):
        return of if jnp.issubdtype(array_aval(eqn.outvars[0]).dtype, jnp.floating) else None
    if isinstance(of, FirstAlong):
        return of
    if not isinstance(of, (MaximumSum, MaximumProduct)) or not all(map(is_independent, rest)):
        return None
    if not jnp.issubdtype(array_aval(eqn.outvars[0]).dtype, jnp.floating):
        return None
    places = moved_axes(eqn)
    axes = [places.get(axis) for axis in of.axes]
    if None in axes:
        return None
    changes: dict[str, Any] = {"axes": tuple(axis for axis in axes if axis is not None)}
    if isinstance(of, MaximumProduct):
        changes["even"] = frozenset(places[axis] for axis in of.even if axis in places)
        if eqn.primitive.name == "broadcast_in_dim":
            changes["even"] |= set(range(len(array_aval(eqn.outvars[0]).shape))) - set(
                places.values()
            )
        sizes = [array_aval(atom).shape for atom in (eqn.invars[0], eqn.outvars[0])]
        is_part = math.prod(sizes[1]) < math.prod(sizes[0])
        cut = {axis for axis, size in enumerate(sizes[0]) if size > 1 and axis not in places}
        if is_part and not cut <= of.even:
            changes["implies"] = frozenset()
    return dataclasses.replace(of, **changes)


def _concatenated(eqn, types, key):
    first, dimension = types[0], eqn.params["dimension"]
    if not isinstance(first, (MaximumSum, MaximumProduct)) or len(set(types)) > 1:
        return None
    if dimension in first.axes:
        return None
    if isinstance(first, MaximumSum):
        return first
    return dataclasses.replace(first, even=first.even - {dimension}, implies=frozenset())


def moved_axes(eqn) -> dict[int, int]:
    """Axis of the operand -> the result's axis along which the same elements lie in the same order."""
    name, params = eqn.primitive.name, eqn.params
    shape, new = array_aval(eqn.invars[0]).shape, array_aval(eqn.outvars[0]).shape
    every = range(len(shape))
    pairs: Iterable[tuple[int, int]]
    if name == "broadcast_in_dim":
        pairs = zip(every, params["broadcast_dimensions"])
    elif name == "reshape":
        before = {
            (math.prod(new[:place]), size): place for place, size in enumerate(new) if size > 1
        }
        keys = [(math.prod(shape[:axis]), size) for axis, size in enumerate(shape)]
        pairs = ((axis, before[key]) for axis, key in zip(every, keys) if key in before)
    elif name == "squeeze":
        rest = [axis for axis in every if axis not in params["dimensions"]]
        pairs = zip(rest, range(len(rest)))
    elif name == "transpose":
        pairs = ((axis, place) for place, axis in enumerate(params["permutation"]))
    else:
        pairs = zip(every, every)
    return {axis: place for axis, place in pairs if shape[axis] == new[place]}


def _select(eqn, types, key):
    which, *cases = types
    if isinstance(which, AsksForZero) and len(cases) == 2:
        chosen, other = cases if not which.negated else cases[::-1]
        if (
            isinstance(chosen, MaximumProduct)
            and is_independent(other)
            and chosen.axes == which.axes
            and not chosen.or_where_zero
        ):
            return dataclasses.replace(
                chosen, exact=False, implies=which.implies, or_where_zero=True
            )
    if not is_independent(which):
        return None
    if len({*cases}) == 1:
        return cases[0]
    result = alternatives(cases, [False] * len(cases))
    if not isinstance(result, MaximumProduct):
        return result
    products = [case for case in cases if isinstance(case, MaximumProduct)]
    positive = all(case.implies for case in products)
    keys = frozenset({key})
    return dataclasses.replace(
        result,
        even=frozenset(),
        implies=keys if positive else frozenset(),
        vanishes_with=keys | frozenset.intersection(*(case.vanishes_with for case in products)),
    )


def _compared(eqn, types, key):
    a, b = types
    name = eqn.primitive.name
    if isinstance(a, PlaceInGrid) and name == "eq" and _constant(eqn, 1) == 0:
        return FirstAlong(frozenset({a.axis}))
    if not isinstance(a, MaximumProduct) or not is_zero(b) or a.or_where_zero:
        return None
    wide = _other_axes(eqn, a.axes)
    if not a.implies or not wide <= a.even or name not in ("eq", "le", "ne", "gt"):
        return INDEPENDENT  # a factor that is positive changes no sign
    return AsksForZero(a.axes, a.implies, negated=name in ("ne", "gt"))


def _not(eqn, types, key):
    (of,) = types
    if isinstance(of, AsksForZero):
        return AsksForZero(of.axes, of.implies, not of.negated)
    return None


def _and(eqn, types, key):
    firsts = [type_.axes for type_ in types if isinstance(type_, FirstAlong)]
    if firsts and all(map(is_independent, types)):
        return FirstAlong(frozenset().union(*firsts))
    return None


_MOVING = (
    *SHAPE_VIEWS,
    "transpose",
    "slice",
    "dynamic_slice",
    "convert_element_type",
    "reduce_precision",
    "stop_gradient",
    "copy",
    "copy_p",
    "optimization_barrier",
)
_RULES = {
    "exp": _exp,
    "exp2": _exp,
    "log": _log,
    "log2": _log,
    "neg": _neg,
    "add": _add,
    "add_any": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "integer_pow": _integer_pow,
    "reduce_sum": _reduced,
    "reduce_max": _reduced,
    "reduce_min": _reduced,
    "dot_general": _dot_general,
    "concatenate": _concatenated,
    "select_n": _select,
    "not": _not,
    "and": _and,
    **dict.fromkeys(("eq", "ne", "gt", "ge", "lt", "le"), _compared),
    **dict.fromkeys(_MOVING, _moved),
}
