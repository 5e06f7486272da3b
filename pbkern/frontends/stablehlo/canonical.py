"""Module -> the same module with its calls inlined, operations shared and reshapes to the same shape gone.

Rules that recognise what a region means, such as a counted loop, then need not look into calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir, passmanager

from .places import names_a_line

PASSES = "builtin.module(canonicalize,cse)"


def canonicalise(module: ir.Module, main: str) -> None:
    """Changes a module so that its function `main` calls no other; these go."""
    functions = functions_of(module)
    with module.context, ir.Location.unknown():
        while calls := [op for op in operations(functions[main]) if op.name == "func.call"]:
            for call in calls:
                _inline(call, functions[ir.FlatSymbolRefAttr(call.attributes["callee"]).value])
        if not any(
            op.name == "stablehlo.composite" for op in operations(functions[main])
        ):  # these name functions, too
            for name, function in functions.items():
                if name != main:
                    function.erase()
        passmanager.PassManager.parse(PASSES).run(module.operation)
        for op in list(operations(functions_of(module)[main])):
            if op.name == "stablehlo.reshape" and op.results[0].type == op.operands[0].type:
                op.results[0].replace_all_uses_with(op.operands[0])
                op.erase()


def functions_of(module: ir.Module) -> dict[str, Any]:
    """A module's functions by name."""
    return {
        name_of(operation.operation): operation.operation
        for operation in module.body.operations
        if operation.operation.name == "func.func"
    }


def name_of(function: Any) -> str:
    return ir.StringAttr(function.attributes["sym_name"]).value


def operations(op: Any) -> Iterator[Any]:
    """All operations in an operation's regions."""
    for region in op.regions:
        for block in region.blocks:
            for view in list(block.operations):
                yield view.operation
                yield from operations(view.operation)


def _inline(call: Any, callee: Any) -> None:
    copy = callee.clone()
    block = copy.regions[0].blocks[0]
    for argument, operand in zip(list(block.arguments), list(call.operands)):
        argument.replace_all_uses_with(operand)
    *body, last = [operation.operation for operation in block.operations]
    if names_a_line(call.location):
        for op in operations(copy):
            if not names_a_line(op.location):
                op.location = call.location
    for op in body:
        op.move_before(call)
    for result, value in zip(list(call.results), list(last.operands)):
        result.replace_all_uses_with(value)
    call.erase()
    copy.erase()
