"""Schedule of a long group of one program that takes in equations: one program again, priced by the new equations alone.

A search walks the whole group several times. Doing so for each equation that joins is quadratic in
the group's length, and groups of small arrays grow to thousands of equations: they are one program,
as there is too little data for more. Whole arrays need no search, and growing needs only the steps
of what is new. When all groups have grown, the partitioner searches each once.
"""

from __future__ import annotations

from collections.abc import Sequence

from pbkern.core.jaxprs.walks import atoms
from pbkern.fuse.access.blocks import request, request_more
from pbkern.fuse.access.rules import whole
from pbkern.fuse.cost.model import CostModel

from .schedule import Schedule, priced

# Equations of a group from which on it is grown: below, searches take less than a millisecond per
# equation. Networks on arrays of real size have shorter groups.
LONG_GROUP = 64


def grows(eqns: Sequence, schedule: Schedule | None) -> bool:
    """Whether a group is long, and was one program on whole arrays before it took in some of `eqns`."""
    return (
        schedule is not None
        and not schedule.grid
        and schedule.wave is None
        and schedule.online is None
        and len(eqns) > LONG_GROUP
    )


def in_front(eqns: Sequence, outputs: Sequence, schedule: Schedule) -> list | None:
    """The equations that a group takes in; None where they read its values, or where its results so far change."""
    before, computed = schedule.requests.equations, schedule.requests.computed
    more = [eqn for eqn in eqns if id(eqn) not in before]
    known = {var for var, _ in schedule.outputs}
    stays = (
        len(more) + len(before) == len(eqns)
        and not any(atom in computed for eqn in more for atom in atoms(eqn))
        and known <= set(outputs)
        and not any(var in computed for var in outputs if var not in known)
    )
    return more if stays else None


def grown(
    eqns: Sequence, outputs: Sequence, schedule: Schedule, machine: CostModel
) -> Schedule | None:
    """Schedules `eqns`, a group that `grows`, as one program. None where the target refuses; raises as `request` does."""
    placed = tuple((var, tuple(map(whole, var.aval.shape))) for var in outputs)
    more = in_front(eqns, outputs, schedule)
    if more is None:
        requests = request(eqns, placed)
    else:
        known = {var for var, _ in schedule.outputs}
        requests = request_more(
            more, schedule.requests, [(var, access) for var, access in placed if var not in known]
        )
    return priced(eqns, requests, placed, (), outputs[0].aval.shape, machine)
