"""ClosedJaxpr -> equivalent ClosedJaxpr that fusion reads more easily. Re-traces; never builds jaxprs by hand.

Calls are inlined (also inside control flow), dead code dropped, equal equations merged, identities folded, weak types
erased. Padding and input dilation of convolutions and windows become `pad`, so that they fuse like any producer;
`split` becomes slices. Rewrites that could change rounding are `_UNSAFE` and optional.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from .. import jaxprs
from .._jax import source_of, user_line
from .access_windows import _greatest, _least
from .blocks import literal

Rewrite = Callable  # (eqn, operands) -> list of results, or None to keep the equation

CONTROL = ("scan", "while", "cond")


def simplify(closed: jex.ClosedJaxpr, *, unsafe_math: bool = True) -> jex.ClosedJaxpr:
    """Runs the rewrites, then CSE and dead code elimination. `unsafe_math` admits rewrites that may change rounding."""
    return drop_dead_carries(retrace(closed, _REWRITES | (_UNSAFE if unsafe_math else {})))


def retrace(closed: jex.ClosedJaxpr, rewrites: dict[str, Rewrite]) -> jex.ClosedJaxpr:
    """The same function with equations rewritten: primitive name -> Rewrite."""
    avals = [_strong(v.aval) for v in closed.jaxpr.invars]
    traced = jax.make_jaxpr(lambda *args: _run(closed, args, rewrites))(*avals)
    return _drop_dead(traced)


def _strong(aval):
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _run(closed: jex.ClosedJaxpr, args, rewrites: dict) -> list:
    """Binds every equation anew, merging equal ones and folding what a rewrite knows."""
    seen: dict = {}

    def bind(eqn, operands):
        rewrite = rewrites.get(eqn.primitive.name)
        results = rewrite(eqn, operands) if rewrite else None
        if results is not None:
            return results
        params = _simplify_inner(eqn, rewrites)
        key = _key(eqn, operands, params)
        if key is not None and key in seen:
            return seen[key]
        results = eqn.primitive.bind(*operands, **params)
        results = list(results) if eqn.primitive.multiple_results else [results]
        if key is not None:
            seen[key] = results
        return results

    return _evaluate(closed.jaxpr, closed.consts, args, bind)


def _evaluate(jaxpr: jex.Jaxpr, consts, args, bind, caller=None) -> list:
    """Binds each equation; one without a user line, inside a library's function, carries the line of the call."""
    env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))

    def read(atom):
        return literal(atom) if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(a) for a in eqn.invars]
        inner = jaxprs.called_jaxpr(eqn)
        line = eqn if caller is None or user_line(eqn) else caller
        if inner is not None:
            results = _evaluate(inner.jaxpr, inner.consts, operands, bind, line)
        else:
            with source_of(line):
                results = bind(eqn, operands)
        env.update(zip(eqn.outvars, results))
    return [read(a) for a in jaxpr.outvars]


def _simplify_inner(eqn, rewrites: dict) -> dict:
    """Parameters with the jaxprs of control flow simplified."""
    if eqn.primitive.name not in CONTROL:
        return eqn.params

    def inner(value):
        if isinstance(value, jex.ClosedJaxpr):
            avals = [v.aval for v in value.jaxpr.invars]
            made = jax.make_jaxpr(lambda *args: _keep_types(_run(value, args, rewrites), value.jaxpr.outvars))(*avals)
            return _drop_dead(made)
        return tuple(map(inner, value)) if isinstance(value, tuple) and value else value

    return {k: inner(v) for k, v in eqn.params.items()}


def _keep_types(results, atoms) -> list:
    """Weak types of a control-flow body's results belong to the equation's type: they stay."""
    kept = []
    for r, a in zip(results, atoms):
        weak = getattr(a.aval, "weak_type", False)
        have = getattr(jax.typeof(r), "weak_type", False)
        kept.append(r if weak == have else lax.convert_element_type_p.bind(r, new_dtype=a.aval.dtype, weak_type=weak, sharding=None))
    return kept


def _key(eqn, operands, params):
    """Hashable identity of a computation without effects, or None."""
    if eqn.effects:
        return None

    def of(x):
        if isinstance(x, (np.ndarray, np.generic)):
            return (x.dtype.str, x.shape, x.tobytes()) if x.size <= 16 else id(x)
        return id(x)

    try:
        key = (eqn.primitive, tuple(map(of, operands)), tuple(sorted(params.items(), key=lambda kv: kv[0])))
        hash(key)
        return key
    except TypeError:
        return None


def _drop_dead(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Drops equations without effects whose results nobody reads."""
    jaxpr = closed.jaxpr
    live = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in live for v in eqn.outvars):
            kept.append(eqn)
            live.update(a for a in eqn.invars if not isinstance(a, jex.Literal))
    if len(kept) == len(jaxpr.eqns):
        return closed
    return jex.ClosedJaxpr(jaxpr.replace(eqns=kept[::-1]), closed.consts)


# ---- control flow

def _live_carries(body: jex.Jaxpr, n_consts: int, n_carry: int, wanted: set[int]) -> set[int]:
    """Carries that reach a wanted one or a ys result, directly or over several steps."""
    live = set(wanted)
    while True:
        read = {a for k, a in enumerate(body.outvars) if k >= n_carry or k in live}
        for eqn in reversed(body.eqns):
            if eqn.effects or any(v in read for v in eqn.outvars):
                read.update(a for a in eqn.invars if not isinstance(a, jex.Literal))
        more = live | {k for k in range(n_carry) if body.invars[n_consts + k] in read}
        if more == live:
            return live
        live = more


def drop_dead_carries(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Takes carries out of scans that nothing reads but themselves, as the counter of most fori_loops."""
    used = {a for e in closed.jaxpr.eqns for a in e.invars if not isinstance(a, jex.Literal)}
    used |= {a for a in closed.jaxpr.outvars if not isinstance(a, jex.Literal)}

    def rewrite(eqn, operands):
        p, body = eqn.params, eqn.params["jaxpr"]
        n_consts, n_carry = p["num_consts"], p["num_carry"]
        wanted = {k for k in range(n_carry) if eqn.outvars[k] in used}
        kept = sorted(_live_carries(body.jaxpr, n_consts, n_carry, wanted))
        if len(kept) == n_carry:
            return None
        inner_types = [body.jaxpr.invars[n_consts + k].aval for k in range(n_carry)]

        def slim(*args):
            # A dead carry's value is of no consequence.
            carry = [jax.numpy.zeros(t.shape, t.dtype) for t in inner_types]
            for k, x in zip(kept, args[n_consts:]):
                carry[k] = x
            results = jex.jaxpr_as_fun(body)(*args[:n_consts], *carry, *args[n_consts + len(kept) :])
            return [results[k] for k in kept] + list(results[n_carry:])

        ins = [v.aval for v in body.jaxpr.invars]
        ins = ins[:n_consts] + [ins[n_consts + k] for k in kept] + ins[n_consts + n_carry :]
        made = _drop_dead(jax.make_jaxpr(slim)(*ins))
        operands = operands[:n_consts] + [operands[n_consts + k] for k in kept] + operands[n_consts + n_carry :]
        made_results = eqn.primitive.bind(*operands, **{**p, "jaxpr": made, "num_carry": len(kept)})
        results: list = [None] * n_carry + list(made_results[len(kept) :])
        for k, x in zip(kept, made_results):
            results[k] = x
        return results

    has_scan = any(e.primitive.name == "scan" and "linear" not in e.params for e in closed.jaxpr.eqns)
    return _drop_dead(retrace(closed, {"scan": rewrite})) if has_scan else closed


# ---- rewrites

def _is_scalar_constant(x, value) -> bool:
    return isinstance(x, (np.ndarray, np.generic)) and np.ndim(x) == 0 and bool(x == value)


def _same(eqn, operands):
    """The operand itself, if it has the equation's type."""
    (x, *_), out = operands, eqn.outvars[0].aval
    weak = getattr(jax.typeof(x), "weak_type", False)
    return [x] if not weak and x.shape == out.shape and x.dtype == out.dtype else None


def _convert(eqn, operands):
    (x,) = operands
    if isinstance(x, (np.ndarray, np.generic)) and x.ndim == 0:
        return [np.asarray(x).astype(eqn.params["new_dtype"])]
    same = _same(eqn, operands)
    if same is not None:
        return same
    return [lax.convert_element_type_p.bind(x, **{**eqn.params, "weak_type": False})]


def _mul(eqn, operands):
    x, y = operands
    if _is_scalar_constant(y, 1):
        return _same(eqn, [x])
    return _same(eqn, [y]) if _is_scalar_constant(x, 1) else None


def _sub_zero(eqn, operands):
    """x - 0 is x, for zeros of both signs; x + 0 is not (-0 + 0 is 0)."""
    x, y = operands
    return _same(eqn, [x]) if _is_scalar_constant(y, 0) and not np.signbit(np.asarray(y, np.float64)) else None


def _div(eqn, operands):
    """x / c -> x * (1 / c) where c is a power of two: exact."""
    x, y = operands
    if _is_scalar_constant(y, 1):
        return _same(eqn, [x])
    if not _float_constant(y):
        return None
    mantissa, _ = np.frexp(np.float64(y))
    inverse = np.asarray(1.0 / np.float64(y)).astype(y.dtype)
    exact = abs(mantissa) == 0.5 and abs(float(inverse)) >= float(jax.numpy.finfo(y.dtype).tiny)
    return [lax.mul(x, inverse)] if exact and np.isfinite(inverse) else None


def _float_constant(y) -> bool:
    return (
        isinstance(y, (np.ndarray, np.generic)) and y.ndim == 0 and jax.numpy.issubdtype(y.dtype, np.floating)
        and bool(np.isfinite(np.float64(y))) and bool(y != 0)
    )


def _div_unsafe(eqn, operands):
    """x / c -> x * (1 / c): differs by one unit in the last place."""
    exact = _div(eqn, operands)
    x, y = operands
    if exact is not None or not _float_constant(y) or np.ndim(x) == 0:
        return exact
    inverse = np.asarray(1.0 / np.float64(y)).astype(y.dtype)
    normal = np.isfinite(np.float64(inverse)) and abs(float(inverse)) >= float(jax.numpy.finfo(y.dtype).tiny)
    return [lax.mul(x, inverse)] if normal else None


def _max(eqn, operands):
    """max(x, -inf) is x, NaN included."""
    for x, y in (operands, operands[::-1]):
        if jax.numpy.issubdtype(y.dtype, np.floating) and _is_scalar_constant(y, -np.inf):
            return _same(eqn, [x])
    return None


def _select(eqn, operands):
    which, *cases = operands
    if isinstance(which, (np.ndarray, np.generic)) and which.ndim == 0:
        return [cases[int(which)]]
    return None


def _fold_scalars(eqn, operands):
    """Arithmetic and comparisons of rank-0 constants."""
    if any(not isinstance(x, (np.ndarray, np.generic)) or np.ndim(x) for x in operands):
        return None
    with jax.ensure_compile_time_eval():
        return [np.asarray(eqn.primitive.bind(*map(jax.numpy.asarray, operands), **eqn.params))]


def _first(*rules: Rewrite) -> Rewrite:
    def first(eqn, operands):
        return next((r for rule in rules if (r := rule(eqn, operands)) is not None), None)

    return first


def _broadcast(eqn, operands):
    return _same(eqn, operands) if len(operands) == 1 else None


def _split(eqn, operands):
    (x,), p, results, start = operands, eqn.params, [], 0
    for size in p["sizes"]:
        lo = [start if d == p["axis"] else 0 for d in range(x.ndim)]
        hi = [start + size if d == p["axis"] else n for d, n in enumerate(x.shape)]
        results.append(lax.slice(x, lo, hi))
        start += size
    return results


def _concatenate(eqn, operands):
    """Empty operands go."""
    kept = [x for x in operands if 0 not in x.shape]
    if len(kept) == len(operands) or not kept:
        return None
    return kept if len(kept) == 1 else [lax.concatenate(kept, eqn.params["dimension"])]


def _stack(eqn, operands):
    axis = next(v for v in eqn.params.values() if isinstance(v, int))
    return [lax.concatenate([lax.expand_dims(x, (axis,)) for x in operands], axis)]


def _conv(eqn, operands):
    """Padding and input dilation become pad."""
    (x, w), p = operands, eqn.params
    spatial = p["dimension_numbers"].lhs_spec[2:]
    if all(lo == hi == 0 for lo, hi in p["padding"]) and all(d == 1 for d in p["lhs_dilation"]):
        return None
    if 0 in x.shape:
        return None
    config = [(0, 0, 0)] * x.ndim
    for d, (lo, hi), dilation in zip(spatial, p["padding"], p["lhs_dilation"]):
        config[d] = (lo, hi, dilation - 1)
    x = lax.pad_p.bind(x, np.zeros((), x.dtype), padding_config=tuple(config))
    plain = {**p, "padding": ((0, 0),) * len(spatial), "lhs_dilation": (1,) * len(spatial)}
    return [eqn.primitive.bind(x, w, **plain)]


def _window(identity: Callable):
    def rewrite(eqn, operands):
        (x,), p = operands, eqn.params
        config = tuple((lo, hi, d - 1) for (lo, hi), d in zip(p["padding"], p["base_dilation"]))
        if 0 in x.shape or all(c == (0, 0, 0) for c in config):
            return None
        x = lax.pad_p.bind(x, identity(x.dtype), padding_config=config)
        plain = {**p, "padding": ((0, 0),) * x.ndim, "base_dilation": (1,) * x.ndim}
        return [eqn.primitive.bind(x, **plain)]

    return rewrite


_REWRITES: dict[str, Rewrite] = {
    **dict.fromkeys(
        ("add", "neg", "gt", "lt", "ge", "le", "eq", "ne", "and", "or", "not", "min", "convert_element_type"),
        _fold_scalars,
    ),
    "convert_element_type": _convert,
    "stop_gradient": _same,
    "copy": _same,
    "copy_p": _same,
    "optimization_barrier": lambda eqn, operands: list(operands),
    "mul": _first(_fold_scalars, _mul),
    "sub": _first(_fold_scalars, _sub_zero),
    "div": _first(_fold_scalars, _div),
    "max": _first(_fold_scalars, _max),
    "select_n": _select,
    "broadcast_in_dim": _broadcast,
    "reshape": _same,
    "split": _split,
    "stack": _stack,
    "concatenate": _concatenate,
    "conv_general_dilated": _conv,
    "reduce_window_sum": _window(lambda t: np.zeros((), t)),
    "reduce_window_max": _window(_least),
    "reduce_window_min": _window(_greatest),
}
_UNSAFE: dict[str, Rewrite] = {"div": _first(_fold_scalars, _div_unsafe)}
