"""Which sums and differences of a nest's expressions keep the rounding of their products."""

from __future__ import annotations

from .ir import Const, Expr, Op


def may_cancel(expr: Op) -> bool:
    """A difference of scaled numbers, such as pixels / 255, or of powers: equal ones cancel only if both are rounded."""
    if expr.info.primitive != "sub":
        return False
    return all(map(_is_scaled, expr.args)) or all(map(_is_power, expr.args))


def _is_power(expr: Expr) -> bool:
    """A number times itself, also one that several sums read and that is rounded for them."""
    while isinstance(expr, Op) and expr.info.primitive == "reduce_precision":
        (expr,) = expr.args
    return isinstance(expr, Op) and expr.info.primitive in ("square", "integer_pow")


def _is_scaled(expr: Expr) -> bool:
    """A product with a constant, or of several numbers, some of them constants."""
    waiting, seen = [expr], {expr}
    while waiting:
        expr = waiting.pop()
        name = expr.info.primitive if isinstance(expr, Op) else None
        if name == "mul" and any(isinstance(arg, Const) for arg in expr.args):
            return True
        if name in ("max", "min"):
            waiting += [arg for arg in expr.args if arg not in seen]
            seen.update(expr.args)
    return False
