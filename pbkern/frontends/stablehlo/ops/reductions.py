"""Operations that combine elements: along dimensions, in windows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern.frontends.stablehlo.comparators import combiner, extreme
from pbkern.frontends.stablehlo.operation import HloOperation, made_by
from pbkern.frontends.stablehlo.table import check, rule

REDUCTIONS = {
    "add": lax.reduce_sum,
    "multiply": lax.reduce_prod,
    "maximum": lax.reduce_max,
    "minimum": lax.reduce_min,
    "and": lax.reduce_and,
    "or": lax.reduce_or,
    "xor": lax.reduce_xor,
}
PAIRS = {
    "add": lax.add,
    "multiply": lax.mul,
    "maximum": lax.max,
    "minimum": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
}
CUMULATIVE = {
    "add": lax.cumsum,
    "multiply": lax.cumprod,
    "maximum": lax.cummax,
    "minimum": lax.cummin,
}
BOOLEAN = {"add": "or", "multiply": "and", "maximum": "or", "minimum": "and"}


def identity(name: str, dtype: np.dtype) -> np.ndarray:
    """The element that an operation leaves others as they are with."""
    if name in ("add", "or", "xor"):
        return np.zeros((), dtype)
    if name == "multiply":
        return np.ones((), dtype)
    if name == "and":
        return np.invert(np.zeros((), dtype))
    if dtype.kind == "b":
        return np.array(name == "minimum")
    if jnp.issubdtype(dtype, jnp.floating):
        return np.array(-np.inf if name == "maximum" else np.inf, dtype)
    return np.array(jnp.iinfo(dtype).min if name == "maximum" else jnp.iinfo(dtype).max, dtype)


def starts_at_identity(name: str, start) -> bool:
    """Whether a reduction's start is known to change nothing."""
    return isinstance(start, np.ndarray) and bool(start == identity(name, start.dtype))


@rule("stablehlo.reduce")
def reduce(op: HloOperation, *operands):
    num_operands = len(operands) // 2
    xs, starts, dims = (
        operands[:num_operands],
        operands[num_operands:],
        tuple(op.integers("dimensions")),
    )
    name = combiner(op.block(0)) if num_operands == 1 else None
    if name in REDUCTIONS:
        (x,), (start,) = xs, starts
        name = BOOLEAN.get(name, name) if x.dtype == bool else name
        reduced = REDUCTIONS[name](x, dims)
        return (
            reduced
            if starts_at_identity(name, start)
            else PAIRS[name](reduced, jnp.broadcast_to(start, reduced.shape))
        )
    if (
        num_operands == 2
        and len(dims) == 1
        and _places_along(op, dims[0])
        and _starts_low(op, starts)
    ):
        best = extreme(op.block(0))
        place = (lax.argmax if best == "argmax" else lax.argmin)(xs[0], dims[0], op.type(1)[1])
        value = (lax.reduce_max if best == "argmax" else lax.reduce_min)(xs[0], dims)
        return value, place
    region = op.region(0)
    return lax.reduce(tuple(xs), tuple(starts), lambda x, y: tuple(region(*x, *y)), dims)


def _places_along(op: HloOperation, dim: int) -> bool:
    """Whether the second operand of a reduction numbers the elements of the first along a dimension."""
    maker = made_by(op.mlir.operands[1])
    if maker is not None and maker.name == "stablehlo.broadcast_in_dim":
        dims = HloOperation(maker).integers("broadcast_dimensions")
        dim = dims.index(dim) if dim in dims else -1
        maker = made_by(maker.operands[0])
    return (
        maker is not None
        and maker.name == "stablehlo.iota"
        and HloOperation(maker).integer("iota_dimension") == dim
    )


def _starts_low(op: HloOperation, starts) -> bool:
    """Whether a search for an extreme starts at a value that every element beats."""
    best = extreme(op.block(0))
    return best is not None and starts_at_identity(
        "maximum" if best == "argmax" else "minimum", starts[0]
    )


@rule("stablehlo.reduce_window")
def reduce_window(op: HloOperation, *operands):
    num_operands = len(operands) // 2
    xs, starts, rank = operands[:num_operands], operands[num_operands:], operands[0].ndim
    ones = [1] * rank
    window, strides = op.integers("window_dimensions"), op.integers("window_strides", ones)
    inner, outer = op.integers("base_dilations", ones), op.integers("window_dilations", ones)
    pads = op.pairs("padding", rank)
    name = combiner(op.block(0)) if num_operands == 1 else None
    if name in PAIRS:
        (x,), (start,) = xs, starts
        name = BOOLEAN.get(name, name) if x.dtype == bool else name
        plain = strides == inner == outer == ones and starts_at_identity(name, start)
        along = _cumulated(x.shape, window, pads) if plain and name in CUMULATIVE else None
        if along is not None:
            return CUMULATIVE[name](x, along[0], reverse=along[1])
        return lax.reduce_window(x, start, PAIRS[name], window, strides, pads, inner, outer)
    region = op.region(0)
    along = (
        _cumulated(xs[0].shape, window, pads)
        if strides == inner == outer == ones and _starts_neutral(op, starts)
        else None
    )
    if along is not None:
        return lax.associative_scan(
            lambda x, y: region(*x, *y), list(xs), axis=along[0], reverse=along[1]
        )
    return lax.reduce_window(
        tuple(xs),
        tuple(starts),
        lambda x, y: tuple(region(*x, *y)),
        window,
        strides,
        pads,
        inner,
        outer,
    )


def _starts_neutral(op: HloOperation, starts) -> bool:
    """Whether a region leaves numbers as they are with the starts: tried on some, where starts are constants."""
    if not all(isinstance(start, np.ndarray) and start.dtype.kind == "f" for start in starts):
        return False
    with jax.ensure_compile_time_eval():
        tried = [np.array([-2.5, -1.0, 0.0, 0.5, 3.0], start.dtype) for start in starts]
        given = [np.broadcast_to(start, (5,)) for start in starts]
        region = jax.vmap(lambda *values: tuple(op.region(0)(*values)))
        results = (*region(*given, *tried), *region(*tried, *given))
    return all(
        bool((np.asarray(result) == want).all()) for result, want in zip(results, (*tried, *tried))
    )


def _cumulated(shape, window, pads) -> tuple[int, bool] | None:
    """(dimension, whether from its end) of windows that hold all elements before, or behind, each."""
    wide = [axis for axis, extent in enumerate(window) if extent != 1]
    if len(wide) != 1 or any(pad != (0, 0) for axis, pad in enumerate(pads) if axis not in wide):
        return None
    (dim,) = wide
    if window[dim] != shape[dim] or pads[dim] not in ((shape[dim] - 1, 0), (0, shape[dim] - 1)):
        return None
    return dim, pads[dim][0] == 0


@rule("stablehlo.select_and_scatter")
def select_and_scatter(op: HloOperation, x, source, start):
    """The gradient of a pool that takes maxima or minima: each window's element goes to where its extreme is."""
    ones = [1] * x.ndim
    window, strides = op.integers("window_dimensions", ones), op.integers("window_strides", ones)
    name = "maximum" if _direction(op.block(0)) in ("GE", "GT") else "minimum"
    pool = lambda x: lax.reduce_window(
        x, identity(name, x.dtype), PAIRS[name], window, strides, op.pairs("padding", x.ndim)
    )
    (gradient,) = jax.vjp(pool, x)[1](source)
    return gradient if starts_at_identity("add", start) else gradient + start


@check("stablehlo.select_and_scatter")
def _selects_extremes(op):
    if _direction(op.regions[0].blocks[0]) is None:
        return "an element is selected by more than one comparison"
    return None if combiner(op.regions[1].blocks[0]) == "add" else "elements are not added"


def _direction(block) -> str | None:
    """Recognises a region that compares its two arguments in order, the first with the second."""
    compare, *rest = [operation.operation for operation in block.operations]
    if (
        compare.name != "stablehlo.compare"
        or len(rest) != 1
        or list(compare.operands) != list(block.arguments)
    ):
        return None
    direction = HloOperation(compare).choice("comparison_direction")
    return direction if direction in ("GE", "GT", "LE", "LT") else None


@rule("stablehlo.map")
def map_(op: HloOperation, *xs):
    """Regions get single elements."""
    region = op.region(0)
    return functools.reduce(lambda f, _: jax.vmap(f), range(xs[0].ndim), lambda *x: region(*x)[0])(
        *xs
    )
