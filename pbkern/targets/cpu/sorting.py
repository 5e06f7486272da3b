"""Sorts of lines that are too long for registers: words that stand for keys, and scratch beside the operands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pbkern.core.lazy_dataclass import dataclass
from pbkern.targets.costs.sorts import (
    RANK_VECTOR_BITS,
    digit_bits,
    head_length,
    is_network,
    keeps_places,
    key_bits,
    word_bits,
    word_layout,
)


def word_dtype(dtype) -> np.dtype:
    """Type of the integers that stand for keys."""
    return np.dtype(f"uint{word_bits(key_bits(dtype))}")


def word_dtypes(dtypes, keys: int) -> list[np.dtype]:
    return list(dict.fromkeys(map(word_dtype, dtypes[:keys])))


@dataclass(frozen=True)
class LineScratch:
    """See lower/build_options.py; what the files of targets/cpu/emit/sorts/ find beside the operands."""

    def __call__(
        self, lines: int, length: int, dtypes: Sequence, keys: int, first: int
    ) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Words of lines side by side, and a line of each operand; or what sorts one line after the other.

        That is counts, words of each width, places, and a line of each operand. Where only `first`
        elements are read, lines are as short as the head that targets/cpu/emit/sorts/top_k.py sorts.
        """
        if is_network(lines, length, dtypes, keys, first):
            layout = word_layout(length, dtypes, keys)
            side_by_side = (len(layout.words) * length * layout.lanes,)
            spare = dtypes if keeps_places(dtypes, keys) else ()
            return [
                (side_by_side, np.dtype(f"uint{layout.bits}")),
                *(((length,), np.dtype(dtype)) for dtype in spare),
            ]
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
