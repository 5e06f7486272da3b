"""Simplified ClosedJaxpr -> the same with updates and slices at known places made of pads, selects and slices.

`x.at[1:-1].set(v)` traces to a scatter whose indices are computed from literals. Where the place is
known, or the window is one element wide where it is not, the result is a select on index ranges: it
can be tiled and fused, and lowering cuts its nests at the boundaries. Other scatters stay, and so do small windows of
donated operands, which are written in place. A gather
of one window at a known place becomes a slice, top_k the first elements of a sort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import inner_jaxprs
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.scatter import SCATTERS, scatter_combines
from pbkern.core.ops.top_k import by_sorting
from pbkern.core.ops.views import iota_numbers
from pbkern.core.passes import threshold
from pbkern.dsl.interpret import numpy_result
from pbkern.fuse.access.windows_contractions import REDUCERS
from pbkern.fuse.cost.kinds import is_alias
from pbkern.fuse.cost.small_updates import SmallUpdates
from pbkern.fuse.simplify.driver import retrace

from .sorted_prefix import first_sorted

# Scatter -> (combine, identity element). Adding -0 keeps the sign of a zero, adding 0 does not.
COMBINE: dict[str, tuple[Callable, Callable]] = {
    "scatter-add": (
        lax.add,
        lambda dtype: np.asarray(-0.0 if dtype.kind not in "iub" else 0, dtype),
    ),
    "scatter-sub": (lax.sub, lambda dtype: np.zeros((), dtype)),
    "scatter-mul": (lax.mul, REDUCERS["reduce_prod"][1]),
    "scatter-min": (lax.min, REDUCERS["reduce_min"][1]),
    "scatter-max": (lax.max, REDUCERS["reduce_max"][1]),
}

# Equations of index arithmetic, whose results are computed where their operands are known.
ARITHMETIC = frozenset(
    "add sub mul min max lt ge clamp select_n convert_element_type reshape squeeze concatenate "
    "broadcast_in_dim iota".split()
)


class Constants:
    """Values of index arithmetic that depends on literals only, also on literals outside of the body that uses it."""

    def __init__(self, closed: jex.ClosedJaxpr, most_indices: float) -> None:
        self.most_indices = most_indices
        self.makers: dict = {}
        self.known: dict = {}
        self.given: dict = {}  # operand of a body, the same in every step -> its value, wherever the body runs
        self._walk(closed)

    def _walk(self, closed: jex.ClosedJaxpr) -> None:
        for var, const in zip(closed.jaxpr.constvars, closed.consts):
            if np.size(const) <= self.most_indices and np.dtype(var.aval.dtype).kind in "iub":
                self.known[var] = np.asarray(const)
        for eqn in closed.jaxpr.eqns:
            if len(eqn.outvars) == 1 and eqn.primitive.name in ARITHMETIC:
                self.makers[eqn.outvars[0]] = eqn
            for var, outer in _handed_in(eqn):
                self.given.setdefault(var, []).append(outer)
            for inner in inner_jaxprs(eqn):
                self._walk(inner)

    def value(self, atom) -> np.ndarray | None:
        if isinstance(atom, jex.Literal):
            return np.asarray(atom.val, array_aval(atom).dtype)
        if atom not in self.known:
            self.known[atom] = self._evaluate(atom)
        return self.known[atom]

    def _evaluate(self, var) -> np.ndarray | None:
        eqn = self.makers.get(var)
        if var.aval.size > self.most_indices or var.aval.dtype.kind not in "iub":
            return None
        if eqn is None:
            return _agreed(map(self.value, self.given.get(var, ())))
        operands = [self.value(atom) for atom in eqn.invars]
        if any(operand is None for operand in operands):
            return None
        if eqn.primitive.name == "iota":
            return iota_numbers(eqn.params)
        return numpy_result(eqn, operands)


def _handed_in(eqn) -> Iterator[tuple]:
    """(operand of a body, the operand of the loop or conditional that it always equals)."""
    params = params_of(eqn)
    match eqn.primitive.name:
        case "scan":
            yield from zip(params["jaxpr"].jaxpr.invars[: params["num_consts"]], eqn.invars)
        case "while":
            first, second = params["cond_nconsts"], params["body_nconsts"]
            yield from zip(params["cond_jaxpr"].jaxpr.invars[:first], eqn.invars)
            yield from zip(params["body_jaxpr"].jaxpr.invars[:second], eqn.invars[first:])
        case "cond":
            for branch in params["branches"]:
                yield from zip(branch.jaxpr.invars, eqn.invars[1:])


def _agreed(values: Iterable[np.ndarray | None]) -> np.ndarray | None:
    """The value that all share, if there is one."""
    first, *rest = [*values] or [None]
    return (
        first
        if first is not None
        and all(other is not None and np.array_equal(first, other) for other in rest)
        else None
    )


@dataclass(frozen=True)
class UpdatesToSelects(SmallUpdates):
    """Rewrites top_k, and the updates and dynamic slices whose places allow it. Small updates of donated operands stay."""

    most_indices: int = threshold(
        4096, "elements of an array of known indices: larger ones are data. Source: not recorded"
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: object) -> jex.ClosedJaxpr:
        names = {*SCATTERS, "gather", "dynamic_slice", "dynamic_update_slice", "top_k"}

        def has_any(nested: jex.ClosedJaxpr) -> bool:
            return any(
                eqn.primitive.name in names or any(map(has_any, inner_jaxprs(eqn)))
                for eqn in nested.jaxpr.eqns
            )

        if not has_any(closed):
            return closed
        constants = Constants(closed, self.most_indices)
        outer = set(map(id, closed.jaxpr.eqns))
        in_place = self.in_place(closed.jaxpr, getattr(options, "donated", ()))

        def scatter(eqn, operands):
            if id(eqn) in in_place:
                return None
            # In a loop XLA writes a moving window in place; a select would touch the whole array each
            # step.
            return _scatter(eqn, operands, constants, moving=id(eqn) in outer)

        def update_slice(eqn, operands):
            return None if id(eqn) in in_place else _dynamic_update_slice(eqn, operands, constants)

        rewrites: dict = dict.fromkeys(SCATTERS, scatter)
        rewrites["top_k"] = lambda eqn, operands: by_sorting(eqn, operands, first_sorted)
        rewrites["dynamic_slice"] = lambda eqn, operands: _dynamic_slice(eqn, operands, constants)
        rewrites["gather"] = lambda eqn, operands: _gather(eqn, operands, constants)
        rewrites["dynamic_update_slice"] = update_slice
        return retrace(closed, rewrites)

    def in_place(self, jaxpr: jex.Jaxpr, donated: Sequence[bool]) -> set[int]:
        """ids of updates of small windows, one after the other, between a donated operand and a result."""
        written = {var for var, given in zip(jaxpr.invars, donated) if given}
        steps: dict[object, jex.JaxprEqn] = {}
        for eqn in jaxpr.eqns if written else ():
            is_small = self.has(eqn) and self.leaves_most(eqn)
            if (is_alias(eqn) or is_small) and eqn.invars[0] in written:
                (result,) = eqn.outvars
                written.add(result)
                steps[result] = eqn
        windows: set[int] = set()
        value: object
        for value in jaxpr.outvars:
            while not isinstance(value, jex.Literal) and value in steps:
                windows.add(id(steps[value]))
                value = steps[value].invars[0]
        return windows


# ---- slices and updates at constant starts


def _starts(atoms: Sequence, extents, sizes, constants: Constants) -> list[int] | None:
    """Constant starts, clamped so that the window is in bounds; a window over a whole dimension starts at 0."""
    starts = []
    for atom, extent, size in zip(atoms, extents, sizes):
        value = np.zeros((), int) if extent == size else constants.value(atom)
        if value is None:
            return None
        starts.append(int(np.clip(value, 0, extent - size)))
    return starts


def _gather(eqn, operands, constants: Constants):
    """One window, at a constant place in bounds."""
    x, dn, sizes = operands[0], eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if operands[1].ndim != 1 or (places := constants.value(eqn.invars[1])) is None:
        return None
    starts = [0] * x.ndim
    for dim, place in zip(dn.start_index_map, places):
        starts[dim] = int(place)
    if not all(0 <= start <= size - width for start, size, width in zip(starts, x.shape, sizes)):
        return None
    return [
        lax.squeeze(
            lax.slice(x, starts, [start + size for start, size in zip(starts, sizes)]),
            dn.collapsed_slice_dims,
        )
    ]


def _dynamic_slice(eqn, operands, constants: Constants):
    x, sizes = operands[0], eqn.params["slice_sizes"]
    starts = _starts(eqn.invars[1 : 1 + x.ndim], x.shape, sizes, constants)
    if starts is None:
        return None
    return [lax.slice(x, starts, [start + size for start, size in zip(starts, sizes)])]


def _dynamic_update_slice(eqn, operands, constants: Constants):
    x, update = operands[:2]
    starts = _starts(eqn.invars[2 : 2 + x.ndim], x.shape, update.shape, constants)
    if starts is None or 0 in update.shape:
        return None
    tests = [
        _Range(axis, start)
        for axis, start in enumerate(starts)
        if update.shape[axis] != x.shape[axis]
    ]
    return [_updated(x, update, tests, "scatter")]


# ---- scatters of one window, or of one per batch element


class _Range:
    """The window covers `dim` from a constant `start`."""

    def __init__(self, dim: int, start: int):
        self.dim, self.start = dim, start

    def inside(self, x, update):
        low, high = self.start, self.start + update.shape[self.dim]
        index = _line(x, self.dim)
        tests = [lax.ge(index, np.int32(low))] if low > 0 else []
        tests += [lax.lt(index, np.int32(high))] if high < x.shape[self.dim] else []
        is_inside = tests[0] if len(tests) == 1 else tests[0] & tests[1]
        return lax.broadcast_in_dim(is_inside, x.shape, (self.dim,))

    def padding(self, x, update) -> tuple[int, int, int]:
        return (self.start, x.shape[self.dim] - self.start - update.shape[self.dim], 0)


class _At:
    """The window is one element of `dim`, at `start`: an array whose extents are 1 except in batch dimensions."""

    def __init__(self, dim: int, start):
        self.dim, self.start = dim, start

    def inside(self, x, update):
        index = lax.broadcast_in_dim(_line(x, self.dim), x.shape, (self.dim,))
        return lax.eq(index, _spread(self.start, x.shape))


def _line(x, dim: int):
    return lax.broadcasted_iota(np.int32, (x.shape[dim],), 0)


def _spread(x, shape):
    """Broadcasts dimensions of size 1."""
    axes = [axis for axis, size in enumerate(x.shape) if size == shape[axis]]
    squeezed = lax.squeeze(x, [axis for axis in range(x.ndim) if axis not in axes])
    return lax.broadcast_in_dim(squeezed, shape, axes)


def _updated(x, update, tests: Sequence, name: str):
    """x with `update`, of x's rank, combined where all tests hold."""
    inside, config = None, [(0, 0, 0)] * x.ndim
    for test in tests:
        here = test.inside(x, update)
        inside = here if inside is None else inside & here
        if isinstance(test, _Range):
            config[test.dim] = test.padding(x, update)
    if any(entry != (0, 0, 0) for entry in config):
        update = lax.pad(update, np.zeros((), update.dtype), config)
    update = _spread(update, x.shape) if update.shape != x.shape else update
    if name == "scatter":
        return update if inside is None else lax.select_n(inside, x, update)
    combine, neutral = COMBINE[name]
    if inside is not None:
        update = lax.select_n(
            inside, lax.full(x.shape, neutral(np.dtype(x.dtype)), x.dtype), update
        )
    return combine(x, update)


def _scatter(eqn, operands, constants: Constants, moving: bool):
    (x, indices, update), params = operands, eqn.params
    if 0 in update.shape:
        return [x]
    dn, name = params["dimension_numbers"], eqn.primitive.name
    batch = dict(zip(dn.operand_batching_dims, dn.scatter_indices_batching_dims))
    single = all(
        size == 1 for axis, size in enumerate(indices.shape[:-1]) if axis not in batch.values()
    )
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return None
    numbers = jax.numpy.issubdtype(x.dtype, np.floating) or x.dtype.kind in "iub"
    if not single or not numbers or 0 in x.shape or scatter_combines(eqn) is None:
        return None
    box = _box(x, update, dn, batch)
    constant, mode = constants.value(eqn.invars[1]), str(params["mode"])
    other_axes = (
        axis
        for axis in range(x.ndim)
        if axis not in dn.scatter_dims_to_operand_dims and box.shape[axis] != x.shape[axis]
    )
    tests: list = [_Range(other, 0) for other in other_axes]
    for k, dim in enumerate(dn.scatter_dims_to_operand_dims):
        room = x.shape[dim] - box.shape[dim]
        if constant is not None and not batch:
            start = int(constant.reshape(-1)[k])
            if "CLIP" in mode:
                start = min(max(start, 0), room)
            if not 0 <= start <= room:
                return [x]  # dropped as a whole
            tests += [_Range(dim, start)] if room else []
        elif box.shape[dim] == 1 and moving:
            column = _index_column(indices, k, x.ndim, batch)
            if "CLIP" in mode:
                column = lax.clamp(np.int32(0), column, np.int32(room))
            tests.append(_At(dim, column))
        else:
            return None
    return [_updated(x, box, tests, name)]


def _box(x, update, dn, batch: dict[int, int]):
    """The update with one dimension per dimension of x: 1 where the window is one element wide."""
    scatter_dims = [dim for dim in range(update.ndim) if dim not in dn.update_window_dims]
    windows = iter(dn.update_window_dims)
    dims = []
    for axis in range(x.ndim):
        if axis in batch:
            dims.append(scatter_dims[batch[axis]])
        elif axis not in dn.inserted_window_dims:
            dims.append(next(windows))
    dropped = [dim for dim in range(update.ndim) if dim not in dims]
    squeezed = lax.squeeze(lax.transpose(update, (*dims, *dropped)), range(len(dims), update.ndim))
    return lax.expand_dims(
        squeezed, [dim for dim in range(x.ndim) if dim in dn.inserted_window_dims]
    )


def _index_column(indices, entry: int, rank: int, batch: dict[int, int]):
    """Entry `entry` of every index vector as an i32 array of `rank` dimensions, of size 1 except batch dimensions."""
    column = lax.index_in_dim(indices, entry, indices.ndim - 1, keepdims=False)
    if column.dtype != np.int32:
        column = lax.convert_element_type(column, np.int32)
    dims = list(batch.values())
    column = lax.squeeze(
        lax.transpose(column, (*dims, *(axis for axis in range(column.ndim) if axis not in dims))),
        range(len(dims), column.ndim),
    )
    return lax.expand_dims(column, [axis for axis in range(rank) if axis not in batch])
