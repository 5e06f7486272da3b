"""SmallUpdates: scatters and dynamic_update_slices that change little of an array, so that writing over it pays."""

from __future__ import annotations

from pbkern.core.jax_types import array_aval
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.scatter import SCATTERS, scatter_combines
from pbkern.core.passes import threshold


@dataclass(frozen=True)
class SmallUpdates:
    """Which updates are small enough to be a step of their own."""

    few_updates: int = threshold(
        1 << 14, "elements that are updated in one program: several take longer to start"
    )
    least_share: int = threshold(
        8,
        "elements of an array for each in its window: a larger window is updated by arithmetic on "
        "the whole, which fuses. Source: not recorded",
    )

    def has(self, eqn) -> bool:
        """Whether an equation changes few elements of its first operand to make its result."""
        if eqn.primitive.name in SCATTERS:
            few = array_aval(eqn.invars[2]).size <= self.few_updates
            return few and scatter_combines(eqn) is not None
        if eqn.primitive.name != "dynamic_update_slice":
            return False
        return array_aval(eqn.invars[1]).size <= self.few_updates and self.leaves_most(eqn)

    def leaves_most(self, eqn) -> bool:
        """Whether an update's window is a small part of its operand."""
        window = array_aval(eqn.invars[2 if eqn.primitive.name in SCATTERS else 1]).size
        return window > 0 and window * self.least_share <= array_aval(eqn.invars[0]).size
