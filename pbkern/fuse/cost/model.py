"""CostModel: what a target tells the fuser of its device: sizes, rates, and prices of steps and kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from jax.extend import core as jex

from pbkern.core.lazy_dataclass import dataclass
from pbkern.fuse.access.blocks import BlockRequests, Step
from pbkern.fuse.access.rules import Access

from .sizes import Sizes


@dataclass(frozen=True, slots=True)
class Price:
    """Cost of one step for one program, and its kind: most attempts to join groups share their steps.

    Attributes:
      seconds, packing: all but that of copies for contractions, and that.
      operations: of all its elements.
      part: the part of the result.
      limit: seconds of a contraction's operations at the machine's peak, each done once.
      block_bytes: of its first result.
      read: the variables that it reads.
      of_tests: whether comparisons of indices consist of such.
      in_place: whether it makes each element of elements at the same place, so that lowering needs
        no stored operands.
      light: whether it makes as many elements as it reads, or only renames them.
      own_updates: the part of a scatter's updates that the program reads; None for all other steps.
      table: what it looks up or scatters.
      streams: whether operands that are computed for it alone are computed a part at a time, while they are copied.
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
      seconds: all of it.
      compute, memory: arithmetic alone, traffic alone (seconds).
      bytes_moved: compulsory bytes, each array once.
      flops: operations done, repeated ones included.
      recompute: operations done / operations needed.
      working_set: bytes that one program touches.
      scratch: the part of them that are values between equations.
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
      near_bytes: memory of one core that is as good as near: what a program holds there costs
        little to read again.
      scratch_bytes: values between equations that a program may hold without a look at blocks of
        another shape.
      shared_bytes: the last cache, that all cores share.
      near_bandwidth, shared_bandwidth, memory_bandwidth: of these and of the memory behind them.
      clock_hz: operations of `lanes` elements per second of one core.
      launch_seconds: start and end of one kernel on all cores. program_seconds: overhead of one
        program.
      sizes: what has been found good for the device, see fuse/cost/sizes.py.
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
        """Bandwidth of a kernel's first reading of so many bytes: small arrays may have stayed in a cache."""

    def rows_alias(self, stride: int) -> bool:
        """Whether reads of a row wait for writes to neighbouring rows, which are `stride` bytes apart."""

    def operations(self, eqn: Any) -> float:
        """Operations per element of an equation's first result."""

    def scatter_cycles(self, eqn: Any) -> float:
        """Cycles of one core that combines all updates of a scatter one after the other."""

    def step_price(self, step: Step) -> Price:
        """Prices one step of one program."""

    def kernel_cost(
        self,
        requests: BlockRequests,
        outputs: Sequence[tuple[jex.Var, Access]],
        grid: Sequence[int],
        parts: Mapping[object, float] = MappingProxyType({}),
        repeated_steps: Collection[int] = (),
    ) -> Cost | None:
        """Predicts one kernel; None where it computes a heavy value too often.

        `parts`: how much of its block a program holds at a time, of values that it computes in
        runs; `repeated_steps`: ids of equations that it computes twice.
        """


def price_of(step: Step, costs: CostModel) -> Price:
    """The step's, worked out once (fuse/access/blocks.py)."""
    if not isinstance(step.price, Price):
        step.price = costs.step_price(step)
    return step.price
