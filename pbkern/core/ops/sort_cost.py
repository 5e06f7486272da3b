"""How lines are sorted: in registers where they are short, else by the digits of their keys. For planning and lowering."""

from __future__ import annotations

import math

import numpy as np

# Lines of up to this many elements are sorted in registers, side by side, if that takes no more operations than one nest holds.
SHORT_LINE, MOST_SORTING = 16, 1600
# Cycles of a pass over a digit, for one element in it, and for one value of the digit; of making a key or picking an operand's
# element. Measured on Zen 5 with lines of 17 to 20000 elements.
PASS_CYCLES, MOVE_CYCLES, COUNT_CYCLES, ENDS_CYCLES = 200.0, 3.5, 0.9, 4.0
# Cycles of comparing one key with a vector of others.
COMPARE_CYCLES, RANK_VECTOR_BITS = 1.8, 512
# More values of a digit than this do not have their own cache lines in L1.
MAX_DIGIT_BITS = 11


def sorts_in_registers(length: int, keys: int, operands: int) -> bool:
    """Whether lines of so many elements are sorted in registers: neighbours compare keys, and exchange all operands."""
    exchanges = length * (length - 1) // 2
    return length <= SHORT_LINE and exchanges * (7 * keys + 2 * operands) <= MOST_SORTING


def key_bits(dtype) -> int:
    """Bits of a key's digits together."""
    dtype = np.dtype(dtype)
    return 1 if dtype.kind == "b" else 8 * dtype.itemsize


def digit_bits(length: int, bits: int) -> int | None:
    """Bits of one digit, for lines of `length` elements; None where comparing each key with all others takes less."""
    digit = min(range(1, MAX_DIGIT_BITS + 1), key=lambda w: _digits_cycles(length, bits, w))
    return None if _ranks_cycles(length, bits) < _digits_cycles(length, bits, digit) else digit


def word_bits(bits: int) -> int:
    """Bits of the integers that stand for keys of so many bits."""
    return 64 if bits > 32 else 32


def _digits_cycles(length: int, bits: int, digit: int) -> float:
    return -(-bits // digit) * (PASS_CYCLES + length * MOVE_CYCLES + (1 << digit) * COUNT_CYCLES)


def _ranks_cycles(length: int, bits: int) -> float:
    vectors = -(-length * word_bits(bits) // RANK_VECTOR_BITS)
    return PASS_CYCLES / 2 + length * (vectors * COMPARE_CYCLES + MOVE_CYCLES)


def _key_cycles(length: int, bits: int) -> float:
    digit = digit_bits(length, bits)
    return _ranks_cycles(length, bits) if digit is None else _digits_cycles(length, bits, digit)


def line_cycles(length: int, dtypes, keys: int) -> float:
    """Scalar cycles of sorting one line of operands by the first `keys`."""
    passes = sum(_key_cycles(length, key_bits(d)) for d in dtypes[:keys])
    return passes + length * ENDS_CYCLES * len(dtypes)


# Candidates for each element that is wanted where lines are not sorted as a whole, and at least.
CANDIDATES, FEWEST_CANDIDATES = 4, 64


def head_length(length: int, first: int) -> int | None:
    """How many candidates for the `first` elements of a sorted line are sorted together; None: all of the line's elements."""
    head = max(CANDIDATES * first, FEWEST_CANDIDATES)
    return head if 0 < first and 2 * head <= length else None


def first_cycles(length: int, first: int, dtypes, keys: int) -> float:
    """Cycles of finding the `first` elements of a sorted line: heads are sorted whenever candidates have filled one.

    Of elements in random order, first / i of those at place i become candidates.
    """
    head = head_length(length, first)
    if head is None:
        return line_cycles(length, dtypes, keys)
    heads = 2 + first * math.log(length / head) / (head - first)
    return length + heads * line_cycles(head, dtypes, keys)
