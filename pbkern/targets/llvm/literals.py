"""LLVM IR as MLIR's newer LLVM prints it -> as llvmlite's older one reads it: float literals become hexadecimal.

One rule: a literal has the type that stands last before it on its line. Source: LLVM Language
Reference, Simple Constants.
"""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np

KINDS = {
    "float": np.float32,
    "double": np.float64,
    "half": np.float16,
    "bfloat": ml_dtypes.bfloat16,
}
# A string, a type, or a literal: decimal, infinite, not a number, or its bits behind f0x.
_TOKEN = re.compile(
    r'(c?"(?:[^"\\]|\\.)*")|\b(float|double|half|bfloat)\b|'
    r"(?<![\w.$@%!#])([-+]?\d+\.\d+(?:e[-+]?\d+)?|[-+](?:inf|qnan|s?nan\(0x[0-9A-Fa-f]+\))|f0x[0-9A-Fa-f]+)(?![\w.])"
)
_WORDS = {"inf": np.inf, "qnan": np.nan}
_UNTYPED = ("!", ";", "source_filename", "target", "attributes")


def readable(text: str) -> str:
    """The text with all float literals in hexadecimal."""
    return "\n".join(
        line if line.startswith(_UNTYPED) else _line(line) for line in text.split("\n")
    )


def _line(line: str) -> str:
    kind: str | None = None

    def replaced(match: re.Match) -> str:
        nonlocal kind
        if match[2]:
            kind = match[2]
        if not match[3] or kind is None:
            return match[0]
        return spelled(kind, match[3])

    return _TOKEN.sub(replaced, line)


def spelled(kind: str, literal: str) -> str:
    """A literal of this LLVM type in the older spelling.

    Floats are written as the double of the same value.
    """
    dtype = KINDS[kind]
    bits = np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")
    if literal.startswith("f0x"):
        value = np.array(int(literal[3:], 16), bits).view(dtype)
    else:
        sign, word = (literal[0] == "-", literal[1:]) if literal[0] in "+-" else (False, literal)
        number = _WORDS[word] if word in _WORDS else np.nan if "nan" in word else float(word)
        value = np.array(-number if sign else number).astype(dtype)
    if kind == "half":
        return f"0xH{int(value.view(bits)):04X}"
    if kind == "bfloat":
        return f"0xR{int(value.view(bits)):04X}"
    if kind == "double" or np.isnan(value):
        return f"0x{_wide(value):016X}"
    return f"0x{int(np.float64(value).view(np.uint64)):016X}"


def _wide(value: np.ndarray) -> int:
    """Bits of a double, or of a NaN of 32 bits with its payload at the upper end."""
    if value.dtype == np.float64:
        return int(value.view(np.uint64))
    bits = int(value.view(np.uint32))
    return (bits >> 31) << 63 | 0x7FF << 52 | (bits & 0x7FFFFF) << 29
