"""Schedule: the block of every result of one kernel, and with it the grid.

`schedule_at` makes the schedule for given blocks of one result, the root; the other results follow its grid axes.
block_search.py looks for the best blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jax.extend import core as jex

from pbkern.core.affine import Affine
from pbkern.core.jaxprs.walks import atoms
from pbkern.core.lazy_dataclass import dataclass
from pbkern.fuse.access.blocks import BlockRequests, Unfusable, request, request_more, volume
from pbkern.fuse.access.rules import Access, NeedsWhole, Span, whole
from pbkern.fuse.cost.model import Cost, CostModel
from pbkern.fuse.cost.sizes import Sizes

from .online_analysis import FEWEST_CHUNK_COLUMNS, find_online
from .online_blocks import OnlineBlocks, online_blocks, overflow

if TYPE_CHECKING:
    from .time_skewing import Wavefront

# Share of L2: programs that touch more than it take long reductions in chunks.
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
      loop: control flow that runs inside the kernel, a node of fuse/graph.py (fuse/partition/loop_kernels/)..
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
    online: OnlineBlocks | None = None

    @property
    def semantics(self) -> tuple[str, ...]:
        return ("parallel",) * len(self.grid)

    def with_inputs_like(self, places: Mapping[jex.Var, int]) -> Schedule:
        """The schedule with its inputs in the order of their places, after those that have none.

        Equal layers stay equal kernels: what one layer hands to the next comes before the weights,
        as the first argument of the first layer does.
        """
        inputs = self.requests.inputs
        numbers = sorted(range(len(inputs)), key=lambda number: places.get(inputs[number][0], -1))
        if self.wave is not None or numbers == sorted(numbers):
            return self
        requests = BlockRequests(
            self.requests.hulls, self.requests.steps, [inputs[number] for number in numbers]
        )
        aliases = tuple((numbers.index(operand), result) for operand, result in self.aliases)
        return replace(self, requests=requests, aliases=aliases)


def input_places(schedule: Schedule) -> dict[jex.Var, int]:
    """Input of a schedule -> its first place among them."""
    return {var: place for place, (var, _) in reversed([*enumerate(schedule.requests.inputs)])}


def tile(
    shape: Sequence[int], blocks: Sequence[int]
) -> tuple[Access, tuple[int, ...], dict[int, int]]:
    """Cuts an array into blocks.

    Args:
      shape: the array's.
      blocks: block size per dimension.

    Returns:
      (access of one program, number of programs per grid axis, grid axis -> dimension that it cuts).
    """
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
    var,
    eqns,
    placed: Sequence,
    shape_of_axis: Sequence[int],
    grid: Sequence[int],
    requests: BlockRequests,
) -> Access:
    """Another output's access under the root's grid. Raises Unfusable unless every axis splits it.

    Args:
      var: the output.
      eqns: the group's equations.
      placed: the outputs with accesses so far, the root first.
      shape_of_axis: the extent that each grid axis cuts.
      grid: number of programs per axis.
      requests: blocks of the group's values that the root's block needs.
    """
    shape = var.aval.shape
    for hull in requests.hulls.get(var, ()):
        access = _cut_like(hull, shape, grid)
        if access is not None:
            return access
    _, access_of_root = placed[0]
    span_of_axis = {
        next(iter(span.start.symbols)): span for span in access_of_root if span.start.terms
    }
    candidates = [
        tuple(
            span_of_axis[dims.index(dim)] if dim in dims else whole(extent)
            for dim, extent in enumerate(shape)
        )
        for dims in itertools.permutations(range(len(shape)), len(grid))
        if all(shape[dim] == extent for dim, extent in zip(dims, shape_of_axis))
    ]
    if not candidates:
        raise Unfusable("an output does not have every grid axis")
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda access: _elements(eqns, [*placed, (var, access)]))


def _cut_like(hull: Access, shape: Sequence[int], grid: Sequence[int]) -> Access | None:
    """Blocks of an array that lie where a hull of its elements starts.

    None unless the hull's stride along each grid axis cuts one dimension into as many blocks as the grid has.
    """
    cuts: dict[int, Span] = {}
    for dim, span in enumerate(hull):
        for axis, size in enumerate(grid):
            step = span.start.coefficient(axis)
            if step > 0 and len(span.start.terms) == 1 and -(-shape[dim] // step) == size:
                cuts[dim] = Span(Affine.symbol(axis, step), step)
    axes = {symbol for span in cuts.values() for symbol in span.start.symbols}
    if not len(cuts) == len(grid) == len(axes):
        return None
    return tuple(cuts.get(dim, whole(extent)) for dim, extent in enumerate(shape))


def _elements(eqns, placed: Sequence) -> float:
    """Elements that one program computes and reads for these outputs: the more they share, the fewer."""
    try:
        requests = request(eqns, placed)
    except NeedsWhole:
        return math.inf
    computed = sum(volume(step.out) for step in requests.steps)
    return computed + sum(volume(hull) for _, hull in requests.inputs)


def schedule_at(
    eqns, outputs: Sequence, blocks: Sequence[int], machine: CostModel
) -> Schedule | None:
    """The schedule with the given root blocks; None where it repeats heavy work.

    Raises NeedsWhole (root dimensions).
    """
    requests, placed, grid = _requested(eqns, outputs, blocks)
    return priced(eqns, requests, placed, grid, blocks, machine)


def resized(eqns, model: Schedule, blocks: Sequence[int], chunk_columns: int) -> Schedule:
    """The schedule with other root blocks and, where reductions are online, other chunks. It is not priced again.

    Raises NeedsWhole, Unfusable.
    """
    requests, placed, grid = _requested(eqns, [var for var, _ in model.outputs], blocks)
    chunks = None
    if model.online is not None:
        chunks = online_blocks(replace(model.online.online, chunk_columns=chunk_columns), placed)
        if chunks is None:
            raise Unfusable("these chunks do not suit")
    other = Schedule(grid, tuple(blocks), tuple(placed), requests, model.cost, online=chunks)
    ordered = other.with_inputs_like(input_places(model))
    return replace(ordered, aliases=model.aliases, params=model.params)


def _requested(
    eqns, outputs: Sequence, blocks: Sequence[int]
) -> tuple[BlockRequests, list[tuple[jex.Var, Access]], tuple[int, ...]]:
    """(requests, outputs with accesses, grid) with the given root blocks. Raises NeedsWhole (root dimensions)."""
    root = outputs[0]
    access, grid, axes = tile(root.aval.shape, blocks)
    try:
        requests = request(eqns, [(root, access)])
        placed = [(root, access)]
        if len(outputs) > 1:
            extents = [root.aval.shape[axes[axis]] for axis in range(len(grid))]
            for output in outputs[1:]:
                placed.append((output, _follow(output, eqns, placed, extents, grid, requests)))
            # Blocks that the root's program computes anyway ask for nothing more.
            if not all(requests.computes(output, block) for output, block in placed):
                requests = request(eqns, placed)
    except NeedsWhole as e:
        raise NeedsWhole(frozenset(axes[axis] for axis in e.axes), e.why, e.multiple) from None
    return requests, placed, grid


def schedule_more(eqns, current: Schedule, machine: CostModel) -> Schedule | None:
    """The schedule of a group that has grown, with the blocks that it had before, as `schedule_at` makes it.

    Only the requests of new equations are worked out, if no new equation reads a value of the others. Raises
    NeedsWhole.

    Args:
      eqns: all equations of the group, the new ones among them.
      current: the schedule before the group grew.
      machine: the target's prices.
    """
    before, computed = current.requests.equations, current.requests.computed
    more = [eqn for eqn in eqns if id(eqn) not in before]
    have_left = len(more) + len(before) > len(eqns)
    if have_left or any(atom in computed for eqn in more for atom in atoms(eqn)):
        return schedule_at(eqns, [var for var, _ in current.outputs], current.blocks, machine)
    requests = request_more(more, current.requests)
    return priced(eqns, requests, current.outputs, current.grid, current.blocks, machine)


def priced(
    eqns, requests: BlockRequests, placed: Sequence, grid, blocks, machine: CostModel
) -> Schedule | None:
    """The schedule with known requests, priced; in chunks where that is better. None where the target refuses."""
    cost = machine.kernel_cost(requests, placed, grid)
    if cost is None:
        return None
    plain = Schedule(grid, tuple(blocks), tuple(placed), requests, cost)
    if cost.working_set <= NEAR_CHUNK_SHARE * machine.near_bytes:
        return plain
    return _in_chunks(eqns, plain, machine) or plain


def _in_chunks(eqns, plain: Schedule, machine: CostModel) -> Schedule | None:
    """The schedule with long reductions taken chunk by chunk.

    None where that is impossible, or where it costs more and near memory holds the scratch of `plain`.
    """
    online = find_online(eqns, [var for var, _ in plain.outputs], machine.sizes)
    if online is None:
        return None
    online = replace(online, leaves_out_hidden=machine.sizes.leaves_out_hidden)
    chunks = online_blocks(online, plain.outputs)
    if chunks is None:
        return None
    chunks = _shortened(chunks, plain.outputs, machine.sizes)
    cost = machine.kernel_cost(
        plain.requests,
        plain.outputs,
        plain.grid,
        chunks.parts(),
        chunks.repeated(),
        stores_parts=not chunks.are_matrices(),
    )
    if cost is None:
        return None
    suits = cost.seconds <= plain.cost.seconds or plain.cost.scratch > machine.near_bytes
    return replace(plain, cost=cost, online=chunks) if suits else None


def _shortened(chunks: OnlineBlocks, outputs: Sequence, sizes: Sizes) -> OnlineBlocks:
    """Halves chunks of products by matrix instructions until registers hold the scores, and near memory the operands.

    FEWEST_CHUNK_COLUMNS ends it, too.
    """
    if not sizes.held_words:
        return chunks
    columns = chunks.online.chunk_columns
    while columns // 2 >= FEWEST_CHUNK_COLUMNS and columns <= sizes.matrix_tiles[0]:
        if not overflow(chunks, sizes.held_words, sizes.held_bytes):
            break
        shorter = online_blocks(replace(chunks.online, chunk_columns=columns // 2), outputs)
        if shorter is None:
            break
        chunks, columns = shorter, columns // 2
    return chunks
