"""Body of a loop with periodic borders -> the same on arrays with a periodic halo, without borders inside.

jnp.roll and jnp.pad(mode="wrap") are concatenations of slices of one array. Here they become
`roll`, whose access rule only shifts the block: element -1 of a value stands for its last one, and
a block may ask for it like for any other. That is right if everything between the arrays read and
the rolls treats all elements along the rolled dimensions alike, which `periodic_dimensions` checks.
The arrays read then need a halo of their own elements (`continued`). Only overlapped.py may hold
such equations: no lowering knows them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

import jax
from jax.extend import core as jex

from pbkern.core.affine import Affine
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.lazy_dataclass import dataclass
from pbkern.fuse.access.rules import Access, NeedsWhole, Pull, Span, pull, rules
from pbkern.fuse.simplify.driver import retrace

roll_p = jex.Primitive(
    "roll"
)  # x -> x of the same type; params: starts, of element 0 of the result per dimension


@roll_p.def_abstract_eval
def _roll_type(x, *, starts):
    return jax.core.ShapedArray(x.shape, x.dtype)


@rules.register("roll")
def _roll(eqn, out: Access) -> Pull:
    moved = tuple(span.shifted(by) for span, by in zip(out, eqn.params["starts"]))
    return Pull((moved,), {}, lambda ctx, x: [x])


# ---- concatenations of slices -> roll


@dataclass(frozen=True)
class _Window:
    """`shape` elements of `base` from `starts`, modulo its extents."""

    base: jax.Array
    starts: tuple[int, ...]
    shape: tuple[int, ...]


class _BorderWindows:
    """Rewrites that know which values are windows of another, and turn windows as large as their base into rolls."""

    def __init__(self) -> None:
        self.notes = Notes()

    def of(self, x) -> _Window:
        window = self.notes.find("window", x)
        return window[0] if window else _Window(x, (0,) * x.ndim, x.shape)

    def replaced(self, eqn, operands, window: _Window) -> list:
        """The equation's results: a roll if the window has its base's shape."""
        base, shape = window.base, window.base.shape
        if window.shape == shape:
            # The shorter way round.
            starts = tuple(
                (start + size // 2) % size - size // 2 if size else 0
                for start, size in zip(window.starts, shape)
            )
            result = roll_p.bind(base, starts=starts) if any(starts) else base
        else:
            result = eqn.primitive.bind(*operands, **eqn.params)
        return self.notes.note("window", result, window)

    def slice(self, eqn, operands):
        (x,), params = operands, eqn.params
        if any(stride != 1 for stride in params["strides"] or ()):
            return None
        whole = self.of(x)
        starts = tuple(start + index for start, index in zip(whole.starts, params["start_indices"]))
        return self.replaced(eqn, operands, _Window(whole.base, starts, eqn.outvars[0].aval.shape))

    def concatenate(self, eqn, operands):
        """Adjacent parts of one base are a longer window of it."""
        parts, dim = [self.of(operand) for operand in operands], eqn.params["dimension"]
        first = parts[0]
        extent, at = first.base.shape[dim] if first.base.ndim > dim else 0, first.starts[dim]
        for part in parts:
            if part.base is not first.base or not extent or (part.starts[dim] - at) % extent:
                return None
            if any(
                start != base
                for k, (start, base) in enumerate(zip(part.starts, first.starts))
                if k != dim
            ):
                return None
            at += part.shape[dim]
        return self.replaced(
            eqn, operands, _Window(first.base, first.starts, eqn.outvars[0].aval.shape)
        )


def with_periodic_halos(body: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites concatenations that wrap around as rolls."""
    windows = _BorderWindows()
    return retrace(body, {"slice": windows.slice, "concatenate": windows.concatenate})


# ---- which dimensions must be continued


def periodic_dimensions(body: jex.Jaxpr, counts: tuple[int, int]) -> list[set[int]] | None:
    """Per operand of the body, the dimensions along which it is read beyond its edges.

    `counts` as in overlapped.block_time. None if an equation treats elements along such a dimension
    differently: it cannot be continued.
    """
    links: defaultdict = defaultdict(set)
    uneven: set[tuple] = set()
    continued_axes: set[tuple] = set()
    try:
        joined = [each for eqn in body.eqns for each in _links(eqn)]
    except (NeedsWhole, NotImplementedError):
        return None
    carried = zip(body.invars[counts[0] : sum(counts)], body.outvars)
    joined += [
        ((var, axis), (result, axis), True)
        for var, result in carried
        if not isinstance(result, jex.Literal)
        for axis in range(array_aval(var).ndim)
    ]
    for left, right, alike in joined:
        links[left].add(right)
        links[right].add(left)
        uneven.update(() if alike else (left, right))
    waiting = []
    for eqn in body.eqns:
        if eqn.primitive is roll_p:
            waiting += [
                (eqn.outvars[0], axis) for axis, by in enumerate(eqn.params["starts"]) if by
            ]
        if eqn.primitive.name == "iota":
            uneven.add((eqn.outvars[0], eqn.params["dimension"]))
    while waiting:
        place = waiting.pop()
        if place not in continued_axes:
            continued_axes.add(place)
            waiting += links[place]
    return (
        None
        if continued_axes & uneven
        else [
            {axis for axis in range(array_aval(var).ndim) if (var, axis) in continued_axes}
            for var in body.invars
        ]
    )


def _links(eqn) -> Iterator[tuple[tuple, tuple, bool]]:
    """((result, dimension), (operand, dimension), does each element depend on the one of the same index?)."""
    shape = eqn.outvars[0].aval.shape
    asked = tuple(Span(Affine.symbol(axis), 1) for axis in range(len(shape)))
    for atom, access in zip(eqn.invars, pull(eqn, asked).inputs):
        if access is None or isinstance(atom, jex.Literal):
            continue
        for dim, span in enumerate(access):
            for symbol in span.start.symbols:
                same = span == asked[symbol] or eqn.primitive is roll_p
                for var in eqn.outvars:
                    yield (var, symbol), (atom, dim), same and atom.aval.shape[dim] == shape[symbol]


def reach(body: jex.Jaxpr) -> int:
    """Halo width: an upper bound of elements beyond an edge that one step reads."""
    return sum(sum(map(abs, eqn.params["starts"])) for eqn in body.eqns if eqn.primitive is roll_p)


def continued(x, dims: Collection[int]):
    """`x` with a periodic halo along `dims`: elements beyond its edges come from the other side, up to one extent away."""
    for dim in sorted(dims):
        x = continued_p.bind(x, x, x, dimension=dim)
    return x


continued_p = jex.Primitive(
    "continued"
)  # x, x, x -> x with elements of the first before it and of the last behind it


@continued_p.def_abstract_eval
def _continued_type(x, *_, dimension):
    return jax.core.ShapedArray(x.shape, x.dtype)


@rules.register("continued")
def _continued(eqn, out: Access) -> Pull:
    """The middle third of a concatenation.

    Lines stay whole: if both dimensions of a block move, guards are expensive.
    """
    dim = eqn.params["dimension"]
    moving = out[dim].start.symbols
    if moving and 0 < dim == len(out) - 1:
        raise NeedsWhole(moving, "lines with periodic borders are taken whole")
    extent = eqn.outvars[0].aval.shape[dim]
    return rules.lookup("concatenate")(
        eqn, tuple(span.shifted(extent) if k == dim else span for k, span in enumerate(out))
    )
