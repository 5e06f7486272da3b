"""Requests of one program, grid, Machine -> seconds, with the terms that explain them. Formulas only; no choices.

A kernel takes the longer of its arithmetic (equation.py) and its traffic, plus a part of the shorter, since they overlap.
Traffic has two parts: every array once from memory (or L3, if it fits), and blocks that other programs read again from the
caches. Values between equations are in a core's scratch: beyond L1 or L2, they pay for the trips.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from jax.extend import core as jex

from pbkern.core.machine import Machine
from pbkern.core.ops.scatter import SCATTERS
from pbkern.fuse.access.blocks import Requests, Step, volume
from pbkern.fuse.access.rules import Access
from pbkern.fuse.access.scatter import share

from .equation import LOOKUPS, SINGLE_PASS, VIEWS, Price, is_heavy, itemsize, nbytes, price_of

# The part of the shorter of arithmetic and traffic that does not overlap with the longer one.
UNOVERLAPPED = 0.25
# How many of a program's stored values are live at once; the largest ones count.
LIVE_VALUES = 3
# Heavy values (equation.py) are not computed more often than this, operations done over operations needed,
RECOMPUTE_LIMIT = 1.3
# unless they reduce what a nearest cache holds, as the partial results of a sum, and all of that takes this part of the
# kernel's time at most.
REPEATED_SHARE = 0.02
# Fewer than two programs per core leave one core waiting for the other: the part of the time that is lost.
UNBALANCED = 0.05


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted time of one kernel.

    Attributes:
      seconds: all of it.
      compute, memory: arithmetic alone, traffic alone (seconds).
      bytes_moved: compulsory bytes, each array once.
      flops: operations done, repeated ones included.
      recompute: operations done / operations needed.
      working_set: bytes that one program touches.
      scratch: the part of the working set that is values between equations.
      programs: grid size.
      limit: the machine's limit for this kernel's compulsory work, from where the data can be at best (seconds).
    """

    seconds: float
    compute: float
    memory: float
    bytes_moved: int
    flops: float
    recompute: float
    working_set: int
    scratch: int
    programs: int
    limit: float

    @property
    def share_of_limit(self) -> float:
        return self.limit / self.seconds if self.seconds else 1.0


def far_bandwidth(size: int, machine: Machine) -> float:
    """Bandwidth of an array's first read: L3's if it is small enough to have stayed there, else DRAM's."""
    return machine.l3_bandwidth if size <= machine.l3_bytes // 4 else machine.dram_bandwidth


def traffic_limit(moved: int, machine: Machine) -> float:
    """Least seconds for so many bytes, each once: what caches can hold comes from there, call after call."""
    near = min(moved, machine.l2_bytes * machine.cores)
    middle = min(moved - near, machine.l3_bytes)
    far = moved - near - middle
    return near / machine.l2_bandwidth + middle / machine.l3_bandwidth + far / machine.dram_bandwidth


def evaluate(
    requests: Requests,
    outputs: Sequence[tuple[object, Access]],
    grid: Sequence[int],
    machine: Machine,
    parts: Mapping[object, float] = MappingProxyType({}),
    repeated_steps: Collection[int] = (),
) -> Cost | None:
    """Predicts one kernel; None where it computes a heavy value too often.

    `parts`: for values taken in chunks, the part of the block that a program holds at a time. `repeated_steps`: ids of
    equations that it computes twice.
    """  # fmt: skip
    programs = math.prod(grid)
    per_program = repeated = needed = done = 0.0
    priced = _Priced([(step, price_of(step, machine)) for step in requests.steps])
    stored = priced.stored_values({v for v, _ in outputs})
    evaluated = priced.evaluated_shares(outputs)
    temporaries, sizes = 0, []  # bytes of stored values: in all, and of each at a time
    tests: set = set()
    for step, price in priced.steps:
        if price.of_tests and tests.issuperset(price.read):
            # Part of a comparison of indices: lowering cuts code where it changes, and computes nothing.
            tests.update(step.eqn.outvars)
            continue
        share = evaluated.get(id(step), 1.0)
        seconds = price.seconds * share * (1 + (id(step.eqn) in repeated_steps))
        factor = price.part * programs * share
        if factor > RECOMPUTE_LIMIT and programs > 1 and is_heavy(step.eqn, machine):
            if step.eqn.primitive.name not in SINGLE_PASS or nbytes(step.eqn.invars[0].aval) > machine.l1_bytes // 2:
                return None
            repeated += seconds
        per_program += seconds + price.packing
        operations = price.operations * programs * share
        done += operations
        needed += operations / max(factor, 1.0)  # of a value that is needed in part, that part
        if not stored.isdisjoint(step.eqn.outvars):
            temporaries += price.block_bytes
            sizes.append(int(price.block_bytes * parts.get(step.eqn.outvars[0], 1)))
    rounds = math.ceil(programs / machine.cores)
    compute = rounds * per_program * (1 + UNBALANCED * (1 < programs < 2 * machine.cores))
    far, near, moved, blocks = _traffic(requests, outputs, grid, machine, priced.tables())
    scratch = sum(sorted(sizes)[-LIVE_VALUES:])
    blocks -= int(sum(volume(a) * itemsize(v) * (1 - parts[v]) for v, a in requests.inputs if v in parts))
    working_set = blocks + scratch
    trips = _scratch_trips(temporaries, working_set, blocks, machine) * programs
    parallel = min(programs, machine.cores) / machine.cores
    memory = (far + near + trips) / max(parallel, 0.6)
    overhead = machine.launch_seconds + rounds * machine.program_seconds
    seconds = max(compute, memory) + UNOVERLAPPED * min(compute, memory) + overhead
    if rounds * repeated > REPEATED_SHARE * seconds:
        return None
    if scratch > machine.l2_bytes:
        seconds += trips  # spilled values stall the nests that read them: nothing overlaps
    limit = max(sum(price.limit for _, price in priced.steps), traffic_limit(moved, machine))
    return Cost(
        seconds,
        compute,
        memory,
        moved,
        done,
        done / needed if needed else 1.0,
        working_set,
        scratch,
        programs,
        limit,
    )


@dataclass(frozen=True)
class _Priced:
    """The steps of a kernel, each with its price."""

    steps: list[tuple[Step, Price]]

    @cached_property
    def scatters(self) -> bool:
        return any(price.own_updates is not None for _, price in self.steps)

    def evaluated_shares(self, outputs: Sequence[tuple[object, Access]]) -> dict[int, float]:
        """id of a step -> the part of its block that a program evaluates, if not all: a scatter's own updates."""
        wanted = {v: 1.0 for v, _ in outputs}
        shares: dict[int, float] = {}
        for step, price in reversed(self.steps) if self.scatters else ():
            made = step.eqn.outvars
            share = max([wanted.get(v, 0.0) for v in made], default=1.0) if price.light else 1.0
            shares[id(step)] = share
            for v in price.read:
                part = share * price.own_updates if price.own_updates is not None and v is step.eqn.invars[2] else share
                if part > wanted.get(v, 0.0):
                    wanted[v] = part
        return shares

    def stored_values(self, results: set) -> set:
        """Values that a program keeps in scratch.

        Lowering merges equal iteration spaces into one nest: a value is stored only where a consumer reads it in
        another order or from several places (windows, contractions, reductions, shifted slices).
        """
        moving = [(step.eqn, price) for step, price in self.steps if not price.in_place]
        stored = {v for e, price in moving if price.own_updates is not None for v in e.outvars if v not in results}
        if not moving:
            return stored
        makers = {v: step.eqn for step, _ in self.steps for v in step.eqn.outvars}
        readers = Counter(a for _, price in self.steps for a in price.read)
        chosen_by = self.index_values()
        for e, price in moving:
            name = e.primitive.name
            if name == "concatenate" and e.outvars[0] in chosen_by:
                continue  # each index vector is read entry by entry
            once = name in SINGLE_PASS or price.own_updates is not None
            for atom in price.read:
                if once and readers[atom] == 1:
                    continue  # reduced or scattered while it is computed
                while not isinstance(atom, jex.Literal) and atom in makers:
                    maker = makers[atom]
                    if maker.primitive.name not in VIEWS or not maker.invars:
                        stored.add(atom)
                        break
                    atom = maker.invars[0]  # a view of what is stored
        return stored

    def index_values(self) -> set:
        """Indices of scatters, and the values they are computed from by arithmetic and views."""
        found: set = set()
        for step, price in reversed(self.steps) if self.scatters else ():
            if price.own_updates is not None:
                found.add(step.eqn.invars[1])
            elif price.light and not found.isdisjoint(step.eqn.outvars):
                found.update(price.read)
        return found

    def tables(self) -> set:
        """Values that a program looks up, or scatters."""
        return {price.table for _, price in self.steps if price.table is not None}


def _scratch_trips(temporaries: int, working_set: int, blocks: int, machine: Machine) -> float:
    """Seconds that a program's stored values take to a cache and back: the larger they are, the further away."""
    if working_set <= machine.l1_bytes:
        return 0.0
    if working_set > machine.l2_bytes:
        return (2.0 * temporaries + 0.3 * blocks) / machine.l3_bandwidth
    # Nests share outer loops: one step's part of a value is often all that is stored.
    return (0.1 + working_set / machine.l2_bytes) * (temporaries + 0.3 * blocks) / machine.l2_bandwidth


def tables(requests: Requests, machine: Machine) -> set:
    """Values that a program looks up, or scatters."""
    return _Priced([(step, price_of(step, machine)) for step in requests.steps]).tables()


def elements_read(requests: Requests, v, access: Access, among: Collection) -> int:
    """Elements of an input that one program reads: of a table, only those that it looks up. `among`: tables."""
    if v not in among:
        return volume(access)
    looked_up = [s for s in requests.steps if s.eqn.primitive.name in LOOKUPS and s.eqn.invars[0] is v]
    scattered = [s for s in requests.steps if s.eqn.primitive.name in SCATTERS and s.eqn.invars[2] is v]
    readers = [s for s in requests.steps if any(a is v for a in s.eqn.invars)]
    if scattered and len(scattered) == len(readers):
        return math.ceil(volume(access) * min(1.0, sum(share(s.eqn, s.out) for s in readers)))
    if len(looked_up) < len(readers) or any(a is v for s in readers for a in s.eqn.invars[1:]):
        return volume(access)
    return min(volume(access), sum(volume(s.out) for s in looked_up))


def _line_waste(access: Access, shape: Sequence[int], size: int) -> float:
    """Bytes moved per byte used: short contiguous runs waste parts of cache lines and of DRAM bursts.

    At most, what is between the runs is moved as well: for every second element, both.
    """
    run, between, least = size, 1.0, math.inf
    for s, n in zip(reversed(access), reversed(shape)):
        if 0 < s.size != n:
            part = run * s.size
            least = min(least, between * max(256 / part, 1 + 128 / part))
            between *= n / s.size
        run *= n
    return min(least, between)


def _covered(access: Access, grid: Sequence[int], shape: Sequence[int]) -> int:
    """Elements of the part of an array that the blocks of all programs cover."""
    found = 1
    for s, extent in zip(access, shape):
        low, high = s.start.bounds(grid.__getitem__)
        found *= max(min(high + s.size, extent) - max(low, 0), 0)
    return found


def _traffic(requests, outputs, grid, machine, looked_up: Collection) -> tuple[float, float, int, int]:
    """(seconds from far, seconds of repeated reads, compulsory bytes, bytes of one program's blocks)."""
    programs, last = math.prod(grid), len(grid) - 1
    far = near = 0.0
    moved = blocks = 0
    for v, access in requests.inputs:
        size, block = nbytes(v.aval), elements_read(requests, v, access, looked_up) * itemsize(v)
        waste = _line_waste(access, v.aval.shape, itemsize(v))
        total = int(block * programs * waste)
        read = int(_covered(access, grid, v.aval.shape) * itemsize(v) * waste)  # a slice moves only its part
        once = min(size, read, total)  # overlap and half-used lines come from caches
        far += once / far_bandwidth(size, machine)
        # Programs run along the last grid axis first: what does not depend on it is still in L2.
        stays = not any(s.start.coefficient(last) for s in access) and block <= machine.l2_bytes // 2
        near += (total - once) / (machine.l2_bandwidth if stays else machine.l3_bandwidth)
        moved, blocks = moved + once, blocks + block
    for v, access in outputs:
        size = nbytes(v.aval)
        # A store reads its line first.
        far += 2 * size / far_bandwidth(size, machine)
        moved, blocks = moved + size, blocks + volume(access) * itemsize(v)
    return far, near, moved, blocks
