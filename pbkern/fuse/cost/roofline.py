"""The roofline: seconds of a kernel from named terms of its work and from how a machine spreads its programs.

    seconds = longer of (compute, memory) + a part of the shorter + launch and programs + stalls
    compute = arithmetic of a program * rounds of programs
    memory  = (reads + stores + rereads + trips) / part of the bandwidth in use

Targets say how programs are spread (`Spread`); the terms are the same for all.
"""

from __future__ import annotations

from pbkern.core.lazy_dataclass import dataclass

from .model import Cost, CostModel

# The part of the shorter of arithmetic and traffic that does not overlap with the longer one.
UNOVERLAPPED = 0.25


@dataclass(frozen=True, slots=True)
class Terms:
    """Work of one kernel in seconds and bytes, each counted as if nothing overlapped.

    Attributes:
      arithmetic: seconds of one program on one core, copies for contractions included.
      repeated: the part of `arithmetic` for heavy values that several programs compute.
      reads, stores: seconds of all programs' first reads, and of storing results once, at the full
        bandwidth of the place of each array.
      rereads: seconds of reading blocks again, from caches.
      trips: seconds of all programs' stored values to a cache and back.
      copied: bytes of one program's blocks that overlap with those of others, or are read across rows.
      bytes_moved, flops, recompute, working_set, scratch, programs, limit, streams: see Cost.
    """

    arithmetic: float
    repeated: float
    reads: float
    stores: float
    rereads: float
    trips: float
    bytes_moved: int
    flops: float
    recompute: float
    working_set: int
    scratch: int
    programs: int
    limit: float
    streams: bool = False
    copied: int = 0


@dataclass(frozen=True, slots=True)
class Spread:
    """A machine's way of running a kernel's programs.

    Attributes:
      rounds: times that a core runs a program's arithmetic, idle cores included.
      starts: programs that a core starts.
      bandwidth: the part of the bandwidth that programs reach together.
      store_passes: times that a stored byte moves: 2 where a store reads its line first.
      stalls: seconds in which nothing else happens.
    """

    rounds: float
    starts: float
    bandwidth: float
    store_passes: int
    stalls: float


def overlapped(first: float, second: float) -> float:
    """Seconds of two kinds of work that mostly run at the same time."""
    return max(first, second) + UNOVERLAPPED * min(first, second)


def predicted(terms: Terms, spread: Spread, costs: CostModel) -> Cost:
    """The cost of a kernel with these terms, spread like this."""
    compute = spread.rounds * terms.arithmetic
    traffic = terms.reads + spread.store_passes * terms.stores + terms.rereads + terms.trips
    memory = traffic / spread.bandwidth
    overhead = costs.launch_seconds + spread.starts * costs.program_seconds
    return Cost(
        seconds=overlapped(compute, memory) + overhead + spread.stalls,
        compute=compute,
        memory=memory,
        bytes_moved=terms.bytes_moved,
        flops=terms.flops,
        recompute=terms.recompute,
        working_set=terms.working_set,
        scratch=terms.scratch,
        programs=terms.programs,
        limit=terms.limit,
        streams=terms.streams,
    )
