"""Which dimensions become which, where an array of row-major elements gets another shape."""

from __future__ import annotations

from collections.abc import Sequence


def segments(a: Sequence[int], b: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Splits shapes of equal size into smallest runs of dimensions with equal products, units left out."""
    ka, kb = (
        [axis for axis, extent in enumerate(a) if extent != 1],
        [axis for axis, extent in enumerate(b) if extent != 1],
    )
    groups, i, j = [], 0, 0
    while i < len(ka) or j < len(kb):
        da, db, pa, pb = [ka[i]], [kb[j]], a[ka[i]], b[kb[j]]
        i, j = i + 1, j + 1
        while pa != pb:
            if pa < pb:
                da.append(ka[i])
                pa, i = pa * a[ka[i]], i + 1
            else:
                db.append(kb[j])
                pb, j = pb * b[kb[j]], j + 1
        groups.append((da, db))
    return groups
