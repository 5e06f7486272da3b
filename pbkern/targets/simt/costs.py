"""ThreadCosts: a GPU's Machine as the fuser asks it: the formulas that targets share, and what differs for blocks.

A core of the Machine is the place of one block: RESIDENT_BLOCKS of them share a multiprocessor, its
arithmetic, and its near memory, out of which scratch of a program comes. Few blocks, or blocks so
large that few fit beside each other, leave bandwidth and arithmetic idle. Stores do not read what
they overwrite.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax.extend import core as jex

from pbkern.fuse.access.blocks import BlockRequests
from pbkern.fuse.access.rules import Access
from pbkern.fuse.cost.kinds import UNOVERLAPPED, nbytes
from pbkern.fuse.cost.model import Cost
from pbkern.targets.costs.kernel import LEAST_PARALLEL
from pbkern.targets.costs.model import MachineCosts

from .machine import IN_FLIGHT_BYTES, RESIDENT_BLOCKS

# The part of a multiprocessor's own memory that shared memory may take: 227 of 256 KB, 163 of 192,
# 99 of 128. Source: CUDA C++ Programming Guide, technical specifications.
SHARED_SHARE = 0.8


class ThreadCosts(MachineCosts):
    """`l2_bytes`: a block's share of a multiprocessor's memory."""

    @property
    def near_bytes(self) -> int:
        """A block may have all of it."""
        return self.l2_bytes * RESIDENT_BLOCKS

    @property
    def scratch_bytes(self) -> int:
        return self.l1_bytes // 4

    def kernel_cost(
        self,
        requests: BlockRequests,
        outputs: Sequence[tuple[jex.Var, Access]],
        grid: Sequence[int],
        parts: Mapping[object, float] = MappingProxyType({}),
        repeated_steps: Collection[int] = (),
    ) -> Cost | None:
        found = super().kernel_cost(requests, outputs, grid, parts, repeated_steps)
        if found is None:
            return None
        longer, shorter = max(found.compute, found.memory), min(found.compute, found.memory)
        overhead = found.seconds - longer - UNOVERLAPPED * shorter
        parallel = min(found.programs, self.cores) / self.cores
        made: list[Any] = [out_var for out_var, _ in outputs]
        stores = sum((nbytes(var.aval) / self.far_bandwidth(nbytes(var.aval)) for var in made), 0.0)
        memory = found.memory * max(parallel, LEAST_PARALLEL) - stores
        beside = min(
            self.near_bytes // max(found.scratch, 1), RESIDENT_BLOCKS
        )  # blocks whose scratch fits one multiprocessor
        idle = RESIDENT_BLOCKS / max(beside, 1)
        loads = min(found.working_set / IN_FLIGHT_BYTES, 1.0)
        in_flight = max(min(found.programs, self.cores / idle) * loads / self.cores, 1e-9)
        compute, memory = (
            found.compute * (idle if found.programs > self.cores else 1),
            memory / in_flight,
        )
        if found.scratch > SHARED_SHARE * self.near_bytes:  # it lies in global memory
            overhead += 2 * found.scratch * found.programs / self.memory_bandwidth
        overhead += (
            found.programs / self.cores - math.ceil(found.programs / self.cores)
        ) * self.program_seconds
        seconds = max(compute, memory) + UNOVERLAPPED * min(compute, memory) + overhead
        return dataclasses.replace(found, seconds=seconds, compute=compute, memory=memory)
