"""Costs of one step of one program on one core of the Machine: formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jax.extend import core as jex

from pbkern.core.machine import LINE_BYTES, Machine
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.ops.scatter import SCATTERS
from pbkern.fuse.access.blocks import Step, volume
from pbkern.fuse.access.rules import block_shape
from pbkern.fuse.access.scatter import share
from pbkern.fuse.cost.kinds import (
    CONTRACTIONS,
    DATA_MOVEMENT,
    LOOKUPS,
    RENAMED,
    contracted_size,
    is_of_index_tests,
    itemsize,
    nbytes,
    recompute_of,
)
from pbkern.fuse.cost.model import Price
from pbkern.fuse.cost.sizes import Sizes
from pbkern.fuse.tiling.block_options import are_matrices
from pbkern.lower.build_options import BuildOptions

from .caches import (
    CONFLICT_BYTES,
    ROW_REUSE,
    SCATTERED_REUSE,
    TRANSPOSE_CYCLES,
    are_apart,
    fit,
)
from .sorts import LONGEST_REGISTER_LINE, MOST_NETWORK_OPERATIONS, first_cycles, line_cycles

# What does not depend on the kernel.
LOWERED = BuildOptions(
    short_line=LONGEST_REGISTER_LINE, short_line_operations=MOST_NETWORK_OPERATIONS
)
# Cycles of a reduction along rows for each row beside its elements: the lanes of a vector are added
# up.
ACROSS_CYCLES = 3.0
# Vector operations of putting two elements of a short line in order.
EXCHANGE_OPERATIONS = 6.0
# Registers, packing and edges: the part of peak that contractions of this design reach.
CONTRACTION_EFFICIENCY = 0.93
# Rows, columns and depth from which a contraction is one of tiles.
FEWEST_OF_TILES = 16
# Cycles of a scatter for reading and testing an entry of an index vector. Source: not recorded.
READ_INDEX_CYCLES = 2.0
# Cycles of a scatter for starting a window. Source: not recorded.
WINDOW_CYCLES = 3.0
# Cycles of a mispredicted branch with the loads that wait for it. Source: not recorded.
MISPREDICTED_CYCLES = 30.0
# Cycles of a far update for the next part of a row whose rest other programs read. Source: not
# recorded.
CUT_ROW_CYCLES = 75.0
# Cycles of a far update for the next row where the rows between are skipped. Source: not recorded.
SKIPPED_ROWS_CYCLES = 600.0


def operations_per_element(eqn, machine: Machine) -> float:
    """Vector operations per element of the first result."""
    name = eqn.primitive.name
    if name in DATA_MOVEMENT:
        return (
            0.0
            if name not in ("transpose", "concatenate", "continued", "pad", "rev")
            else machine.cycles(name)
        )
    out = max(math.prod(eqn.outvars[0].aval.shape), 1)
    if name in CONTRACTIONS:
        return 2.0 * contracted_size(eqn)
    if name.startswith("reduce_window"):
        return float(math.prod(eqn.params["window_dimensions"]))
    if (name.startswith("reduce_") and name != "reduce_precision") or name in (
        "argmax",
        "argmin",
        "partial_reduce",
    ):
        return machine.cycles(name) * math.prod(eqn.invars[0].aval.shape) / out
    if name in SCATTERS:
        return max(1.0, machine.cycles(name) * math.prod(eqn.invars[2].aval.shape) / out)
    if name == "integer_pow":
        return float(max(1, 2 * int(abs(eqn.params["y"])).bit_length() - 2))
    if name == "sort":
        shape = eqn.outvars[0].aval.shape
        length = shape[eqn.params["dimension"]]
        lines = math.prod(shape) // max(length, 1)
        if LOWERED.sorts_in_registers(length, eqn.params["num_keys"], len(eqn.invars)):
            return EXCHANGE_OPERATIONS * (length - 1) / 2
        dtypes = [var.aval.dtype for var in eqn.invars]
        cycles = line_cycles(lines, length, dtypes, eqn.params["num_keys"])
        return cycles / max(length, 1) * machine.vector_bits / 32
    if name == "first_sorted":
        params = eqn.params
        shape = eqn.invars[0].aval.shape
        length = shape[params["dimension"]]
        cycles = first_cycles(
            math.prod(shape) // max(length, 1),
            length,
            params["first"],
            [var.aval.dtype for var in eqn.invars],
            params["num_keys"],
        )
        return cycles / params["first"] * machine.vector_bits / 32
    return machine.cycles(name)


def step_price(step: Step, machine: Machine, sizes: Sizes) -> Price:
    eqn, name = step.eqn, step.eqn.primitive.name
    streams = name in CONTRACTIONS and are_matrices(eqn, sizes)
    table = eqn.invars[0 if name in LOOKUPS else 2] if name in LOOKUPS or name in SCATTERS else None
    return Price(
        _step_seconds(step, machine),
        0.0 if streams else _packing_seconds(step, machine),
        operations_per_element(eqn, machine) * volume(step.out),
        recompute_of(step, 1),
        _limit_seconds(step, machine),
        volume(step.out) * itemsize(eqn.outvars[0]),
        tuple(var for var in eqn.invars if not isinstance(var, jex.Literal)),
        is_of_index_tests(name),
        name in ELEMENTWISE or name in RENAMED,
        name in ELEMENTWISE or name in DATA_MOVEMENT,
        share(eqn, step.out) if name in SCATTERS else None,
        None if isinstance(table, jex.Literal) else table,
        streams,
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
        rate = _contraction_flops(eqn, machine) / machine.cores * CONTRACTION_EFFICIENCY
        seconds = operations / rate
        usual = seconds / _fill(_columns(eqn, shape), lanes)
        return min([usual, *_swapped_seconds(step, seconds, lanes, machine)])
    extents, across = eqn.outvars[0].aval.shape, 0.0
    if eqn.primitive.name.startswith(("reduce_", "arg", "partial")) and eqn.params.get("axes"):
        results = math.prod(shape)
        shape, extents = block_shape(step.pull.inputs[0]), eqn.invars[0].aval.shape
        across = (
            ACROSS_CYCLES * results * (len(extents) - 1 in eqn.params["axes"] and extents[-1] > 1)
        )
    # Whole trailing dimensions are one.
    run = 1
    for size, extent in zip(reversed(shape), reversed(extents)):
        run *= size
        if size != extent or run >= 4 * lanes:
            break
    fill = run / (math.ceil(run / lanes) * lanes)
    return (operations / lanes / fill + across) / machine.clock_hz


def _contraction_flops(eqn, machine: Machine) -> float:
    """Multiply-adds, counted as two, per second of all cores: of tiles where a contraction fills them."""
    name = np.dtype(eqn.invars[0].aval.dtype).name
    return machine.tile_flops[name] if _is_of_tiles(eqn, machine) else machine.flops(name)


def _is_converted(eqn, machine: Machine) -> bool:
    """Whether a contraction of floats of 16 bits multiplies copies of them in 32."""
    dtype = np.dtype(eqn.invars[0].aval.dtype)
    is_small = dtype.itemsize == 2 and dtype.name in ("bfloat16", "float16")
    return is_small and machine.flops(dtype.name) <= machine.flops("float32")


def _is_of_tiles(eqn, machine: Machine) -> bool:
    """Whether an instruction on tiles multiplies a contraction, which must be large enough."""
    name = np.dtype(eqn.invars[0].aval.dtype).name
    if name not in machine.tile_flops or contracted_size(eqn) < FEWEST_OF_TILES:
        return False
    if eqn.primitive.name != "dot_general":
        return True
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    rows = len(eqn.invars[0].aval.shape) - len(contracted)
    shape = eqn.outvars[0].aval.shape
    sides = shape[len(batch) : rows], shape[rows:]
    return all(math.prod(side) >= FEWEST_OF_TILES for side in sides)


def _fill(columns: int, lanes: int) -> float:
    """The part of the lanes that this many elements use."""
    return max(columns, 1) / (math.ceil(max(columns, 1) / lanes) * lanes)


def _swapped_seconds(step: Step, full: float, lanes: int, machine: Machine) -> list[float]:
    """Seconds of a convolution with vectors along channels or images that are not its last axis.

    The operands are swapped: one is transposed, and so are the results. `full`: time of its
    arithmetic with all lanes used.
    """
    if step.eqn.primitive.name != "conv_general_dilated":
        return []
    candidates, shape = [], block_shape(step.out)
    results = math.prod(shape)
    for operand, axis in enumerate(step.eqn.params["dimension_numbers"].out_spec[:2]):
        if axis < len(shape) - 1:
            columns = (
                shape[axis] // max(step.pull.params["feature_group_count"], 1)
                if operand
                else shape[axis]
            )
            transposed = results + volume(step.pull.inputs[operand])
            candidates.append(
                full / _fill(columns, lanes) + TRANSPOSE_CYCLES * transposed / machine.clock_hz
            )
    return candidates


def _columns(eqn, shape: Sequence[int]) -> int:
    """Elements of one block of a contraction's result that vectors may run along."""
    if eqn.primitive.name != "dot_general":
        return max(shape[-2:]) if shape[-1] == 1 else shape[-1]
    contracted, batch = eqn.params["dimension_numbers"]
    runs, at = [], len(shape)
    for side in (1, 0):
        extents = eqn.invars[side].aval.shape
        free = [
            axis
            for axis in range(len(extents))
            if axis not in contracted[side] and axis not in batch[side]
        ]
        at -= len(free)
        if side == 1 or free[-1:] == [
            len(extents) - 1
        ]:  # the first operand's columns are not gathered into panels
            runs.append(_joint_run(free, shape[at:], extents))
    return max(runs)


def _joint_run(dims: Sequence[int], block: Sequence[int], extents: Sequence[int]) -> int:
    """Elements of a block along the operand's last dimension that has any, and along dimensions contiguous with it."""
    run = 1
    for axis in reversed(range(len(dims))):
        run *= block[axis]
        if run > 1 and (
            block[axis] != extents[dims[axis]] or (axis and dims[axis - 1] != dims[axis] - 1)
        ):
            break
    return run


def scatter_cycles(eqn, machine: Machine) -> float:
    """Reading all indices, starting each window, combining whole vectors of updates."""
    indices, updates = (var.aval for var in eqn.invars[1:])
    windows = math.prod(indices.shape[:-1])
    return windows * (READ_INDEX_CYCLES + WINDOW_CYCLES) + updates.size / machine.lanes(
        updates.dtype.itemsize
    )


def _scatter_seconds(step: Step, machine: Machine) -> float:
    """Time of one program's scatter: storing the operand, reading all indices, updating the windows of its own updates."""
    eqn, (operand, indices, updates) = step.eqn, step.pull.inputs
    size = itemsize(eqn.outvars[0])
    vector = size * machine.lanes(size)
    windows = volume(indices[:-1])
    own_windows = windows * share(eqn, step.out)
    window_bytes = volume(updates) / max(windows, 1) * size
    block_bytes = volume(operand) * size
    cycles = block_bytes / vector + windows * READ_INDEX_CYCLES * max(indices[-1].size, 1)
    foreign_share = 1 - own_windows / max(windows, 1)
    cycles += (
        2 * own_windows * foreign_share * MISPREDICTED_CYCLES
    )  # ownership of an update cannot be predicted
    cycles += own_windows * (WINDOW_CYCLES + math.ceil(window_bytes / vector))
    if nbytes(eqn.invars[2].aval) > machine.l3_bytes // 4:
        is_cut = updates[-1].size < eqn.invars[2].aval.shape[-1]
        cycles += own_windows * (CUT_ROW_CYCLES * is_cut + SKIPPED_ROWS_CYCLES * foreign_share)
    lines = own_windows * math.ceil(window_bytes / LINE_BYTES)
    near = machine.l3_bandwidth if block_bytes <= machine.l3_bytes // 2 else machine.dram_bandwidth
    trips = (
        2 * LINE_BYTES * lines / (near / machine.cores)
        if block_bytes > machine.l2_bytes // 2
        else 0.0
    )
    return cycles / machine.clock_hz + trips


def _packing_seconds(step: Step, machine: Machine) -> float:
    """Copies of a contraction's operands that one program makes, on one core, as targets/cpu/packing does."""
    eqn = step.eqn
    if eqn.primitive.name != "dot_general" or not step.out or step.out[-1].size == 1:
        return 0.0
    (left, right), (batch, _) = eqn.params["dimension_numbers"]
    lhs, rhs = (var.aval.shape for var in eqn.invars)
    columns = step.out[-1].size if len(rhs) > len(right) + len(batch) else 1
    bytes_of = [volume(block) * itemsize(var) for block, var in zip(step.pull.inputs, eqn.invars)]
    row_bytes = [shape[-1] * itemsize(var) for shape, var in zip((lhs, rhs), eqn.invars)]
    if _is_of_tiles(eqn, machine):
        return 2 * sum(bytes_of) / (machine.l3_bandwidth / machine.cores)
    depth, copied, turned = math.prod(lhs[dim] for dim in left), 0, 0
    if len(lhs) - 1 not in left:
        if columns >= SCATTERED_REUSE and not fit(depth, row_bytes[0], machine):
            turned += volume(step.pull.inputs[0])
    elif step.out[-1].size >= ROW_REUSE:
        if _is_converted(eqn, machine):  # read in 16 bits, written in 32
            copied += 3 * bytes_of[0] // 2
        elif row_bytes[0] % CONFLICT_BYTES == 0:
            copied += bytes_of[0]
    if len(rhs) - 1 in right or are_apart(depth, row_bytes[1], depth * row_bytes[1], machine):
        copied += bytes_of[1]
    return (
        2 * copied / (machine.l3_bandwidth / machine.cores)
        + turned * TRANSPOSE_CYCLES / machine.clock_hz
    )


def _limit_seconds(step: Step, machine: Machine) -> float:
    eqn = step.eqn
    if eqn.primitive.name not in CONTRACTIONS:
        return 0.0
    full = math.prod(eqn.outvars[0].aval.shape)
    return operations_per_element(eqn, machine) * full / _contraction_flops(eqn, machine)
