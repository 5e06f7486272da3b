"""Operands of instructions: registers, numbers, special registers, addresses of variables; and bits under another type."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import ops
from .counts import WARP_THREADS
from .memory import Fault
from .parse import PtxProgram

# Reads an operand of a gang of lanes (machine.py): an array that broadcasts to [blocks, threads].
Reader = Callable[[Any], np.ndarray]
# The lanes that take part; None: all of them.
Mask = np.ndarray | None
# Runs an instruction for a gang of lanes.
Step = Callable[[Any, Mask], None]


def as_type(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The bits of a register as another type; the low ones of a wider register."""
    if value.dtype == dtype:
        return value
    if value.dtype.itemsize == dtype.itemsize:
        return value.view(dtype)
    return (
        value.view(ops.unsigned(value.dtype.itemsize))
        .astype(ops.unsigned(dtype.itemsize))
        .view(dtype)
    )


def operand(program: PtxProgram, text: str, dtype: np.dtype) -> Callable[[Any], np.ndarray]:
    """Reads an operand as a type: a register, a number, a special register, the address of a variable."""
    special = _SPECIAL.get(text)
    if special is not None:
        return lambda gang: as_type(special(gang), dtype)
    if text.startswith("%") or text in program.named_predicates:

        def register(gang: Any) -> np.ndarray:
            content = gang.registers.get(text)
            if content is None:
                if not gang.launch.check:
                    return np.zeros((1, 1), dtype)
                raise Fault("uninitialised", f"register {text} is read before it is written")
            return as_type(content, dtype)

        return register
    value = np.full((1, 1), _number(program, text, dtype), dtype)
    return lambda gang: value


def _number(program: PtxProgram, text: str, dtype: np.dtype):
    if text in program.shared:
        return program.shared[text]
    if text == program.dynamic_shared and text:
        return -(-program.shared_bytes // 16) * 16
    if text in program.local:
        return program.local[text]
    if text[:2].lower() in ("0f", "0d"):
        bits = 32 if text[1] in "fF" else 64
        pattern = int(text[2:], 16)
        return (
            np.array(pattern, f"uint{bits}").view(f"float{bits}").astype(dtype)
            if ops.is_float(dtype)
            else pattern
        )
    try:
        number = int(text.rstrip("U"), 0)
    except ValueError:
        raise ops.Unknown(f"operand {text}") from None
    if dtype.kind == "b" or ops.is_float(dtype):
        return number
    return np.array(number % (1 << 8 * dtype.itemsize), ops.unsigned(dtype.itemsize)).view(dtype)


def _constant(number: int) -> Callable[[Any], np.ndarray]:
    return lambda gang: np.full((1, 1), number, np.uint32)


_SPECIAL: Mapping[str, Callable[[Any], np.ndarray]] = {
    "%tid.x": lambda gang: gang.tid,
    "%ctaid.x": lambda gang: gang.ctaid,
    "%ntid.x": lambda gang: np.full((1, 1), gang.threads, np.uint32),
    "%nctaid.x": lambda gang: np.full((1, 1), gang.launch.grid, np.uint32),
    **{f"%{name}.{dim}": _constant(0) for name in ("tid", "ctaid") for dim in "yz"},
    **{f"%{name}.{dim}": _constant(1) for name in ("ntid", "nctaid") for dim in "yz"},
    "%clock64": lambda gang: gang.clock,
    "%globaltimer": lambda gang: gang.clock,
    "%smid": lambda gang: gang.ctaid,
    "%laneid": lambda gang: gang.tid % np.uint32(WARP_THREADS),
    "WARP_SZ": _constant(WARP_THREADS),
}


def names_of(text: str) -> list[str]:
    """The registers between braces."""
    return re.findall(r"[^\s,{}]+", text)


def widened(elements: np.ndarray, signed: bool) -> np.ndarray:
    """Extends a smaller integer to a register: the sign in all bits above."""
    return elements.view(f"int{8 * elements.itemsize}").astype(np.int64) if signed else elements
