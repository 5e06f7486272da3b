"""A GPU's answers to passes for every target: the dimension along lanes, threads of a block, shared memory."""

from __future__ import annotations

import math

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.context import NestPolicy
from pbkern.lower.nest.ir import Buf, Nest, nodes

from .threads import ThreadMapping, lane_dimension, map_to_threads


@dataclass(frozen=True)
class ThreadPolicy(NestPolicy):
    """Answers for blocks of `threads`, of which `warp` run in step.

    Attributes:
      reassociate: sums of floats may be made of partial ones.
      relaxed_atomics: see VendorCode.
    """

    threads: int = 128
    warp: int = 32
    reassociate: bool = True
    relaxed_atomics: bool = False

    def mapping(self, nest: Nest) -> ThreadMapping:
        """Who computes a nest."""
        return map_to_threads(nest, self.threads, self.warp, self.reassociate)

    def vector_dimension(self, nest: Nest) -> str | None:
        return lane_dimension(nest, self.mapping(nest)) or None

    def lanes(self, nest: Nest, dim: str | None = None) -> int:
        """Threads that take neighbouring elements together."""
        return self.mapping(nest).team if dim in nest.rdims else self.threads

    def is_far(self, buf: Buf) -> bool:
        return not buf.root.arena

    def cycles(self, nest: Nest, far_cycles: float) -> float:
        """Steps of the block's threads, times operations of a point. Threads hand no values to their neighbours."""
        if nest.moves():
            return math.inf
        far = {load.buf.root for load in nest.loads() if self.is_far(load.buf)}
        far |= {store.buf.root for store in nest.stores if self.is_far(store.buf)}
        steps = -(-math.prod(nest.dims.values()) // self.threads)
        operations = len(list(nodes(nest.nodes())))
        return steps * (operations + far_cycles * len(far))
