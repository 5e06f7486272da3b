"""Equation, NumPy operands -> its result on NumPy: what the oracle need not compile for each shape and type.

Written by themselves, after the definitions of jax.lax. Arrays of NumPy's own booleans, integers and floats only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pbkern.dsl.interpret import SHAPE_RULES, numpy_result

KINDS = "biuf"
# What the rows of ELEMENTWISE say: NumPy's own function, tested by itself (tests/core).
PLAIN = frozenset(
    "add sub mul neg abs sqrt max min eq ne lt le gt ge and or xor not select_n".split()
)


def result(eqn, operands: list) -> np.ndarray | np.generic | None:
    """The result of an equation, a NumPy scalar if it has no dimensions; None if no rule covers it for these operands."""
    rule = RULES.get(eqn.primitive.name)
    if rule is None and eqn.primitive.name in PLAIN:
        found = numpy_result(eqn, operands)
        return found if found is None or eqn.outvars[0].aval.shape else found[()]
    if rule is None or not all(np.asarray(x).dtype.kind in KINDS for x in operands):
        return None
    out = rule(eqn.params, *operands)
    if out is None:
        return None
    aval = eqn.outvars[0].aval
    return np.asarray(out, aval.dtype) if aval.shape else np.asarray(out, aval.dtype)[()]


def _unary(f: Callable) -> Callable:
    return lambda params, x: f(x)


def _of_floats(f: Callable) -> Callable:
    """Integers are divided towards zero, and division by zero has a result: not so in NumPy."""
    return lambda params, x, y: f(x, y) if np.asarray(x).dtype.kind == "f" else None


def _converted(p, x):
    """Floats to integers are left out, whose results NumPy does not specify outside of the range, and what rounds twice."""
    x, dtype = np.asarray(x), np.dtype(p["new_dtype"])
    whole = dtype.kind in "iu" and x.dtype.kind in "biu"
    return (
        x.astype(dtype) if whole or dtype.kind == "b" or dtype in (np.float32, np.float64) else None
    )


# --- shapes ---------------------------------------------------------------------------------------------------------


def _iota(p):
    shape = [1] * len(p["shape"])
    shape[p["dimension"]] = -1
    dtype = np.dtype(p["dtype"])
    numbers = np.arange(p["shape"][p["dimension"]]).astype(dtype) if dtype.kind in KINDS else None
    return None if numbers is None else np.broadcast_to(numbers.reshape(shape), p["shape"])


def _pad(p, x, value):
    """Interior padding first, then margins, of which negative ones cut off."""
    config = p["padding_config"]
    spread = np.full(
        [n + max(n - 1, 0) * between for n, (*_, between) in zip(x.shape, config)], value, x.dtype
    )
    spread[tuple(slice(None, None, between + 1) for *_, between in config)] = x
    out = np.full(
        [max(n + low + high, 0) for n, (low, high, _) in zip(spread.shape, config)], value, x.dtype
    )
    target = tuple(slice(max(low, 0), max(low, 0) + max(n + min(low, 0) + min(high, 0), 0))
                   for n, (low, high, _) in zip(spread.shape, config))  # fmt: skip
    source = tuple(
        slice(max(-low, 0), max(n - max(-high, 0), max(-low, 0)))
        for n, (low, high, _) in zip(spread.shape, config)
    )
    out[target] = spread[source]
    return out


def _window(shape: tuple[int, ...], sizes: tuple[int, ...], starts: tuple) -> tuple[slice, ...]:
    """A dynamic slice's window, moved inside."""
    places = [min(max(int(s), 0), extent - n) for s, extent, n in zip(starts, shape, sizes)]
    return tuple(slice(s, s + n) for s, n in zip(places, sizes))


def _dynamic_update_slice(p, x, update, *starts):
    out = np.array(x)
    out[_window(x.shape, update.shape, starts)] = update
    return out


# --- reductions -----------------------------------------------------------------------------------------------------


def _extreme(f: np.ufunc, largest: bool) -> Callable:
    def rule(p, x):
        if x.dtype.kind == "f":
            first = -np.inf if largest else np.inf
        elif x.dtype.kind == "b":
            first = not largest
        else:
            first = np.iinfo(x.dtype).min if largest else np.iinfo(x.dtype).max
        return f.reduce(x, axis=tuple(p["axes"]), initial=first)

    return rule


def _sum(p, x):
    """Floats are added in float64: the result is rounded once."""
    return np.add.reduce(
        x, axis=tuple(p["axes"]), dtype=np.float64 if x.dtype.kind == "f" else x.dtype
    )


def _dot_general(p, x, y):
    """Products of floats in float64, of integers in the result's type."""
    (xc, yc), (xb, yb) = p["dimension_numbers"]
    names = iter("abcdefghijklmnopqrstuvwxyz")
    left, right = [next(names) for _ in x.shape], [next(names) for _ in y.shape]
    for i, j in (*zip(xc, yc), *zip(xb, yb)):
        right[j] = left[i]
    batch = [left[i] for i in xb]
    free = [n for i, n in enumerate(left) if i not in (*xc, *xb)] + [
        n for j, n in enumerate(right) if j not in (*yc, *yb)
    ]
    wide = (
        np.float64 if np.result_type(x, y).kind == "f" else p["preferred_element_type"] or x.dtype
    )
    text = f"{''.join(left)},{''.join(right)}->{''.join(batch + free)}"
    return np.einsum(text, np.asarray(x, wide), np.asarray(y, wide), optimize=True)


RULES: dict[str, Callable] = {
    **SHAPE_RULES,
    **{
        n: _unary(getattr(np, n))
        for n in "floor ceil square exp exp2 log log1p expm1 tanh sin cos".split()
    },
    "is_finite": _unary(np.isfinite),
    "logistic": _unary(lambda x: 0.5 + 0.5 * np.tanh(0.5 * np.asarray(x, np.float64))),
    "rsqrt": _unary(lambda x: 1 / np.sqrt(np.asarray(x, np.float64))),
    **{n: _of_floats(f) for n, f in (("div", np.divide), ("rem", np.fmod), ("pow", np.power))},
    "clamp": lambda p, low, x, high: np.minimum(np.maximum(x, low), high),
    "convert_element_type": _converted,
    "iota": _iota,
    "pad": _pad,
    "dynamic_slice": lambda p, x, *starts: x[_window(x.shape, p["slice_sizes"], starts)],
    "dynamic_update_slice": _dynamic_update_slice,
    "reduce_max": _extreme(np.maximum, True),
    "reduce_min": _extreme(np.minimum, False),
    "reduce_and": lambda p, x: np.bitwise_and.reduce(x, axis=tuple(p["axes"])),
    "reduce_or": lambda p, x: np.bitwise_or.reduce(x, axis=tuple(p["axes"])),
    "reduce_sum": _sum,
    "dot_general": _dot_general,
}
