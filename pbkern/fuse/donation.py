"""Operands that the caller gives up -> kernels that write their result where such an operand lay.

XLA would have the kernel write to memory of its own and copy that into the donated array. A kernel may write there at once
if it reads each element of the operand just to make the element of the result that takes its place: one result, made by
elementwise arithmetic alone, from blocks of the operand that are the result's blocks. A stencil reads what another program
may have overwritten; it keeps its copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.extend import core as jex

from .access import ELEMENTWISE
from .nodes import Node
from .schedule import Schedule


def write_in_place(nodes: Sequence[Node], jaxpr: jex.Jaxpr, donated: Sequence[bool]) -> None:
    """Sets `aliases` of the schedules of groups that may write into a donated operand of the jaxpr, which nobody else reads."""
    given = {v for v, flag in zip(jaxpr.invars, donated) if flag}
    results = [a for a in jaxpr.outvars if not isinstance(a, jex.Literal)]
    readers: dict = {}
    for node in nodes:
        for v in node.reads():
            readers.setdefault(v, []).append(node)
    for node in nodes:
        if node.kind == "group" and len(node.outputs) == 1 and node.outputs[0] in results:
            free = {v for v in given if readers.get(v) == [node] and v not in results}
            operand = _replaced(node, free)
            if operand is not None:
                assert node.schedule is not None
                node.schedule = dataclasses.replace(node.schedule, aliases=((operand, 0),))


def _replaced(node: Node, free: set) -> int | None:
    """The number of the operand whose place the node's result can take."""
    schedule: Schedule | None = node.schedule
    if schedule is None:
        return None
    ((result, access),) = schedule.outputs
    inputs = schedule.requests.inputs
    for n, (v, read) in enumerate(inputs):
        same_type = v.aval.shape == result.aval.shape and v.aval.dtype == result.aval.dtype
        once = sum(other is v for other, _ in inputs) == 1
        if v in free and same_type and once and read == access and _is_elementwise(node, v):
            return n
    return None


def _is_elementwise(node: Node, v) -> bool:
    """Does the node's result follow from `v` by elementwise arithmetic alone?"""
    tainted = {v}
    for eqn in node.eqns:
        if any(a in tainted for a in eqn.invars if not isinstance(a, jex.Literal)):
            if eqn.primitive.name not in ELEMENTWISE:
                return False
            tainted.update(eqn.outvars)
    return node.outputs[0] in tainted
