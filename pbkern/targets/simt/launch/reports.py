"""Words that a launch has stored (emit/reports.py) -> prints, and errors of failed checks, in the host process."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pbkern.lower.rules.debug_callbacks import SITES, Type
from pbkern.targets.simt.emit.kernel import ThreadFunction
from pbkern.targets.simt.emit.reports import (
    NO_PRINT,
    PRINT_HEADER_WORDS,
    REPORT_WORD_BYTES,
    value_words,
    words,
)


def receive(
    function: ThreadFunction, stored: np.ndarray, operands: Callable[[], list[np.ndarray]]
) -> None:
    """Prints block after block, and reports the checks that failed.

    Raises nothing: what a print's own code raises is shown.

    Args:
      function: the kernel that was launched.
      stored: int64[Reports.nbytes / 8].
      operands: reads what the kernel was given.
    """
    reports = function.reports
    assert reports is not None
    try:
        for _, site, values in sorted(_printed(function, stored), key=lambda printed: printed[0]):
            SITES[site].receive(values, operands)
        if (asked := int(stored[0])) > reports.room:
            print(
                f"pbkern: kernel `{function.name}` printed {asked * REPORT_WORD_BYTES} bytes in one "
                f"launch; {reports.room * REPORT_WORD_BYTES} are kept, and the prints that did not fit are not shown",
                file=sys.stderr,
            )
        for site, at in reports.places.items():
            if stored[at]:
                SITES[site].receive(_values(stored[at + 1 :], SITES[site].types), operands)
    except (
        Exception
    ) as e:  # no exception can pass through the frames of the caller, which is compiled code
        print(f"pbkern: a print or check in a kernel failed: {e!r}", file=sys.stderr)


def _printed(function: ThreadFunction, stored: np.ndarray) -> Iterator[tuple[int, int, list]]:
    """(block, site, values) as they were stored, up to the first that did not fit."""
    reports = function.reports
    assert reports is not None
    rest = stored[reports.first_print :]
    at, end = 0, min(int(stored[0]), reports.room)
    while at < end:
        site, block = map(int, rest[at : at + PRINT_HEADER_WORDS])
        if site == NO_PRINT:
            return
        count = words(SITES[site].types)
        yield block, site, _values(rest[at + PRINT_HEADER_WORDS :], SITES[site].types)
        at += PRINT_HEADER_WORDS + count


def _values(stored: np.ndarray, types: Sequence[Type]) -> list[np.ndarray]:
    values, at = [], 0
    for shape, dtype in types:
        count = value_words((shape, dtype))
        flat = stored[at : at + count].view(np.uint8)[: math.prod(shape) * dtype.itemsize]
        values.append(flat.view(dtype).reshape(shape).copy())
        at += count
    return values
