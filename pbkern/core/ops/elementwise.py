"""ELEMENTWISE: one row per elementwise primitive, with properties that hold for every target.

    ELEMENTWISE["exp"].kinds          "f": floats                              what lowering takes, and tests try
    ELEMENTWISE["exp"].meaning        NumPy arrays -> NumPy array              interpreters, constants, known scalars
    ELEMENTWISE["exp"].spelling       "lax.exp"                                printed kernels
    ELEMENTWISE["exp"].price          8 additions                              cost models, where a target measured nothing
    ELEMENTWISE["exp"].error_ulp      at most 1.1 units in the last place      tests of code

A new primitive is a row here and a rule in lower/math/elementwise.py: access, printing, interpreters and prices follow from
the row. A target prices all rows by a PriceTable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from . import elementwise_meanings as meanings
from .elementwise_row import SECOND, STATED, TRUTH, ElementwisePrimitive, Spelling

# Reasons for leaving a primitive to XLA.
COMPLEX = "complex numbers become pairs of real ones before (fuse/complex)"
ITERATIVE = "its series and continued fractions are XLA's own expansions"


def _comparison(
    name: str,
    meaning: Callable[..., np.ndarray],
    operator: str,
    operator_kinds: str,
    *,
    in_index_tests: bool = False,
) -> ElementwisePrimitive:
    spelling = Spelling(f"lax.{name}", operator, operator_kinds)
    return ElementwisePrimitive(
        name, "fiub", meaning, spelling, price=1.0, result=TRUTH,
        in_memory=True, on_sub_byte=True, in_index_tests=in_index_tests,
    )  # fmt: skip


def _total_comparison(name: str, compare: Callable[..., np.ndarray]) -> ElementwisePrimitive:
    """A comparison by which -NaN < -inf < -0 < +0 < inf < NaN."""
    meaning = meanings.total_order(compare)
    return ElementwisePrimitive(
        name, "fiub", meaning, None, price=1.0, result=TRUTH, in_memory=True
    )


def _bitwise(
    name: str,
    meaning: Callable[..., np.ndarray],
    operator: str,
    *,
    on_sub_byte: bool = False,
    in_index_tests: bool = False,
) -> ElementwisePrimitive:
    spelling = Spelling(f"lax.bitwise_{name}", operator, "iub")
    return ElementwisePrimitive(
        name, "iub", meaning, spelling, price=1.0,
        on_sub_byte=on_sub_byte, in_index_tests=in_index_tests,
    )  # fmt: skip


def _on_integers(
    name: str, meaning: Callable[..., np.ndarray], price: float
) -> ElementwisePrimitive:
    return ElementwisePrimitive(name, "iu", meaning, Spelling(f"lax.{name}"), price)


def _inexact(
    name: str,
    meaning: Callable[..., np.ndarray],
    price: float,
    error_ulp: tuple[float, float],
    approx_relative: tuple[float, float] | None = None,
) -> ElementwisePrimitive:
    """A function of floats that code computes with an error."""
    return ElementwisePrimitive(
        name, "f", meaning, Spelling(f"lax.{name}"), price,
        error_ulp=error_ulp, approx_relative=approx_relative,
    )  # fmt: skip


def _iterative(name: str, spelling: Spelling | None) -> ElementwisePrimitive:
    return ElementwisePrimitive(name, "f", None, spelling, price=1.0, unlowered=ITERATIVE)


_ROWS = (
    # --- arithmetic
    ElementwisePrimitive(
        "add", "fiu", np.add, Spelling("lax.add", "+", "fiuc"), price=1.0, in_index_tests=True
    ),
    ElementwisePrimitive("add_any", "fiu", np.add, None, price=1.0),
    ElementwisePrimitive(
        "sub", "fiu", np.subtract, Spelling("lax.sub", "-", "fiuc"), price=1.0, in_index_tests=True
    ),
    ElementwisePrimitive("mul", "fiu", np.multiply, Spelling("lax.mul", "*", "fiuc"), price=1.0),
    ElementwisePrimitive("div", "fiu", meanings.div, Spelling("lax.div", "/", "fc"), price=5.0),
    ElementwisePrimitive("rem", "fiu", meanings.rem, Spelling("lax.rem"), price=16.0),
    ElementwisePrimitive("neg", "fiu", np.negative, Spelling("lax.neg", "-", "fiuc"), price=1.0),
    ElementwisePrimitive("abs", "fiu", np.abs, Spelling("lax.abs"), price=1.0),
    ElementwisePrimitive("sign", "fiu", meanings.sign, Spelling("lax.sign"), price=1.0),
    ElementwisePrimitive("square", "fiu", np.square, Spelling("lax.square"), price=1.0),
    ElementwisePrimitive(
        "integer_pow",
        "fiu",
        meanings.integer_pow,
        Spelling("lax.integer_pow"),
        price=1.0,
        parameters=("y",),
    ),
    ElementwisePrimitive("mulhi", "iu", meanings.mulhi, Spelling("lax.mulhi"), price=1.0),
    ElementwisePrimitive(
        "max",
        "fiub",
        meanings.max_,
        Spelling("lax.max", "jnp.maximum", "fiu"),
        price=1.0,
        on_sub_byte=True,
    ),
    ElementwisePrimitive(
        "min",
        "fiub",
        meanings.min_,
        Spelling("lax.min", "jnp.minimum", "fiu"),
        price=1.0,
        on_sub_byte=True,
    ),
    ElementwisePrimitive(
        "clamp", "fiu", meanings.clamp, Spelling("lax.clamp"), price=1.0, result=SECOND
    ),
    ElementwisePrimitive(
        "nextafter", "f", meanings.nextafter, Spelling("lax.nextafter"), price=6.0, in_memory=True
    ),
    # --- rounding
    ElementwisePrimitive("floor", "f", np.floor, Spelling("lax.floor"), price=1.0),
    ElementwisePrimitive("ceil", "f", np.ceil, Spelling("lax.ceil"), price=1.0),
    ElementwisePrimitive(
        "round",
        "f",
        meanings.round_,
        Spelling("lax.round"),
        price=1.0,
        parameters=("rounding_method",),
    ),
    ElementwisePrimitive("sqrt", "f", np.sqrt, Spelling("lax.sqrt"), price=8.0),
    # --- comparison and choice
    _comparison("eq", np.equal, "==", "fiuc"),
    _comparison("ne", np.not_equal, "!=", "fiuc"),
    _comparison("lt", np.less, "<", "fiu", in_index_tests=True),
    _comparison("le", np.less_equal, "<=", "fiu", in_index_tests=True),
    _comparison("gt", np.greater, ">", "fiu", in_index_tests=True),
    _comparison("ge", np.greater_equal, ">=", "fiu", in_index_tests=True),
    _total_comparison("eq_to", np.equal),
    _total_comparison("le_to", np.less_equal),
    _total_comparison("lt_to", np.less),
    ElementwisePrimitive(
        "is_finite",
        "f",
        np.isfinite,
        Spelling("lax.is_finite"),
        price=1.0,
        result=TRUTH,
        in_memory=True,
    ),
    ElementwisePrimitive("in_range", "iu", meanings.same, None, price=1.0, reports=True),
    ElementwisePrimitive(
        "select_n",
        "fiub",
        meanings.select_n,
        Spelling("lax.select_n"),
        price=1.0,
        result=SECOND,
        on_sub_byte=True,
        in_index_tests=True,
    ),
    # --- bits
    _bitwise("and", np.bitwise_and, "&", on_sub_byte=True, in_index_tests=True),
    _bitwise("or", np.bitwise_or, "|", on_sub_byte=True, in_index_tests=True),
    _bitwise("xor", np.bitwise_xor, "^", on_sub_byte=True),
    _bitwise("not", meanings.not_, "~", in_index_tests=True),
    _on_integers("shift_left", meanings.shift_left, 1.0),
    _on_integers("shift_right_logical", meanings.shift_right_logical, 1.0),
    _on_integers("shift_right_arithmetic", meanings.shift_right_arithmetic, 1.0),
    _on_integers("population_count", meanings.population_count, 2.0),
    _on_integers("clz", meanings.clz, 2.0),
    # --- formats
    ElementwisePrimitive(
        "convert_element_type",
        "fiub",
        meanings.convert,
        Spelling("lax.convert_element_type"),
        price=1.0,
        result=STATED,
        parameters=("new_dtype",),
        on_sub_byte=True,
        in_index_tests=True,
    ),
    ElementwisePrimitive(
        "bitcast_convert_type",
        "fiu",
        meanings.bitcast,
        Spelling("lax.bitcast_convert_type"),
        price=1.0,
        result=STATED,
        parameters=("new_dtype",),
        in_memory=True,
    ),
    ElementwisePrimitive(
        "reduce_precision",
        "f",
        meanings.reduce_precision,
        Spelling("lax.reduce_precision"),
        price=1.0,
        parameters=("exponent_bits", "mantissa_bits"),
        in_memory=True,
    ),
    ElementwisePrimitive("copy", "fiub", meanings.same, None, price=1.0, on_sub_byte=True),
    ElementwisePrimitive("stop_gradient", "fiub", meanings.same, None, price=1.0),
    # --- functions that are not exact: name, meaning, price, bounds of error
    _inexact("rsqrt", meanings.rsqrt, 8.0, (1.5, 1.5)),
    _inexact("cbrt", meanings.in_float64(np.cbrt), 25.0, (0.8, 0.8)),
    _inexact("exp", meanings.in_float64(np.exp), 8.0, (1.1, 1.1), (6e-06, 1e-10)),
    _inexact("exp2", meanings.in_float64(np.exp2), 7.0, (1.1, 1.1)),
    _inexact("expm1", meanings.in_float64(np.expm1), 12.0, (1.6, 2), (3e-05, 5e-10)),
    _inexact("log", meanings.in_float64(np.log), 12.0, (1, 1)),
    _inexact("log1p", meanings.in_float64(np.log1p), 14.0, (1.5, 1.5)),
    _inexact("logistic", meanings.logistic, 12.0, (2.75, 2.75), (6e-06, 1e-10)),
    _inexact("pow", meanings.pow_, 30.0, (0.6, 1.5)),
    _inexact("sin", meanings.in_float64(np.sin), 18.0, (1.75, 3)),
    _inexact("cos", meanings.in_float64(np.cos), 18.0, (1.75, 3)),
    _inexact("tan", meanings.in_float64(np.tan), 30.0, (1.25, 1.25)),
    _inexact("asin", meanings.in_float64(np.arcsin), 25.0, (2.5, 2.5)),
    _inexact("acos", meanings.in_float64(np.arccos), 25.0, (1.25, 1.25)),
    _inexact("atan", meanings.in_float64(np.arctan), 25.0, (2, 2)),
    _inexact("atan2", meanings.in_float64(np.arctan2), 35.0, (2.5, 2.5)),
    _inexact("sinh", meanings.in_float64(np.sinh), 20.0, (1.75, 1.75), (8e-06, 1e-10)),
    _inexact("cosh", meanings.in_float64(np.cosh), 20.0, (1.5, 1.5), (6e-06, 1e-10)),
    _inexact("tanh", meanings.in_float64(np.tanh), 14.0, (2.75, 2.75), (3e-05, 4e-10)),
    _inexact("asinh", meanings.in_float64(np.arcsinh), 30.0, (2, 2)),
    _inexact("acosh", meanings.in_float64(np.arccosh), 30.0, (2.5, 2.5)),
    _inexact("atanh", meanings.in_float64(np.arctanh), 30.0, (2.25, 2.25)),
    _inexact("erf", meanings.erf, 16.0, (1.75, 2.5)),
    _inexact("erfc", meanings.erfc, 30.0, (4.5, 5), (8e-06, 1e-10)),
    _inexact("erf_inv", meanings.erf_inv, 30.0, (3.25, 5)),
    _inexact("lgamma", meanings.lgamma, 30.0, (4.5, 4.5)),
    _inexact("digamma", meanings.digamma, 30.0, (6, 6.5)),
    # --- left to XLA
    ElementwisePrimitive(
        "real", "c", None, Spelling("lax.real"), price=1.0, result=STATED, unlowered=COMPLEX
    ),
    ElementwisePrimitive(
        "imag", "c", None, Spelling("lax.imag"), price=1.0, result=STATED, unlowered=COMPLEX
    ),
    _iterative("igamma", Spelling("lax.igamma")),
    _iterative("igammac", Spelling("lax.igammac")),
    _iterative("regularized_incomplete_beta", None),
    _iterative("bessel_i0e", Spelling("lax.bessel_i0e")),
    _iterative("bessel_i1e", Spelling("lax.bessel_i1e")),
)
ELEMENTWISE: dict[str, ElementwisePrimitive] = {row.name: row for row in _ROWS}


class PriceTable(Mapping[str, float]):
    """A target's price of every elementwise primitive, in additions.

    Attributes:
      measured: prices by primitive.
      otherwise: the price of all others; None: each row's own.

    It raises KeyError for what is no elementwise primitive.
    """

    def __init__(self, measured: Mapping[str, float], otherwise: float | None = None):
        self.measured = dict(measured)
        self.otherwise = otherwise

    def __getitem__(self, primitive: str) -> float:
        price = self.measured.get(primitive)
        if price is not None:
            return price
        row = ELEMENTWISE[primitive]
        return row.price if self.otherwise is None else self.otherwise

    def __iter__(self) -> Iterator[str]:
        return iter(ELEMENTWISE)

    def __len__(self) -> int:
        return len(ELEMENTWISE)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PriceTable) and (self.measured, self.otherwise) == (
            other.measured,
            other.otherwise,
        )

    def __repr__(self) -> str:
        return f"PriceTable({self.measured}, {self.otherwise})"

    def __hash__(self) -> int:
        return hash((frozenset(self.measured.items()), self.otherwise))


# Prices of a target that measured nothing: the rows' own.
UNMEASURED = PriceTable({})
# Prices of a target that counts operations: one addition each.
ONE_EACH = PriceTable({}, otherwise=1.0)
