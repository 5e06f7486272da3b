"""CpuCosts: a CPU's Machine as the fuser asks it."""

from __future__ import annotations

from dataclasses import dataclass

from pbkern.targets.costs.model import MachineCosts


@dataclass(frozen=True)
class CpuCosts(MachineCosts):
    """A core's own caches are near."""

    @property
    def near_bytes(self) -> int:
        return self.l2_bytes

    @property
    def scratch_bytes(self) -> int:
        return self.near_bytes
