"""Reshapes that merge dimensions of an operand's block -> another view of the operand, where its elements are in one run.

Whole rows r0 .. r0 + 15 of a[n, 4096] as 65536 elements are elements 4096 r0 .. of a seen as a[4096
n]. Nothing is copied.
"""

from __future__ import annotations

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.reshape import segments
from pbkern.lower.nest.edit.collapse_dims import Aliases
from pbkern.lower.values.values import ZERO, Index, Stored


@dataclass(frozen=True)
class _Merge:
    """Buffer axes low to high, which dimension `axis` of the new shape walks as one."""

    low: int
    high: int
    axis: int


def merged(stored: Stored, shape: tuple[int, ...], aliases: Aliases) -> Stored | None:
    """Gives stored elements another shape, where they are; None if they are scattered, scratch, or may be outside."""
    if stored.guard or stored.buf.root.arena or 0 in shape:
        return None
    names = [f"@{axis}" for axis in range(len(stored.shape))]
    placed = stored.place(
        tuple(Affine.symbol(name) if size > 1 else ZERO for name, size in zip(names, stored.shape))
    )
    merges, splits = [], {}
    for old, new in segments(stored.shape, shape):
        if len(old) == 1:
            splits[old[0]] = new
            continue
        run = (
            _run(stored, placed, [names[dim] for dim in old], [stored.shape[dim] for dim in old])
            if len(new) == 1
            else None
        )
        if run is None:
            return None
        merges.append(_Merge(*run, new[0]))
    merges.sort(key=lambda span: -span.low)
    buf = stored.buf
    for merge in merges:
        buf = aliases.joined(buf, merge.low, merge.high)

    def place(ix: Index) -> Index:
        at = [ZERO] * len(stored.shape)
        for dim, new in splits.items():
            for new_axis in new:
                at[dim] = at[dim] * shape[new_axis] + ix[new_axis]
        index = list(stored.place(tuple(at)))
        for span in merges:
            flat = ZERO
            for position, size in zip(
                index[span.low : span.high + 1], stored.buf.shape[span.low : span.high + 1]
            ):
                flat = flat * size + position
            index[span.low : span.high + 1] = [flat + ix[span.axis]]
        return tuple(index)

    return Stored(shape, stored.dtype, buf, place)


def _run(
    stored: Stored, placed: Index, names: list[str], sizes: list[int]
) -> tuple[int, int] | None:
    """(first, last) buffer axis along which the named dimensions are one run of elements."""
    at = [[k for k, i in enumerate(placed) if name in i.symbols] for name in names]
    if any(len(axes) != 1 for axes in at):
        return None
    axes = [buf_axis for (buf_axis,) in at]
    low, high = axes[0], axes[-1]
    whole = {axis: (name, size) for axis, name, size in zip(axes[1:], names[1:], sizes[1:])}
    for k in range(low + 1, high + 1):
        symbol, count = whole.get(k, (None, 1))
        if stored.buf.shape[k] != count or placed[k] != (
            ZERO if symbol is None else Affine.symbol(symbol)
        ):
            return None
    first = placed[low] - Affine.symbol(names[0])
    apart = first.symbols.isdisjoint(names) and axes == sorted(set(axes))
    return (low, high) if apart else None
