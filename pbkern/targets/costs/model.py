"""MachineCosts: a Machine as the fuser asks it, see fuse/cost/model.py. What each target says of its devices is abstract."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from jax.extend import core as jex

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.machine import Machine
from pbkern.fuse.access.blocks import BlockRequests, Step
from pbkern.fuse.access.equation_kinds import once_per_kind
from pbkern.fuse.access.rules import Access
from pbkern.fuse.cost import roofline
from pbkern.fuse.cost.model import Cost, Price
from pbkern.fuse.cost.roofline import Spread, Terms
from pbkern.fuse.cost.sizes import Sizes

from . import caches, kernel, step
from .sizes import SIZES

# Heavy values that several programs compute take this part of the kernel's time at most. A ratio of
# predictions for one machine: from 0.005 to 0.08 the benchmarks' plans for Zen 3, Zen 5, Granite Rapids and
# Haswell are the same (26 November 2026).
REPEATED_SHARE = 0.02


@dataclass(frozen=True)
class MachineCosts(Machine, abc.ABC):
    """L3 is what cores share."""

    @classmethod
    def of(cls, machine: Machine) -> Self:
        return cls(
            **{field.name: getattr(machine, field.name) for field in dataclasses.fields(Machine)}
        )

    @property
    def sizes(self) -> Sizes:
        return SIZES

    @property
    @abc.abstractmethod
    def near_bytes(self) -> int: ...

    @property
    @abc.abstractmethod
    def scratch_bytes(self) -> int: ...

    @abc.abstractmethod
    def spread(self, terms: Terms) -> Spread:
        """Says how the device runs a kernel's programs."""

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
        return caches.rows_alias(stride)

    def operations(self, eqn: Any) -> float:
        return once_per_kind("operations", eqn, lambda: step.operations_per_element(eqn, self))

    def scatter_cycles(self, eqn: Any) -> float:
        return step.scatter_cycles(eqn, self)

    def step_price(self, of: Step) -> Price:
        return step.step_price(of, self, self.sizes)

    def repeats_heavy_value(self, of: Step, programs: int) -> bool:
        return kernel.repeats_heavy_value(of, programs, self, self)

    def kernel_cost(
        self,
        requests: BlockRequests,
        outputs: Sequence[tuple[jex.Var, Access]],
        grid: Sequence[int],
        parts: Mapping[object, float] = MappingProxyType({}),
        repeated_steps: Collection[int] = (),
        stores_parts: bool = False,
    ) -> Cost | None:
        terms = kernel.kernel_terms(
            requests, outputs, grid, self, self, parts, repeated_steps, stores_parts
        )
        if terms is None:
            return None
        spread = self.spread(terms)
        cost = roofline.predicted(terms, spread, self)
        most = REPEATED_SHARE * (cost.seconds - spread.stalls)
        return None if math.ceil(terms.programs / self.cores) * terms.repeated > most else cost
