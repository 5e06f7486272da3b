"""Operands of instructions: registers, numbers, special registers, addresses of variables; and bits under another type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import ops
from .counts import WARP_THREADS
from .memory import Fault
from .parse import PtxProgram

# Reads an operand of a gang of lanes (machine.py): an array that broadcasts to [blocks, threads].
Reader = Callable[[Any], np.ndarray]


def as_type(v: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The bits of a register as another type; the low ones of a wider register."""
    if v.dtype == dtype:
        return v
    if v.dtype.itemsize == dtype.itemsize:
        return v.view(dtype)
    return v.view(ops.unsigned(v.dtype.itemsize)).astype(ops.unsigned(dtype.itemsize)).view(dtype)


def operand(program: PtxProgram, text: str, dtype: np.dtype) -> Callable[[Any], np.ndarray]:
    """Reads an operand as a type: a register, a number, a special register, the address of a variable."""
    special = _SPECIAL.get(text)
    if special is not None:
        return lambda g: as_type(special(g), dtype)
    if text.startswith("%"):

        def register(g: Any) -> np.ndarray:
            v = g.registers.get(text)
            if v is None:
                raise Fault("uninitialised", f"register {text} is read before it is written")
            return as_type(v, dtype)

        return register
    value = np.full((1, 1), _number(program, text, dtype), dtype)
    return lambda g: value


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
        n = int(text.rstrip("U"), 0)
    except ValueError:
        raise ops.Unknown(f"operand {text}") from None
    if dtype.kind == "b" or ops.is_float(dtype):
        return n
    return np.array(n % (1 << 8 * dtype.itemsize), ops.unsigned(dtype.itemsize)).view(dtype)


def _constant(n: int) -> Callable[[Any], np.ndarray]:
    return lambda g: np.full((1, 1), n, np.uint32)


_SPECIAL: Mapping[str, Callable[[Any], np.ndarray]] = {
    "%tid.x": lambda g: g.tid,
    "%ctaid.x": lambda g: g.ctaid,
    "%ntid.x": lambda g: np.full((1, 1), g.threads, np.uint32),
    "%nctaid.x": lambda g: np.full((1, 1), g.launch.grid, np.uint32),
    **{f"%{n}.{dim}": _constant(0) for n in ("tid", "ctaid") for dim in "yz"},
    **{f"%{n}.{dim}": _constant(1) for n in ("ntid", "nctaid") for dim in "yz"},
    "%clock64": lambda g: g.clock,
    "%globaltimer": lambda g: g.clock,
    "%smid": lambda g: g.ctaid,
    "%laneid": lambda g: g.tid % np.uint32(WARP_THREADS),
    "WARP_SZ": _constant(WARP_THREADS),
}
