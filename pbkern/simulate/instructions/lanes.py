"""Instructions by which the lanes of a warp exchange values."""

from __future__ import annotations

from typing import Any

import numpy as np

from pbkern.simulate import ops
from pbkern.simulate.counts import WARP_THREADS
from pbkern.simulate.memory import Fault
from pbkern.simulate.operands import Mask, Step, operand
from pbkern.simulate.parse import Instruction, PtxProgram


def shuffle(program: PtxProgram, instruction: Instruction) -> Step:
    kind = instruction.op[2]
    names, u32 = instruction.operands[0].split("|"), ops.TYPES["u32"]
    value, by, limits = (operand(program, text, u32) for text in instruction.operands[1:4])

    def step(gang: Any, mask: Mask) -> None:
        lane = gang.tid % np.uint32(WARP_THREADS)
        delta, limit = by(gang), limits(gang)
        high, segment = limit & np.uint32(31), (limit >> np.uint32(8)) & np.uint32(31)
        low = lane & segment
        top = low | (high & ~segment)
        lane, delta, low, top = (
            array.astype(np.int64) for array in (lane, delta & np.uint32(31), low, top)
        )
        other = {
            "bfly": lane ^ delta,
            "up": lane - delta,
            "down": lane + delta,
            "idx": low | (delta & ~segment.astype(np.int64)),
        }[kind]
        inside = other >= top if kind == "up" else other <= top
        source = np.where(inside, other, lane) + (
            gang.tid.astype(np.int64) - gang.tid.astype(np.int64) % WARP_THREADS
        )
        source, inside = (np.broadcast_to(array, gang.shape) for array in (source, inside))
        _check_present(gang, mask, source)
        values = np.broadcast_to(value(gang), gang.shape)
        gang.put(
            names[0], np.take_along_axis(values, np.minimum(source, gang.threads - 1), 1), mask
        )
        if len(names) > 1:
            gang.put(names[1], inside, mask)

    return step


def _check_present(gang: Any, mask: Mask, source: np.ndarray) -> None:
    """Raises Fault where a lane asks one that does not take part."""
    if int(source.max()) >= gang.threads:
        raise Fault(
            "divergence", "a lane asks for the register of a thread that the block does not have"
        )
    if mask is None:
        return
    absent = mask & ~np.take_along_axis(np.broadcast_to(mask, gang.shape), source, 1)
    if absent.any():
        block, thread = (int(coord) for coord in np.argwhere(absent)[0])
        raise Fault(
            "divergence",
            f"thread {thread} of block {gang.numbers[block]} asks for the register of thread "
            f"{int(source[block, thread])}, which does not take part",
        )


def vote(program: PtxProgram, instruction: Instruction) -> Step:
    kind, dst = instruction.op[2], instruction.operands[0]
    pred = operand(program, instruction.operands[1].lstrip("!"), np.dtype(bool))

    def step(gang: Any, mask: Mask) -> None:
        here = np.ones(gang.shape, bool) if mask is None else mask
        preds = np.broadcast_to(
            ~pred(gang) if instruction.operands[1].startswith("!") else pred(gang), gang.shape
        )
        lanes, votes = gang._by_warp(here), gang._by_warp(preds & here)
        some, every = votes.any(-1, keepdims=True), (votes | ~lanes).all(-1, keepdims=True)
        if kind == "ballot":
            bits = (votes.astype(np.uint32) << np.arange(WARP_THREADS, dtype=np.uint32)).sum(
                -1, keepdims=True, dtype=np.uint32
            )
        else:
            bits = {"any": some, "all": every, "uni": every | ~some}[kind]
        gang.put(
            dst,
            np.broadcast_to(bits, lanes.shape).reshape(gang.blocks, -1)[:, : gang.threads],
            mask,
        )

    return step


def active_mask(program: PtxProgram, instruction: Instruction) -> Step:
    def step(gang: Any, mask: Mask) -> None:
        lanes = gang._by_warp(np.ones(gang.shape, bool) if mask is None else mask)
        bits = (lanes.astype(np.uint32) << np.arange(WARP_THREADS, dtype=np.uint32)).sum(
            -1, keepdims=True, dtype=np.uint32
        )
        gang.put(
            instruction.operands[0],
            np.broadcast_to(bits, lanes.shape).reshape(gang.blocks, -1)[:, : gang.threads],
            mask,
        )

    return step
