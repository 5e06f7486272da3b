"""The CPU's answers to passes for every target: vectors, caches, register tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.context import NestPolicy
from pbkern.lower.nest.ir import Buf, For, Nest, Stmt
from pbkern.targets.costs.sizes import MASK_STRIP
from pbkern.targets.cpu.machines.machine import WIDE_VECTORS, Vectors
from pbkern.targets.cpu.schedule import register_promotion
from pbkern.targets.cpu.schedule.nest_schedule import NestSchedule, schedule_so_far, scheduled
from pbkern.targets.cpu.schedule.prefetch import is_far
from pbkern.targets.cpu.schedule.register_tiles.choice import choose
from pbkern.targets.cpu.schedule.sliding_windows import Visits, moved_loads
from pbkern.targets.cpu.schedule.vector_dimension import register_bits

from .walk_order import walks_ahead


@dataclass(frozen=True)
class CpuPolicy(NestPolicy):
    """Answers for `vectors`, of `step_bytes` each. contract: sums may be reassociated."""

    contract: bool = True
    # A strip of float32 probabilities of 64 rows is 16 KB and stays in the L1 cache.
    mask_strip: int = MASK_STRIP
    vectors: Vectors = WIDE_VECTORS

    def _schedule(self, nest: Nest) -> NestSchedule:
        """The schedule of a nest, or the one that it would have if no pass changed it further."""
        return schedule_so_far(nest) or choose(nest, self.vectors, self.contract)

    def vector_dimension(self, nest: Nest) -> str | None:
        return self._schedule(nest).vector

    def lanes(self, nest: Nest, dim: str | None = None) -> int:
        return self.vectors.bits // register_bits(nest, dim)

    def is_far(self, buf: Buf) -> bool:
        return is_far(buf)

    def prefetching(self, nest: Nest, ahead: Mapping[Buf, int]) -> Nest:
        return scheduled(nest, prefetched=ahead)

    def keeps_in_registers(self, stmt: Stmt) -> bool:
        if not isinstance(stmt, For):
            return False
        return register_promotion.plan(stmt, self.vectors, self._schedule) is not None

    def cycles(self, nest: Nest, far_cycles: float) -> float:
        schedule = self._schedule(nest)
        if schedule.vector is None:
            return 0.0
        buffers = {load.buf.root for load in nest.loads() if schedule.vector in load.symbols}
        buffers |= {store.buf.root for store in nest.stores}
        visits = Visits(moved_loads(nest, schedule, self.vectors), schedule, schedule.unroll)
        return visits.cycles(self.vectors, far_cycles * sum(map(is_far, buffers))) * math.prod(
            nest.dims.values()
        )

    def overwriting(self, nest: Nest, buffers: frozenset[Buf]) -> Nest:
        return scheduled(nest, overwritten=buffers)

    def loads_ahead(self, nest: Nest) -> bool:
        return walks_ahead(nest, self._schedule(nest), self.vectors)
