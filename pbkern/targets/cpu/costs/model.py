"""CpuCosts: a CPU's Machine as the fuser asks it, see fuse/cost/model.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pbkern.core.machine import Machine
from pbkern.fuse.access.blocks import BlockRequests, Step
from pbkern.fuse.access.rules import Access
from pbkern.fuse.cost.model import Cost, Price
from pbkern.fuse.cost.sizes import Sizes
from pbkern.targets.cpu import machine as cpu

from . import kernel, step

# Rows in multiples of a register tile's, columns of whole vectors. Bytes were measured on Zen 5 and
# Zen 4: of far rows, parts of 512 bytes came at 14 GB/s, of a page at 22 of 25.
SIZES = Sizes(
    line_bytes=cpu.LINE_BYTES,
    mask_strip=cpu.MASK_STRIP,
    tile_rows=(6, 12, 24, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
    tile_columns=(64, 128, 256, 512, 1024),
    stage_bytes=1 << 18,
    far_row_bytes=1 << 12,
    short_row_bytes=1 << 14,
    split_result_bytes=1 << 17,
    split_operand_bytes=1 << 20,
)


@dataclass(frozen=True)
class CpuCosts(Machine):
    """A core's own caches are near; L3 is what cores share."""

    @classmethod
    def of(cls, machine: Machine) -> CpuCosts:
        return cls(
            **{field.name: getattr(machine, field.name) for field in dataclasses.fields(Machine)}
        )

    @property
    def sizes(self) -> Sizes:
        return SIZES

    @property
    def near_bytes(self) -> int:
        return self.l2_bytes

    @property
    def scratch_bytes(self) -> int:
        return self.near_bytes

    @property
    def shared_bytes(self) -> int:
        return self.l3_bytes

    @property
    def near_bandwidth(self) -> float:
        return self.l2_bandwidth

    @property
    def shared_bandwidth(self) -> float:
        return self.l3_bandwidth

    @property
    def memory_bandwidth(self) -> float:
        return self.dram_bandwidth

    def far_bandwidth(self, size: int) -> float:
        return kernel.far_bandwidth(size, self)

    def rows_alias(self, stride: int) -> bool:
        return cpu.rows_alias(stride)

    def operations(self, eqn: Any) -> float:
        return step.operations_per_element(eqn, self)

    def scatter_cycles(self, eqn: Any) -> float:
        return step.scatter_cycles(eqn, self)

    def step_price(self, of: Step) -> Price:
        return step.step_price(of, self)

    def kernel_cost(
        self,
        requests: BlockRequests,
        outputs: Sequence[tuple[object, Access]],
        grid: Sequence[int],
        parts: Mapping[object, float] = MappingProxyType({}),
        repeated_steps: Collection[int] = (),
    ) -> Cost | None:
        return kernel.kernel_cost(requests, outputs, grid, self, self, parts, repeated_steps)
