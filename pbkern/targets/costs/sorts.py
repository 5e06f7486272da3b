"""Sorts of lines: which are sorted in registers, digits of the keys of longer ones, and cycles."""

from __future__ import annotations

import math

import numpy as np

# Elements of the longest line that is sorted in registers. Source: not recorded.
LONGEST_REGISTER_LINE = 16
# Most operations of a sort in registers: what one nest holds.
MOST_NETWORK_OPERATIONS = 1600
# Cycles of a pass over a digit, whatever the length. Measured on Zen 5 with lines of 17 to 20000
# elements.
PASS_CYCLES = 200.0
# Cycles of a pass for one element. Measured the same way.
MOVE_CYCLES = 3.5
# Cycles of a pass for one value of the digit. Measured the same way.
COUNT_CYCLES = 0.9
# Cycles of making a key or reading an operand's element. Measured the same way.
ENDS_CYCLES = 4.0
# Cycles of comparing one key with a vector of others. Source: not recorded.
COMPARE_CYCLES = 1.8
# Bits of such a vector.
RANK_VECTOR_BITS = 512
# More values of a digit than this do not have their own cache lines in L1.
MAX_DIGIT_BITS = 11


def key_bits(dtype) -> int:
    """Bits of a key's digits together."""
    dtype = np.dtype(dtype)
    return 1 if dtype.kind == "b" else 8 * dtype.itemsize


def digit_bits(length: int, bits: int) -> int | None:
    """Bits of one digit, for lines of `length` elements; None where comparing each key with all others takes less."""
    digit = min(range(1, MAX_DIGIT_BITS + 1), key=lambda width: _digits_cycles(length, bits, width))
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
    passes = sum(_key_cycles(length, key_bits(dtype)) for dtype in dtypes[:keys])
    return passes + length * ENDS_CYCLES * len(dtypes)


# Candidates for each element that is wanted where lines are not sorted as a whole. Source: not
# recorded.
CANDIDATES_PER_RESULT = 4
# Fewest candidates. Source: not recorded.
FEWEST_CANDIDATES = 64


def head_length(length: int, first: int) -> int | None:
    """Number of candidates for the `first` elements of a sorted line that are sorted together; None: all elements."""
    head = max(CANDIDATES_PER_RESULT * first, FEWEST_CANDIDATES)
    return head if first > 0 and 2 * head <= length else None


def first_cycles(length: int, first: int, dtypes, keys: int) -> float:
    """Cycles of finding the `first` elements of a sorted line: heads are sorted whenever candidates have filled one.

    Of elements in random order, first / i of those at place i become candidates.
    """
    head = head_length(length, first)
    if head is None:
        return line_cycles(length, dtypes, keys)
    heads = 2 + first * math.log(length / head) / (head - first)
    return length + heads * line_cycles(head, dtypes, keys)
