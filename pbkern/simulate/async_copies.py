"""cp.async: copies to shared memory that lanes begin, group and wait for. Source: PTX ISA 8.7, section 9.7.9.25.3.

A copy stores when its lane waits for its group, as late as the program allows. Until then an access to its bytes by any lane
is a fault.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pbkern.core.lazy_dataclass import dataclass

from . import ops
from .counts import Memo
from .instructions.accesses import address_of, read
from .instructions.table import MAKERS
from .memory import Fault
from .operands import Mask, Step, operand
from .parse import Instruction, PtxProgram

BYTE = np.dtype(np.uint8)


@dataclass
class LaneCopies:
    """Copies of one instruction that are under way.

    Attributes:
      lanes: which have not waited for theirs. group: of each lane, the number of its group.
      places: of each lane, the first byte in the memory of all blocks. data: bytes of each lane.
    """

    lanes: np.ndarray
    group: np.ndarray
    places: np.ndarray
    data: np.ndarray

    def bytes_of(self, lanes: np.ndarray) -> np.ndarray:
        """Places of all bytes of some lanes."""
        return self.places[lanes][:, None] + np.arange(self.data.shape[-1])


def _maker(program: PtxProgram, instruction: Instruction) -> Step:
    if instruction.op[:2] != ("cp", "async") or "bulk" in instruction.op:
        raise ops.Unknown("bulk copies")
    match instruction.op[2]:
        case "commit_group":
            return _commit
        case "wait_all":
            return lambda gang, mask: _wait(gang, mask, 0)
        case "wait_group":
            groups = int(instruction.operands[0])
            return lambda gang, mask: _wait(gang, mask, groups)
    return _copy(program, instruction)


def _copy(program: PtxProgram, instruction: Instruction) -> Step:
    size = int(instruction.operands[2])
    to, source = (address_of(program, text) for text in instruction.operands[:2])
    word = ops.TYPES["u32"]
    text = instruction.operands[3] if len(instruction.operands) > 3 else str(size)
    wanted, memo, stored = operand(program, text, word), Memo(), Memo()

    def step(gang: Any, mask: Mask) -> None:
        lanes = np.ones(gang.shape, bool) if mask is None else mask
        if not lanes.any():
            return
        count = np.broadcast_to(wanted(gang), gang.shape)
        if not np.isin(count[lanes], (0, size)).all():
            raise Fault("bounds", f"a copy of a part of {size} bytes is not simulated")
        data, reading = np.zeros((*gang.shape, size), np.uint8), lanes & (count == size)
        if reading.any():
            addresses = np.broadcast_to(source(gang), gang.shape)
            data[reading] = read(gang, addresses, reading, "global", BYTE, size, memo)
        offsets = np.broadcast_to(to(gang), gang.shape)
        places = np.zeros(gang.shape, np.int64)
        places[lanes] = gang.shared.find(offsets[lanes], gang.rows[lanes], size)
        gang.counts.add_shared(offsets, lanes, size, stored)
        copies = LaneCopies(lanes.copy(), gang.committed.copy(), places, data)
        _mark(gang, copies, lanes)  # who has touched these bytes without a barrier?
        threads = np.broadcast_to(gang.tid, gang.shape)[lanes].astype(np.int16)
        gang.shared.stored(places[lanes], size, threads)
        gang.shared.begin(copies.bytes_of(lanes))
        gang.copies.append(copies)

    return step


def _commit(gang: Any, mask: Mask) -> None:
    gang.committed = gang.committed + (1 if mask is None else mask)


def _wait(gang: Any, mask: Mask, groups: int) -> None:
    here = np.ones(gang.shape, bool) if mask is None else mask
    for copies in gang.copies:
        done = here & copies.lanes & (copies.group < gang.committed - groups)
        if done.any():
            places = copies.bytes_of(done)
            gang.shared.end(places)
            gang.shared.flat[places] = copies.data[done]
            threads = np.broadcast_to(gang.tid, gang.shape)[done].astype(np.int16)
            gang.shared.stored(copies.places[done], copies.data.shape[-1], threads)
            _mark(gang, copies, done)
            copies.lanes &= ~done
    gang.copies = [copies for copies in gang.copies if copies.lanes.any()]


def _mark(gang: Any, copies: LaneCopies, lanes: np.ndarray) -> None:
    """Notes that lanes store their bytes."""
    shadow = gang.shared.shadow
    if shadow is None:
        return
    for byte in range(0, copies.data.shape[-1], shadow.size):
        cells = (copies.places[lanes] + byte) // shadow.size
        shadow.store(cells, gang.base[lanes], gang.mark[lanes])


MAKERS["cp"] = _maker
