"""Approximate cycles per vector operation, by primitive, for cost models."""

from __future__ import annotations

DEFAULT = 1.0
COST: dict[str, float] = {
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "bitcast_convert_type"), 0.0),
    **dict.fromkeys(("add", "add_any", "sub", "mul", "neg", "abs", "square", "and", "or", "xor", "not"), 1.0),
    **dict.fromkeys(
        ("eq", "ne", "lt", "le", "gt", "ge", "select_n", "floor", "ceil", "convert_element_type"), 1.0
    ),
    **dict.fromkeys(
        ("shift_left", "shift_right_logical", "shift_right_arithmetic", "population_count", "clz"), 1.0
    ),
    **dict.fromkeys(("eq_to", "le_to", "lt_to", "sign", "is_finite", "round", "mulhi", "integer_pow"), 2.0),
    **dict.fromkeys(("max", "min"), 2.0),
    "clamp": 3.0,
    "reduce_precision": 4.0,
    "nextafter": 6.0,
    "div": 4.0,
    "rem": 16.0,
    "sqrt": 6.0,
    "rsqrt": 10.0,
    "cbrt": 20.0,
    **dict.fromkeys(("exp", "exp2"), 8.0),
    **dict.fromkeys(("log", "expm1", "log1p", "logistic", "tanh"), 12.0),
    **dict.fromkeys(("sin", "cos", "erf", "sinh", "cosh"), 14.0),
    **dict.fromkeys(("tan", "atan", "atan2", "asin", "acos", "asinh", "acosh", "atanh"), 20.0),
    **dict.fromkeys(("erfc", "erf_inv"), 25.0),
    "pow": 30.0,
    **dict.fromkeys(("lgamma", "digamma"), 60.0),
}
