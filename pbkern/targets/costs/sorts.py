"""Sorts of lines: which are sorted in registers, side by side, by ranks or by digits, and their cycles."""

from __future__ import annotations

import math

import numpy as np

from pbkern.core.lazy_dataclass import dataclass

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
# Bits of the words that one exchange of a network over lines side by side compares. Machines with
# narrower vectors take several.
EXCHANGED_BITS = 512
# Cycles of one exchange for each such vector of words. Source: loads and stores of a vector of 512 bits,
# counted on Zen 3, which takes two of 256; not measured on machines with AVX-512, which take fewer.
EXCHANGE_CYCLES = 5.0
# Cycles of one element's way into words and back, beside ENDS_CYCLES for each operand. Source: an estimate;
# lines of 60 to 1,000 int32 took 2.0 to 5.3 ns an element in all on Zen 3.
PACK_CYCLES = 3.0
# Most bytes of words that a network exchanges: they stay in the nearest cache.
MOST_WORD_BYTES = 64 << 10
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


def keeps_places(dtypes, keys: int) -> bool:
    """Do places travel with the keys, because one key alone does not tell the results?"""
    return len(dtypes) > 1 or keys > 1 or "float" in np.dtype(dtypes[0]).name


@dataclass(frozen=True)
class WordLayout:
    """Words of `bits` bits that stand for one element: each holds fields of so many bits, the first uppermost.

    Fields are the keys in order, and last the place, where places travel along. Elements are in
    order if their words are, the first word first.
    """

    bits: int
    words: tuple[tuple[int, ...], ...]

    @property
    def lanes(self) -> int:
        """Lines side by side."""
        return EXCHANGED_BITS // self.bits


def word_layout(length: int, dtypes, keys: int) -> WordLayout:
    """The fewest words for elements of lines of `length` elements."""
    fields = [key_bits(dtype) for dtype in dtypes[:keys]]
    if keeps_places(dtypes, keys):
        fields.append(max(length - 1, 1).bit_length())
    bits = 32 if sum(fields) <= 32 else 64
    words: list[list[int]] = [[]]
    for field in fields:
        if sum(words[-1]) + field > bits:
            words.append([])
        words[-1].append(field)
    return WordLayout(bits, tuple(map(tuple, words)))


def network_passes(length: int) -> list[tuple[int, int, int]]:
    """Passes (p, r, d) of a sorting network: places i with i & p == r below length - d are exchanged with i + d.

    Source: Batcher's merge exchange; Knuth, The Art of Computer Programming 3, algorithm 5.2.2M.
    """
    passes = []
    top = 1 << max((length - 1).bit_length() - 1, 0)
    p = top
    while p:
        q, r, d = top, 0, p
        while True:
            passes.append((p, r, d))
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    return passes


def _exchanges(length: int) -> int:
    """Exchanges of a network for lines of `length` elements, roughly: the passes' mean is half of the line."""
    return sum((length - d) // 2 for _, _, d in network_passes(length))


def network_line_cycles(lines: int, length: int, dtypes, keys: int) -> float | None:
    """Cycles of sorting one of `lines` lines in a network over lines side by side; None: it holds no line this long."""
    layout = word_layout(length, dtypes, keys)
    count = len(layout.words)
    if length * count * EXCHANGED_BITS // 8 > MOST_WORD_BYTES:
        return None
    groups = -(-lines // layout.lanes)
    exchanged = groups * _exchanges(length) * count * EXCHANGE_CYCLES / max(lines, 1)
    return exchanged + length * (PACK_CYCLES + ENDS_CYCLES * len(dtypes))


def is_network(lines: int, length: int, dtypes, keys: int, first: int) -> bool:
    """Whether lines are sorted side by side, rather than one after the other."""
    if head_length(length, first) is not None:
        return False
    cycles = network_line_cycles(lines, length, dtypes, keys)
    return cycles is not None and cycles < _single_line_cycles(length, dtypes, keys)


def _single_line_cycles(length: int, dtypes, keys: int) -> float:
    passes = sum(_key_cycles(length, key_bits(dtype)) for dtype in dtypes[:keys])
    return passes + length * ENDS_CYCLES * len(dtypes)


def line_cycles(lines: int, length: int, dtypes, keys: int) -> float:
    """Scalar cycles of sorting one of `lines` lines of operands by the first `keys`."""
    single = _single_line_cycles(length, dtypes, keys)
    side_by_side = network_line_cycles(lines, length, dtypes, keys)
    return single if side_by_side is None else min(single, side_by_side)


# Candidates for each element that is wanted where lines are not sorted as a whole. Source: not
# recorded.
CANDIDATES_PER_RESULT = 4
# Fewest candidates. Source: not recorded.
FEWEST_CANDIDATES = 64


def head_length(length: int, first: int) -> int | None:
    """Number of candidates for the `first` elements of a sorted line that are sorted together; None: all elements."""
    head = max(CANDIDATES_PER_RESULT * first, FEWEST_CANDIDATES)
    return head if first > 0 and 2 * head <= length else None


def first_cycles(lines: int, length: int, first: int, dtypes, keys: int) -> float:
    """Cycles of finding the `first` elements of a sorted line: heads are sorted whenever candidates have filled one.

    Of elements in random order, first / i of those at place i become candidates.
    """
    head = head_length(length, first)
    if head is None:
        return line_cycles(lines, length, dtypes, keys)
    heads = 2 + first * math.log(length / head) / (head - first)
    return length + heads * _single_line_cycles(head, dtypes, keys)
