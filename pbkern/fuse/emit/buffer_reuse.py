"""Steps over values -> buffers with lifetimes: which temporaries can share storage.

Temporaries live from the step that writes them to the last that reads them; those that never live
together share a slot. Inside a loop every temporary lives as long as the loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pbkern.dsl.host_program import Buffer, BufferKind, Cond, Copy, HostWhile, Launch, Loop, Step


def touched(step: Step) -> Iterator[str]:
    """Names of the buffers that a step reads or writes, nested steps included."""
    match step:
        case Launch(operands=o, results=r):
            yield from (view.buffer for view in (*o, *r))
        case Copy(source=s, destination=d):
            yield from (s.buffer, d.buffer)
        case Loop(steps=inner):
            for nested in inner:
                yield from touched(nested)
        case HostWhile(condition=c, predicate=p, steps=inner):
            yield p.buffer
            for nested in (*c, *inner):
                yield from touched(nested)
        case Cond(index=i, branches=branches):
            yield i.buffer
            for branch in branches:
                for nested in branch:
                    yield from touched(nested)


def lifetimes(steps: Sequence[Step]) -> dict[str, list[int]]:
    """Name of a buffer -> the first and the last step at the top level that reads or writes it."""
    life: dict[str, list[int]] = {}
    for n, step in enumerate(steps):
        for name in touched(step):
            life.setdefault(name, [n, n])[1] = n
    return life


def assign_slots(buffers: Sequence[Buffer], steps: Sequence[Step]) -> tuple[Buffer, ...]:
    """`buffers` with temporaries given slots; first fit over lifetimes at the top level of steps."""
    life = lifetimes(steps)
    slots: list[tuple[int, int]] = []  # (last step in use, bytes) per slot
    placed: dict[str, int] = {}
    temps = [buffer for buffer in buffers if buffer.kind is BufferKind.TEMP and buffer.name in life]
    for temp in sorted(temps, key=lambda buffer: (life[buffer.name][0], -buffer.type.nbytes)):
        first, last = life[temp.name]
        free = [k for k, (end, _) in enumerate(slots) if end < first]
        if free:
            # The closest size: a small value does not hold a large slot.
            slot = min(free, key=lambda candidate: abs(slots[candidate][1] - temp.type.nbytes))
            slots[slot] = (last, max(slots[slot][1], temp.type.nbytes))
        else:
            slot = len(slots)
            slots.append((last, temp.type.nbytes))
        placed[temp.name] = slot
    persistent = (
        buffer for buffer in buffers if buffer.kind is not BufferKind.TEMP or buffer.name in life
    )
    return tuple(
        replace(buffer, slot=placed[buffer.name]) if buffer.name in placed else buffer
        for buffer in persistent
    )
