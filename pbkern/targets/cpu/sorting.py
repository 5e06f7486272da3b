"""Sorts of lines that are too long for registers: digits of their keys, cycles, and scratch beside the operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Lines of up to this many elements are sorted in registers, if that takes no more operations than
# one nest holds.
SHORT_LINE, MOST_OPERATIONS = 16, 1600
# Cycles of a pass over a digit, for one element in it, and for one value of the digit; of making a
# key or reading an operand's element. Measured on Zen 5 with lines of 17 to 20000 elements.
PASS_CYCLES, MOVE_CYCLES, COUNT_CYCLES, ENDS_CYCLES = 200.0, 3.5, 0.9, 4.0
# Cycles of comparing one key with a vector of others.
COMPARE_CYCLES, RANK_VECTOR_BITS = 1.8, 512
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


# Candidates for each element that is wanted where lines are not sorted as a whole, and at least.
CANDIDATES, FEWEST_CANDIDATES = 4, 64


def head_length(length: int, first: int) -> int | None:
    """Number of candidates for the `first` elements of a sorted line that are sorted together; None: all elements."""
    head = max(CANDIDATES * first, FEWEST_CANDIDATES)
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


def word_dtype(dtype) -> np.dtype:
    """Type of the integers that stand for keys."""
    return np.dtype(f"uint{word_bits(key_bits(dtype))}")


def keeps_places(dtypes, keys: int) -> bool:
    """Do places travel with the keys, because one key alone does not tell the results?"""
    return len(dtypes) > 1 or keys > 1 or "float" in np.dtype(dtypes[0]).name


def word_dtypes(dtypes, keys: int) -> list[np.dtype]:
    return list(dict.fromkeys(map(word_dtype, dtypes[:keys])))


@dataclass(frozen=True)
class RadixScratch:
    """See lower/build_options.py; what targets/cpu/emit/radix_sort.py and top_k.py find beside the operands."""

    def __call__(
        self, length: int, dtypes: Sequence, keys: int, first: int
    ) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Counts, words of each width, places, and a line of each operand.

        Where only `first` elements are read, lines are as short as the head that
        targets/cpu/emit/top_k.py sorts.
        """
        length = head_length(length, first) or length
        digits = [digit_bits(length, key_bits(dtype)) for dtype in dtypes[:keys]]
        counts = max(
            1 << digit if digit else length + key_lanes(dtype)
            for digit, dtype in zip(digits, dtypes)
        )
        keeps = keeps_places(dtypes, keys)
        # Vectors of keys reach past the last one.
        words = [
            ((2 * length + RANK_VECTOR_BITS // 32,), dtype) for dtype in word_dtypes(dtypes, keys)
        ]
        places = (
            [((2 * length,), np.dtype(np.int32)), *(((length,), dtype) for dtype in dtypes)]
            if keeps
            else []
        )
        return [((counts,), np.dtype(np.int32)), *words, *places]


def key_lanes(dtype) -> int:
    """Words of keys in a vector."""
    return RANK_VECTOR_BITS // (8 * word_dtype(dtype).itemsize)
