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

from collections.abc import Iterator, Mapping

import numpy as np

from . import elementwise_meanings as meanings
from .elementwise_row import SECOND, STATED, TRUTH, ElementwisePrimitive, Spelling

# Reasons for leaving a primitive to XLA.
COMPLEX = "complex numbers become pairs of real ones before (fuse/complex)"
ITERATIVE = "its series and continued fractions are XLA's own expansions"

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
    ElementwisePrimitive(
        "eq",
        "fiub",
        np.equal,
        Spelling("lax.eq", "==", "fiuc"),
        price=1.0,
        result=TRUTH,
        in_memory=True,
        on_sub_byte=True,
    ),
    ElementwisePrimitive(
        "ne",
        "fiub",
        np.not_equal,
        Spelling("lax.ne", "!=", "fiuc"),
        price=1.0,
        result=TRUTH,
        in_memory=True,
        on_sub_byte=True,
    ),
    ElementwisePrimitive(
        "lt",
        "fiub",
        np.less,
        Spelling("lax.lt", "<", "fiu"),
        price=1.0,
        result=TRUTH,
        in_memory=True,
        on_sub_byte=True,
        in_index_tests=True,
    ),
    ElementwisePrimitive(
        "le",
        "fiub",
        np.less_equal,
        Spelling("lax.le", "<=", "fiu"),
        price=1.0,
        result=TRUTH,
        in_memory=True,
        on_sub_byte=True,
        in_index_tests=True,
    ),
    ElementwisePrimitive(
        "gt",
        "fiub",
        np.greater,
        Spelling("lax.gt", ">", "fiu"),
        price=1.0,
        result=TRUTH,
        in_memory=True,
        on_sub_byte=True,
        in_index_tests=True,
    ),
    ElementwisePrimitive(
        "ge",
        "fiub",
        np.greater_equal,
        Spelling("lax.ge", ">=", "fiu"),
        price=1.0,
        result=TRUTH,
        in_memory=True,
        on_sub_byte=True,
        in_index_tests=True,
    ),
    ElementwisePrimitive(
        "eq_to",
        "fiub",
        meanings.total_order(np.equal),
        None,
        price=1.0,
        result=TRUTH,
        in_memory=True,
    ),
    ElementwisePrimitive(
        "le_to",
        "fiub",
        meanings.total_order(np.less_equal),
        None,
        price=1.0,
        result=TRUTH,
        in_memory=True,
    ),
    ElementwisePrimitive(
        "lt_to",
        "fiub",
        meanings.total_order(np.less),
        None,
        price=1.0,
        result=TRUTH,
        in_memory=True,
    ),
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
    ElementwisePrimitive(
        "and",
        "iub",
        np.bitwise_and,
        Spelling("lax.bitwise_and", "&", "iub"),
        price=1.0,
        on_sub_byte=True,
        in_index_tests=True,
    ),
    ElementwisePrimitive(
        "or",
        "iub",
        np.bitwise_or,
        Spelling("lax.bitwise_or", "|", "iub"),
        price=1.0,
        on_sub_byte=True,
        in_index_tests=True,
    ),
    ElementwisePrimitive(
        "xor",
        "iub",
        np.bitwise_xor,
        Spelling("lax.bitwise_xor", "^", "iub"),
        price=1.0,
        on_sub_byte=True,
    ),
    ElementwisePrimitive(
        "not",
        "iub",
        meanings.not_,
        Spelling("lax.bitwise_not", "~", "iub"),
        price=1.0,
        in_index_tests=True,
    ),
    ElementwisePrimitive(
        "shift_left", "iu", meanings.shift_left, Spelling("lax.shift_left"), price=1.0
    ),
    ElementwisePrimitive(
        "shift_right_logical",
        "iu",
        meanings.shift_right_logical,
        Spelling("lax.shift_right_logical"),
        price=1.0,
    ),
    ElementwisePrimitive(
        "shift_right_arithmetic",
        "iu",
        meanings.shift_right_arithmetic,
        Spelling("lax.shift_right_arithmetic"),
        price=1.0,
    ),
    ElementwisePrimitive(
        "population_count",
        "iu",
        meanings.population_count,
        Spelling("lax.population_count"),
        price=2.0,
    ),
    ElementwisePrimitive("clz", "iu", meanings.clz, Spelling("lax.clz"), price=2.0),
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
    # --- functions that are not exact
    ElementwisePrimitive(
        "rsqrt", "f", meanings.rsqrt, Spelling("lax.rsqrt"), price=8.0, error_ulp=(1.5, 1.5)
    ),
    ElementwisePrimitive(
        "cbrt",
        "f",
        meanings.in_float64(np.cbrt),
        Spelling("lax.cbrt"),
        price=25.0,
        error_ulp=(0.8, 0.8),
    ),
    ElementwisePrimitive(
        "exp",
        "f",
        meanings.in_float64(np.exp),
        Spelling("lax.exp"),
        price=8.0,
        error_ulp=(1.1, 1.1),
        approx_relative=(6e-06, 1e-10),
    ),
    ElementwisePrimitive(
        "exp2",
        "f",
        meanings.in_float64(np.exp2),
        Spelling("lax.exp2"),
        price=7.0,
        error_ulp=(1.1, 1.1),
    ),
    ElementwisePrimitive(
        "expm1",
        "f",
        meanings.in_float64(np.expm1),
        Spelling("lax.expm1"),
        price=12.0,
        error_ulp=(1.6, 2),
        approx_relative=(3e-05, 5e-10),
    ),
    ElementwisePrimitive(
        "log", "f", meanings.in_float64(np.log), Spelling("lax.log"), price=12.0, error_ulp=(1, 1)
    ),
    ElementwisePrimitive(
        "log1p",
        "f",
        meanings.in_float64(np.log1p),
        Spelling("lax.log1p"),
        price=14.0,
        error_ulp=(1.5, 1.5),
    ),
    ElementwisePrimitive(
        "logistic",
        "f",
        meanings.logistic,
        Spelling("lax.logistic"),
        price=12.0,
        error_ulp=(2.75, 2.75),
        approx_relative=(6e-06, 1e-10),
    ),
    ElementwisePrimitive(
        "pow", "f", meanings.pow_, Spelling("lax.pow"), price=30.0, error_ulp=(0.6, 1.5)
    ),
    ElementwisePrimitive(
        "sin",
        "f",
        meanings.in_float64(np.sin),
        Spelling("lax.sin"),
        price=18.0,
        error_ulp=(1.75, 3),
    ),
    ElementwisePrimitive(
        "cos",
        "f",
        meanings.in_float64(np.cos),
        Spelling("lax.cos"),
        price=18.0,
        error_ulp=(1.75, 3),
    ),
    ElementwisePrimitive(
        "tan",
        "f",
        meanings.in_float64(np.tan),
        Spelling("lax.tan"),
        price=30.0,
        error_ulp=(1.25, 1.25),
    ),
    ElementwisePrimitive(
        "asin",
        "f",
        meanings.in_float64(np.arcsin),
        Spelling("lax.asin"),
        price=25.0,
        error_ulp=(2.5, 2.5),
    ),
    ElementwisePrimitive(
        "acos",
        "f",
        meanings.in_float64(np.arccos),
        Spelling("lax.acos"),
        price=25.0,
        error_ulp=(1.25, 1.25),
    ),
    ElementwisePrimitive(
        "atan",
        "f",
        meanings.in_float64(np.arctan),
        Spelling("lax.atan"),
        price=25.0,
        error_ulp=(2, 2),
    ),
    ElementwisePrimitive(
        "atan2",
        "f",
        meanings.in_float64(np.arctan2),
        Spelling("lax.atan2"),
        price=35.0,
        error_ulp=(2.5, 2.5),
    ),
    ElementwisePrimitive(
        "sinh",
        "f",
        meanings.in_float64(np.sinh),
        Spelling("lax.sinh"),
        price=20.0,
        error_ulp=(1.75, 1.75),
        approx_relative=(8e-06, 1e-10),
    ),
    ElementwisePrimitive(
        "cosh",
        "f",
        meanings.in_float64(np.cosh),
        Spelling("lax.cosh"),
        price=20.0,
        error_ulp=(1.5, 1.5),
        approx_relative=(6e-06, 1e-10),
    ),
    ElementwisePrimitive(
        "tanh",
        "f",
        meanings.in_float64(np.tanh),
        Spelling("lax.tanh"),
        price=14.0,
        error_ulp=(2.75, 2.75),
        approx_relative=(3e-05, 4e-10),
    ),
    ElementwisePrimitive(
        "asinh",
        "f",
        meanings.in_float64(np.arcsinh),
        Spelling("lax.asinh"),
        price=30.0,
        error_ulp=(2, 2),
    ),
    ElementwisePrimitive(
        "acosh",
        "f",
        meanings.in_float64(np.arccosh),
        Spelling("lax.acosh"),
        price=30.0,
        error_ulp=(2.5, 2.5),
    ),
    ElementwisePrimitive(
        "atanh",
        "f",
        meanings.in_float64(np.arctanh),
        Spelling("lax.atanh"),
        price=30.0,
        error_ulp=(2.25, 2.25),
    ),
    ElementwisePrimitive(
        "erf", "f", meanings.erf, Spelling("lax.erf"), price=16.0, error_ulp=(1.25, 2.5)
    ),
    ElementwisePrimitive(
        "erfc",
        "f",
        meanings.erfc,
        Spelling("lax.erfc"),
        price=30.0,
        error_ulp=(4.5, 5),
        approx_relative=(8e-06, 1e-10),
    ),
    ElementwisePrimitive(
        "erf_inv", "f", meanings.erf_inv, Spelling("lax.erf_inv"), price=30.0, error_ulp=(3.25, 5)
    ),
    ElementwisePrimitive(
        "lgamma", "f", meanings.lgamma, Spelling("lax.lgamma"), price=30.0, error_ulp=(4.5, 4.5)
    ),
    ElementwisePrimitive(
        "digamma", "f", meanings.digamma, Spelling("lax.digamma"), price=30.0, error_ulp=(6, 6.5)
    ),
    # --- left to XLA
    ElementwisePrimitive(
        "real", "c", None, Spelling("lax.real"), price=1.0, result=STATED, unlowered=COMPLEX
    ),
    ElementwisePrimitive(
        "imag", "c", None, Spelling("lax.imag"), price=1.0, result=STATED, unlowered=COMPLEX
    ),
    ElementwisePrimitive(
        "igamma", "f", None, Spelling("lax.igamma"), price=1.0, unlowered=ITERATIVE
    ),
    ElementwisePrimitive(
        "igammac", "f", None, Spelling("lax.igammac"), price=1.0, unlowered=ITERATIVE
    ),
    ElementwisePrimitive(
        "regularized_incomplete_beta", "f", None, None, price=1.0, unlowered=ITERATIVE
    ),
    ElementwisePrimitive(
        "bessel_i0e", "f", None, Spelling("lax.bessel_i0e"), price=1.0, unlowered=ITERATIVE
    ),
    ElementwisePrimitive(
        "bessel_i1e", "f", None, Spelling("lax.bessel_i1e"), price=1.0, unlowered=ITERATIVE
    ),
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
