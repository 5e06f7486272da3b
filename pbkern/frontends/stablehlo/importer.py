"""ProgramSource -> ImportedProgram: the main function of a program as a ClosedJaxpr, with calls of other functions inlined.

What cannot be imported is found, all of it, before anything is traced. The jaxpr is traced with
64-bit types, which programs of TensorFlow and others hold; where it is called does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jaxlib.mlir import ir

from pbkern.core.errors import ArgumentError, PbkernError, UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass

from . import ops
from .canonical import canonicalise, functions_of, name_of
from .operation import HloOperation, described, tensor_type, type_problem
from .parse import WITHOUT_RULE_HINT, ProgramSource
from .places import SourcePlaces
from .table import CHECKS, RULES

RETURNS = ("func.return", "stablehlo.return")
WITHOUT_EFFECT = ("sdy.mesh", "builtin.module", "func.func", *RETURNS)
MAIN = "main"

assert ops.__all__  # its files register their rules


@dataclass(frozen=True)
class ImportedProgram:
    """A program's function.

    Attributes:
      jaxpr: of the function's own arguments and results.
      name: of the module, without the prefix that JAX gives it.
    """

    jaxpr: jex.ClosedJaxpr
    name: str


def import_program(source: ProgramSource) -> ImportedProgram:
    """Raises UnsupportedOp, which names all that cannot be imported; ArgumentError for a module without a main function."""
    functions = functions_of(source.module)
    if MAIN not in functions and len(functions) != 1:
        raise ArgumentError(
            f"{source.what} has no function `{MAIN}`",
            why=f"it has {', '.join(functions) or 'none'}",
            hint="name the function to import main",
        )
    main = functions.get(MAIN) or next(iter(functions.values()))
    canonicalise(source.module, name_of(main))
    _check(source)
    types = [
        jax.ShapeDtypeStruct(*tensor_type(argument))
        for argument in main.regions[0].blocks[0].arguments
    ]
    scope = BlockScope(functions_of(source.module), {}, source.places)
    block = main.regions[0].blocks[0]
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(lambda *args: [jnp.asarray(x) for x in scope.run(block, args)])(
            *types
        )
    attributes = source.module.operation.attributes
    name = ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else "program"
    return ImportedProgram(jaxpr, name.removeprefix("jit_") or "program")


def _check(source: ProgramSource) -> None:
    problems = list(dict.fromkeys(_problems(source.module.operation, source.places)))
    if problems:
        count = f"{len(problems)} operations" if len(problems) > 1 else "an operation"
        raise UnsupportedOp(
            f"{source.what} has {count} that cannot be imported",
            why="; ".join(problems),
            hint=WITHOUT_RULE_HINT,
        )


def _problems(op: Any, places: SourcePlaces) -> Iterator[str]:
    """Names the operations without a rule: an operation, and those within it."""
    name = op.name
    if name not in WITHOUT_EFFECT:
        if name not in RULES:
            yield described(op, places)
        elif name in CHECKS and (why := CHECKS.lookup(name)(op)):
            yield described(op, places) + (f": {why}" if why != "unknown" else "")
        for result in op.results:
            if why := type_problem(result.type):
                yield f"{described(op, places)}: {why}"
    for region in op.regions:
        for block in region.blocks:
            if name == "func.func":
                for k, argument in enumerate(block.arguments):
                    if why := type_problem(argument.type):
                        yield f"argument {k} of `{ir.StringAttr(op.attributes['sym_name']).value}`: {why}"
            for inner in block.operations:
                yield from _problems(inner.operation, places)


class BlockScope:
    """Values that the operations of a block can name."""

    def __init__(self, functions: dict[str, Any], values: dict[Any, Any], places: SourcePlaces):
        self.functions, self.values, self.places = functions, values, places

    def run(self, block: Any, arguments: Sequence[Any]) -> list:
        """Results of a block called with these arguments, in a scope of its own within this one."""
        inner = BlockScope(self.functions, dict(self.values), self.places)
        inner.values.update(zip(block.arguments, arguments))
        for view in block.operations:
            op = view.operation
            operands = [inner.values[operand] for operand in op.operands]
            if op.name in RETURNS:
                return operands
            inner.values.update(zip(op.results, inner.results(op, operands)))
        raise AssertionError("a block ends with a return")

    def results(self, op: Any, operands: list) -> Sequence[Any]:
        """Results of one operation. Raises UnsupportedOp with its place if lax refuses it."""
        try:
            with self.places.context(op):
                results = RULES.lookup(op.name)(
                    HloOperation(op, self.run, self.call, self.places), *operands
                )
        except PbkernError:
            raise
        except Exception as e:
            what = f"{described(op, self.places)} is not imported"
            raise UnsupportedOp(
                what,
                why=f"{type(e).__name__}: {str(e).splitlines()[0]}",
                hint="check the program with stablehlo-opt",
            ) from e
        return results if isinstance(results, tuple | list) else (results,)

    def call(self, name: str, arguments: Sequence[Any]) -> list:
        """Results of a function of the module."""
        return BlockScope(self.functions, {}, self.places).run(
            self.functions[name].regions[0].blocks[0], arguments
        )
