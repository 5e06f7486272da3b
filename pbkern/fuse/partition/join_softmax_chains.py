"""Partitioner -> the same with softmax chains (exponentials, their sums, their products, as in attention) in one group.

Sums and products stay groups of their own where the model sees no gain in joining one to the other.
Together they no longer need the exponentials as a whole (fuse/tiling/online_analysis.py), which no
single step of joining shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pbkern.core.jaxprs.walks import atoms, leading_to
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.passes import threshold
from pbkern.fuse.cost.kinds import CONTRACTIONS, DATA_MOVEMENT
from pbkern.fuse.graph import Node
from pbkern.fuse.tiling.online_analysis import EXPONENTIALS

from .partitioner import Partitioner


def are_scores(values: Iterable, eqns: Sequence) -> bool:
    """Whether values lead to, or come from, exponentials that `eqns`, in program order, both sum and multiply."""
    weights, ends = _followed(eqns)
    names = {eqn.primitive.name for eqn in ends}
    if "reduce_sum" not in names or names.isdisjoint(CONTRACTIONS):
        return False
    leads = set(weights)
    for eqn in reversed(eqns):
        if _passes(eqn) and any(var in leads for var in eqn.outvars):
            leads.update(atoms(eqn))
    return any(value in leads for value in values)


def _passes(eqn) -> bool:
    return eqn.primitive.name in ELEMENTWISE or eqn.primitive.name in DATA_MOVEMENT


@dataclass(frozen=True)
class ScoresLimit:
    """The time that one kernel may take if it keeps scores.

    Two kernels against one, measured where the model saw 1.2 to 1.25: 64 positions of 1 head 64 and 32 us; 512 of 8 heads, 16
    wide, 1873 and 1506; causal 2991 and 1067.
    """

    scores_slack: float = threshold(2.0, "modelled time together, relative to apart")


@dataclass(frozen=True)
class JoinSoftmaxChains(ScoresLimit):
    """Joins a group with all readers of its result if the result is scores."""

    def __call__(self, parts: Partitioner, options: object) -> Partitioner:
        for group in parts.groups():
            if group not in parts.nodes:  # it has joined another
                continue
            users, aliases = parts.readers(group)
            if len(users) < 2 or any(user.kind != "group" for user in users):
                continue
            inside = [group, *aliases, *users]
            eqns = sorted(
                {id(eqn): eqn for member in inside for eqn in member.eqns}.values(),
                key=lambda eqn: parts.order[id(eqn)],
            )
            if not are_scores(group.outputs, eqns):
                continue
            around = any(_leads_around(parts, user, inside) for user in users)
            if around or not _join(parts, inside, eqns, self.scores_slack):
                _join_ends(parts, group, aliases, users, self.scores_slack)
        return parts


def _leads_around(parts: Partitioner, user: Node, inside: list[Node]) -> bool:
    """Whether a node outside of `inside` reads results of `user`, and one of `inside` reads that node's."""
    outside = [successor for successor in parts.successors(user) if successor not in inside]
    return any(parts.reaches(outside, member) for member in inside)


def _join(parts: Partitioner, inside: list[Node], eqns: list, slack: float) -> bool:
    """Makes the nodes `inside`, which compute `eqns`, one group if it takes less than `slack` of their time."""
    *earlier, last = inside
    outputs = [
        output
        for member in inside
        for output in member.outputs
        if output in parts.results or any(user not in inside for user in parts.users(output))
    ]
    schedule, why = parts.attempt(eqns, outputs, None, eqns[-1], parts.fits_chain)
    before = sum(member.seconds for member in inside if member.kind == "group")
    ok = schedule is not None and schedule.cost.seconds < before * slack
    parts.record(inside[0].eqns[-1], ok, why, before, schedule, slack)
    if schedule is not None and ok:
        for other in earlier:
            parts.drop(other)
        parts.set_group(last, eqns, outputs, schedule)
    return ok


def _join_ends(
    parts: Partitioner, group: Node, aliases: list[Node], users: list[Node], slack: float
) -> None:
    """Joins a group of scores with the sums and products in its readers, whose other equations stay where they are.

    A reader may hold a layer's next product, which nothing makes one group with attention.
    """
    joined = [*group.eqns, *(eqn for alias in aliases for eqn in alias.eqns)]
    weights, _ = _followed(joined)
    inside = [group, *aliases, *users]
    rests, outputs_of_rests, ends = {}, {}, set()
    shared = {var for member in (group, *aliases) for var in member.outputs}
    for user in users:
        ended = {var for eqn in _followed(user.eqns, weights)[1] for var in eqn.outvars}
        ends |= ended
        shared |= ended
        outputs_of_rests[id(user)] = [var for var in user.outputs if var not in ended]
        rests[id(user)] = leading_to(user.eqns, outputs_of_rests[id(user)], ended)
        joined += leading_to(user.eqns, ended)
    eqns = sorted({id(eqn): eqn for eqn in joined}.values(), key=lambda eqn: parts.order[id(eqn)])
    read = _read(eqns)
    makers = [node for var in read for node in parts.nodes_of.get(id(parts.makers.get(var)), ())]
    after = parts.successors(group)
    stays = not any(rests.values()) or not ends
    if stays or any(parts.reaches(after, maker) for maker in makers):
        return
    of_rests = {var for rest in rests.values() for eqn in rest for var in eqn.outvars}
    needed = {var for rest in rests.values() for var in _read(rest)}
    given = {var for member in inside for var in member.outputs} - of_rests
    outputs = [
        var
        for eqn in eqns
        for var in eqn.outvars
        if (var in needed and var in shared)
        or (var in given and var in parts.results)
        or (var in given and any(user not in inside for user in parts.users(var)))
    ]
    schedule, why = parts.attempt(eqns, outputs, None, eqns[-1], parts.fits_chain)
    left = {
        id(user): parts.attempt(rest, outputs_of_rests[id(user)], None, rest[-1])[0]
        for user in users
        if (rest := rests[id(user)])
    }
    before = sum(member.seconds for member in (group, *users))
    if schedule is None or None in left.values():
        parts.record(group.eqns[-1], False, why, before, schedule, slack)
        return
    after_seconds = sum(other.cost.seconds for other in (schedule, *filter(None, left.values())))
    ok = after_seconds < before * slack
    parts.record(group.eqns[-1], ok, why, before, schedule, slack)
    if not ok:
        return
    for alias in aliases:
        parts.drop(alias)
    parts.set_group(group, eqns, outputs, schedule)
    for user in users:
        of_rest = left.get(id(user))
        if of_rest is None:
            parts.drop(user)
        else:
            parts.set_group(user, rests[id(user)], outputs_of_rests[id(user)], of_rest)


def _read(eqns: Sequence) -> set:
    """Values that equations read and do not make."""
    return {atom for eqn in eqns for atom in atoms(eqn)} - {
        var for eqn in eqns for var in eqn.outvars
    }


def _followed(eqns: Sequence, known: Iterable | None = None) -> tuple[set, list]:
    """Follows exponentials through elementwise operations.

    Args:
      eqns: the equations, in program order.
      known: exponentials that the equations read; None: those that they make.

    Returns:
      (exponentials and what is made of them, the sums, products and other equations that read these).
    """
    weights: set = set(known or ())
    ends: list = []
    for eqn in eqns:
        reads = bool(weights) and any(atom in weights for atom in atoms(eqn))
        if (reads and _passes(eqn)) or (known is None and eqn.primitive.name in EXPONENTIALS):
            weights.update(eqn.outvars)
        elif reads:
            ends.append(eqn)
    return weights, ends
