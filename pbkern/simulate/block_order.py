"""An order of places in which threads of a warp that have branched apart meet again: the earliest go on first.

A place comes behind all from which threads get there, but for the way back to the head of a loop, and what follows a loop comes
behind all of the loop. Threads that wait there then meet all others that come. The order of a text is none such: compilers
place the end of a loop's body before its head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .parse import Instruction, PtxProgram

# Instructions behind which a warp goes on elsewhere, or not at all.
JUMPS = ("bra", "ret", "exit", "brx", "trap")

Edges = Mapping[int, Sequence[int]]


def place_order(program: PtxProgram) -> list[int]:
    """The number of each place of the code in that order; places without a way to them come last."""
    code = program.code
    heads = {0, *program.labels.values()}
    heads |= {place + 1 for place, step in enumerate(code) if step.op[0] in JUMPS}
    starts = sorted(head for head in heads if head < len(code))
    ends = dict(zip(starts, [*starts[1:], len(code)]))
    edges = {start: _next(program, code[end - 1], end) for start, end in ends.items()}
    blocks = dict.fromkeys(_loops_together(edges, set(starts), [0]))
    order = [0] * len(code)
    places = (place for start in (*blocks, *starts) for place in range(start, ends[start]))
    for number, place in enumerate(dict.fromkeys(places)):
        order[place] = number
    return order


def _next(program: PtxProgram, last: Instruction, end: int) -> list[int]:
    """Places that follow a block's last instruction."""
    follows = [end] if last.op[0] not in JUMPS or last.predicate is not None else []
    if last.op[0] == "bra":
        follows.append(program.labels[last.operands[-1]])
    elif last.op[0] == "brx":
        follows += [program.labels[label] for label in program.tables[last.operands[1]]]
    return [place for place in follows if place < len(program.code)]


def _loops_together(edges: Edges, within: set[int], heads: Sequence[int]) -> Iterator[int]:
    """Blocks that some first ones lead to: circles of them as one, each begun by the block that leads into it."""
    for circle in _circles(edges, within, heads):
        yield circle[0]
        if len(circle) > 1:
            rest = set(circle[1:])
            yield from _loops_together(
                edges, rest, [block for block in edges[circle[0]] if block in rest]
            )


def _circles(edges: Edges, within: set[int], heads: Sequence[int]) -> list[list[int]]:
    """Strongly connected components that some blocks lead to, each before those behind it; in each, the first met first.

    Source: Tarjan 1972, Depth-first search and linear graph algorithms.
    """
    numbers: dict[int, int] = {}
    lowest: dict[int, int] = {}
    path: list[int] = []
    components: list[list[int]] = []
    finished: set[int] = set()
    work: list[tuple[int, Iterator[int]]] = []

    def enter(block: int) -> None:
        numbers[block] = lowest[block] = len(numbers)
        path.append(block)
        work.append((block, iter(edges[block])))

    for head in heads:
        if head not in numbers:
            enter(head)
        while work:
            block, ways = work[-1]
            for follower in ways:
                if follower not in within or follower in finished:
                    continue
                if follower not in numbers:
                    enter(follower)
                    break
                lowest[block] = min(lowest[block], numbers[follower])
            else:
                work.pop()
                if work:
                    before = work[-1][0]
                    lowest[before] = min(lowest[before], lowest[block])
                if lowest[block] == numbers[block]:
                    start = path.index(block)
                    components.append(path[start:])
                    finished.update(path[start:])
                    del path[start:]
    return components[::-1]
