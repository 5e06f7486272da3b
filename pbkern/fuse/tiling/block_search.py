"""Group, CostModel -> Schedule: the block of every output and with it the grid. Never changes meaning.

One output, the root, is tiled; the other outputs follow its grid axes. Options per dimension depend
on the role that a probe with blocks of one element finds: lanes (contiguous), rows, columns, batch.
Coordinate descent in the cost model picks among them. Emission is fuse/emit/group_kernel.py, prices
are the target's (fuse/cost/model.py), options block_options.py.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jax.extend import core as jex

from pbkern.core.affine import Affine
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs import atoms
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.scatter import SCATTERS, ScatterForm
from pbkern.fuse.access.blocks import BlockRequests, Unfusable, request, request_more, volume
from pbkern.fuse.access.rules import Access, NeedsWhole, Span, whole
from pbkern.fuse.access.scatter import owned
from pbkern.fuse.access.windows_contractions import run_dimensions
from pbkern.fuse.cost.kinds import CONTRACTIONS, is_heavy
from pbkern.fuse.cost.model import Cost, CostModel
from pbkern.fuse.cost.sizes import Sizes
from pbkern.fuse.cost.steps import elements_read, tables

from .block_options import contraction_roles, even_cuts, multiples, options_of
from .online_analysis import FEWEST_CHUNK_COLUMNS, chunks_allowed, find
from .online_blocks import Blocks, at, overflow

if TYPE_CHECKING:
    from .time_skewing import Wavefront

# If halos multiply the work by more than this, or scratch outgrows L2, the descent starts again
# from square blocks. Source: not recorded.
HALO_RECOMPUTE = 1.1
# Elements of the blocks from which products are searched a second time, by the role of a dimension.
# Measured: docs/decisions/031-second-block-search.md.
TALL = {"row": 1024, "column": 128}
# Columns of a block that the second search finds are a multiple of this number, elements. Measured:
# docs/decisions/031-second-block-search.md.
TALL_TILE = 64
# Programs that touch more than this part of L2 take long reductions in chunks.
NEAR_CHUNK_SHARE = 0.5


@dataclass(frozen=True)
class Schedule:
    """Choices for one kernel, no code.

    Attributes:
      grid: programs per grid axis.
      blocks: block size per dimension of the root output.
      outputs: (value, access) of every result.
      requests: what one program reads and computes.
      cost: prediction.
      params: chosen fields of the target's CompilerParams, by name (fuse/emit/choices.py).
      aliases: (operand, result) pairs that share one array (fuse/partition/donation.py).
      wave: the wavefront that takes several steps of a loop, in place of blocks (time_skewing.py).
      loop: control flow that runs inside the kernel, a node of fuse/graph.py (fuse/partition/loops_in_kernels.py).
      online: how reductions over a long dimension are taken in chunks (online_analysis.py).
      semantics: per grid axis; fused kernels are parallel throughout.
    """

    grid: tuple[int, ...]
    blocks: tuple[int, ...]
    outputs: tuple[tuple[jex.Var, Access], ...]
    requests: BlockRequests
    cost: Cost
    params: tuple[tuple[str, object], ...] = ()
    aliases: tuple[tuple[int, int], ...] = ()
    wave: Wavefront | None = None
    loop: Any = None
    online: Blocks | None = None

    @property
    def semantics(self) -> tuple[str, ...]:
        return ("parallel",) * len(self.grid)

    def with_inputs_like(self, order: Sequence[jex.Var]) -> Schedule:
        """The schedule with its inputs in this order, after those that are not in it.

        Equal layers stay equal kernels: what one layer hands to the next comes before the weights,
        as the first argument of the first layer does.
        """
        places = {var: place for place, var in reversed([*enumerate(order)])}
        inputs = self.requests.inputs
        numbers = sorted(range(len(inputs)), key=lambda number: places.get(inputs[number][0], -1))
        if self.wave is not None or numbers == sorted(numbers):
            return self
        requests = BlockRequests(
            self.requests.hulls, self.requests.steps, [inputs[number] for number in numbers]
        )
        aliases = tuple((numbers.index(operand), result) for operand, result in self.aliases)
        return replace(self, requests=requests, aliases=aliases)


def _tile(
    shape: Sequence[int], blocks: Sequence[int]
) -> tuple[Access, tuple[int, ...], dict[int, int]]:
    """(access, grid, grid axis -> dimension) of an array cut into blocks."""
    access: list[Span] = []
    grid: list[int] = []
    dims: dict[int, int] = {}
    for axis, (size, block) in enumerate(zip(shape, blocks)):
        if block >= size:
            access.append(whole(size))
        else:
            dims[len(grid)] = axis
            access.append(Span(Affine.symbol(len(grid), block), block))
            grid.append(-(-size // block))
    return tuple(access), tuple(grid), dims


def _follow(
    var, eqns, placed: Sequence, shape_of_axis: Sequence[int], grid, requests: BlockRequests
) -> Access:
    """Another output's access under the root's grid. Raises Unfusable unless every axis splits it.

    `placed` are the outputs with accesses so far, the root first; `shape_of_axis` is the extent
    that each axis cuts.
    """
    shape = var.aval.shape
    for hull in requests.hulls.get(var, ()) if var in requests.hulls else ():
        at = {}
        for hull_dim, span in enumerate(hull):
            for axis, size in enumerate(grid):
                # The hull's own stride cuts this dimension into exactly as many blocks as the grid
                # has.
                step = span.start.coefficient(axis)
                if step > 0 and len(span.start.terms) == 1 and -(-shape[hull_dim] // step) == size:
                    at[hull_dim] = Span(Affine.symbol(axis, step), step)
        if (
            len(at)
            == len(grid)
            == len({next(iter(placed_span.start.symbols)) for placed_span in at.values()})
        ):
            return tuple(at.get(dim, whole(extent)) for dim, extent in enumerate(shape))
    by_axis = {
        next(iter(root_span.start.symbols)): root_span
        for root_span in placed[0][1]
        if root_span.start.terms
    }
    ways = [
        tuple(
            by_axis[dims.index(dim)] if dim in dims else whole(extent)
            for dim, extent in enumerate(shape)
        )
        for dims in itertools.permutations(range(len(shape)), len(grid))
        if all(shape[dim] == extent for dim, extent in zip(dims, shape_of_axis))
    ]
    if not ways:
        raise Unfusable("an output does not have every grid axis")
    return (
        min(ways, key=lambda access: _elements(eqns, [*placed, (var, access)]))
        if len(ways) > 1
        else ways[0]
    )


def _elements(eqns, placed: Sequence) -> float:
    """Elements that one program computes and reads: the more the outputs share, the fewer."""
    try:
        requests = request(eqns, placed)
    except NeedsWhole:
        return math.inf
    return sum(volume(step.out) for step in requests.steps) + sum(
        volume(hull) for _, hull in requests.inputs
    )


def schedule_at(
    eqns, outputs: Sequence, blocks: Sequence[int], machine: CostModel
) -> Schedule | None:
    """The schedule with the given root blocks; None where it repeats heavy work.

    Raises NeedsWhole (root dimensions).
    """
    requests, placed, grid = _requested(eqns, outputs, blocks)
    return priced(eqns, requests, placed, grid, blocks, machine)


def resized(eqns, model: Schedule, blocks: Sequence[int], run: int) -> Schedule:
    """The schedule with other root blocks, and `run` columns of online reductions at a time, but not another price.

    Raises NeedsWhole, Unfusable.
    """
    requests, placed, grid = _requested(eqns, [var for var, _ in model.outputs], blocks)
    runs = None
    if model.online is not None:
        runs = at(replace(model.online.online, run=run), placed)
        if runs is None:
            raise Unfusable("these chunks do not suit")
    other = Schedule(grid, tuple(blocks), tuple(placed), requests, model.cost, online=runs)
    ordered = other.with_inputs_like([var for var, _ in model.requests.inputs])
    return replace(ordered, aliases=model.aliases, params=model.params)


def _requested(
    eqns, outputs: Sequence, blocks: Sequence[int]
) -> tuple[BlockRequests, list[tuple[jex.Var, Access]], tuple[int, ...]]:
    """(requests, outputs with accesses, grid) with the given root blocks. Raises NeedsWhole (root dimensions)."""
    root = outputs[0]
    access, grid, axes = _tile(root.aval.shape, blocks)
    try:
        requests = request(eqns, [(root, access)])
        placed = [(root, access)]
        if len(outputs) > 1:
            extents = [root.aval.shape[axes[axis]] for axis in range(len(grid))]
            for output in outputs[1:]:
                placed.append((output, _follow(output, eqns, placed, extents, grid, requests)))
            requests = request(eqns, placed)
    except NeedsWhole as e:
        raise NeedsWhole(frozenset(axes[axis] for axis in e.axes), e.why, e.multiple) from None
    return requests, placed, grid


def schedule_more(eqns, current: Schedule, machine: CostModel) -> Schedule | None:
    """Schedules a group that took in some of `eqns`, all that it has now, like `schedule_at`.

    Its blocks are those that it had before. If the new equations only make what the others read,
    only their part is computed. Raises NeedsWhole.
    """
    before, computed = current.requests.equations, current.requests.computed
    more = [eqn for eqn in eqns if id(eqn) not in before]
    if len(more) + len(before) > len(eqns) or any(
        atom in computed for eqn in more for atom in atoms(eqn)
    ):
        return schedule_at(eqns, [var for var, _ in current.outputs], current.blocks, machine)
    requests = request_more(more, current.requests)
    return priced(eqns, requests, current.outputs, current.grid, current.blocks, machine)


def priced(
    eqns, requests: BlockRequests, placed: Sequence, grid, blocks, machine: CostModel
) -> Schedule | None:
    """The schedule with known requests, in chunks where that is better; None where the target refuses."""
    cost = machine.kernel_cost(requests, placed, grid)
    if cost is None:
        return None
    plain = Schedule(grid, tuple(blocks), tuple(placed), requests, cost)
    return (
        plain
        if cost.working_set <= NEAR_CHUNK_SHARE * machine.near_bytes
        else _in_runs(eqns, plain, machine)
    )


def _in_runs(eqns, plain: Schedule, machine: CostModel) -> Schedule:
    """Schedules long reductions run by run, if that is possible, and costs no more or scratch outgrows near memory."""
    online = find(eqns, [var for var, _ in plain.outputs], machine.sizes)
    runs = None if online is None else at(online, plain.outputs)
    if runs is None:
        return plain
    runs = _in_registers(runs, plain.outputs, machine.sizes)
    cost = machine.kernel_cost(
        plain.requests, plain.outputs, plain.grid, runs.parts(), runs.repeated()
    )
    if cost is None:
        return plain
    suits = cost.seconds <= plain.cost.seconds or plain.cost.scratch > machine.near_bytes
    return replace(plain, cost=cost, online=runs) if suits else plain


def _in_registers(runs: Blocks, outputs: Sequence, sizes: Sizes) -> Blocks:
    """Chunks so short that they fit where products by matrix instructions have them, or as short as can be.

    Scores are in registers, other operands in memory beside a core.
    """
    limits = sizes.held_words, sizes.held_bytes
    while sizes.held_words and runs.online.run // 2 >= FEWEST_CHUNK_COLUMNS:
        if runs.online.run > sizes.matrix_tiles[0] or not overflow(runs, *limits):
            break
        shorter = at(replace(runs.online, run=runs.online.run // 2), outputs)
        if shorter is None:
            break
        runs = shorter
    return runs


class _Least(dict):
    """Dimension of the root -> its blocks must be multiples of this many elements."""

    def whole(self, shape: Sequence[int]) -> set[int]:
        return {dim for dim, extent in self.items() if extent >= shape[dim]}

    def demand(self, error: NeedsWhole, dims: Iterable[int], shape: Sequence[int]) -> None:
        """Adds what an equation needs of `dims`.

        Raises Unfusable if that was known and did not help.
        """
        news = False
        for dim in dims:
            old = self.get(dim, 1)
            new = math.lcm(old, error.multiple) if error.multiple else shape[dim]
            new = shape[dim] if new == old or new >= shape[dim] or shape[dim] % new else new
            news, self[dim] = news or new != old, new
        if not news:
            raise Unfusable(error.why) from None


def _roles(eqns, root, machine: CostModel) -> tuple[_Least, dict[int, str], int]:
    """(least blocks of the root, dimension -> role in the group's contraction, elements under one)."""
    shape, least = root.aval.shape, _Least()
    while True:
        blocks = [least.get(dim, 1) for dim in range(len(shape))]
        access, grid, axes = _tile(shape, blocks)
        try:
            requests = request(eqns, [(root, access)])
            if not grid or machine.kernel_cost(requests, [(root, access)], grid) is not None:
                break
            repeated = _repeats(eqns, root, blocks, axes.values(), machine)
            least[repeated] = shape[repeated]
        except NeedsWhole as e:
            least.demand(e, [axes[symbol] for symbol in e.axes], shape)
    roles: dict[int, str] = {}
    for step in requests.steps:
        if step.eqn.primitive.name == "partial_reduce":
            # A chunk is one program's work, for each index of the dimensions before it.
            runs = step.out[
                : run_dimensions(*(step.eqn.params[key] for key in ("axis", "axes", "outer"))).stop
            ]
            roles.update({axes[symbol]: "run" for run in runs for symbol in run.start.symbols})
        if step.eqn.primitive.name in SCATTERS:
            for role, among in (
                ("scatter batch", ScatterForm.of(step.eqn).batch),
                ("owned", owned(step.eqn)),
            ):
                roles.update(
                    {axes[symbol]: role for dim in among for symbol in step.out[dim].start.symbols}
                )
    for step in reversed(requests.steps):
        if step.eqn.primitive.name in CONTRACTIONS and is_heavy(step.eqn, machine):
            names = contraction_roles(step.eqn, machine.sizes)
            if set(names) <= {"batch"}:
                continue  # sums along rows of an elementwise product
            for repeated, span in enumerate(step.out):
                for axis in span.start.symbols:
                    roles.setdefault(axes[axis], names[repeated])
            break
    if {"owned", "scatter batch"} & set(roles.values()):
        return least, roles, 1
    moving, looked_up = (
        [
            (var, hull)
            for var, hull in requests.inputs
            if any(hull_span.start.terms for hull_span in hull)
        ],
        tables(requests, [(root, access)], machine),
    )
    grain = max(
        (
            min(_own_elements(hull), elements_read(requests, var, hull, looked_up))
            for var, hull in moving
        ),
        default=1,
    )
    return least, roles, grain


def _repeats(eqns, root, blocks: Sequence[int], dims: Iterable[int], machine: CostModel) -> int:
    """A dimension along which a heavy value would be repeated: the last whose whole is enough, or the last of all."""
    dims = sorted(dims, reverse=True)
    products = any(eqn.primitive.name in CONTRACTIONS and is_heavy(eqn, machine) for eqn in eqns)
    for dim in dims if len(dims) > 1 and products else ():
        access, grid, _ = _tile(
            root.aval.shape,
            [root.aval.shape[axis] if axis == dim else block for axis, block in enumerate(blocks)],
        )
        try:
            if (
                machine.kernel_cost(request(eqns, [(root, access)]), [(root, access)], grid)
                is not None
            ):
                return dim
        except NeedsWhole:
            continue
    return dims[0]


def _own_elements(access: Access) -> int:
    """Elements of a block without its halo."""
    return math.prod(
        min(span.size, max(abs(coefficient) for _, coefficient in span.start.terms))
        if span.start.terms
        else span.size
        for span in access
    )


def root_first(outputs: Sequence) -> list:
    """Results in the order in which they are placed."""
    return sorted(
        outputs, key=lambda output: (-len(output.aval.shape), -math.prod(output.aval.shape))
    )


def search(
    eqns, outputs: Sequence, machine: CostModel, accept: Callable[[Cost], bool] | None = None
) -> Schedule:
    """The best schedule found, among those that `accept`, if given, takes. Raises Unfusable."""

    def at(blocks):
        schedule = schedule_at(eqns, outputs, blocks, machine)
        return (
            schedule if schedule is not None and (accept is None or accept(schedule.cost)) else None
        )

    def stored(blocks):
        """Schedules without chunks: scores stay in L2 and are not computed twice."""
        with chunks_allowed(False):
            schedule = at(blocks)
        return (
            schedule
            if schedule is not None and schedule.cost.scratch <= machine.near_bytes
            else None
        )

    outputs = root_first(outputs)
    root = outputs[0]
    least, roles, grain = _roles(eqns, root, machine)
    while True:
        options, target = _options(root, least, roles, machine, grain)
        try:
            best = _descend(at, options, target)
            if (
                best is None
                or best.cost.recompute > HALO_RECOMPUTE
                or best.cost.scratch > machine.scratch_bytes
            ):
                best = _better(
                    best,
                    _descend(at, options, _squarish(options, target, machine.sizes.square_side)),
                )
            side = machine.sizes.turned_side
            if best is not None and side and not roles and _is_turned(best):
                planes, _ = _options(root, least, roles, machine, grain, cuts_planes=True)
                best = _better(best, _descend(at, planes, _turned_blocks(best, side)))
            if best is not None and best.online is not None:
                best = _better(best, _descend(stored, options, target))
            best = best or _equal_cuts(at, options, root.aval.shape, least)
        except NeedsWhole as e:
            least.demand(e, e.axes, root.aval.shape)
            continue
        if best is None:
            raise Unfusable(
                "a heavy value would be computed several times, or one program would need too much memory"
            )
        return best


def _options(
    root: jex.Var,
    least: _Least,
    roles: Mapping[int, str],
    machine: CostModel,
    grain: int,
    cuts_planes: bool = False,
) -> tuple[list[list[int]], list[int]]:
    """See options_of; blocks are multiples of the least."""
    shape = array_aval(root).shape
    options, target = options_of(
        shape, least.whole(shape), roles, machine.sizes, grain, cuts_planes
    )
    return [multiples(option, least.get(axis, 1)) for axis, option in enumerate(options)], target


def _equal_cuts(
    at: Callable, options: list[list[int]], shape: Sequence[int], least: _Least
) -> Schedule | None:
    """The best of schedules with blocks of equal sizes, or else one program.

    The options then leave a last block that is mostly outside of the array: too much of a heavy
    value would be computed for nothing.
    """
    even = [
        multiples(even_cuts(size, option), least.get(axis, 1))
        for axis, (size, option) in enumerate(zip(shape, options))
    ]
    return _descend(at, even, [option[-1] for option in options]) or at(list(shape))


def tall_blocks(eqns, current: Schedule, machine: CostModel) -> Schedule | None:
    """Another descent for a group with a product, from blocks of many rows and few columns: rows are not copied for those.

    None if the group has no such dimensions, or if the descent ends at columns that do not fill
    register tiles.
    """
    outputs = [var for var, _ in current.outputs]
    root = outputs[0]
    least, roles, grain = _roles(eqns, root, machine)
    if not {"row", "column"} <= set(roles.values()) or current.online is not None:
        return None
    options, target = _options(root, least, roles, machine, grain)
    start = [TALL.get(roles.get(axis, ""), size) for axis, size in enumerate(target)]
    try:
        tall = _descend(lambda blocks: schedule_at(eqns, outputs, blocks, machine), options, start)
    except (NeedsWhole, Unfusable):
        return None
    columns = next(dim for dim, role in roles.items() if role == "column")
    return tall if tall is not None and tall.blocks[columns] % TALL_TILE == 0 else None


def _squarish(options: list[list[int]], target: Sequence[int], side: int) -> list[int]:
    """Another starting point: square blocks have the smallest halos."""
    free = [axis for axis, option in enumerate(options) if len(option) > 2][-2:]
    return [
        min(side, options[axis][-1]) if axis in free else size for axis, size in enumerate(target)
    ]


def _is_turned(schedule: Schedule) -> bool:
    """Whether the parts of an operand's rows that programs read follow a dimension of the root that is not along its rows."""
    _, access = schedule.outputs[0]
    outer = {symbol for span in access[:-1] for symbol in span.start.symbols}
    return any(hull and hull[-1].start.symbols & outer for _, hull in schedule.requests.inputs)


def _turned_blocks(schedule: Schedule, side: int) -> list[int]:
    """Root blocks of `side` elements along its own rows and along those of its operands."""
    root, access = schedule.outputs[0]
    moved = {
        symbol for _, hull in schedule.requests.inputs if hull for symbol in hull[-1].start.symbols
    }
    blocks, run = [1] * len(access), 1
    for dim in reversed(range(len(access))):
        if access[dim].start.symbols & moved:
            blocks[dim] = side
        else:
            blocks[dim] = -(-side // run)
        run *= min(blocks[dim], array_aval(root).shape[dim])
    return blocks


def _better(schedule: Schedule | None, rival: Schedule | None) -> Schedule | None:
    return min(
        (candidate for candidate in (schedule, rival) if candidate is not None),
        key=lambda candidate: candidate.cost.seconds,
        default=None,
    )


def _descend(at: Callable, options: list[list[int]], target: Sequence[int]) -> Schedule | None:
    """Coordinate descent from the options nearest to `target`, one step per dimension at a time."""
    place = [
        min(range(len(option)), key=lambda number: abs(option[number] - size))
        for option, size in zip(options, target)
    ]
    known: dict = {}

    def price(where) -> float:
        key = tuple(where)
        if key not in known:
            known[key] = at([option[index] for option, index in zip(options, key)])
        return known[key].cost.seconds if known[key] else math.inf

    best, improved = price(place), True
    while improved:
        improved = False
        for axis in range(len(options)):
            for step in (1, -1):
                while 0 <= place[axis] + step < len(options[axis]):
                    moved = [index + step * (other == axis) for other, index in enumerate(place)]
                    cost = price(moved)
                    if not (cost < best * 0.995 or (best == math.inf and cost == math.inf)):
                        break
                    place, best, improved = moved, min(cost, best), improved or cost < math.inf
    return known[tuple(place)]


# Schedules priced per schedule that `alternatives` returns.
PRICED_PER_RESULT = 5


def alternatives(
    eqns, outputs: Sequence, blocks: Sequence[int], machine: CostModel, count: int
) -> list[Schedule]:
    """Up to `count` schedules, cheapest first by the model, around the one with the given root blocks.

    `outputs` as in Schedule.outputs. From the cheapest schedule seen so far, each dimension goes
    one option up and down.
    """
    least, roles, grain = _roles(eqns, outputs[0], machine)
    options, _ = _options(outputs[0], least, roles, machine, grain)
    options = [sorted({*option, block}) for option, block in zip(options, blocks)]
    start = tuple(option.index(block) for option, block in zip(options, blocks))
    known: dict[tuple[int, ...], Schedule] = {}
    waiting, seen = [(0.0, start)], {start}
    while waiting and len(seen) <= PRICED_PER_RESULT * count:
        _, place = heapq.heappop(waiting)
        for near in _neighbours(place, options):
            if near in seen and near != start:
                continue
            seen.add(near)
            try:
                candidate = schedule_at(
                    eqns, outputs, [option[index] for option, index in zip(options, near)], machine
                )
            except (NeedsWhole, Unfusable):
                continue
            if candidate is not None and near not in known:
                known[near] = candidate
                heapq.heappush(waiting, (candidate.cost.seconds, near))
    return sorted(known.values(), key=lambda schedule: schedule.cost.seconds)[:count]


def _neighbours(place: tuple[int, ...], options: list[list[int]]) -> list[tuple[int, ...]]:
    """The place itself, and those one option away in one dimension."""
    steps = [
        (axis, step)
        for axis, option in enumerate(options)
        for step in (1, -1)
        if 0 <= place[axis] + step < len(option)
    ]
    return [
        place,
        *(
            tuple(index + step * (other == dim) for other, index in enumerate(place))
            for dim, step in steps
        ),
    ]
