"""jax.debug.print and failed checks in bodies -> Trace statements: values are copied to scratch and handed to the host process.

The target's runtime provides TRACE(site, operand, address), called once per operand in order; `SITES[site]` says what
to do with the values once the last one is there. Sites live as long as the process, as its compiled kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .. import _jax
from ..dsl import checks
from ..dsl.breakpoints import breakpoint_p
from ..errors import UnsupportedOp
from .nest import Trace
from .text import Block, Text

TRACE = "pbk_trace"


@dataclass(frozen=True)
class Site:
    """One equation: types of its operands and what receives them."""

    types: tuple[tuple[tuple[int, ...], np.dtype], ...]
    receive: Callable[..., None]


SITES: list[Site] = []


def trace(builder, eqn, env: dict) -> None:
    """Notes the statement; operands are read where it stands in the program's order. A failed check has the grid's indices
    as further operands."""
    from .build import ControlItem

    if eqn.primitive is breakpoint_p:
        raise UnsupportedOp(
            "pbkern.breakpoint in a compiled kernel", at=_jax.user_line(eqn), why="machine code has no Python frame to stop in",
            hint="interpret=True, or pbkern.interpret(kernel.trace(*arrays), *arrays)",
        )  # fmt: skip
    values = [builder.read(env, a) for a in eqn.invars]
    receive = _jax.debug_printer(eqn) if eqn.primitive is not checks.fail_p else _reporter(eqn, builder.kernel)
    values += builder.grid if eqn.primitive is checks.fail_p else ()
    site = len(SITES)
    SITES.append(Site(tuple((v.shape, v.dtype) for v in values), receive))

    def run() -> None:
        copies = [builder.new_buffer(v.shape, v.dtype) for v in values]
        for copy, value in zip(copies, values):
            builder.store_value(copy, value, lambda ix: ix)
        builder.stmts.append(Trace(site, [c.buf for c in copies]))

    builder.append_control(ControlItem(tuple(values), frozenset(), run), [])


def _reporter(eqn, kernel: str) -> Callable[..., None]:
    count = len(eqn.invars)
    return lambda *values: checks.report(checks.error(eqn, kernel, values[count:], values[:count]))


def emit_trace(text: Text, block: Block, s: Trace, memref: Callable) -> None:
    """One call per operand, or one without address."""
    site = text.put(block, f"arith.constant {s.site} : i64")
    for k, buf in enumerate(s.buffers):
        address = text.put(block, f"memref.extract_aligned_pointer_as_index {buf.name} : {memref(buf)} -> index")
        _call(text, block, site, k, text.put(block, f"arith.index_cast {address} : index to i64"))
    if not s.buffers:
        _call(text, block, site, 0, text.put(block, "arith.constant 0 : i64"))


def _call(text: Text, block: Block, site: str, operand: int, address: str) -> None:
    k = text.put(block, f"arith.constant {operand} : i64")
    block.lines.append(f"func.call @_mlir_ciface_{TRACE}({site}, {k}, {address}) : (i64, i64, i64) -> ()")


DECLARATION = f"func.func private @_mlir_ciface_{TRACE}(i64, i64, i64)"
