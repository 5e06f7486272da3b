"""Table of rewrites: (equation, operands) -> cheaper or simpler equations, or None to keep it. Data for driver.py.

REWRITES give the same values bit by bit. UNSAFE ones may change rounding and replace their
namesakes. NaN, infinities and signed zeros are always kept.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax import lax

from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.ops.scatter import SCATTERS
from pbkern.dsl.body_rewrites.numpy_primitives import EQUIVALENTS
from pbkern.dsl.body_rewrites.numpy_primitives import rewrite as equivalent
from pbkern.fuse.access.windows_contractions import greatest, least

from .empty_scatter_indices import index_first_elements

Rewrite = Callable  # (eqn, operands) -> list of results, or None to keep the equation


def _is_scalar_constant(x, value) -> bool:
    return isinstance(x, (np.ndarray, np.generic)) and np.ndim(x) == 0 and bool(x == value)


def _same(eqn, operands):
    """The operand itself, if it has the result's type."""
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
    return [
        lax.convert_element_type_p.bind(
            x, new_dtype=eqn.params["new_dtype"], weak_type=False, sharding=None
        )
    ]


def _mul(eqn, operands):
    x, y = operands
    if _is_scalar_constant(y, 1):
        return _same(eqn, [x])
    return _same(eqn, [y]) if _is_scalar_constant(x, 1) else None


def _sub_zero(eqn, operands):
    """x - 0 is x, for zeros of both signs; x + 0 is not (-0 + 0 is 0)."""
    x, y = operands
    return (
        _same(eqn, [x])
        if _is_scalar_constant(y, 0) and not np.signbit(np.asarray(y, np.float64))
        else None
    )


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
        isinstance(y, (np.ndarray, np.generic))
        and y.ndim == 0
        and jax.numpy.issubdtype(y.dtype, np.floating)
        and bool(np.isfinite(np.float64(y)))
        and bool(y != 0)
    )


def _div_unsafe(eqn, operands):
    """x / c -> x * (1 / c): differs by one unit in the last place."""
    exact = _div(eqn, operands)
    x, y = operands
    if exact is not None or not _float_constant(y) or np.ndim(x) == 0:
        return exact
    inverse = np.asarray(1.0 / np.float64(y)).astype(y.dtype)
    normal = np.isfinite(np.float64(inverse)) and abs(float(inverse)) >= float(
        jax.numpy.finfo(y.dtype).tiny
    )
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
        return [cases[min(max(int(which), 0), len(cases) - 1)]]
    return None


# Primitives of rank-0 constants that are computed while simplifying.
FOLDED = frozenset(
    "add sub mul div rem neg sign max min and or not floor ceil gt lt ge le eq ne clamp".split()
)


def _fold_scalars(eqn, operands):
    """Arithmetic and comparisons of rank-0 constants, by NumPy: with JAX, XLA would compile each one."""
    if any(
        not isinstance(operand, (np.ndarray, np.generic)) or np.ndim(operand)
        for operand in operands
    ):
        return None
    row, dtype = ELEMENTWISE[eqn.primitive.name], eqn.outvars[0].aval.dtype
    try:
        return [row.evaluated(operands, eqn.params, dtype)]
    except TypeError:  # an element type without this operation in NumPy
        return None


def first_of(*rules: Rewrite) -> Rewrite:
    """The first of these rewrites that applies."""

    def first(eqn, operands):
        return next((result for rule in rules if (result := rule(eqn, operands)) is not None), None)

    return first


def _broadcast(eqn, operands):
    return _same(eqn, operands) if len(operands) == 1 else None


def _reshape(eqn, operands):
    if eqn.params["dimensions"] is None:
        return _same(eqn, operands)
    (transposed,) = (lax.transpose(operand, eqn.params["dimensions"]) for operand in operands)
    return [lax.reshape(transposed, eqn.params["new_sizes"])]


def _concatenate(eqn, operands):
    """Drops empty operands."""
    nonempty = [operand for operand in operands if 0 not in operand.shape]
    if len(nonempty) == len(operands) or not nonempty:
        return None
    return nonempty if len(nonempty) == 1 else [lax.concatenate(nonempty, eqn.params["dimension"])]


def _pad(eqn, operands):
    """Around an empty operand there is only padding: derivatives of jnp.roll by 0 have such pads."""
    x, value = operands
    return [lax.broadcast(value, eqn.outvars[0].aval.shape)] if 0 in x.shape else None


# Operation of a reduction's body -> its identity element.
MONOIDS = {
    "add": (lax.reduce_sum_p, lambda dtype: np.zeros((), dtype)),
    "mul": (lax.reduce_prod_p, lambda dtype: np.ones((), dtype)),
    "max": (lax.reduce_max_p, least),
    "min": (lax.reduce_min_p, greatest),
}


def _monoids(eqn, operands):
    """(equation of the body, operand, start) per result of a variadic reduction, if each body is one operation; else None."""
    count, body = len(operands) // 2, eqn.params["jaxpr"]
    body = getattr(body, "jaxpr", body)
    makers = {var: body_eqn for body_eqn in body.eqns for var in body_eqn.outvars}
    monoids = []
    for k, (operand, init) in enumerate(zip(operands[:count], operands[count:])):
        combine = makers.get(body.outvars[k])
        pair = [body.invars[k], body.invars[count + k]]
        if combine is None or combine.primitive.name not in MONOIDS:
            return None
        if combine.invars not in (pair, pair[::-1]):
            return None
        monoids.append((combine, operand, init))
    return monoids


def _reduce(eqn, operands):
    """x, y -> sum(x), max(y). Over no dimension they are x and y: the start does not count there, as in XLA."""
    if not eqn.params["dimensions"]:
        return list(operands[: len(operands) // 2])
    results = []
    for combine, x, init in _monoids(eqn, operands) or ():
        reducer, identity = MONOIDS[combine.primitive.name]
        sharding = {"out_sharding": None} if reducer is lax.reduce_sum_p else {}
        reduced = reducer.bind(x, axes=tuple(eqn.params["dimensions"]), **sharding)
        # A sum of one element is that element plus the start, whose sign of zero may matter.
        if not _is_scalar_constant(init, identity(x.dtype)):
            reduced = combine.primitive.bind(reduced, lax.broadcast_in_dim(init, reduced.shape, ()))
        results.append(reduced)
    return results or None


WINDOWS = {
    "add": lax.reduce_window_sum_p,
    "max": lax.reduce_window_max_p,
    "min": lax.reduce_window_min_p,
}


def _reduce_window(eqn, operands):
    """Windows whose body is one operation.

    The start counts once, as in XLA on CPUs; padding does not count. Nor does the start where the operands are scalars.
    """
    if not operands[0].ndim:
        return list(operands[: len(operands) // 2])
    names = ("window_dimensions", "window_strides", "window_dilation", "padding", "base_dilation")
    results = []
    for combine, x, init in _monoids(eqn, operands) or ():
        name = combine.primitive.name
        if name not in WINDOWS or 0 in x.shape:
            return None
        identity = MONOIDS[name][1](x.dtype)
        reduced = _padded_windows(
            WINDOWS[name], x, {key: eqn.params[key] for key in names}, identity
        )
        if not _is_scalar_constant(init, identity):
            reduced = combine.primitive.bind(reduced, lax.broadcast_in_dim(init, reduced.shape, ()))
        results.append(reduced)
    return results or None


def _padded_windows(primitive, x, params: dict, identity):
    """Windows with padding and input dilation as a pad; those of one element as a slice."""
    config = tuple(
        (lo, hi, dim - 1) for (lo, hi), dim in zip(params["padding"], params["base_dilation"])
    )
    if any(pads != (0, 0, 0) for pads in config):
        x = lax.pad_p.bind(x, identity, padding_config=config)
    if all(size == 1 for size in params["window_dimensions"]):
        return lax.slice(x, (0,) * x.ndim, x.shape, params["window_strides"]) if x.ndim else x
    return primitive.bind(
        x, **{**params, "padding": ((0, 0),) * x.ndim, "base_dilation": (1,) * x.ndim}
    )


def reduce_units(eqn, operands):
    """Reductions over dimensions of size 1 only rename elements."""
    (x,), axes = operands, eqn.params["axes"]
    if x.dtype != eqn.outvars[0].aval.dtype or any(x.shape[axis] != 1 for axis in axes):
        return None
    return [lax.squeeze(x, axes) if axes else x]


def _arg_units(eqn, operands):
    """Along a dimension of size 1 the first element wins."""
    (out,) = (var.aval for var in eqn.outvars)
    return (
        [lax.full(out.shape, 0, out.dtype)]
        if all(operands[0].shape[axis] == 1 for axis in eqn.params["axes"])
        else None
    )


def _window(identity: Callable):
    def rewrite(eqn, operands):
        (x,) = operands
        return (
            None
            if 0 in x.shape
            else [_padded_windows(eqn.primitive, x, eqn.params, identity(x.dtype))]
        )

    return rewrite


REWRITES: dict[str, Rewrite] = {
    **dict.fromkeys(FOLDED, _fold_scalars),
    **dict.fromkeys(EQUIVALENTS, lambda eqn, operands: equivalent(eqn, *operands)),
    "convert_element_type": _convert,
    "stop_gradient": _same,
    "copy": _same,
    "optimization_barrier": lambda eqn, operands: list(operands),
    "device_put": lambda eqn, operands: (
        None if any(device is not None for device in eqn.params["devices"]) else list(operands)
    ),
    # Inside shard_map: plans have plain types, which do not say over which mesh axes a value
    # varies.
    "pvary": lambda eqn, operands: list(operands),
    "psum_invariant": lambda eqn, operands: list(lax.psum(tuple(operands), eqn.params["axes"])),
    "mul": first_of(_fold_scalars, _mul),
    "sub": first_of(_fold_scalars, _sub_zero),
    "div": first_of(_fold_scalars, _div),
    "max": first_of(_fold_scalars, _max),
    "select_n": _select,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "reduce": _reduce,
    "reduce_window": _reduce_window,
    **dict.fromkeys(SCATTERS, index_first_elements),
    **dict.fromkeys(
        ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or"),
        reduce_units,
    ),
    **dict.fromkeys(("argmax", "argmin"), _arg_units),
    "concatenate": _concatenate,
    "pad": _pad,
    "reduce_window_sum": _window(lambda dtype: np.zeros((), dtype)),
    "reduce_window_max": _window(least),
    "reduce_window_min": _window(greatest),
}
UNSAFE: dict[str, Rewrite] = {"div": first_of(_fold_scalars, _div_unsafe)}
