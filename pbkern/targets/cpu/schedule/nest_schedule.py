"""Decisions of the CPU's passes about a nest: vectors, register tiles, prefetching, stores in place."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import Any

from pbkern.core.errors import InternalError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.ir import Buf, Nest
from pbkern.lower.nest.parse import Dialect
from pbkern.targets.cpu.schedule.instructions import INSTRUCTIONS

# Vector registers that accumulators leave to operands.
OPERAND_REGISTERS = 4


@dataclass(frozen=True, slots=True)
class NestSchedule:
    """lanes 0: scalar code.

    `vector`: vectorised dim, `unroll` vectors per step; `jam`: points per step of other dims.
    """

    lanes: int = 0
    vector: str | None = None
    unroll: int = 1
    jam: Mapping[str, int] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    # loads contiguous along this dim are transposed in registers, `lanes` rows at a time
    transpose: str | None = None
    straight: bool = False  # reductions have no loops: each step stands by itself
    # sums of `lanes` points along this dim become one vector
    # (targets/cpu/emit/reductions/horizontal.py)
    batched_rows: str | None = None
    cut_as: int = 0  # vectors of the tile by which long sums are cut into runs; 0: its own
    registers: int = 32  # of the machine
    fixed: bool = False  # others rely on the tile: code that is too long does not make it smaller
    # row, column and depth of what one instruction on tiles multiplies (emit/tile_products.py)
    instruction_dims: tuple[str, ...] = ()

    @property
    def along(self) -> str:
        """The vectorised dimension; in scalar code "", which no dimension is called."""
        return self.vector or ""

    @property
    def accumulators(self) -> int:
        """Registers that accumulators may fill."""
        return self.registers - OPERAND_REGISTERS

    @property
    def tile(self) -> int:
        """Vectors of a full tile. Elements behind the last one are added up like the others."""
        return self.cut_as or math.prod(self.jam.values()) * self.unroll

    def differences(self) -> str:
        """The fields that differ from their defaults, as keyword arguments."""
        plain = NestSchedule()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(
            f"{name}={value!r}" for name, value in values.items() if value != getattr(plain, name)
        )

    def __str__(self) -> str:
        jam = "".join(f", jam {dim} by {count}" for dim, count in self.jam.items())
        return f"{self.lanes} lanes along {self.vector}, unroll {self.unroll}{jam}, order {' '.join(self.order)}"


@dataclass(frozen=True, slots=True)
class ScheduledNest(Nest):
    """A nest with decisions, of which each may be left open.

    schedule: vectors and register tiles; None before "decide schedules".
    prefetched: root buffer -> elements that its loads are prefetched ahead.
    overwritten: root buffers that it stores to, always behind what it still loads there
      (targets/cpu/locality/walk_order.py).
    """

    schedule: NestSchedule | None = None
    prefetched: Mapping[Buf, int] = field(default_factory=dict)
    overwritten: frozenset[Buf] = frozenset()

    def decisions(self) -> str:
        words = [f"prefetch {buf.name} + {ahead}" for buf, ahead in self.prefetched.items()]
        words += [f"over {buf.name}" for buf in sorted(self.overwritten, key=lambda buf: buf.name)]
        if self.schedule is not None:
            words.append(f"schedule({self.schedule.differences()})")
        return "".join(f" {word}" for word in words)


def scheduled(nest: Nest, **decisions: Any) -> Nest:
    """The nest with decisions, fields of ScheduledNest by name; those made before stay."""
    if not any(decisions.values()):
        return nest
    if isinstance(nest, ScheduledNest):
        return replace(nest, **decisions)
    values = {field.name: getattr(nest, field.name) for field in fields(nest)}
    return ScheduledNest(**values, **decisions)


def schedule_so_far(nest: Nest) -> NestSchedule | None:
    """The schedule that a pass before "decide schedules" has left with the nest; None for most nests."""
    return nest.schedule if isinstance(nest, ScheduledNest) else None


def final_schedule(nest: Nest) -> NestSchedule:
    """The schedule that "decide schedules" has left with every nest, by which code is made."""
    schedule = schedule_so_far(nest)
    if schedule is None:
        raise InternalError("a nest has no schedule")
    return schedule


def prefetched_by(nest: Nest) -> Mapping[Buf, int]:
    """Elements that loads of root buffers are prefetched ahead, {} where no pass has decided it."""
    return nest.prefetched if isinstance(nest, ScheduledNest) else {}


def overwritten_by(nest: Nest) -> frozenset[Buf]:
    """Root buffers that the nest stores to behind its own loads."""
    return nest.overwritten if isinstance(nest, ScheduledNest) else frozenset()


def _with_decisions(nest: Nest, text: str, buffers: Mapping[str, Buf]) -> Nest:
    """The nest with decisions that `ScheduledNest.decisions` has written."""
    prefetched = {
        buffers[name]: int(ahead) for name, ahead in re.findall(r"prefetch (\S+) \+ (-?\d+)", text)
    }
    overwritten = frozenset(buffers[name] for name in re.findall(r"over (\S+)", text))
    written = re.search(r"schedule(\(.*\))", text)
    schedule = None
    if written is not None:
        call = ast.parse(f"f{written[1]}", mode="eval").body
        assert isinstance(call, ast.Call)
        schedule = NestSchedule(
            **{str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        )
    return scheduled(nest, schedule=schedule, prefetched=prefetched, overwritten=overwritten)


# Words of the CPU's nests, for texts that are read back.
CPU_DIALECT = Dialect(_with_decisions, INSTRUCTIONS)
