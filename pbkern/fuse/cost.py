"""Requests of one program, grid, Machine -> seconds, with the terms that explain them. Formulas only; no
choices.

A kernel takes the longer of its arithmetic and its traffic, plus a part of the shorter, which overlaps.
Traffic has two parts: every array once from memory (or L3, if it fits), and blocks read again by other
programs from the caches. Values between equations live in a core's scratch: once they outgrow L1 or L2 they
pay for the trips.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from jax.extend import core as jex

from ..machine import CONFLICT_BYTES, LINE_BYTES, ROW_REUSE, TURN_CYCLES, Machine
from ..scatter import SCATTERS
from ..sorting import first_cycles, line_cycles, sorts_in_registers
from .access import ELEMENTWISE, Access, block_shape
from .access_scatter import share
from .blocks import Requests, Step, volume

# Equations that only rename elements: they emit no code, or very little.
VIEWS = frozenset(
    "broadcast_in_dim reshape squeeze slice roll transpose rev iota concatenate continued pad copy stop_gradient".split()
)
CONTRACTIONS = frozenset(("dot_general", "conv_general_dilated"))
# Equations that read few elements of their first operand, at places that are data.
LOOKUPS = frozenset(("gather", "dynamic_slice"))

# Reductions that take each element once, in any order.
SINGLE_PASS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor partial_reduce".split()
)

# The part of the shorter of arithmetic and traffic that does not overlap with the longer one.
UNOVERLAPPED = 0.25
# Stored values of one program that live at the same time.
LIVE_VALUES = 3
# A value that costs this many operations per element is not computed again beyond RECOMPUTE_LIMIT.
HEAVY_OPERATIONS = 128
RECOMPUTE_LIMIT = 1.3
# ... unless it reduces what a nearest cache holds, as the partial results of a sum, and all of that takes this part of the
# kernel's time at most.
REPEATED_SHARE = 0.02
# What a reduction along rows takes for each row beside its elements: the lanes of a vector are added up.
ACROSS_CYCLES = 3.0
# Vector operations of putting two elements of a short line in order.
EXCHANGE_OPERATIONS = 6.0
# Registers, packing and edges: the part of peak that contractions of this design reach.
CONTRACTION_EFFICIENCY = 0.93
# Fewer than two programs per core leave one core waiting for the other: the part of the time that is lost.
UNBALANCED = 0.05
# Scatters, cycles: reading a number of an index vector and testing it, starting a window, a branch that goes the other way
# with the loads that wait for it. Of far updates: the next part of a row that other programs read the rest of, the next row
# where those between are skipped.
READ_INDEX_CYCLES = 2.0
WINDOW_CYCLES = 3.0
MISPREDICTED_CYCLES = 30.0
CUT_ROW_CYCLES = 75.0
SKIPPED_ROWS_CYCLES = 600.0


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
      scratch: the part of them that are values between equations.
      programs: grid size.
      limit: the machine's limit for this kernel's compulsory work (seconds).
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


def nbytes(aval) -> int:
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize


def itemsize(v) -> int:
    return np.dtype(v.aval.dtype).itemsize


def contracted_size(eqn) -> int:
    """Multiply-adds per output element of a contraction."""
    lhs, rhs = (a.aval.shape for a in eqn.invars[:2])
    if eqn.primitive.name == "dot_general":
        (lc, _), _ = eqn.params["dimension_numbers"]
        return math.prod(lhs[d] for d in lc)
    return math.prod(rhs) // max(rhs[eqn.params["dimension_numbers"].rhs_spec[0]], 1)


def operations_per_element(eqn, machine: Machine) -> float:
    """Vector operations per element of the first result."""
    name = eqn.primitive.name
    if name in VIEWS:
        return 0.0 if name not in ("transpose", "concatenate", "continued", "pad", "rev") else machine.cycles(name)
    out = max(math.prod(eqn.outvars[0].aval.shape), 1)
    if name in CONTRACTIONS:
        return 2.0 * contracted_size(eqn)
    if name.startswith("reduce_window"):
        return float(math.prod(eqn.params["window_dimensions"]))
    if (
        name.startswith("reduce_")
        and name != "reduce_precision"
        or name in ("argmax", "argmin", "partial_reduce")
    ):
        return machine.cycles(name) * math.prod(eqn.invars[0].aval.shape) / out
    if name in SCATTERS:
        return max(1.0, machine.cycles(name) * math.prod(eqn.invars[2].aval.shape) / out)
    if name == "integer_pow":
        return float(max(1, 2 * int(abs(eqn.params["y"])).bit_length() - 2))
    if name == "sort":
        length = eqn.outvars[0].aval.shape[eqn.params["dimension"]]
        if sorts_in_registers(length, eqn.params["num_keys"], len(eqn.invars)):
            return EXCHANGE_OPERATIONS * (length - 1) / 2
        cycles = line_cycles(length, [a.aval.dtype for a in eqn.invars], eqn.params["num_keys"])
        return cycles / max(length, 1) * machine.vector_bits / 32
    if name == "first_sorted":
        p = eqn.params
        shape = eqn.invars[0].aval.shape
        cycles = first_cycles(shape[p["dimension"]], p["first"], [a.aval.dtype for a in eqn.invars], p["num_keys"])
        return cycles / p["first"] * machine.vector_bits / 32
    return machine.cycles(name)


def is_heavy(eqn, machine: Machine) -> bool:
    """Is one element so dear that computing it twice is worse than storing it?"""
    name = eqn.primitive.name
    if name in SCATTERS:
        return True
    return (name in CONTRACTIONS or name.startswith("reduce_") or name in ("sort", "first_sorted")) and (
        operations_per_element(eqn, machine) >= HEAVY_OPERATIONS
    )


def _step_seconds(step: Step, machine: Machine) -> float:
    """Time of one step of one program on one core."""
    eqn, shape = step.eqn, block_shape(step.out)
    if eqn.primitive.name in SCATTERS:
        return _scatter_seconds(step, machine)
    operations = operations_per_element(eqn, machine) * math.prod(shape)
    if not operations:
        return 0.0
    dtype = np.dtype(eqn.outvars[0].aval.dtype)
    lanes = machine.lanes(dtype.itemsize)
    if eqn.primitive.name in CONTRACTIONS and contracted_size(eqn) >= 16:
        operand = np.dtype(eqn.invars[0].aval.dtype)
        seconds = operations / (machine.flops(operand.name) / machine.cores * CONTRACTION_EFFICIENCY)
        usual = seconds / _fill(_columns(eqn, shape), lanes)
        return min([usual, *_turned_seconds(step, seconds, lanes, machine)])
    extents, across = eqn.outvars[0].aval.shape, 0.0
    if eqn.primitive.name.startswith(("reduce_", "arg", "partial")) and eqn.params.get("axes"):
        results = math.prod(shape)
        shape, extents = block_shape(step.pull.inputs[0]), eqn.invars[0].aval.shape
        across = ACROSS_CYCLES * results * (len(extents) - 1 in eqn.params["axes"] and extents[-1] > 1)
    # Whole trailing dimensions run as one.
    run = 1
    for n, extent in zip(reversed(shape), reversed(extents)):
        run *= n
        if n != extent or run >= 4 * lanes:
            break
    fill = run / (math.ceil(run / lanes) * lanes)
    return (operations / lanes / fill + across) / machine.clock_hz


def _fill(columns: int, lanes: int) -> float:
    """The part of the lanes that so many elements use."""
    return max(columns, 1) / (math.ceil(max(columns, 1) / lanes) * lanes)


def _turned_seconds(step: Step, full: float, lanes: int, machine: Machine) -> list[float]:
    """A convolution with vectors along channels or images, where those are not its last dimension: the operand that they
    belong to is turned, and so are the results. `full`: the time of its arithmetic where all lanes are used."""
    if step.eqn.primitive.name != "conv_general_dilated":
        return []
    found, shape = [], block_shape(step.out)
    results = math.prod(shape)
    for operand, d in enumerate(step.eqn.params["dimension_numbers"].out_spec[:2]):
        if d < len(shape) - 1:
            columns = shape[d] // max(step.pull.params["feature_group_count"], 1) if operand else shape[d]
            turned = results + volume(step.pull.inputs[operand])
            found.append(full / _fill(columns, lanes) + TURN_CYCLES * turned / machine.clock_hz)
    return found


def _columns(eqn, shape: Sequence[int]) -> int:
    """Elements of one block of a contraction's result that vectors may run along."""
    if eqn.primitive.name != "dot_general":
        return max(shape[-1:] + shape[-2:-1] * (shape[-1] == 1))
    contracted, batch = eqn.params["dimension_numbers"]
    runs, at = [], len(shape)
    for side in (1, 0):
        extents = eqn.invars[side].aval.shape
        free = [d for d in range(len(extents)) if d not in contracted[side] and d not in batch[side]]
        at -= len(free)
        if side == 1 or free[-1:] == [len(extents) - 1]:  # of the first operand, columns are not gathered into panels
            runs.append(_joint_run(free, shape[at:], extents))
    return max(runs)


def _joint_run(dims: Sequence[int], block: Sequence[int], extents: Sequence[int]) -> int:
    """Elements of a block along the last of an operand's dimensions in which it has some, and those walked with it."""
    run = 1
    for k in reversed(range(len(dims))):
        run *= block[k]
        if run > 1 and (block[k] != extents[dims[k]] or k and dims[k - 1] != dims[k] - 1):
            break
    return run


def _scatter_seconds(step: Step, machine: Machine) -> float:
    """Time of one program's scatter: storing the operand, reading all indices, and the windows of its own updates."""
    eqn, (operand, indices, updates) = step.eqn, step.pull.inputs
    size = itemsize(eqn.outvars[0])
    vector = size * machine.lanes(size)
    windows = volume(indices[:-1])
    own = windows * share(eqn, step.out)
    window_bytes = volume(updates) / max(windows, 1) * size
    block_bytes = volume(operand) * size
    cycles = block_bytes / vector + windows * READ_INDEX_CYCLES * max(indices[-1].size, 1)
    others = 1 - own / max(windows, 1)
    cycles += 2 * own * others * MISPREDICTED_CYCLES  # whether an update belongs to a program cannot be foreseen
    cycles += own * (WINDOW_CYCLES + math.ceil(window_bytes / vector))
    if nbytes(eqn.invars[2].aval) > machine.l3_bytes // 4:
        is_cut = updates[-1].size < eqn.invars[2].aval.shape[-1]
        cycles += own * (CUT_ROW_CYCLES * is_cut + SKIPPED_ROWS_CYCLES * others)
    lines = own * math.ceil(window_bytes / LINE_BYTES)
    near = machine.l3_bandwidth if block_bytes <= machine.l3_bytes // 2 else machine.dram_bandwidth
    trips = 2 * LINE_BYTES * lines / (near / machine.cores) if block_bytes > machine.l2_bytes // 2 else 0.0
    return cycles / machine.clock_hz + trips


@dataclass(frozen=True, slots=True)
class _Price:
    """What one step costs one program, and what kind of step it is: most attempts to join groups share their steps.

    Attributes:
      seconds, packing: all but that of copies for contractions, and that.
      operations: of all its elements.
      part: the part of the result.
      limit: seconds of a contraction's operations at the machine's peak, each done once.
      block_bytes: of its first result.
      read: the variables that it reads.
      of_tests: whether comparisons of indices consist of such.
      in_place: whether it makes each element of elements at the same place, so that lowering needs no stored operands.
      light: whether it makes as many elements as it reads, or only renames them.
      own_updates: the part of a scatter's updates that the program reads; None for all other steps.
      table: what it looks up or scatters.
    """

    seconds: float
    packing: float
    operations: float
    part: float
    limit: float
    block_bytes: int
    read: tuple
    of_tests: bool
    in_place: bool
    light: bool
    own_updates: float | None
    table: object

    @classmethod
    def of(cls, step: Step, machine: Machine) -> _Price:
        eqn, name = step.eqn, step.eqn.primitive.name
        table = eqn.invars[0 if name in LOOKUPS else 2] if name in LOOKUPS or name in SCATTERS else None
        return cls(
            _step_seconds(step, machine),
            _packing_seconds(step, machine),
            operations_per_element(eqn, machine) * volume(step.out),
            recompute_of(step, 1),
            _limit_seconds(step, machine),
            volume(step.out) * itemsize(eqn.outvars[0]),
            tuple(a for a in eqn.invars if not isinstance(a, jex.Literal)),
            name in OF_TESTS,
            name in ELEMENTWISE or name in RENAMED,
            name in ELEMENTWISE or name in VIEWS,
            share(eqn, step.out) if name in SCATTERS else None,
            None if isinstance(table, jex.Literal) else table,
        )


def _price(step: Step, machine: Machine) -> _Price:
    """The step's, worked out once (blocks.py)."""
    if not isinstance(step.price, _Price):
        step.price = _Price.of(step, machine)
    return step.price


def recompute_of(step: Step, programs: int) -> float:
    full = math.prod(step.eqn.outvars[0].aval.shape)
    return programs * volume(step.out) / max(full, 1)


def far_bandwidth(size: int, machine: Machine) -> float:
    """Where an array comes from: L3 while it is small enough to have stayed there."""
    return machine.l3_bandwidth if size <= machine.l3_bytes // 4 else machine.dram_bandwidth


# Views whose elements are read where they are needed.
RENAMED = frozenset(("broadcast_in_dim", "iota", "reshape", "squeeze"))
# Operations that comparisons of indices, and combinations of those, consist of.
OF_TESTS = VIEWS | {"iota", "add", "sub", "convert_element_type", "ge", "gt", "le", "lt", "and", "or", "not", "select_n"}


def evaluate(
    requests: Requests,
    outputs: Sequence[tuple[object, Access]],
    grid: Sequence[int],
    machine: Machine,
    parts: Mapping[object, float] = MappingProxyType({}),
    repeated_steps: Collection[int] = (),
) -> Cost | None:
    """Predicts one kernel; None where it computes a heavy value too often.

    `parts`: how much of its block a program holds at a time, of values that it goes through in runs; `repeated_steps`: ids of
    equations that it computes twice.
    """  # fmt: skip
    programs = math.prod(grid)
    per_program = repeated = needed = done = 0.0
    priced = _Priced([(step, _price(step, machine)) for step in requests.steps])
    stored = priced.stored_values({v for v, _ in outputs})
    evaluated = priced.evaluated_shares(outputs)
    temporaries, sizes = 0, []  # bytes of stored values: all in all, and of each at a time
    tests: set = set()
    for step, price in priced.steps:
        if price.of_tests and tests.issuperset(price.read):
            # Part of a comparison of indices: code is cut where that changes, and nothing is computed.
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
        needed += operations / max(factor, 1e-9)
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
    limit = max(sum(price.limit for _, price in priced.steps), moved / machine.dram_bandwidth)
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

    steps: list[tuple[Step, _Price]]

    @cached_property
    def scatters(self) -> bool:
        return any(price.own_updates is not None for _, price in self.steps)

    def evaluated_shares(self, outputs: Sequence[tuple[object, Access]]) -> dict[int, float]:
        """id of a step -> the part of its block that a program evaluates, where that is not all: of updates that a scatter
        reads, its own.
        """
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
                continue  # each index vector is read one number at a time
            once = name in SINGLE_PASS or price.own_updates is not None
            for atom in price.read:
                if once and readers[atom] == 1:
                    continue  # reduced or scattered while it is made
                while not isinstance(atom, jex.Literal) and atom in makers:
                    maker = makers[atom]
                    if maker.primitive.name not in VIEWS or not maker.invars:
                        stored.add(atom)
                        break
                    atom = maker.invars[0]  # a view of what is stored
        return stored

    def index_values(self) -> set:
        """The indices of scatters, and what they are made of by arithmetic and views."""
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
    """Seconds of a program's stored values going to a cache and back: the larger, the further away."""
    if working_set <= machine.l1_bytes:
        return 0.0
    if working_set > machine.l2_bytes:
        return (2.0 * temporaries + 0.3 * blocks) / machine.l3_bandwidth
    # Nests share outer loops: one step's part of a value is often all that is stored.
    return (0.1 + working_set / machine.l2_bytes) * (temporaries + 0.3 * blocks) / machine.l2_bandwidth


def _packing_seconds(step: Step, machine: Machine) -> float:
    """Copies of a contraction's operands that one program makes, on one core.

    Rows whose length is a multiple of CONFLICT_BYTES fall into few cache sets and are copied for many columns, and columns
    of long rows are gathered into panels.
    """
    eqn = step.eqn
    if eqn.primitive.name != "dot_general" or not step.out or step.out[-1].size == 1:
        return 0.0
    (_, contracted), _ = eqn.params["dimension_numbers"]
    lhs, rhs = (a.aval.shape for a in eqn.invars)
    copied = 0
    if lhs[-1] * itemsize(eqn.invars[0]) % CONFLICT_BYTES == 0 and step.out[-1].size >= ROW_REUSE:
        copied += volume(step.pull.inputs[0]) * itemsize(eqn.invars[0])
    if len(rhs) - 1 in contracted or rhs[-1] * itemsize(eqn.invars[1]) >= CONFLICT_BYTES:
        copied += volume(step.pull.inputs[1]) * itemsize(eqn.invars[1])
    return 2 * copied / (machine.l3_bandwidth / machine.cores)


def _limit_seconds(step: Step, machine: Machine) -> float:
    eqn = step.eqn
    if eqn.primitive.name not in CONTRACTIONS:
        return 0.0
    full = math.prod(eqn.outvars[0].aval.shape)
    return operations_per_element(eqn, machine) * full / machine.flops(np.dtype(eqn.invars[0].aval.dtype).name)


def tables(requests: Requests, machine: Machine) -> set:
    """Values that a program looks up, or scatters."""
    return _Priced([(step, _price(step, machine)) for step in requests.steps]).tables()


def elements_read(requests: Requests, v, access: Access, among: Collection) -> int:
    """Elements of an input that one program reads: of a table that is only looked up, those it finds there. `among`: tables."""
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

    At most, what lies between runs is moved as well: of every second element, both.
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
    """Elements of the part of an array in which the blocks of all programs lie."""
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
        read = int(_covered(access, grid, v.aval.shape) * itemsize(v) * waste)  # slices leave the rest where it is
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
