"""Requests of one program, grid, Machine -> terms of the roofline (fuse/cost/roofline.py). Formulas only; no choices.

Arithmetic is that of step.py. Traffic has two parts: every array once from memory (or L3, if it
fits), and blocks read again by other programs from the caches. Values between equations live in a
core's scratch: once they outgrow L1 or L2 they pay for the trips.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from jax.extend import core as jex

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.machine import Machine
from pbkern.fuse.access.blocks import BlockRequests, volume
from pbkern.fuse.access.rules import Access
from pbkern.fuse.cost.kinds import SINGLE_PASS, is_heavy, itemsize, nbytes
from pbkern.fuse.cost.model import CostModel
from pbkern.fuse.cost.roofline import Terms
from pbkern.fuse.cost.steps import PricedSteps, covered, elements_read

# Stored values of one program that live at the same time.
LIVE_VALUES = 3
# Heavy values (fuse/cost/kinds.py) are not computed more often than this, operations done over
# operations needed, unless they reduce what a nearest cache holds, as the partial results of a sum.
RECOMPUTE_LIMIT = 1.3
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
    per_program = repeated = needed = done = 0.0
    priced = PricedSteps.of(requests, outputs, costs)
    stored, evaluated = priced.stored, priced.shares
    temporaries, sizes = 0, []  # bytes of stored values: all in all, and of each at a time
    streams = any(price.streams for _, price in priced.steps)
    tests: set = set()
    for step, price in priced.steps:
        if price.of_tests and tests.issuperset(price.read):
            # Part of a comparison of indices: code is cut where that changes, and nothing is
            # computed.
            tests.update(step.eqn.outvars)
            continue
        share = evaluated.get(id(step), 1.0)
        seconds = price.seconds * share * (1 + (id(step.eqn) in repeated_steps))
        factor = price.part * programs * share
        if factor > RECOMPUTE_LIMIT and programs > 1 and is_heavy(step.eqn, costs):
            if (
                step.eqn.primitive.name not in SINGLE_PASS
                or nbytes(step.eqn.invars[0].aval) > machine.l1_bytes // 2
            ):
                return None
            repeated += seconds
        per_program += seconds + price.packing
        operations = price.operations * programs * share
        done += operations
        needed += operations / max(factor, 1.0)  # of a value that is needed in part, that part
        if not stored.isdisjoint(step.eqn.outvars):
            part = parts.get(step.eqn.outvars[0], 1)
            # Chunks between products that stream their operands stay in registers.
            is_held = streams and part < 1 and not stores_parts
            temporaries += 0 if is_held else price.block_bytes
            sizes.append(int(price.block_bytes * part))
    traffic = _traffic(requests, outputs, grid, machine, priced.tables)
    scratch = sum(sorted(sizes)[-LIVE_VALUES:])
    blocks = traffic.blocks - int(
        sum(
            volume(access) * itemsize(var) * (1 - parts[var])
            for var, access in requests.inputs
            if var in parts
        )
    )
    working_set = blocks + scratch
    # Where copies of blocks, those of a transpose at least half of all, fit a core's part of near memory, what is stored
    # between steps has the rest.
    is_copied = traffic.has_halos or (2 * traffic.copied >= traffic.blocks > 0 and not temporaries)
    is_near = is_copied and traffic.copied <= machine.l2_bytes and not streams
    near = costs.near_bytes if is_near else machine.l2_bytes
    trips = _scratch_trips(temporaries, working_set, 0 if streams else blocks, near, machine)
    return Terms(
        arithmetic=per_program,
        repeated=repeated,
        reads=traffic.reads,
        stores=traffic.stores,
        rereads=traffic.rereads,
        trips=trips * programs,
        streams=streams,
        bytes_moved=traffic.moved,
        flops=done,
        recompute=done / needed if needed else 1.0,
        working_set=working_set,
        scratch=scratch,
        programs=programs,
        limit=max(
            sum(price.limit for _, price in priced.steps), traffic_limit(traffic.moved, machine)
        ),
        copied=traffic.copied,
    )


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


def _sector_waste(access: Access, shape: Sequence[int], size: int, machine: Machine) -> float:
    """Bytes of whole sectors per byte of a block, where threads move a vector register of neighbours at a time.

    Runs of a block begin at multiples of the least distance between them: rows whose length is no multiple of a sector
    begin in the middle of one. Each run of two registers and more then touches a sector more, others do with each access.
    """
    sector, step = machine.sector_bytes, machine.vector_bits // 8
    if not sector:
        return 1.0
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
      reads, stores, rereads, copied: see Terms.
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
    reads = stores = rereads = 0.0
    moved = blocks = copied = 0
    has_halos = False
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
        read = int(
            covered(access, grid, shape) * itemsize(var) * waste
        )  # slices leave the rest where it is
        once = min(size, read, total)  # overlap and half-used lines come from caches
        reads += once / far_bandwidth(size, machine)
        # Programs run along the last grid axis first: what does not depend on it is still in L2.
        stays = (
            not any(span.start.coefficient(last) for span in access)
            and block <= machine.l2_bytes // 2
        )
        rereads += (total - once) / (machine.l2_bandwidth if stays else machine.l3_bandwidth)
        moved, blocks = moved + once, blocks + block
        overlaps = volume(access) * programs > OVERLAP * covered(access, grid, shape)
        if any(span.start.terms for span in access) and (overlaps or _is_turned(access, outputs)):
            copied += block
            has_halos |= overlaps
    for var, access in outputs:
        size = nbytes(var.aval)
        stores += size / far_bandwidth(size, machine)
        waste = _sector_waste(access, var.aval.shape, itemsize(var), machine)
        rereads += (
            size * (waste - 1) / machine.l3_bandwidth
        )  # the shared cache joins parts of sectors
        moved, blocks = moved + size, blocks + volume(access) * itemsize(var)
    return _Traffic(reads, stores, rereads, copied, has_halos, moved, blocks)


def _is_turned(access: Access, outputs: Sequence[tuple[jex.Var, Access]]) -> bool:
    """Whether parts of an operand's rows follow a dimension of the first result that is not along its rows."""
    _, result = outputs[0]
    across = {symbol for span in result[:-1] for symbol in span.start.symbols}
    return bool(access) and not access[-1].start.symbols.isdisjoint(across)
