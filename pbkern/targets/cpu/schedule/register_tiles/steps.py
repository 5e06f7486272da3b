"""The schedule of one vector per step, from which tiles are made."""

from __future__ import annotations

from dataclasses import replace

from pbkern.lower.nest.ir import Nest
from pbkern.targets.cpu.machines.machine import Vectors
from pbkern.targets.cpu.schedule.nest_schedule import NestSchedule


def untiled(nest: Nest, vector: str, lanes: int, vectors: Vectors) -> NestSchedule:
    """One vector of a dimension per step."""
    order = tuple(dim for dim in nest.dims if dim != vector)
    return NestSchedule(lanes=lanes, vector=vector, order=order, registers=vectors.registers)


def in_squares(sched: NestSchedule, dim: str, step: int) -> NestSchedule:
    """Loads are contiguous along `dim`; squares of each element between, of which there are `step`, fill the registers."""
    most = sched.registers // 2 // step  # rows of a square, which is turned by halves
    return replace(sched, transpose=dim, lanes=min(sched.lanes, 1 << (most.bit_length() - 1)))


def vectors_along(nest: Nest, sched: NestSchedule) -> int:
    return -(-nest.dims[sched.along] // sched.lanes)
