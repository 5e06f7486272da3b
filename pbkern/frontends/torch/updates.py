"""Graph that stores into its arguments -> one that returns their new elements, and a function that stores these.

AOTAutograd ends a graph that changes arguments with nodes copy_(argument, value). A compiled graph returns the values, last;
where kernels have written over the argument itself (donated operands of its jaxpr), nothing is left to store.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch


def apart(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, tuple[int, ...]]:
    """(the graph with each argument's new elements as its last results, numbers of these arguments)."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    if not any(_stores(node, placeholders) for node in module.graph.nodes):
        return module, ()
    functional = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    graph = functional.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    values = {}
    for node in list(graph.nodes):
        if _stores(node, placeholders):
            argument, value = node.args[:2]
            node.replace_all_uses_with(value)
            graph.erase_node(node)
            values[placeholders.index(argument)] = value
    results = output.args[0]
    several = results if isinstance(results, list | tuple) else [results]
    output.args = ((*several, *values.values()),)
    functional.recompile()
    return functional, tuple(values)


def _stores(node: torch.fx.Node, placeholders: Sequence[torch.fx.Node]) -> bool:
    return node.target is torch.ops.aten.copy_.default and node.args[0] in placeholders


def stored(run: Callable, updated: tuple[int, ...]) -> Callable:
    """A function of arguments that stores the last results of `run` in the arguments of these numbers, and returns the rest."""

    def stores(arguments: Sequence[Any]) -> list[Any]:
        results = run(arguments)
        values = results[len(results) - len(updated) :]
        written = [arguments[number] for number in updated]
        rest = [_apart(result, written) for result in results[: len(results) - len(updated)]]
        for argument, value in zip(written, values):
            if value.data_ptr() != argument.data_ptr():
                argument.copy_(value)
            elif (
                value.stride() != argument.stride()
            ):  # XLA gave the operand back, as its own transpose
                argument.copy_(value.clone())
        return rest

    return stores


def _apart(result: Any, written: Sequence[torch.Tensor]) -> Any:
    """A result with memory of its own: XLA gives back an operand that is a result."""
    if not isinstance(result, torch.Tensor) or not result.numel():
        return result
    address = result.data_ptr()
    return result.clone() if any(address == x.data_ptr() for x in written) else result
