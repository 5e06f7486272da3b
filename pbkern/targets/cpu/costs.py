"""CpuCosts: a CPU's Machine as the fuser asks it."""

from __future__ import annotations

import math

from pbkern.core.lazy_dataclass import dataclass
from pbkern.fuse.cost.roofline import Spread, Terms
from pbkern.targets.costs.model import MachineCosts

# The part of the memory's bandwidth that few programs reach at least. Source: not recorded.
LEAST_PARALLEL = 0.6
# Part of a program's time that cores wait at a kernel's end for the slowest: cores of virtual machines are threads of cores
# that others use as well. Measured on two cores of Zen 3, first quartiles of 20 calls, ms, with 0, 0.05 and 0.2: 512 x 8192 x
# 512 in 4, 8 and 16 programs 44, 39 and 39, jax.jit 41; a.T @ b of 1024 in 2, 8 and 16 20, 17 and 19; 1001 x 777 x 1003 in 4, 4
# and 16 12.5, 12.4 and 13.9; bfloat16 of 1024 in 8, 8 and 16 21, 21 and 18. See decision 131.
UNEVEN = 0.05


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
            rounds=rounds + UNEVEN * (min(programs, cores) > 1),
            starts=rounds,
            bandwidth=max(min(programs, cores) / cores, LEAST_PARALLEL),
            store_passes=2,
            # Values that spill stall the nests that read them.
            stalls=terms.trips if terms.scratch > self.l2_bytes else 0.0,
        )
