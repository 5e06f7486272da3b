"""jax.debug.print and failed checks in bodies -> Trace statements: values are copied to scratch and handed to the host process.

The target's runtime provides TRACE(site, operand, address), called once per operand in order;
`SITES[site]` says what to do with the values once the last one is there. Sites live as long as the
process, as its compiled kernels do.

A failed check also hands over the operands of its kernel, wherever in a program of many it was
launched, so that the error can name a file that fails the same way (dsl/text/repro.py). Of operands
that the kernel updates, the launch keeps a copy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pbkern import _jax
from pbkern.core.errors import UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl import checks
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.primitives.breakpoint import breakpoint_p
from pbkern.dsl.text.repro import LARGEST_OPERANDS
from pbkern.lower.mlir import operation
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.ir import Buf, Trace
from pbkern.lower.values.items import ControlItem

TRACE = "pbk_trace"
# Its name in MLIR.
FUNCTION = f"_mlir_ciface_{TRACE}"
Type = tuple[tuple[int, ...], np.dtype]


@dataclass(frozen=True)
class Site:
    """One equation.

    Attributes:
      types: of the values that it shows.
      operands: types of its kernel's operands, where it hands them over.
      receive: called with the values, and a function that reads the operands.
      is_check: whether it is a failed check, of which the first one counts.
    """

    types: tuple[Type, ...]
    operands: tuple[Type, ...]
    receive: Callable[[list, Callable[[], list]], None]
    is_check: bool = False


SITES: list[Site] = []


def trace(builder, eqn, env: dict) -> None:
    """Notes the statement; operands are read where it stands in the program's order.

    A failed check has the grid's indices as further operands.
    """
    if eqn.primitive is breakpoint_p:
        raise UnsupportedOp(
            "pbkern.breakpoint in a compiled kernel",
            at=_jax.user_line(eqn),
            why="machine code has no Python frame to stop in",
            hint="interpret=True, or pbkern.interpret(kernel.trace(*arrays), *arrays)",
        )
    values = [builder.read(env, var) for var in eqn.invars]
    operands: tuple[Buf, ...] = ()
    is_check = eqn.primitive is checks.fail_p
    if is_check:
        receive = _reporter(eqn, builder.kernel)
        values += builder.grid
        operands = builder.operands
    else:
        receive = _printer(eqn)
    site = len(SITES)
    types = [(value.shape, value.dtype) for value in values]
    SITES.append(
        Site(
            tuple(types),
            tuple((operand.shape, operand.dtype) for operand in operands),
            receive,
            is_check,
        )
    )

    def run() -> None:
        copies = [builder.new_buffer(source.shape, source.dtype) for source in values]
        for copy, value in zip(copies, values):
            builder.store_value(copy, value, lambda ix: ix)
        builder.stmts.append(Trace(site, tuple([stored.buf for stored in copies] + list(operands))))

    builder.append_control(ControlItem(tuple(values), frozenset(), run), [])


def _printer(eqn) -> Callable[..., None]:
    show = _jax.debug_printer(eqn)
    return lambda values, _: show(*values)


def _reporter(eqn, kernel: Kernel) -> Callable[..., None]:
    count = len(eqn.invars)

    def receive(values: list, operands: Callable[[], list]) -> None:
        checks.report(
            checks.error(eqn, kernel.name, values[count:], values[:count]), kernel, operands
        )

    return receive


def hands_over_operands(kernel: Kernel) -> bool:
    """Whether a failed check in this kernel can tell its operands: larger ones are not worth a file."""
    return (
        bool(checks.messages(kernel.body.jaxpr))
        and sum(type_.nbytes for type_ in kernel.in_types) <= LARGEST_OPERANDS
    )


def emit_trace(text: Text, block: Block, stmt: Trace, memref: Callable) -> None:
    """One call per operand, or one without address."""
    site = text.put(block, "arith.constant", (), "i64", f" {stmt.site}")
    for k, buf in enumerate(stmt.buffers):
        address = text.put(
            block, "memref.extract_aligned_pointer_as_index", (buf.name,), f"{memref(buf)} -> index"
        )
        _call(text, block, site, k, text.put(block, "arith.index_cast", (address,), "index to i64"))
    if not stmt.buffers:
        _call(text, block, site, 0, text.put(block, "arith.constant", (), "i64", " 0"))


def _call(text: Text, block: Block, site: str, operand: int, address: str) -> None:
    number = text.put(block, "arith.constant", (), "i64", f" {operand}")
    block.add(
        operation.CALL,
        (site, number, address),
        "(i64, i64, i64) -> ()",
        operation.call_syntax(FUNCTION, 3),
    )


DECLARATION = f"func.func private @{FUNCTION}(i64, i64, i64)"
