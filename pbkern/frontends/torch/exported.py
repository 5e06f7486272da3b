"""Module, function or torch.export's program -> Exported: a jaxpr whose parameters and buffers are operands behind the inputs.

Those that nothing reads are none. Other tensors, which a function makes of numbers or a module has as plain attributes, are
constants of the jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend import core as jex
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind

from pbkern.core.errors import UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass

from .aten.table import name_of
from .capture import GraphArgument, ResultPlace, array_of, capture, described, unsupported
from .decompositions import decompositions

ASSERTIONS = ("aten::_assert_tensor_metadata",)
# The greatest size that counts as a maximum: torch.export writes 2^63 - 2 and the like where none is stated.
MOST_SIZE = 1 << 40


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


@dataclass(frozen=True)
class ExportedOfSizes:
    """A program whose inputs may have sizes that are symbols.

    Attributes:
      ranges: (name, least, greatest) of each symbol.
      at: numbers of the symbols, by name -> the program for them.
      obstacle: an extent or a number that is no sum of multiples of symbols, in words; "" if there is none.
    """

    ranges: tuple[tuple[str, int, int], ...]
    at: Callable[[Mapping[str, int]], Exported]
    obstacle: str = ""


def exported(fn: Any, args: tuple, kwargs: dict) -> ExportedOfSizes:
    """Exports a module or function with its arguments.

    Raises UnsupportedOp for what torch.export cannot capture, for operators that are not compiled,
    which it names, for modules that change their buffers or draw random numbers, and for dynamic
    sizes without a maximum.
    """
    program = fn if isinstance(fn, torch.export.ExportedProgram) else _captured(fn, args, kwargs)
    with torch.no_grad():
        program = program.run_decompositions(decompositions())
    graph = program.graph_module
    _without_assertions(graph)
    _check(program)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    symbols = _symbols(placeholders)
    ranges = tuple(
        _range(name, program.range_constraints.get(symbol)) for symbol, name in symbols.items()
    )
    number_of = {name: symbol for symbol, name in symbols.items()}

    def at(sizes: Mapping[str, int]) -> Exported:
        numbers = {number_of[name]: size for name, size in sizes.items()}
        examples = [_at(node.meta["val"], numbers) for node in placeholders]
        return _exported(program, placeholders, examples)

    return ExportedOfSizes(ranges, at, _obstacle(graph))


def _symbols(placeholders: list) -> dict[Any, str]:
    """Symbol -> name of the first input and dimension that is this symbol."""
    symbols: dict[Any, str] = {}
    for node in placeholders:
        for axis, size in enumerate(getattr(node.meta["val"], "shape", ())):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                symbols.setdefault(size.node.expr, f"{node.name}_dim{axis}")
    return symbols


def _obstacle(graph: torch.fx.GraphModule) -> str:
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        for size in (value, *getattr(value, "shape", ())):
            if isinstance(size, torch.SymInt) and not _is_linear(size.node.expr):
                return f"{size.node.expr}, of {described(node)}, is no multiple of a size"
    return ""


def _is_linear(expression: Any) -> bool:
    """Whether an expression of sympy is a sum of numbers and of multiples of symbols."""
    parts = [term.as_coeff_Mul() for term in expression.as_ordered_terms()]
    return all(part.is_number or part.is_symbol for _, part in parts)


def _range(name: str, given: Any) -> tuple[str, int, int]:
    if given is None or not given.upper.is_number or given.upper > MOST_SIZE:
        raise UnsupportedOp(
            f"size `{name}` of the exported program has no maximum",
            why="a library has memory and programs for sizes up to a maximum",
            hint=f'torch.export.Dim("{name}", max=64), or no dynamic_shapes and a library for each size',
        )
    return name, max(int(given.lower), 1), int(given.upper)


def _at(value: Any, numbers: Mapping[Any, int]) -> Any:
    """A fake tensor whose symbols are numbers."""
    if not isinstance(value, torch.Tensor) or not any(
        isinstance(size, torch.SymInt) for size in value.shape
    ):
        return value
    shape = [
        int(size.node.expr.subs(numbers)) if isinstance(size, torch.SymInt) else size
        for size in value.shape
    ]
    with FakeTensorMode():
        return torch.empty(shape, dtype=value.dtype, device=value.device)


def _exported(
    program: torch.export.ExportedProgram, placeholders: list, examples: list
) -> Exported:
    captured = capture(program.graph_module, examples, strided=False, checked=False, views=False)
    if captured.draws:
        raise UnsupportedOp(
            "the module draws random numbers", why="a library has no generator", hint="model.eval()"
        )
    specs = program.graph_signature.input_specs
    tensors = [k for k, example in enumerate(examples) if isinstance(example, torch.Tensor)]
    inputs = [tensor for tensor in tensors if specs[tensor].kind is InputKind.USER_INPUT]
    values = program.state_dict | program.constants
    weights = [
        tensor
        for tensor in tensors
        if specs[tensor].kind in (InputKind.PARAMETER, InputKind.BUFFER)
        and placeholders[tensor].users
    ]
    constants = {
        tensors.index(tensor): array_of(values[specs[tensor].target])
        for tensor in tensors
        if specs[tensor].kind is InputKind.CONSTANT_TENSOR
    }
    order = [tensors.index(place) for place in (*inputs, *weights)]
    names = [placeholders[operand].name for operand in inputs] + [
        specs[weight].target or placeholders[weight].name for weight in weights
    ]
    return Exported(
        _ordered(captured, order, tensors, constants),
        tuple(names),
        tuple(array_of(values[name]) for name in names[len(inputs) :]),
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
    """Drops assertions of the exported types: a library takes no others."""
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
    arguments = [spec.target for spec in changed if spec.kind is OutputKind.USER_INPUT_MUTATION]
    if arguments:
        raise UnsupportedOp(
            "the module changes its arguments in place",
            why=", ".join(map(str, arguments)),
            hint="a module that returns the new values; a library changes only its results",
        )
    if changed:
        raise UnsupportedOp(
            "the module changes what it keeps",
            why=", ".join(str(spec.target) for spec in changed),
            hint="model.eval(), or a module that takes this state as an argument and returns it",
        )


def _ordered(
    captured: Any, order: list[int], tensors: list[int], constants: Mapping[int, np.ndarray]
) -> jex.ClosedJaxpr:
    """The captured jaxpr with its operands in another order, results that are operands among its results.

    constants: values of operands, by number, that it is given.
    """
    run = jex.jaxpr_as_fun(captured.jaxpr)
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in captured.jaxpr.in_avals]

    def ordered(*arrays: Any) -> list:
        known = dict(zip(order, arrays)) | {k: jnp.asarray(x) for k, x in constants.items()}
        # Operands that nothing reads are not among them.
        given = [
            known[k] if k in known else jnp.zeros(type_.shape, type_.dtype)
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
