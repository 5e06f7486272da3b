"""MAKERS: one row per instruction that is simulated. Other modules add theirs."""

from __future__ import annotations

from collections.abc import Callable

from pbkern.core.errors import InternalError
from pbkern.simulate import ops
from pbkern.simulate.operands import Step
from pbkern.simulate.parse import Instruction, PtxProgram

from . import accesses, arithmetic, atomics, lanes


def compiled(program: PtxProgram, instruction: Instruction) -> Step:
    """An instruction as a function of a gang and the lanes that take part.

    Raises InternalError for unknown ones.
    """
    try:
        return MAKERS.get(instruction.op[0], arithmetic.computing)(program, instruction)
    except (ops.Unknown, KeyError, IndexError) as e:
        raise InternalError(
            f"PTX instruction `{'.'.join(instruction.op)}` is not simulated",
            why=f"line {instruction.line}: {instruction.text} ({e})",
            hint="add it to the table in simulate/ops.py",
        ) from None


MAKERS: dict[str, Callable[[PtxProgram, Instruction], Step]] = {
    "setp": arithmetic.set_predicate,
    "selp": arithmetic.select,
    "cvt": arithmetic.convert_type,
    "cvta": arithmetic.convert_address,
    "ld": accesses.load,
    "ldu": accesses.load,
    "st": accesses.store,
    "atom": atomics.atomic,
    "red": atomics.atomic,
    "shfl": lanes.shuffle,
    "vote": lanes.vote,
    "activemask": lanes.active_mask,
    **dict.fromkeys(
        ("membar", "fence", "prefetch", "prefetchu", "nanosleep", "pragma"), arithmetic.no_effect
    ),
}
