"""Grid axes of a loop that programs share -> how many elements along each of them a program has."""

from __future__ import annotations

import math

from pbkern.core.lazy_dataclass import dataclass


@dataclass(frozen=True)
class ProgramSize:
    """Sizes that a program of a loop should have.

    Attributes:
      most: elements along all axes together, at most.
      fewest: elements that do not wait for each other, at least.
      lanes: elements of a vector.
      cores: programs that run at the same time.
    """

    most: int
    fewest: int
    lanes: int
    cores: int


def program_widths(
    extents: tuple[int, ...], elements: int, size: ProgramSize
) -> tuple[int, ...] | None:
    """Elements that a program has along each axis; None if it may have none.

    Args:
      extents: elements along each axis.
      elements: those of the largest value that come with one element along each axis.
      size: of a program.
    """
    if not size.most:
        return None
    # Short rows, such as a state of 4, are no work beside which another row could wait.
    row = elements if elements >= size.lanes else 1
    return _for_all_cores(extents, _largest(extents, size), row, size)


def _largest(extents: tuple[int, ...], size: ProgramSize) -> list[int]:
    """The most elements that a program may have: along the last axis first, in whole vectors."""
    room, widths = size.most, list[int]()
    for extent in reversed(extents):
        width = min(extent, room)
        if size.lanes < width < extent:
            width -= width % size.lanes
        widths.append(width)
        room //= width
    return widths[::-1]


def _for_all_cores(
    extents: tuple[int, ...], largest: list[int], row: int, size: ProgramSize
) -> tuple[int, ...]:
    """Smaller widths, with which all cores have programs at all times; none with which a program has too few elements.

    `row`: elements that come with one element along each axis.
    """
    widths = list(largest)
    for axis, extent in enumerate(extents):
        programs = [_quotient(length, width) for length, width in zip(extents, widths)]
        programs_across = math.prod(programs) // programs[axis]
        rounds = _quotient(math.prod(programs), size.cores)
        programs_along = max(rounds * size.cores // programs_across, 1)
        elements_across = math.prod(widths) // widths[axis] * row
        width = max(_quotient(extent, programs_along), _quotient(size.fewest, elements_across))
        whole_vectors = _quotient(width, size.lanes) * size.lanes
        if axis == len(extents) - 1 and whole_vectors < widths[axis]:
            width = whole_vectors
        widths[axis] = min(width, widths[axis])
    return tuple(widths)


def _quotient(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)
