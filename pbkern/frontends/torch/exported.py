"""Module, function or torch.export's program -> Exported: a jaxpr whose parameters and buffers are operands behind the inputs.

Those that nothing reads are none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend import core as jex
from torch.export.graph_signature import InputKind, OutputKind

from pbkern.core.errors import UnsupportedOp

from .aten.table import name_of
from .capture import GraphArgument, ResultPlace, array_of, capture, described, unsupported
from .decompositions import decompositions

ASSERTIONS = ("aten::_assert_tensor_metadata",)


@dataclass(frozen=True)
class Exported:
    """A program.

    Attributes:
      jaxpr: of the inputs, then parameters and buffers; of its results.
      in_names: of its operands.
      values: of its parameters and buffers, in order.
    """

    jaxpr: jex.ClosedJaxpr
    in_names: tuple[str, ...]
    values: tuple[np.ndarray, ...]


def exported(fn: Any, args: tuple, kwargs: dict) -> Exported:
    """Exports a module or function with its arguments.

    Raises UnsupportedOp for what torch.export cannot capture, for operators that are not compiled,
    which it names, and for modules that change their buffers or draw random numbers.
    """
    program = fn if isinstance(fn, torch.export.ExportedProgram) else _captured(fn, args, kwargs)
    with torch.no_grad():
        program = program.run_decompositions(decompositions())
    graph = program.graph_module
    _without_assertions(graph)
    _check(program)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    examples = [placeholder.meta["val"] for placeholder in placeholders]
    _check_sizes(placeholders, examples)
    captured = capture(graph, examples, strided=False, checked=False)
    if captured.draws:
        raise UnsupportedOp(
            "the module draws random numbers", why="a library has no generator", hint="model.eval()"
        )
    specs = program.graph_signature.input_specs
    tensors = [k for k, example in enumerate(examples) if isinstance(example, torch.Tensor)]
    inputs = [tensor for tensor in tensors if specs[tensor].kind is InputKind.USER_INPUT]
    other_tensors = [
        tensor
        for tensor in tensors
        if specs[tensor].kind is not InputKind.USER_INPUT and placeholders[tensor].users
    ]
    order = [tensors.index(place) for place in (*inputs, *other_tensors)]
    names = [placeholders[operand].name for operand in inputs] + [
        specs[other].target or placeholders[other].name for other in other_tensors
    ]
    values = program.state_dict | program.constants
    return Exported(
        _ordered(captured, order, tensors),
        tuple(names),
        tuple(array_of(values[name]) for name in names[len(inputs) :]),
    )


def _check_sizes(placeholders: list, examples: list) -> None:
    """Raises UnsupportedOp for inputs whose sizes are not known: a program for the example's sizes would be another one."""
    for node, example in zip(placeholders, examples):
        sizes = example.shape if isinstance(example, torch.Tensor) else ()
        dynamic = [
            (axis, size) for axis, size in enumerate(sizes) if isinstance(size, torch.SymInt)
        ]
        if dynamic:
            which = ", ".join(f"dimension {dim} ({size})" for dim, size in dynamic)
            raise UnsupportedOp(
                f"input `{node.name}` of the exported program has a dynamic size",
                why=f"{which} of shape {tuple(sizes)}",
                hint="torch.export.export without dynamic_shapes, a library for each size",
            )


def _captured(fn: Callable, args: tuple, kwargs: dict) -> torch.export.ExportedProgram:
    module = fn if isinstance(fn, torch.nn.Module) else _Function(fn)
    try:
        return torch.export.export(module, args, kwargs)
    except Exception as e:
        raise UnsupportedOp(
            "torch.export cannot capture the function",
            why=f"{type(e).__name__}: {str(e).splitlines()[0]}",
            hint="torch.export.export(module, args) says more",
        ) from e


class _Function(torch.nn.Module):
    """A function as a module."""

    def __init__(self, fn: Callable):
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def _without_assertions(module: torch.fx.GraphModule) -> None:
    """Drops what only checks that types are those that were exported: these a library has for good."""
    for node in list(module.graph.nodes):
        if name_of(node.target) in ASSERTIONS and not node.users:
            module.graph.erase_node(node)


def _check(program: torch.export.ExportedProgram) -> None:
    missing = unsupported(program.graph_module.graph)
    if missing:
        count = f"{len(missing)} operators are" if len(missing) > 1 else "an operator is"
        raise UnsupportedOp(
            f"{count} not compiled",
            why=", ".join(dict.fromkeys(map(described, missing))),
            hint="leave them to Torch, outside of the module",
        )
    changed = [
        spec
        for spec in program.graph_signature.output_specs
        if spec.kind is not OutputKind.USER_OUTPUT
    ]
    if changed:
        raise UnsupportedOp(
            "the module changes what it keeps",
            why=", ".join(str(spec.target) for spec in changed),
            hint="model.eval()",
        )


def _ordered(captured: Any, order: list[int], tensors: list[int]) -> jex.ClosedJaxpr:
    """The captured jaxpr with its operands in another order, results that are operands among its results."""
    run = jex.jaxpr_as_fun(captured.jaxpr)
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in captured.jaxpr.in_avals]

    def ordered(*arrays: Any) -> list:
        given = [
            arrays[order.index(k)] if k in order else jnp.zeros(type_.shape, type_.dtype)
            for k, type_ in enumerate(types)
        ]
        results = run(*given)
        return [
            results[result.number]
            if isinstance(result, ResultPlace)
            else given[tensors.index(result.number)]
            for result in captured.results
            if isinstance(result, ResultPlace | GraphArgument)
        ]

    with jax.enable_x64(True):
        return jax.make_jaxpr(ordered)(*[types[place] for place in order])
