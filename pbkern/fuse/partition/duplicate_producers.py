"""Equations that several groups compute -> shared: one group computes them, and groups that wait for it anyway read them.

Groups grow from their results: x1 = x + f(x), as in a residual network, is copied into every group
that adds to it before the
group of f exists, and that group then has to pass on f's result:

    A: h = f(x), norm(x + h)                       A: x1 = x + f(x), norm(x1)
    B: h2 = g(...), norm(x + h + h2)         ->    B: x2 = x1 + g(...), norm(x2)
    C: h3 = ..., norm(x + h + h2 + h3)             C: x3 = x2 + ..., norm(x3)

Masks and other simple functions of indices are duplicated instead: stored, a mask is a matrix of
numbers; as a test, it lets lowering skip the dead half of causal attention, and costs nothing
elsewhere. So every reader gets a copy.

Works on the groups of partitioner.py in program order, so that a shared value is there for the next
group.
"""

from __future__ import annotations

from pbkern.core.jaxprs.walks import leading_to
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.passes import threshold
from pbkern.fuse.cost.kinds import DATA_MOVEMENT, is_heavy
from pbkern.fuse.graph import Edge, Node
from pbkern.fuse.tiling.schedule import Schedule

from .partitioner import Partitioner


@dataclass(frozen=True)
class DuplicateMasks:
    """Duplicates functions of indices of `parts`, a Partitioner, into the groups that read them."""

    most_index_equations: int = threshold(
        16, "equations of a function of indices that is duplicated. Source: not recorded"
    )
    slack: float = threshold(
        1.25, "time of the readers after the duplication, relative to before. Source: not recorded"
    )

    def __call__(self, parts: Partitioner, options: object) -> Partitioner:
        for group in [node for node in parts.nodes if node.kind == "group" and not node.reads()]:
            names = {eqn.primitive.name for eqn in group.eqns}
            arithmetic = names & ELEMENTWISE.keys()
            is_simple = names <= arithmetic | DATA_MOVEMENT
            if len(group.eqns) <= self.most_index_equations and is_simple and arithmetic:
                _copy(parts, group, self.slack)
        return parts


def _copy(parts, group: Node, slack: float) -> None:
    users, aliases = parts.readers(group)
    copied = [*group.eqns, *(eqn for view in aliases for eqn in view.eqns)]
    users = [reader for reader in users if reader.kind == "group"]
    for user in users:
        schedule = _schedule(parts, [*copied, *user.eqns], user.outputs)
        if schedule is not None and schedule.cost.seconds <= slack * (
            user.seconds + group.seconds / len(users)
        ):
            parts.set_group(user, [*copied, *user.eqns], user.outputs, schedule)
    for member in (*reversed(aliases), group):  # readers first
        member.outputs = [
            output for output in member.outputs if output in parts.results or parts.users(output)
        ]
        if not member.outputs:
            parts.drop(member)


def share_duplicates(parts) -> None:
    """Removes copies from groups of `parts`, a Partitioner, where the model does not lose."""
    for eqn in parts.jaxpr.eqns:
        groups = [node for node in parts.nodes_of.get(id(eqn), ()) if node.kind == "group"]
        for maker in groups if len(groups) > 1 else ():
            given = {output for output in maker.outputs if output in eqn.invars}
            readers = [group for group in groups if group is not maker and given & group.reads()]
            if readers:
                _share(parts, eqn, maker, readers)
                break


def _share(parts, eqn, maker: Node, readers: list[Node]) -> None:
    """Lets `readers`, which wait for the maker anyway, read the results of its copy of `eqn`."""
    changed = [
        (
            reader,
            leading_to([member for member in reader.eqns if member is not eqn], reader.outputs),
            reader.outputs,
        )
        for reader in readers
    ]
    still_read = {
        output: {id(user) for user in parts.users(output)} - {id(reader) for reader in readers}
        for output in maker.outputs
    }
    reads = set().union(*(Node("group", eqns).reads() for _, eqns, _ in changed))
    remaining = [
        output
        for output in maker.outputs
        if output in parts.results or still_read[output] or output in reads
    ]
    outputs = list(dict.fromkeys([*remaining, *eqn.outvars]))
    changed.append((maker, leading_to(maker.eqns, outputs), outputs))
    schedules = []
    for n, eqns, outputs in changed:
        schedule = _schedule(parts, eqns, outputs, n.schedule, eqn)
        if schedule is None:
            return
        schedules.append(schedule)
    before, after = (
        sum(n.seconds for n, _, _ in changed),
        sum(candidate.cost.seconds for candidate in schedules),
    )
    why = (
        "one copy for all"
        if after <= before
        else "a copy in each kernel is faster than one that is stored"
    )
    parts.edges.append(Edge(eqn, after <= before, why, 0, before, after))
    if after <= before:
        for (n, eqns, outputs), schedule in zip(changed, schedules):
            parts.set_group(n, eqns, outputs, schedule)


def _schedule(
    parts, eqns: list, outputs: list, current: Schedule | None = None, changed=None
) -> Schedule | None:
    """`current`: the group's schedule.

    `changed`: the equation by which it differs now; a cheap one keeps the blocks.
    """
    heavy = sum(is_heavy(eqn, parts.machine) for eqn in eqns)
    accept = parts.fits_chain if heavy > 1 else None
    return parts.attempt(eqns, outputs, current, changed or eqns[-1], accept)[0] if eqns else None
