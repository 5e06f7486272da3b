"""Instructions that compute: those of the table in ops.py, conversions, comparisons and choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pbkern.simulate import ops
from pbkern.simulate.memory import LOCAL_BEGIN
from pbkern.simulate.operands import Mask, Step, names_of, operand, widened
from pbkern.simulate.parse import Instruction, PtxProgram

# Types of an instruction that takes 16-bit floats and computes in float32.
MIXED = {("f32", "f16"), ("f32", "bf16")}


def computing(program: PtxProgram, instruction: Instruction) -> Step:
    """Makes a step of an instruction of ops.TABLE."""
    if instruction.op[-1].endswith("x2"):
        return _halves(program, instruction)
    if instruction.op[-2:] in MIXED:
        return _mixed(program, instruction)
    name, dtype = instruction.op[0], ops.TYPES[instruction.op[-1]]
    if name not in ops.TABLE:
        raise ops.Unknown(name)
    if not ops.TYPES.keys().isdisjoint(instruction.op[:-1]):
        raise ops.Unknown("two types")
    if name == "mov" and instruction.operands[0].startswith("{"):
        return _unpacked(program, instruction, dtype)
    if name == "mov" and instruction.operands[1].startswith("{"):
        return _packed(program, instruction, dtype)
    function, dst = ops.TABLE[name](instruction.op, dtype), instruction.operands[0]
    counts = ops.COUNTS.get(name, set())
    wide = (
        np.dtype(f"{'int' if dtype.kind == 'i' else 'uint'}{16 * dtype.itemsize}")
        if "wide" in instruction.op
        else dtype
    )
    types = [
        ops.TYPES["u32"] if k in counts else wide if k == 2 else dtype
        for k in range(len(instruction.operands) - 1)
    ]
    read = [operand(program, text, type_) for text, type_ in zip(instruction.operands[1:], types)]
    if name == "copysign" and _is_undefined(program, instruction.operands[2]):
        # LLVM leaves the magnitude undefined where only the sign is used: NaN shows if it is not so.
        read[1] = lambda gang: np.full((1, 1), np.nan, dtype)
    missing = ops.missing(instruction.op, dtype)
    if missing:
        raise ops.Unknown(missing)
    match read:
        case [x]:
            return lambda gang, mask: gang.put(dst, function(x(gang)), mask)
        case [x, y]:
            return lambda gang, mask: gang.put(dst, function(x(gang), y(gang)), mask)
    return lambda gang, mask: gang.put(dst, function(*(source(gang) for source in read)), mask)


def _is_undefined(program: PtxProgram, text: str) -> bool:
    """Whether an operand is a register that no instruction writes."""
    return text.startswith("%") and text not in program.registers


def _mixed(program: PtxProgram, instruction: Instruction) -> Step:
    """An operation in float32 whose first operands are 16-bit floats."""
    (*op, half), name = instruction.op, instruction.op[0]
    missing = ops.missing(instruction.op, ops.TYPES["f32"])
    if name not in ops.WIDENED or missing:
        raise ops.Unknown(missing or name)
    function, (dst, *sources) = ops.TABLE[name](tuple(op), ops.TYPES["f32"]), instruction.operands
    widened = ops.WIDENED[name]
    read = [
        operand(program, text, ops.TYPES[half if n < widened else "f32"])
        for n, text in enumerate(sources)
    ]

    def step(gang: Any, mask: Mask) -> None:
        values = [source(gang).astype(np.float32) for source in read]
        gang.put(dst, function(*values), mask)

    return step


def _halves(program: PtxProgram, instruction: Instruction) -> Step:
    """An operation on both halves of words."""
    name, base = instruction.op[0], instruction.op[-1].removesuffix("x2")
    if name not in ops.TABLE or ops.COUNTS.get(name):
        raise ops.Unknown(instruction.op[-1])
    dtype = ops.TYPES[base]
    function, dst = ops.TABLE[name]((*instruction.op[:-1], base), dtype), instruction.operands[0]
    read = [operand(program, text, ops.TYPES["u32"]) for text in instruction.operands[1:]]

    def step(gang: Any, mask: Mask) -> None:
        words = [source(gang) for source in read]
        halves = [
            function(*((word >> np.uint32(shift)).astype(np.uint16).view(dtype) for word in words))
            for shift in (0, 16)
        ]
        low, high = (
            np.ascontiguousarray(halve).view(np.uint16).astype(np.uint32) for halve in halves
        )
        gang.put(dst, low | high << np.uint32(16), mask)

    return step


def _unpacked(program: PtxProgram, instruction: Instruction, dtype: np.dtype) -> Step:
    """mov {a, b}, x: parts of a register, the low one first."""
    names, whole = names_of(instruction.operands[0]), ops.unsigned(dtype.itemsize)
    part, read = (
        ops.unsigned(dtype.itemsize // len(names)),
        operand(program, instruction.operands[1], whole),
    )

    def step(gang: Any, mask: Mask) -> None:
        x = read(gang)
        for k, name in enumerate(names):
            gang.put(name, (x >> whole.type(8 * part.itemsize * k)).astype(part), mask)

    return step


def _packed(program: PtxProgram, instruction: Instruction, dtype: np.dtype) -> Step:
    whole, names = ops.unsigned(dtype.itemsize), names_of(instruction.operands[1])
    part = ops.unsigned(dtype.itemsize // len(names))
    # Compilers leave a part that nobody reads again to a register that no instruction writes.
    reads = {
        k: operand(program, name, part)
        for k, name in enumerate(names)
        if name in program.registers or not name.startswith("%")
    }

    def step(gang: Any, mask: Mask) -> None:
        total = whole.type(0)
        for k, read in reads.items():
            total = total | read(gang).astype(whole) << whole.type(8 * part.itemsize * k)
        gang.put(instruction.operands[0], total, mask)

    return step


def set_predicate(program: PtxProgram, instruction: Instruction) -> Step:
    dtype = ops.TYPES[instruction.op[-1]]
    compare = ops.comparison(instruction.op[1], dtype)
    x, y, dst = (
        operand(program, instruction.operands[1], dtype),
        operand(program, instruction.operands[2], dtype),
        instruction.operands[0],
    )
    if "|" in dst or len(instruction.operands) > 3 or instruction.op[2] in ("and", "or", "xor"):
        return _setp_and(program, instruction, compare, dtype)
    return lambda gang, mask: gang.put(dst, compare(x(gang), y(gang)), mask)


def _setp_and(
    program: PtxProgram, instruction: Instruction, function: Callable, dtype: np.dtype
) -> Step:
    """setp with a second result, or combined with a predicate."""
    names = instruction.operands[0].split("|")
    x, y = (operand(program, text, dtype) for text in instruction.operands[1:3])
    joins = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    join = joins.get(instruction.op[2])
    third = instruction.operands[3].lstrip("!") if join else ""
    other = operand(program, third, np.dtype(bool)) if join else None

    def step(gang: Any, mask: Mask) -> None:
        holds = function(x(gang), y(gang))
        both = [holds, ~holds]
        if join is not None and other is not None:
            pred = ~other(gang) if instruction.operands[3].startswith("!") else other(gang)
            both = [join(b, pred) for b in both]
        for name, result in zip(names, both):
            gang.put(name, result, mask)

    return step


def select(program: PtxProgram, instruction: Instruction) -> Step:
    dtype, dst = ops.TYPES[instruction.op[-1]], instruction.operands[0]
    x, y, pred = (
        operand(program, text, source)
        for text, source in zip(instruction.operands[1:], (dtype, dtype, np.dtype(bool)))
    )
    return lambda gang, mask: gang.put(dst, np.where(pred(gang), x(gang), y(gang)), mask)


def convert_type(program: PtxProgram, instruction: Instruction) -> Step:
    if len(instruction.operands) == 3:
        return _cvt_pair(program, instruction)
    to, source, convert = ops.conversion(instruction.op)
    x, dst = operand(program, instruction.operands[1], source), instruction.operands[0]
    signed = to.kind == "i" and to.itemsize < 8
    return lambda gang, mask: gang.put(
        dst, widened(convert(x(gang)), True) if signed else convert(x(gang)), mask
    )


def _cvt_pair(program: PtxProgram, instruction: Instruction) -> Step:
    """Two floats as halves of a word: the first operand is the high one."""
    if not any(modifier in instruction.op for modifier in ("f16x2", "bf16x2")):
        raise ops.Unknown("two operands")
    _to, source, convert = ops.conversion(
        tuple(modifier.removesuffix("x2") for modifier in instruction.op)
    )
    high, low, dst = (
        operand(program, instruction.operands[1], source),
        operand(program, instruction.operands[2], source),
        instruction.operands[0],
    )

    def step(gang: Any, mask: Mask) -> None:
        words = [convert(x(gang)).view(np.uint16).astype(np.uint32) for x in (high, low)]
        gang.put(dst, words[0] << np.uint32(16) | words[1], mask)

    return step


def convert_address(program: PtxProgram, instruction: Instruction) -> Step:
    """Addresses of one memory <-> generic ones: the same, but for local memory."""
    dst, dtype = instruction.operands[0], ops.TYPES[instruction.op[-1]]
    source = operand(program, instruction.operands[1], dtype)
    if "local" not in instruction.op:
        return lambda gang, mask: gang.put(dst, source(gang), mask)
    base = dtype.type(LOCAL_BEGIN)
    if "to" in instruction.op:
        return lambda gang, mask: gang.put(dst, source(gang) - base, mask)
    return lambda gang, mask: gang.put(dst, source(gang) + base, mask)


def no_effect(program: PtxProgram, instruction: Instruction) -> Step:
    """Order of memory, hints: lanes here see memory in the order of the program."""
    return lambda gang, mask: None
