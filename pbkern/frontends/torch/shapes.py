"""Graphs whose shapes are symbols -> graphs of the shapes of one call.

torch.compile makes such graphs once it has seen a second shape (dynamic=True, or its default).
Kernels are compiled for shapes, so that each new one compiles anew.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_symbolic(module: torch.fx.GraphModule) -> bool:
    """Whether some shape or number of a graph is a symbol."""
    return any(map(_is_symbolic, (node.meta.get("val") for node in module.graph.nodes)))


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_symbolic, value))
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, SYMBOLS) for size in (*value.shape, *_strides(value)))
    return isinstance(value, SYMBOLS)


def depends_on_data(node: torch.fx.Node) -> bool:
    """Whether the values of a node's arguments decide the shape of its result."""
    unknown = _unknown(node.meta.get("val"))
    return bool(unknown) and not unknown <= set().union(
        *(_unknown(operand.meta.get("val")) for operand in node.all_input_nodes)
    )


def _unknown(value: Any) -> set:
    return set(free_unbacked_symbols(value)) if _is_symbolic(value) else set()


def _strides(value: torch.Tensor) -> tuple:
    return (*value.stride(), value.storage_offset()) if value.layout is torch.strided else ()


def concrete(module: torch.fx.GraphModule, arguments: Sequence[Any]) -> torch.fx.GraphModule:
    """The graph with the shapes that it has for these arguments; arguments that are fake have no symbols."""
    if not is_symbolic(module):
        return module
    module = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(
            *[_fake(argument) for argument in arguments]
        )
    for node, value in zip(
        (placeholder for placeholder in module.graph.nodes if placeholder.op == "placeholder"),
        arguments,
    ):
        if not isinstance(value, torch.Tensor):
            node.meta["val"] = value
    return module


def _fake(value: Any) -> Any:
    """A fake tensor with the shape, strides and bits of a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    fake = fake.conj() if value.is_conj() else fake
    return torch._neg_view(fake) if value.is_neg() else fake
