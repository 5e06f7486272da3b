"""What one step of one program costs on one core: formulas, and the kinds of operations that they distinguish."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend import core as jex

from pbkern.core.machine import CONFLICT_BYTES, LINE_BYTES, ROW_REUSE, TURN_CYCLES, Machine
from pbkern.core.ops.scatter import SCATTERS
from pbkern.core.ops.sort_cost import first_cycles, line_cycles, sorts_in_registers
from pbkern.fuse.access.blocks import Step, volume
from pbkern.fuse.access.rules import ELEMENTWISE, block_shape
from pbkern.fuse.access.scatter import share

# Equations that only rename elements: they emit next to no code.
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
# Views whose elements are read where they are needed.
RENAMED = frozenset(("broadcast_in_dim", "iota", "reshape", "squeeze"))
# Operations that make up comparisons of indices, and combinations of them.
OF_TESTS = VIEWS | {"iota", "add", "sub", "convert_element_type", "ge", "gt", "le", "lt", "and", "or", "not", "select_n"}
# A value that costs this many operations per element is heavy: not computed again beyond RECOMPUTE_LIMIT of kernel.py.
HEAVY_OPERATIONS = 128
# What a reduction along rows takes per row beside its elements: a horizontal reduction of a vector's lanes.
ACROSS_CYCLES = 3.0
# Vector operations of putting two elements of a short line in order.
EXCHANGE_OPERATIONS = 6.0
# Registers, packing and edges: the part of peak that contractions of this design reach.
CONTRACTION_EFFICIENCY = 0.93
# Scatters, cycles: reading and testing an entry of an index vector, starting a window, a mispredicted branch with the loads
# that wait for it. Far updates: the next part of a row whose rest other programs read, the next row where those between are
# skipped.
READ_INDEX_CYCLES = 2.0
WINDOW_CYCLES = 3.0
MISPREDICTED_CYCLES = 30.0
CUT_ROW_CYCLES = 75.0
SKIPPED_ROWS_CYCLES = 600.0


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
    """Is one element so expensive that computing it twice is worse than storing it?"""
    name = eqn.primitive.name
    if name in SCATTERS:
        return True
    return (name in CONTRACTIONS or name.startswith("reduce_") or name in ("sort", "first_sorted")) and (
        operations_per_element(eqn, machine) >= HEAVY_OPERATIONS
    )


def recompute_of(step: Step, programs: int) -> float:
    full = math.prod(step.eqn.outvars[0].aval.shape)
    return programs * volume(step.out) / max(full, 1)


@dataclass(frozen=True, slots=True)
class Price:
    """What one step costs one program, and what kind of step it is. Most attempts to join groups share their steps.

    Attributes:
      seconds, packing: time without and of copies for contractions.
      operations: of all its elements.
      part: the part of the result that it computes.
      limit: seconds of a contraction's operations at the machine's peak, each done once.
      block_bytes: of its first result.
      read: the variables that it reads.
      of_tests: can it be part of a comparison of indices?
      in_place: does it compute each element from elements at the same place, so that lowering stores no operands?
      light: does it make as many elements as it reads, or only rename them?
      own_updates: the part of a scatter's updates that the program reads; None for other steps.
      table: the value that it looks up or scatters.
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
    def of(cls, step: Step, machine: Machine) -> Price:
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


def price_of(step: Step, machine: Machine) -> Price:
    """The step's price, computed once (fuse/access/blocks.py)."""
    if not isinstance(step.price, Price):
        step.price = Price.of(step, machine)
    return step.price


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
    # Whole trailing dimensions are one.
    run = 1
    for n, extent in zip(reversed(shape), reversed(extents)):
        run *= n
        if n != extent or run >= 4 * lanes:
            break
    fill = run / (math.ceil(run / lanes) * lanes)
    return (operations / lanes / fill + across) / machine.clock_hz


def _fill(columns: int, lanes: int) -> float:
    """The part of the lanes that this many elements use."""
    return max(columns, 1) / (math.ceil(max(columns, 1) / lanes) * lanes)


def _turned_seconds(step: Step, full: float, lanes: int, machine: Machine) -> list[float]:
    """A convolution with vectors along channels or images that are not its last dimension (operand swap): that operand is
    transposed, and so are the results. `full`: time of its arithmetic with all lanes used."""
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
        if side == 1 or free[-1:] == [len(extents) - 1]:  # the first operand's columns are not gathered into panels
            runs.append(_joint_run(free, shape[at:], extents))
    return max(runs)


def _joint_run(dims: Sequence[int], block: Sequence[int], extents: Sequence[int]) -> int:
    """Elements of a block along the operand's last dimension that has any, and along dimensions contiguous with it."""
    run = 1
    for k in reversed(range(len(dims))):
        run *= block[k]
        if run > 1 and (block[k] != extents[dims[k]] or k and dims[k - 1] != dims[k] - 1):
            break
    return run


def _scatter_seconds(step: Step, machine: Machine) -> float:
    """Time of one program's scatter: storing the operand, reading all indices, updating the windows of its own updates."""
    eqn, (operand, indices, updates) = step.eqn, step.pull.inputs
    size = itemsize(eqn.outvars[0])
    vector = size * machine.lanes(size)
    windows = volume(indices[:-1])
    own = windows * share(eqn, step.out)
    window_bytes = volume(updates) / max(windows, 1) * size
    block_bytes = volume(operand) * size
    cycles = block_bytes / vector + windows * READ_INDEX_CYCLES * max(indices[-1].size, 1)
    others = 1 - own / max(windows, 1)
    cycles += 2 * own * others * MISPREDICTED_CYCLES  # ownership of an update cannot be predicted
    cycles += own * (WINDOW_CYCLES + math.ceil(window_bytes / vector))
    if nbytes(eqn.invars[2].aval) > machine.l3_bytes // 4:
        is_cut = updates[-1].size < eqn.invars[2].aval.shape[-1]
        cycles += own * (CUT_ROW_CYCLES * is_cut + SKIPPED_ROWS_CYCLES * others)
    lines = own * math.ceil(window_bytes / LINE_BYTES)
    near = machine.l3_bandwidth if block_bytes <= machine.l3_bytes // 2 else machine.dram_bandwidth
    trips = 2 * LINE_BYTES * lines / (near / machine.cores) if block_bytes > machine.l2_bytes // 2 else 0.0
    return cycles / machine.clock_hz + trips


def _packing_seconds(step: Step, machine: Machine) -> float:
    """Copies of a contraction's operands that one program makes, on one core.

    Rows whose length is a multiple of CONFLICT_BYTES fall into few cache sets (conflict misses): they are copied for many
    columns. Columns of long rows are gathered into panels.
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
