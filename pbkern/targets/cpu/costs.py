"""CpuCosts: a CPU's Machine as the fuser asks it."""

from __future__ import annotations

import math

from pbkern.core.lazy_dataclass import dataclass
from pbkern.fuse.cost.roofline import Spread, Terms
from pbkern.targets.costs.model import UNBALANCED, MachineCosts

# The part of the memory's bandwidth that few programs reach at least. Source: not recorded.
LEAST_PARALLEL = 0.6


@dataclass(frozen=True)
class CpuCosts(MachineCosts):
    """A core's own caches are near."""

    @property
    def near_bytes(self) -> int:
        return self.l2_bytes

    @property
    def scratch_bytes(self) -> int:
        return self.near_bytes

    def spread(self, terms: Terms) -> Spread:
        """Programs in turns; a store reads its line first."""
        programs, cores = terms.programs, self.cores
        rounds = math.ceil(programs / cores)
        return Spread(
            rounds=rounds * (1 + UNBALANCED * (1 < programs < 2 * cores)),
            starts=rounds,
            bandwidth=max(min(programs, cores) / cores, LEAST_PARALLEL),
            store_passes=2,
            # Values that spill stall the nests that read them.
            stalls=terms.trips if terms.scratch > self.l2_bytes else 0.0,
        )
