"""Sorts of lines that are too long for registers: words that stand for keys, and scratch beside the operands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pbkern.core.lazy_dataclass import dataclass
from pbkern.targets.costs.sorts import (
    RANK_VECTOR_BITS,
    digit_bits,
    head_length,
    key_bits,
    word_bits,
)


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
    """See lower/build_options.py; what targets/cpu/emit/sorts/radix_sort.py and top_k.py find beside the operands."""

    def __call__(
        self, length: int, dtypes: Sequence, keys: int, first: int
    ) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Counts, words of each width, places, and a line of each operand.

        Where only `first` elements are read, lines are as short as the head that
        targets/cpu/emit/sorts/top_k.py sorts.
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
