"""CostModel: sizes, rates, and prices of steps and kernels, by which a target steers the fuser."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Protocol

from jax.extend import core as jex

from pbkern.core.lazy_dataclass import dataclass
from pbkern.fuse.access.blocks import BlockRequests, Step
from pbkern.fuse.access.rules import Access

from .sizes import Sizes


@dataclass(frozen=True, slots=True)
class Price:
    """Cost and kind of one step for one program.

    It is worked out once per step (`price_of`): most attempts to join groups share their steps.

    Attributes:
      seconds: all work except packing.
      packing: seconds of copying a contraction's operands into panels.
      operations: of all elements of the step's block.
      part: elements of the block over elements of the whole result.
      limit: seconds of a contraction's operations at the machine's peak, each done once.
      block_bytes: of its first result.
      read: the variables that it reads.
      of_tests: whether comparisons of indices may consist of such steps.
      in_place: whether each element depends on elements at the same place alone, so that lowering stores no operands.
      light: whether it makes as many elements as it reads, or only renames them.
      own_updates: the part of a scatter's updates that the program reads; None for all other steps.
      table: the operand that it looks up or scatters.
      streams: whether operands that are computed for it alone are computed a part at a time, while they are packed.
    """

    seconds: float
    packing: float
    operations: float
    part: float
    limit: float
    block_bytes: int
    read: tuple
    of_tests: bool
    in_place: bool
    light: bool
    own_updates: float | None
    table: object
    streams: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted time of one kernel.

    Attributes:
      seconds: the kernel's.
      compute: seconds of arithmetic alone.
      memory: seconds of traffic alone.
      bytes_moved: compulsory bytes, each array once.
      flops: operations done, repeated ones included.
      recompute: operations done / operations needed.
      working_set: bytes that one program touches.
      scratch: bytes of values between equations, among these.
      programs: grid size.
      limit: the machine's limit for this kernel's compulsory work (seconds).
      streams: whether products read operands a part at a time, from copies made ahead of their use.
    """

    seconds: float
    compute: float
    memory: float
    bytes_moved: int
    flops: float
    recompute: float
    working_set: int
    scratch: int
    programs: int
    limit: float
    streams: bool = False

    @property
    def share_of_limit(self) -> float:
        return self.limit / self.seconds if self.seconds else 1.0


class CostModel(Protocol):
    """One device's prices.

    All times are seconds, sizes bytes, rates per second of all cores together.

    Attributes:
      name: of the device's platform.
      cores: programs that run at the same time: hardware threads of a CPU, multiprocessors of a
        GPU.
      near_bytes: size of one core's near memory, from which reading again costs little.
      scratch_bytes: most bytes of values between equations for which blocks of no other shape are tried.
      shared_bytes: size of the last cache, which all cores share.
      near_bandwidth: of near memory.
      shared_bandwidth: of the last cache.
      memory_bandwidth: of main memory.
      clock_hz: operations of `lanes` elements per second of one core.
      launch_seconds: start and end of one kernel on all cores.
      program_seconds: overhead of one program.
      sizes: limits and preferred sizes (fuse/cost/sizes.py).
    """

    @property
    def name(self) -> str: ...
    @property
    def cores(self) -> int: ...
    @property
    def near_bytes(self) -> int: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def near_bandwidth(self) -> float: ...
    @property
    def shared_bandwidth(self) -> float: ...
    @property
    def memory_bandwidth(self) -> float: ...
    @property
    def clock_hz(self) -> float: ...
    @property
    def launch_seconds(self) -> float: ...
    @property
    def program_seconds(self) -> float: ...
    @property
    def sizes(self) -> Sizes: ...

    def lanes(self, itemsize: int) -> int:
        """Elements that one core computes at a time."""

    def flops(self, dtype_name: str) -> float:
        """Peak of contractions in a dtype."""

    def far_bandwidth(self, size: int) -> float:
        """Bandwidth at which a kernel reads `size` bytes for the first time: small arrays may still be in a cache."""

    def rows_alias(self, stride: int) -> bool:
        """Whether reads of a row wait for writes to neighbouring rows, which are `stride` bytes apart."""

    def operations(self, eqn: Any) -> float:
        """Operations per element of an equation's first result."""

    def scatter_cycles(self, eqn: Any) -> float:
        """Cycles of one core that combines all updates of a scatter one after the other."""

    def step_price(self, step: Step) -> Price:
        """Prices one step of one program."""

    def repeats_heavy_value(self, step: Step, programs: int) -> bool:
        """Whether `kernel_cost` is None for this step alone, with so many programs, in a kernel without scatters."""

    def kernel_cost(
        self,
        requests: BlockRequests,
        outputs: Sequence[tuple[jex.Var, Access]],
        grid: Sequence[int],
        parts: Mapping[object, float] = MappingProxyType({}),
        repeated_steps: Collection[int] = (),
        stores_parts: bool = False,
    ) -> Cost | None:
        """Predicts one kernel; None where it computes a heavy value too often.

        Args:
          requests: blocks that one program reads, and its steps.
          outputs: results with their blocks.
          grid: number of programs per axis.
          parts: value that is computed in chunks -> the part of its block that a program holds at a time.
          repeated_steps: ids of equations that a program computes twice.
          stores_parts: whether such parts are in memory also between products that read their operands a part at a time.
        """


# Prices are copied so often, with other variables, that `replace` of the standard library would show.
_FIELDS = [field.name for field in fields(Price)]
_in_front = operator.attrgetter(*_FIELDS[: _FIELDS.index("read")])
_behind = operator.attrgetter(*_FIELDS[_FIELDS.index("read") + 1 :])


def price_of(step: Step, costs: CostModel) -> Price:
    """The price of a step, which keeps it (fuse/access/blocks.py)."""
    if not isinstance(step.price, Price):
        step.price = _alike(step, costs) or costs.step_price(step)
    return step.price


def _alike(step: Step, costs: CostModel) -> Price | None:
    """The price of a step's model, with the variables that the step reads; None where a price names a table."""
    price = None if step.model is None else price_of(step.model, costs)
    if price is None or price.table is not None:
        return None
    read = tuple([var for var in step.eqn.invars if not isinstance(var, jex.Literal)])
    values: list[Any] = [*_in_front(price), read, *_behind(price)]
    return Price(*values)
