"""Requests of one program, grid, Machine -> terms of the roofline (fuse/cost/roofline.py). Formulas only; no choices.

Arithmetic is that of step.py. Traffic has two parts: every array once from memory (or L3, if it
fits), and blocks read again by other programs from the caches. Values between equations live in a
core's scratch: once they outgrow L1 or L2 they pay for the trips.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from jax.extend import core as jex

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.machine import LINE_BYTES, STREAMED_RUN_BYTES, Machine
from pbkern.fuse.access.blocks import BlockRequests, Step, volume
from pbkern.fuse.access.rules import Access
from pbkern.fuse.cost.kinds import SINGLE_PASS, is_heavy, itemsize, nbytes
from pbkern.fuse.cost.model import CostModel, Price, price_of
from pbkern.fuse.cost.roofline import Terms
from pbkern.fuse.cost.steps import PricedSteps, covered, elements_read

# Stored values of one program that live at the same time.
LIVE_VALUES = 3
# Heavy values (fuse/cost/kinds.py) are not computed more often than this, operations done over
# operations needed, unless they reduce what a nearest cache holds, as the partial results of a sum.
RECOMPUTE_LIMIT = 1.3
# Times that a line that is stored in a block's run moves: it is read first.
STORE_STARTS = 2
# Times that all programs together read an element, on average, from which on their blocks overlap.
OVERLAP = 1.05


def far_bandwidth(size: int, machine: Machine) -> float:
    """Bandwidth of an array's place: L3 while it is small enough to have stayed there."""
    return machine.l3_bandwidth if size <= machine.l3_bytes // 4 else machine.dram_bandwidth


def traffic_limit(moved: int, machine: Machine) -> float:
    """Least seconds for so many bytes, each once: what caches can hold comes from there, call after call."""
    near = min(moved, machine.l2_bytes * machine.cores)
    middle = min(moved - near, machine.l3_bytes)
    far = moved - near - middle
    return (
        near / machine.l2_bandwidth + middle / machine.l3_bandwidth + far / machine.dram_bandwidth
    )


def kernel_terms(
    requests: BlockRequests,
    outputs: Sequence[tuple[jex.Var, Access]],
    grid: Sequence[int],
    machine: Machine,
    costs: CostModel,
    parts: Mapping[object, float] = MappingProxyType({}),
    repeated_steps: Collection[int] = (),
    stores_parts: bool = False,
) -> Terms | None:
    """Terms of a kernel; arguments as of CostModel.kernel_cost. `costs`: the prices of steps on this machine."""
    programs = math.prod(grid)
    is_new = requests.priced is None and requests.behind is None
    if is_new and _repeats_heavy_values(requests.steps, programs, machine, costs):
        return None
    priced = PricedSteps.of(requests, outputs, costs)
    totals = _totals(priced, programs, machine, costs, parts, repeated_steps, stores_parts)
    if totals is None:
        return None
    streams = totals.streams
    traffic = _traffic(requests, outputs, grid, machine, priced.tables)
    blocks = traffic.blocks - int(
        sum(
            elements_read(requests, var, access, priced.tables) * itemsize(var) * (1 - parts[var])
            for var, access in requests.inputs
            if var in parts
        )
    )
    temporaries, scratch = totals.temporaries, sum(totals.largest)
    working_set = blocks + scratch
    # Where copies of blocks, those of a transpose at least half of all, fit a core's part of near memory, what is stored
    # between steps has the rest.
    is_copied = traffic.has_halos or (2 * traffic.copied >= traffic.blocks > 0 and not temporaries)
    is_near = is_copied and traffic.copied <= machine.l2_bytes and not streams
    near = costs.near_bytes if is_near else machine.l2_bytes
    trips = _scratch_trips(temporaries, working_set, 0 if streams else blocks, near, machine)
    return Terms(
        arithmetic=totals.seconds,
        repeated=totals.repeated,
        reads=traffic.reads,
        stores=traffic.stores,
        rereads=traffic.rereads,
        trips=trips * programs,
        streams=streams,
        bytes_moved=traffic.moved,
        flops=totals.operations,
        recompute=totals.operations / totals.needed if totals.needed else 1.0,
        working_set=working_set,
        scratch=scratch,
        programs=programs,
        limit=max(totals.limit, traffic_limit(traffic.moved, machine)),
        copied=traffic.copied,
    )


def _repeats_heavy_values(
    steps: Sequence[Step], programs: int, machine: Machine, costs: CostModel
) -> bool:
    """Whether the work of these steps is certainly refused (`_totals`).

    Prices of single steps tell, unless programs evaluate parts of blocks. Sums over all steps take ten times as long.
    """
    if programs <= 1 or any(price_of(step, costs).own_updates is not None for step in steps):
        return False
    return any(repeats_heavy_value(step, programs, machine, costs) for step in steps)


def repeats_heavy_value(step: Step, programs: int, machine: Machine, costs: CostModel) -> bool:
    """Whether `programs` compute the same heavy value too often in this step, unless they evaluate parts of its block."""
    price = price_of(step, costs)
    return (
        price.part * programs > RECOMPUTE_LIMIT
        and not price.of_tests
        and _is_too_heavy(step.eqn, machine, costs)
    )


def _is_too_heavy(eqn, machine: Machine, costs: CostModel) -> bool:
    """Whether a value is not computed again and again: it is heavy, and reduces more than a nearest cache holds."""
    return is_heavy(eqn, costs) and (
        eqn.primitive.name not in SINGLE_PASS or nbytes(eqn.invars[0].aval) > machine.l1_bytes // 2
    )


def _computed(steps: Sequence[tuple[Step, Price]]) -> list[tuple[Step, Price]]:
    """The steps without comparisons of indices: code is cut where these change, and nothing is computed."""
    tests: set = set()
    computed = []
    for step, price in steps:
        if price.of_tests and tests.issuperset(price.read):
            tests.update(step.eqn.outvars)
        else:
            computed.append((step, price))
    return computed


@dataclass
class _Totals:
    """Sums over the steps of a kernel, from the last to the first: steps in front extend them.

    Attributes:
      seconds: of one program's work.
      repeated: those of them that compute heavy values which other programs compute too.
      operations: of all programs.
      needed: those of them that would do if no element were computed twice.
      temporaries: bytes that a program stores between its steps.
      largest: bytes of the largest of these values, as many as live at the same time.
      limit: see Price.
      streams: whether any step streams its operands.
    """

    seconds: float = 0.0
    repeated: float = 0.0
    operations: float = 0.0
    needed: float = 0.0
    temporaries: int = 0
    largest: tuple[int, ...] = ()
    limit: float = 0.0
    streams: bool = False

    def add_work(self, price: Price, seconds: float, factor: float, operations: float) -> None:
        """Adds a step's work; `factor`: elements that all programs compute over elements of the result."""
        self.seconds += seconds + price.packing
        self.operations += operations
        # Of a value that is needed in part, that part.
        self.needed += operations / max(factor, 1.0)
        self.limit += price.limit
        self.streams |= price.streams

    def add_stored(self, size: int, live: int) -> None:
        """Adds a value that is stored: its bytes, and those that are there at one time."""
        self.temporaries += size
        self.largest = tuple(sorted((*self.largest, live)))[-LIVE_VALUES:]


def _totals(
    priced: PricedSteps,
    programs: int,
    machine: Machine,
    costs: CostModel,
    parts: Mapping[object, float],
    repeated_steps: Collection[int],
    stores_parts: bool,
) -> _Totals | None:
    """Sums over all steps; None where programs repeat heavy values too often.

    Those of one program that takes no parts are remembered: groups of small arrays grow to thousands of equations, one by one.
    """
    is_remembered = programs == 1 and not parts and not repeated_steps
    if is_remembered and priced.totals is not None:
        return priced.totals
    totals, steps = _begun(priced) if is_remembered else (_Totals(), priced.steps)
    streams_parts = bool(parts) and not stores_parts and any(price.streams for _, price in steps)
    for step, price in reversed(_computed(steps)):
        share = priced.shares.get(id(step), 1.0)
        seconds = price.seconds * share * (1 + (id(step.eqn) in repeated_steps))
        factor = price.part * programs * share
        if factor > RECOMPUTE_LIMIT and programs > 1 and is_heavy(step.eqn, costs):
            if _is_too_heavy(step.eqn, machine, costs):
                return None
            totals.repeated += seconds
        totals.add_work(price, seconds, factor, price.operations * programs * share)
        if not priced.stored.isdisjoint(step.eqn.outvars):
            part = parts.get(step.eqn.outvars[0], 1)
            # Chunks between products that stream their operands stay in registers.
            is_held = streams_parts and part < 1
            totals.add_stored(0 if is_held else price.block_bytes, int(price.block_bytes * part))
    if is_remembered:
        priced.totals, priced.behind = totals, None
    return totals


def _begun(priced: PricedSteps) -> tuple[_Totals, list[tuple[Step, Price]]]:
    """(sums over the last steps of one program, the steps in front of these)."""
    if priced.behind is not None:
        before, front = priced.behind
        steps = priced.steps[:front]
        if _computed(steps) == steps:  # the comparisons behind them are as before
            return replace(before), steps
    return _Totals(), priced.steps


def _scratch_trips(
    temporaries: int, working_set: int, blocks: int, near: int, machine: Machine
) -> float:
    """Seconds of a program's stored values going to a cache and back: the larger, the further away.

    near: bytes of the memory beside a core that one program may have.
    """
    if working_set <= machine.l1_bytes:
        return 0.0
    if working_set > near:
        is_shared = working_set <= machine.l3_bytes
        bandwidth = machine.l3_bandwidth if is_shared else machine.dram_bandwidth
        return (2.0 * temporaries + 0.3 * blocks) / bandwidth
    # Nests share outer loops: one step's part of a value is often all that is stored.
    return (0.1 + working_set / near) * (temporaries + 0.3 * blocks) / machine.l2_bandwidth


def _line_waste(access: Access, shape: Sequence[int], size: int, run_bytes: int) -> float:
    """Bytes moved per byte used: short contiguous runs waste parts of cache lines and of DRAM bursts.

    At most, elements between runs are moved as well: of every second element, both.
    """
    run, between, least = size, 1.0, math.inf
    for dim, extent in zip(reversed(access), reversed(shape)):
        if 0 < dim.size != extent:
            part = run * dim.size
            least = min(least, between * max(256 / part, 1 + run_bytes / part))
            between *= extent / dim.size
        run *= extent
    return min(least, between)


def _slow_part(access: Access, aval, machine: Machine) -> float:
    """The part of an array's bytes that memory moves at half its bandwidth, as prefetchers do not follow their runs yet.

    Blocks of several runs, parts of rows, start a stream with each. A program that goes on where the one before it ended
    does not; nor does a slice of almost all of a row, nor what the last cache holds.
    """
    run = aval.dtype.itemsize
    if far_bandwidth(aval.size * run, machine) > machine.dram_bandwidth:
        return 0.0
    for axis in reversed(range(len(access))):
        dim = access[axis]
        run *= dim.size
        if dim.size != aval.shape[axis]:
            is_part = bool(dim.start.terms) and any(outer.size > 1 for outer in access[:axis])
            return min(machine.stream_bytes / run, 1.0) if is_part and run else 0.0
    return 0.0


def _store_seconds(access: Access, aval, machine: Machine) -> float:
    """Seconds that runs of a result, which begin and end inside cache lines, take beyond the result's bytes.

    Lines that two runs share move twice. In memory, short runs fill no lines past the caches: each line is read first.
    """
    size, item = nbytes(aval), aval.dtype.itemsize
    if machine.sector_bytes:  # the shared cache joins parts of sectors
        waste = _sector_waste(access, aval.shape, item, machine)
        return size * (waste - 1) / machine.l3_bandwidth
    run = _run_bytes(access, aval.shape, item)
    if run >= STREAMED_RUN_BYTES:
        return size * LINE_BYTES / run / machine.l3_bandwidth
    lines = _line_share(access, aval.shape, item, LINE_BYTES, 1)
    seconds = size * (lines - 1) / machine.l3_bandwidth
    bandwidth = far_bandwidth(size, machine)
    if lines > 1 and bandwidth == machine.dram_bandwidth:
        seconds += size / bandwidth
    return seconds


def _run_bytes(access: Access, shape: Sequence[int], size: int) -> int:
    """Bytes of neighbours in a block."""
    run = size
    for dim, extent in zip(reversed(access), reversed(shape)):
        run *= dim.size
        if dim.size != extent:
            break
    return run


def _sector_waste(access: Access, shape: Sequence[int], size: int, machine: Machine) -> float:
    """Bytes of whole sectors per byte of a block, where threads move a vector register of neighbours at a time."""
    if not machine.sector_bytes:
        return 1.0
    return _line_share(access, shape, size, machine.sector_bytes, machine.vector_bits // 8)


def _line_share(access: Access, shape: Sequence[int], size: int, sector: int, step: int) -> float:
    """Bytes of whole sectors (or cache lines) per byte of a block that is moved `step` bytes at a time.

    Runs of a block begin at multiples of the least distance between them: rows whose length is no multiple of a sector
    begin in the middle of one. Each run of two steps and more then touches a sector more, others do with each access.
    """
    run, stride, apart, first = size, size, sector, 0
    is_run = True  # so far, the block is one run of neighbours
    for dim, extent in zip(reversed(access), reversed(shape)):
        first += dim.start.const * stride
        distances = [coefficient * stride for _, coefficient in dim.start.terms]
        distances += [stride] if dim.size > 1 and not is_run else []
        apart = math.gcd(apart, *distances)
        if is_run:
            run, is_run = run * dim.size, dim.size == extent
        stride *= extent
    places = range(first % apart, sector, apart)
    # Threads begin long runs with whole sectors.
    step = run if run >= 2 * step else step
    pieces = [step] * (run // step) + ([run % step] if run % step else [])
    touched = sum(-(-(place + piece) // sector) for piece in pieces for place in places)
    return touched * sector / (len(places) * max(run, 1))


@dataclass(frozen=True)
class _Traffic:
    """Bytes between a kernel's programs and memory.

    Attributes:
      reads, stores, rereads, copied: see Terms. Starts of runs count as reads.
      has_halos: whether blocks that move with programs overlap.
      moved: compulsory bytes.
      blocks: bytes of one program's blocks.
    """

    reads: float
    stores: float
    rereads: float
    copied: int
    has_halos: bool
    moved: int
    blocks: int


def _traffic(requests, outputs, grid, machine, looked_up: Collection) -> _Traffic:
    programs, last = math.prod(grid), len(grid) - 1
    reads = stores = rereads = starts = 0.0
    moved = blocks = copied = 0
    has_halos = has_margins = False
    # Where parts of an operand's rows follow a dimension of the first result that is not along its rows, it is turned.
    across = {symbol for span in outputs[0][1][:-1] for symbol in span.start.symbols}
    for var, access in requests.inputs:
        size, block = (
            nbytes(var.aval),
            elements_read(requests, var, access, looked_up) * itemsize(var),
        )
        shape = var.aval.shape
        waste = max(
            _line_waste(access, shape, itemsize(var), machine.run_bytes),
            _sector_waste(access, shape, itemsize(var), machine),
        )
        total = int(block * programs * waste)
        reached = covered(access, grid, shape)
        read = int(reached * itemsize(var) * waste)  # slices leave the rest where it is
        once = min(size, read, total)  # overlap and half-used lines come from caches
        reads += once / far_bandwidth(size, machine)
        starts += once * _slow_part(access, var.aval, machine) / machine.dram_bandwidth
        if total > once:
            # Programs run along the last grid axis first: what does not depend on it is still in L2.
            stays = (
                not any(span.start.coefficient(last) for span in access)
                and block <= machine.l2_bytes // 2
            )
            rereads += (total - once) / (machine.l2_bandwidth if stays else machine.l3_bandwidth)
        moved, blocks = moved + once, blocks + block
        overlaps = volume(access) * programs > OVERLAP * reached
        moves = any(span.start.terms for span in access)
        if moves and (overlaps or not across.isdisjoint(access[-1].start.symbols)):
            copied += block
            has_halos |= overlaps
            has_margins |= any(_has_margin(span) for span in access)
    for var, access in outputs:
        size = nbytes(var.aval)
        stores += size / far_bandwidth(size, machine)
        starts += (
            STORE_STARTS * size * _slow_part(access, var.aval, machine) / machine.dram_bandwidth
        )
        rereads += _store_seconds(access, var.aval, machine)
        moved, blocks = moved + size, blocks + volume(access) * itemsize(var)
    # Blocks that do not reach into their neighbours are parts of rows where they have to be, as columns of products are.
    reads += starts if has_margins else 0.0
    return _Traffic(reads, stores, rereads, copied, has_halos, moved, blocks)


def _has_margin(span) -> bool:
    """Whether a block reaches into the next one along an axis."""
    return any(0 < step < span.size for _, step in span.start.terms)
