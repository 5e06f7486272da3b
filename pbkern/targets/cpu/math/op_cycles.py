"""COST: the CPU's prices of elementwise primitives: approximate cycles per vector operation."""

from __future__ import annotations

from pbkern.core.ops.elementwise import PriceTable

COST = PriceTable(
    {
        **dict.fromkeys(("copy", "stop_gradient", "bitcast_convert_type"), 0.0),
        **dict.fromkeys(
            ("add", "add_any", "sub", "mul", "neg", "abs", "square", "and", "or", "xor", "not"), 1.0
        ),
        **dict.fromkeys(
            (
                "eq",
                "ne",
                "lt",
                "le",
                "gt",
                "ge",
                "select_n",
                "floor",
                "ceil",
                "convert_element_type",
            ),
            1.0,
        ),
        **dict.fromkeys(
            (
                "shift_left",
                "shift_right_logical",
                "shift_right_arithmetic",
                "population_count",
                "clz",
            ),
            1.0,
        ),
        **dict.fromkeys(
            (
                "eq_to",
                "le_to",
                "lt_to",
                "sign",
                "is_finite",
                "round",
                "mulhi",
                "integer_pow",
                "in_range",
            ),
            2.0,
        ),
        **dict.fromkeys(("max", "min"), 2.0),
        "clamp": 3.0,
        "reduce_precision": 4.0,
        "nextafter": 6.0,
        "div": 4.0,
        # Measured: f32, 16 lanes, operands in L1, EPYC with AVX-512 at 3.8 GHz (exp: 0.133 ns per
        # element).
        "sqrt": 6.0,
        "rem": 7.0,
        **dict.fromkeys(("exp", "exp2", "expm1", "rsqrt", "asin", "acos"), 8.0),
        **dict.fromkeys(("cosh", "logistic", "tanh"), 10.0),
        **dict.fromkeys(("sin", "cos", "tan", "atan", "sinh"), 12.0),
        **dict.fromkeys(("log", "log1p", "erf"), 15.0),
        **dict.fromkeys(("cbrt", "erfc", "atan2"), 20.0),
        **dict.fromkeys(("asinh", "acosh", "atanh", "lgamma", "digamma"), 32.0),
        "erf_inv": 42.0,
        "pow": 70.0,
    }
)
