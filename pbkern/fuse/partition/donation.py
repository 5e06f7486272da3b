"""Donated operands -> kernels that write their results over such operands (in-place update).

XLA would have the kernel write to other memory and copy that into the donated array. A kernel may
write there directly if each program reads only the blocks of the operand that it writes: order
within a program is lowering's concern. A stencil reads what another program may have overwritten,
so it keeps the copy. Where more than elementwise arithmetic, or a scatter into it, leads from an
operand to the results, a program would have to save its block first, so the copy stays too.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.jax_types import array_aval
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.ops.scatter import SCATTERS
from pbkern.fuse.graph import Inner, Node, overwritten
from pbkern.fuse.tiling.schedule import Schedule


def use_donated(nodes: Sequence[Node], jaxpr: jex.Jaxpr, donated: Sequence[bool]) -> None:
    """Sets `aliases` in schedules of groups that may write into donated operands.

    Nothing else reads such an operand, or the group scatters into the carries of loops.
    """
    readers = Counter(read for node in nodes for read in node.reads())
    pairs = donated_pairs(jaxpr, donated)
    alone = {result: pair for result, pair in pairs.items() if readers[pair] == 1}
    _set_aliases(nodes, jaxpr, alone)
    for node in nodes:
        for name, inner in node.inner.items():
            scatter_into_carries(node.eqns[0], name, inner)
            use_donated([outer for outer in inner.partition.nodes if outer.inner], inner.jaxpr, ())


def scatter_into_carries(eqn, name: str, inner: Inner) -> None:
    """Sets `aliases` in the body `name` of a loop: if each new carry is the old one with values scattered into it.

    Groups that run before may read the old one.
    """
    groups = [node for node in inner.ordered if node.scatters() and not _overwrites(node)]
    _set_aliases(groups, inner.jaxpr, carried(eqn, name, inner.jaxpr))
    safe = overwritten(inner.ordered)
    for node in groups:
        if not node.overwrites.keys() <= safe.keys():
            node.schedule = dataclasses.replace(node.own_schedule, aliases=())


def _overwrites(node: Node) -> bool:
    return node.schedule is not None and bool(node.schedule.aliases)


def in_place(inner: Inner) -> dict:
    """Result of a body -> the operand of the body over which kernels write it."""
    shared, updated = overwritten(inner.ordered), {}
    for result in inner.jaxpr.outvars:
        var = None if isinstance(result, jex.Literal) else result
        while var in shared:
            var = shared[var]
        if var is not None and var is not result and var in inner.jaxpr.invars:
            updated[result] = var
    return updated


def carried(eqn, name: str, body: jex.Jaxpr) -> dict:
    """New carry -> old one."""
    params = params_of(eqn)
    if name == "jaxpr" and eqn.primitive.name == "scan":
        return dict(zip(body.outvars[: params["num_carry"]], body.invars[params["num_consts"] :]))
    if name == "body_jaxpr":
        return dict(zip(body.outvars, body.invars[params["body_nconsts"] :]))
    return {}


def _set_aliases(groups: Sequence[Node], jaxpr: jex.Jaxpr, pairs: dict) -> None:
    """`pairs`: result -> operand of the jaxpr that it may overwrite, if that is no result itself."""
    results = [var for var in jaxpr.outvars if not isinstance(var, jex.Literal)]
    pairs = {
        result: pair
        for result, pair in pairs.items()
        if pair not in results and results.count(result) == 1
    }
    for node in groups:
        if node.kind == "group" and node.schedule is not None and not node.schedule.aliases:
            aliases = tuple(_aliases(node, node.schedule, pairs))
            node.schedule = dataclasses.replace(node.schedule, aliases=aliases)


def donated_pairs(jaxpr: jex.Jaxpr, donated: Sequence[bool]) -> dict:
    """Result -> the donated operand that it overwrites, paired as jax.jit does: the first with the first of equal type."""
    waiting: dict = {}
    for var, flag in zip(jaxpr.invars, donated):
        if flag:
            aval = array_aval(var)
            waiting.setdefault((aval.shape, aval.dtype), []).append(var)
    pairs: dict = {}
    for output in jaxpr.outvars:
        aval = array_aval(output)
        free = waiting.get((aval.shape, aval.dtype))
        if free:
            var = free.pop(0)
            if not isinstance(output, jex.Literal):
                pairs.setdefault(output, var)
    return pairs


def _aliases(node: Node, schedule: Schedule, pairs: dict) -> Iterator[tuple[int, int]]:
    inputs = schedule.requests.inputs
    for number, (result, access) in enumerate(schedule.outputs):
        operand = pairs.get(result)
        places = [i for i, (other, _) in enumerate(inputs) if other is operand]
        if node.finish is not None and operand in node.finish.reads():
            continue
        if (
            operand is not None
            and len(places) == 1
            and inputs[places[0]][1] == access
            and _stays_in_place(node, operand)
        ):
            yield places[0], number


def _stays_in_place(node: Node, operand) -> bool:
    """Whether the node uses `operand` only in elementwise arithmetic, or scatters other values into it."""
    tainted = {operand}
    for eqn in node.eqns:
        at = [
            k
            for k, var in enumerate(eqn.invars)
            if not isinstance(var, jex.Literal) and var in tainted
        ]
        if at:
            scattered = eqn.primitive.name in SCATTERS and at == [0]
            if eqn.primitive.name not in ELEMENTWISE and not scattered:
                return False
            tainted.update(eqn.outvars)
    return True
