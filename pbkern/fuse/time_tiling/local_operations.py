"""Operations whose results depend on few elements near each: steps of loops over them may share a kernel."""

from __future__ import annotations

import math

from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.fuse.cost.kinds import DATA_MOVEMENT, SINGLE_PASS
from pbkern.fuse.tiling.block_options import FEW_OUTER_ELEMENTS

from .limits import TimeTilingLimits
from .windows_as_slices import is_window


def is_local(eqn, limits: TimeTilingLimits) -> bool:
    name = eqn.primitive.name
    if name in SINGLE_PASS and "axes" in eqn.params:
        return (
            math.prod(eqn.invars[0].aval.shape[axis] for axis in eqn.params["axes"])
            <= FEW_OUTER_ELEMENTS
        )
    return name in ELEMENTWISE or name in DATA_MOVEMENT or is_window(eqn, limits)
