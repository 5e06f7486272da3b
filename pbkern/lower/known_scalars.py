"""Integer and bool scalars that follow from constants, grid indices and loop counters.

They need no memory: branches by constants are taken while the body is built, loops of a constant number of turns have it,
and starts of slices stay affine in grid indices and counters.
"""

from __future__ import annotations

import numpy as np

from ..affine import Affine
from ..dsl.interpret import NUMPY_RULES
from .nest import Expr
from .predicates import Folder, interval
from .values import Lazy, Literal, Value


def _quotient(p, a, b):
    return abs(int(a)) // abs(int(b)) * (1 if (a < 0) == (b < 0) else -1)


# Every place that wants a known scalar computes it: taller ones are stored.
MAX_HEIGHT = 12
# On scalars, as XLA computes them: division rounds toward zero.
RULES = NUMPY_RULES | {
    "div": _quotient,
    "rem": lambda p, a, b: int(a) - _quotient(p, a, b) * int(b),
    "sign": lambda p, a: np.sign(a),
    "clamp": lambda p, low, x, high: min(max(x, low), high),
    "convert_element_type": lambda p, a: a,
}


def known(builder, v: Value) -> Expr | None:
    """The value of a scalar as an expression without loads, None where it is not known."""
    if isinstance(v, Literal):
        return v.at(builder.pool, (), False)
    if isinstance(v, Lazy) and v.shape == () and not v.operands and v.index_only:
        return v.combine(builder.pool, (), [])
    return None


def simplified(builder, eqn, value: Lazy) -> Value:
    """What an equation of scalars makes, `value`, without operands if all of them are known."""
    operands = [known(builder, v) for v in value.operands]
    if any(e is None or e.dtype.kind not in "biu" for e in operands):
        return value
    if all(e.kind == "const" for e in operands):
        return _constant(eqn, value, [e.info for e in operands])
    e = Folder(builder.pool, builder.bounds)(value.combine(builder.pool, (), operands))
    if e.kind == "const":
        return Literal((), value.dtype, e.info)
    if e.height > MAX_HEIGHT:
        return value
    return Lazy((), value.dtype, (), lambda ix: (), lambda pool, ix, xs: e, index_only=True)


def _constant(eqn, value: Lazy, operands: list) -> Value:
    name = eqn.primitive.name
    if name not in RULES or name in ("div", "rem") and operands[1] == 0:
        return value
    with np.errstate(over="ignore"):
        found = np.asarray(RULES[name](eqn.params, *operands))
    return Literal((), value.dtype, found.astype(value.dtype)[()])


def known_index(builder, v: Value, clamp: int | None) -> Affine | None:
    """A known integer scalar as an affine expression; None where it is none or may lie outside [0, clamp]."""
    e = known(builder, v)
    if e is None or e.kind not in ("const", "index"):
        return None
    if e.kind == "const":
        n = int(e.info)
        return Affine((), n if clamp is None else min(max(n, 0), clamp))
    found = None if clamp is None else interval(e.info, builder.bounds)
    return e.info if clamp is None or found is not None and found[0] >= 0 and found[1] <= clamp else None
