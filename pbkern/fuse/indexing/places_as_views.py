"""ClosedJaxpr -> the same with gathers at known places made of slices, reshapes and broadcasts; sums at known places likewise.

    x[iota(n) * 2 + 1]                 ->  slice(x, step 2)
    x[[0, 0, 1, 1, 2, 2]]              ->  reshape(broadcast_in_dim(x, (3, 2, m)), (6, m))
    x[[0, 2, 3, 5, 6, 8]]              ->  reshape(slice(reshape(x, (3, 3, m)), step 2), (6, m))
    x.at[[0, 0, 1, 1]].add(y)          ->  x + reduce_sum(reshape(y, (2, 2, m)), 1)

Places that are the steps of one loop are slices. Those of few nested loops are views whose dimensions are joined last: only
results become these, as joined dimensions of other values have no affine index, and are stored. Sums at known places are the
transposes of gathers. The same values bit by bit, but for the order of sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.walks import primitive_names
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.gather import batch_dims
from pbkern.core.passes import threshold
from pbkern.fuse.simplify.driver import retrace
from pbkern.fuse.simplify.rewrites import reduce_units

from .known_numbers import KnownNumbers, leads_to
from .repeat_to_broadcast import only_moved

# Equations whose second operand is places.
LOOKUPS = ("gather", "scatter-add")
# A loop of places: how many there are, and how far apart.
Loop = tuple[int, int]
# Sizes of the dimensions of an array that stand for one of a shape.
Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class PlacesAsViews:
    """Rewrites gathers and sums whose places are known."""

    most_places: int = threshold(
        16384,
        "places along a dimension that are looked at: time of compilation. An image has fewer rows",
    )
    most_loops: int = threshold(
        3, "nested loops that places along a dimension are steps of: repeats of strides are two"
    )

    def __call__(self, closed: jex.ClosedJaxpr, options) -> jex.ClosedJaxpr:
        if primitive_names(closed).isdisjoint(LOOKUPS) or not leads_to(closed.jaxpr, _looks_up, 1):
            return closed
        views = _Views(self, {*only_moved(closed.jaxpr, ("reshape", "broadcast_in_dim"))})
        rules = views.known.rules() | {"gather": views.gathered}
        if options.unsafe:
            rules["scatter-add"] = views.summed
        return retrace(closed, rules, views.known.note_constant)


def _looks_up(eqn) -> bool:
    return eqn.primitive.name in LOOKUPS


class _Views:
    """Views that stand for gathers, while equations are bound again.

    only_moved: values that become results without arithmetic.
    """

    def __init__(self, limits: PlacesAsViews, only_moved: set) -> None:
        self.limits, self.only_moved = limits, only_moved
        self.known = KnownNumbers(limits.most_places)

    def column(self, indices, entry: int) -> np.ndarray | None:
        """Entry `entry` of every index vector, without the last dimension."""
        if maker := self.known.notes.find("made", indices):
            eqn, pieces = maker
            if (
                eqn.primitive.name == "concatenate"
                and eqn.params["dimension"] == indices.ndim - 1
                and all(piece.shape[-1] == 1 for piece in pieces)
            ):
                indices, entry = pieces[entry], 0
        numbers = self.known.numbers(indices)
        return None if numbers is None else numbers[..., entry]

    def picks(self, indices, dims: Sequence[int], shape: Sequence[int]) -> list[tuple] | None:
        """For each dimension of an array that is looked up: (it, places in it, dimensions of the indices that they go along).

        None where places are not known or outside, or where two dimensions go along the same one of the indices.
        """
        picks = []
        for entry, dim in enumerate(dims):
            column = self.column(indices, entry)
            if column is None or not column.size or column.dtype.kind not in "iu":
                return None
            along = [axis for axis in range(column.ndim) if _varies(column, axis)]
            places = column[
                tuple(slice(None if axis in along else 1) for axis in range(column.ndim))
            ]
            if places.size > self.limits.most_places:
                return None
            if places.min() < 0 or places.max() >= shape[dim]:
                return None
            picks.append((dim, places.reshape(-1).astype(np.int64), along))
        gone_along = [axis for _, _, along in picks for axis in along]
        return picks if len({*gone_along}) == len(gone_along) else None

    def gathered(self, eqn, operands) -> list | None:
        x, indices = operands
        dn, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        if not _looks_up_whole_rows(
            x.shape, sizes, dn.start_index_map, dn.collapsed_slice_dims, dn.operand_batching_dims
        ):
            return None
        picks = self.picks(indices, dn.start_index_map, x.shape)
        if picks is None:
            return None
        out = eqn.outvars[0].aval.shape
        view = self.view(picks, x.shape, out, batch_dims(eqn))
        if view is None:
            return None
        # Loops along one dimension are joined last, so that a gather along another one adds to the
        # same view.
        parts, groups = self.known.notes.find("view", x) or (x, _groups(x.shape))
        if any(len(groups[dim]) > 1 for dim, _, _ in picks):
            parts, groups = x, _groups(x.shape)
        parts, groups = view(parts, groups)
        if eqn.outvars[0] in self.only_moved or all(len(group) == 1 for group in groups):
            value = lax.reshape(parts, out)
        else:
            value = eqn.primitive.bind(x, indices, **eqn.params)
        return self.known.notes.note("view", value, parts, groups)

    def summed(self, eqn, operands) -> list | None:
        """x with updates added at known places: the gather there would be linear, and this is its transpose."""
        x, indices, updates = operands
        dn = eqn.params["dimension_numbers"]
        windows = dn.update_window_dims
        sizes = [1] * x.ndim
        rest = [dim for dim in range(x.ndim) if dim not in dn.inserted_window_dims]
        if dn.operand_batching_dims or len(rest) != len(windows):
            return None
        for dim, axis in zip(rest, windows):
            sizes[dim] = updates.shape[axis]
        if not jax.numpy.issubdtype(x.dtype, np.floating) or not _looks_up_whole_rows(
            x.shape, sizes, dn.scatter_dims_to_operand_dims, dn.inserted_window_dims, ()
        ):
            return None
        picks = self.picks(indices, dn.scatter_dims_to_operand_dims, x.shape)
        if picks is None:
            return None
        loops = [axis for axis in range(updates.ndim) if axis not in windows]
        view = self.view(picks, x.shape, updates.shape, loops)
        if view is None:
            return None

        def read(x):
            parts, _ = view(x, _groups(x.shape))
            return lax.reshape(parts, updates.shape)

        transposed = jax.linear_transpose(read, jax.ShapeDtypeStruct(x.shape, x.dtype))
        sums = jax.make_jaxpr(transposed)(jax.ShapeDtypeStruct(updates.shape, updates.dtype))
        # Transposes of broadcasts sum over no dimension where all are an operand's.
        (added,) = jex.jaxpr_as_fun(retrace(sums, {"reduce_sum": reduce_units}))(updates)
        return [lax.add(x, added)]

    def view(
        self, picks: Sequence[tuple], shape: Sequence[int], out: Sequence[int], batch: Sequence[int]
    ) -> Callable | None:
        """A function that reads an array of `shape` at places that are steps of few loops; None for others.

        Array and result may have several dimensions for one of `shape` and of `out`: it takes and gives (array, sizes of
        these for each dimension).
        batch: dimensions of the result that the indices' dimensions are.
        """
        readers = {}
        for dim, places, along in picks:
            start, loops = loops_of(places) or (0, None)
            if loops is None or len(loops) > self.limits.most_loops:
                return None
            read_loops = _reader(shape[dim], start, loops)
            if read_loops is None:
                return None
            axes = [batch[axis] for axis in along]
            counts = [count for count, _ in loops]
            readers[dim] = read_loops, axes, [counts] if len(axes) == 1 else _groups(out, axes)
        rest = [axis for axis in range(len(out)) if axis not in batch]

        def read(x, groups: Groups):
            axes_left = iter(rest)
            sizes_at: dict[int, Sequence[int]] = {}
            order: list[int] = []
            for dim, group in enumerate(groups):
                at = len(order)
                if dim in readers:
                    read_loops, axes, new = readers[dim]
                    after = x.shape[at + 1 :]
                    x = read_loops(x, at)
                    x = lax.reshape(x, (*x.shape[:at], *itertools.chain(*new), *after))
                else:
                    axes, new = [next(axes_left)], [[*group]]
                for axis, sizes in zip(axes, new):
                    sizes_at[axis] = sizes
                    order += [axis] * len(sizes)
            x = _transposed(x, sorted(range(len(order)), key=order.__getitem__))
            new_groups = [sizes_at.get(axis, [size]) for axis, size in enumerate(out)]
            known = [axis in sizes_at for axis, sizes in enumerate(new_groups) for _ in sizes]
            places = [place for place, is_known in enumerate(known) if is_known]
            return lax.broadcast_in_dim(x, [*itertools.chain(*new_groups)], places), new_groups

        return read


def _groups(shape: Sequence[int], axes: Iterable[int] | None = None) -> list[list[int]]:
    """One size for each of a shape's dimensions."""
    return [[shape[axis]] for axis in (range(len(shape)) if axes is None else axes)]


def _varies(array: np.ndarray, axis: int) -> bool:
    """Whether elements differ along a dimension."""
    if array.shape[axis] == 1 or array.strides[axis] == 0:
        return False
    return bool((array != array.take([0], axis)).any())


def _looks_up_whole_rows(shape, sizes, looked_up, absent, batching) -> bool:
    """Whether windows are one element along each dimension that is looked up, and whole along others."""
    return (
        not batching
        and 0 not in shape
        and sorted(looked_up) == sorted(absent)
        and all(sizes[dim] == (1 if dim in looked_up else shape[dim]) for dim in range(len(shape)))
    )


def loops_of(places: np.ndarray) -> tuple[int, list[Loop]] | None:
    """(first place, loops from the outermost one) whose steps are the places, in order; None where there are no such loops.

    [4, 5, 6, 7] -> (4, [(4, 1)]); [0, 0, 3, 3] -> (0, [(2, 3), (2, 0)]).
    """
    loops: list[Loop] = []
    while len(places) > 1:
        steps = np.diff(places)
        length = 1 + int(np.argmax(steps != steps[0]) if (steps != steps[0]).any() else len(steps))
        if len(places) % length:
            return None
        rows = places.reshape(-1, length)
        if (rows - rows[:, :1] != rows[0] - rows[0, 0]).any():
            return None
        loops.insert(0, (length, int(steps[0])))
        places = rows[:, 0]
    return int(places[0]), loops


def _reader(size: int, start: int, loops: Sequence[Loop]) -> Callable | None:
    """(array, dimension of this size) -> the array with a dimension per loop in its place; None where no slices are its steps.

    All steps of smaller loops are to be between two steps of the larger ones.
    """
    upward, downward = [], []
    for number, (count, step) in enumerate(loops):
        if step < 0:
            start, step = start + (count - 1) * step, -step
            downward.append(number)
        upward.append((count, step))
    moving = sorted(
        (number for number, (_, step) in enumerate(upward) if step),
        key=lambda number: -upward[number][1],
    )
    cuts: list[tuple[int, Loop]] = []  # (first element of a slice of this many blocks, loop)
    for position, number in enumerate(moving):
        count, step = upward[number]
        if position == len(moving) - 1:
            cuts.append((start, (count, step)))
            break
        reach = 1 + sum(
            (upward[inner][0] - 1) * upward[inner][1] for inner in moving[position + 1 :]
        )
        lowest, highest = max(0, start + reach - step), min(start, size - count * step)
        if lowest > highest:
            return None
        cuts.append((highest, (count, step)))
        start, size = start - highest, step

    def read(x, dim: int):
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        if not cuts:
            x = lax.index_in_dim(x, start, dim, keepdims=False)
        counts: list[int] = []
        for first, (count, step) in cuts:
            at = dim + len(counts)
            if len(counts) == len(cuts) - 1:
                x = _sliced(x, first, first + (count - 1) * step + 1, step, at)
            else:
                x = _sliced(x, first, first + count * step, 1, at)
                x = lax.reshape(x, (*before, *counts, count, step, *after))
            counts.append(count)
        if downward:
            x = lax.rev(x, [dim + moving.index(number) for number in downward])
        order = sorted(range(len(moving)), key=moving.__getitem__)
        x = _transposed(
            x, [*range(dim), *(dim + k for k in order), *range(dim + len(moving), x.ndim)]
        )
        finer = (*before, *(count for count, _ in upward), *after)
        places = [*range(dim), *(dim + k for k in sorted(moving))]
        return lax.broadcast_in_dim(x, finer, [*places, *range(dim + len(loops), len(finer))])

    return read


def _sliced(x, first: int, end: int, step: int, dim: int):
    is_whole = (first, end, step) == (0, x.shape[dim], 1)
    return x if is_whole else lax.slice_in_dim(x, first, end, step, dim)


def _transposed(x, order: Sequence[int]):
    return x if [*order] == [*range(x.ndim)] else lax.transpose(x, order)
