"""Joint graph of forward and backward -> the two, by Torch's minimal cut: as few bytes as possible are kept between them.

What is computed again costs little where kernels fuse it, so the cut may go through more than
Torch's own: batched products too, such as the scores of attention, which are many more than what
they are made of. Views are always made again: to keep one would be to copy it. Measured in
docs/decisions/045-saved-tensors.md.

A value that is computed again may be rounded in another way: the two graphs have other kernels. A
decision that is made again of such a value may be another one. The gradient of a maximum, which
goes to the elements that equal it, would go to none. So decisions (`decisions_between`) are kept, one byte
for each comparison, except where what they are made of is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch._functorch import config, partitioners
from torch.utils._ordered_set import OrderedSet

# Beside those of Torch's list. Products with weights stay: they cost more than their bytes.
AGAIN = (
    "bmm",
    "cat",
    "constant_pad_nd",
    "tril",
    "logsumexp",
    "amin",
    "all",
    "repeat",
    "stack",
    "flip",
    "roll",
    "detach",
    "alias",
    "gather",
    "scatter",
    "contiguous",
    "clone",
    "copy",
    "real",
    "imag",
    "view_as_real",
    "view_as_complex",
)
# Results follow from the operands without arithmetic: the same operands have the same results in every kernel.
MOVES = frozenset(
    """abs alias amax amin as_strided cat clamp clamp_max clamp_min clone constant_pad_nd contiguous convert_element_type
    copy detach diagonal expand flip full_like gather getitem imag index index_select lift_fresh_copy max maximum min
    minimum neg ones_like permute real relu repeat reshape roll select slice sort split split_with_sizes squeeze stack t to
    topk transpose tril triu unbind unfold unsqueeze view view_as_complex view_as_real where zeros_like _to_copy
    _unsafe_view""".split()
)
# Floating-point results that jump where an operand passes a limit.
STEPS = frozenset("ceil floor round trunc".split())
ORDER = frozenset("ge gt le lt".split())
CHOICES = {"ban_recompute_materialized_backward": False, "recompute_views": True}
_lock = threading.RLock()


def partition(
    joint: torch.fx.GraphModule, inputs: Any, **options: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """(forward graph, backward graph)."""
    listed = partitioners.get_default_op_list()
    more = [getattr(torch.ops.aten, name) for name in AGAIN]
    again, fused = (
        OrderedSet([*ops, *more]) for ops in (listed.recomputable_ops, listed.fusible_ops)
    )
    ours = dataclasses.replace(listed, recomputable_ops=again, fusible_ops=fused)
    choose = partitioners.choose_saved_values_set

    def with_decisions(graph: fx.Graph, info: Any, memory_budget: float = 1) -> list[fx.Node]:
        saved = choose(graph, info, memory_budget)
        return [*saved, *decisions_between(graph, saved, info.tangents_closure)]

    with _lock, config.patch(CHOICES), _replaced(lambda: ours, with_decisions):
        return partitioners.min_cut_rematerialization_partition(joint, inputs, **options)


@contextlib.contextmanager
def _replaced(get_default_op_list: Callable, choose_saved_values_set: Callable) -> Iterator[None]:
    """Torch's partitioner with these functions in the place of its own."""
    new = {
        "get_default_op_list": get_default_op_list,
        "choose_saved_values_set": choose_saved_values_set,
    }
    before = {name: getattr(partitioners, name) for name in new}
    try:
        for name, function in new.items():
            setattr(partitioners, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(partitioners, name, function)


def decisions_between(
    graph: fx.Graph, saved: Collection[fx.Node], backward: Collection[fx.Node]
) -> list[fx.Node]:
    """Decisions that may be others when they are made again of `saved` values; Torch drops those that no gradient reads.

    backward: nodes that depend on the gradients of results.
    """
    exact, decisions = set(saved), []  # exact: the same in both graphs
    for node in graph.nodes:
        if node in exact or node in backward or node.op == "output":
            continue
        name = base_name(node)
        if exact.issuperset(node.all_input_nodes):
            if not node.all_input_nodes or name in MOVES | STEPS or not _has_floats(node):
                exact.add(node)
        elif not isinstance(node.meta.get("val"), torch.Tensor):
            if isinstance(node.meta.get("val"), (int, torch.SymInt, torch.SymBool)):
                exact.add(node)  # sizes
        elif name in ORDER and len(node.all_input_nodes) == 1:
            # A fixed limit that moves by a rounding error: no more than it does to a continuous function.
            exact.add(node)
        elif not _has_floats(node) or name in STEPS:
            exact.add(node)
            decisions.append(node)
    return decisions


def base_name(node: fx.Node) -> str:
    """Name of a node's operator without namespace and overload."""
    if node.target is operator.getitem:
        return "getitem"
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else packet.__name__


def _has_floats(node: fx.Node) -> bool:
    """Whether a node gives floating-point or complex numbers."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(
        isinstance(each, torch.Tensor) and (each.is_floating_point() or each.is_complex())
        for each in values
    )
