"""wgmma: products of tiles of shared memory that four warps begin, group and wait for. Source: PTX ISA 8.7, section 9.7.15.

Tiles are read and sums are made where a product begins. Until its group is waited for nobody may store to the tiles. Registers
of sums are not watched. Tiles are laid out as the manual words the layouts of descriptors, and not by the layouts with which
code is made.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from pbkern.core.lazy_dataclass import dataclass

from . import ops
from .counts import WARP_THREADS, Memo
from .instructions.accesses import read
from .instructions.table import MAKERS
from .matrices import KINDS, LANE_GROUP, LANE_IN_GROUP
from .memory import Fault
from .operands import Mask, Step, names_of, operand
from .parse import Instruction, PtxProgram

WORD = np.dtype(np.uint32)
# Threads of a group of four warps.
GROUP_THREADS = 4 * WARP_THREADS
# Rows of results of a group.
RESULT_ROWS = 64
# Bytes of a chunk, which a swizzle moves as a whole; unit of a descriptor's addresses.
CHUNK_BYTES = 16
# Bytes of a row of the swizzle of 128 bytes.
SWIZZLED_BYTES = 128
# Rows after which the swizzle repeats.
SWIZZLED_ROWS = 8


@dataclass
class GroupProduct:
    """A product under way: lanes that have begun it, the number of its group, the bytes of its tiles."""

    lanes: np.ndarray
    group: np.ndarray
    places: np.ndarray


def _maker(program: PtxProgram, instruction: Instruction) -> Step:
    match instruction.op[1]:
        case "fence":
            return lambda gang, mask: None
        case "commit_group":
            return _commit
        case "wait_group":
            groups = int(instruction.operands[0])
            return lambda gang, mask: _wait(gang, mask, groups)
    return _product(program, instruction)


def _product(program: PtxProgram, instruction: Instruction) -> Step:
    shape = next(
        (
            re.fullmatch(r"m64n(\d+)k(\d+)", word)
            for word in instruction.op
            if "n" in word and "k" in word
        ),
        None,
    )
    result, kind, other = instruction.op[-3:]
    if shape is None or kind != other or kind not in KINDS or result not in ("f32", "s32"):
        raise ops.Unknown("shape or types")
    columns, depth = int(shape[1]), int(shape[2])
    dtype, accumulator = KINDS[kind]
    names, rest = names_of(instruction.operands[0]), instruction.operands[1:]
    descriptors = [operand(program, text, ops.TYPES["u64"]) for text in rest[:2]]
    turned = [text == "1" for text in rest[5:7]] or [False, False]
    if any(text not in ("1",) for text in rest[3:5]):
        raise ops.Unknown("negated operands")
    adds = operand(program, rest[2], np.dtype(bool))
    sums = [operand(program, name, accumulator) for name in names]
    memos = Memo(), Memo()

    def step(gang: Any, mask: Mask) -> None:
        if gang.threads % GROUP_THREADS:
            raise Fault("bounds", f"{gang.threads} threads are not whole groups of four warps")
        lanes = np.ones(gang.shape, bool) if mask is None else mask
        tiles = [
            _tile(
                gang,
                lanes,
                np.broadcast_to(descriptor(gang), gang.shape),
                wide,
                depth,
                dtype,
                way,
                memo,
            )
            for descriptor, wide, way, memo in zip(
                descriptors, (RESULT_ROWS, columns), turned, memos
            )
        ]
        groups = (gang.blocks, gang.threads // GROUP_THREADS)
        exact = [tile.astype(accumulator) for tile in tiles]
        product = exact[0] @ exact[1].swapaxes(-1, -2)
        keep = np.broadcast_to(adds(gang), gang.shape)
        for number, (name, reader) in enumerate(zip(names, sums)):
            rows = 16 * np.arange(4)[:, None] + LANE_GROUP + 8 * (number // 2 % 2)
            place = 8 * (number // 4) + 2 * LANE_IN_GROUP + number % 2
            part = product[:, :, rows, np.broadcast_to(place, rows.shape)].reshape(
                *groups, GROUP_THREADS
            )
            before = np.where(keep, np.broadcast_to(reader(gang), gang.shape), 0)
            gang.put(name, (before + part.reshape(gang.shape)).astype(accumulator), mask)

    return step


def _tile(
    gang: Any, lanes: np.ndarray, descriptor: np.ndarray, rows: int, depth: int,
    dtype: np.dtype, turned: bool, memo: Memo,
) -> np.ndarray:  # fmt: skip
    """[blocks, groups, rows, depth] of the tile that each group's descriptor names; its threads read it chunk by chunk."""
    grouped = descriptor.reshape(gang.blocks, -1, GROUP_THREADS)
    if (grouped != grouped[..., :1]).any():
        raise Fault("bounds", "threads of a group give different descriptors")
    first = grouped[:, :, :1].view(np.int64)
    if (first >> 62 & 3 != 1).any() or (first >> 49 & 7).any():
        raise Fault(
            "bounds", "only tiles with swizzles of 128 bytes, without an offset, are simulated"
        )
    start, lead, stride = ((first >> bit & 0x3FFF) * CHUNK_BYTES for bit in (0, 16, 32))
    each = CHUNK_BYTES // dtype.itemsize
    chunks = np.arange(rows * depth // each)
    if turned:  # rows of a panel run along the tile's rows
        deep, part = chunks // (rows // each), chunks % (rows // each)
        per_row = SWIZZLED_BYTES // CHUNK_BYTES
        places = start + deep // SWIZZLED_ROWS * stride + deep % SWIZZLED_ROWS * SWIZZLED_BYTES
        places = places + part // per_row * lead + part % per_row * CHUNK_BYTES
    else:
        row, part = chunks % rows, chunks // rows
        places = (
            start
            + row // SWIZZLED_ROWS * stride
            + row % SWIZZLED_ROWS * SWIZZLED_BYTES
            + part * CHUNK_BYTES
        )
    places = places ^ (places // SWIZZLED_BYTES % SWIZZLED_ROWS) * CHUNK_BYTES
    loaded = []
    for begin in range(0, len(chunks), GROUP_THREADS):
        addresses = np.zeros((*grouped.shape[:2], GROUP_THREADS), np.int64)
        here = places[..., begin : begin + GROUP_THREADS]
        addresses[..., : here.shape[-1]] = here
        some = np.zeros(addresses.shape, bool)
        some[..., : here.shape[-1]] = True
        reading = some.reshape(gang.shape) & lanes
        words = np.zeros((*gang.shape, CHUNK_BYTES // WORD.itemsize), WORD)
        flat = addresses.reshape(gang.shape)
        words[reading] = read(gang, flat, reading, "shared", WORD, words.shape[-1], memo)
        _note(gang, flat, reading)
        loaded.append(
            words.reshape(*grouped.shape[:2], GROUP_THREADS, -1)[..., : here.shape[-1], :]
        )
    values = np.ascontiguousarray(np.concatenate(loaded, 2)).view(dtype)
    if turned:
        return values.reshape(*grouped.shape[:2], depth, rows).swapaxes(-1, -2)
    values = values.reshape(*grouped.shape[:2], depth // each, rows, each).swapaxes(2, 3)
    return values.reshape(*grouped.shape[:2], rows, depth)


def _note(gang: Any, addresses: np.ndarray, lanes: np.ndarray) -> None:
    """Checks that what was stored is fenced, and notes that chunks are read until their group is waited for."""
    places = (addresses + gang.rows * gang.shared.stride)[lanes][:, None] + np.arange(CHUNK_BYTES)
    gang.shared.read_by_products(places)
    whole = np.zeros((*gang.shape, CHUNK_BYTES), np.int64)
    whole[lanes] = places
    gang.products.append(GroupProduct(lanes.copy(), gang.grouped.copy(), whole))


def _commit(gang: Any, mask: Mask) -> None:
    gang.grouped = gang.grouped + (1 if mask is None else mask)


def _wait(gang: Any, mask: Mask, groups: int) -> None:
    here = np.ones(gang.shape, bool) if mask is None else mask
    for product in gang.products:
        done = here & product.lanes & (product.group < gang.grouped - groups)
        gang.shared.left_by_products(product.places[done])
        product.lanes &= ~done
    gang.products = [product for product in gang.products if product.lanes.any()]


def _fence(program: PtxProgram, instruction: Instruction) -> Step:
    """fence.proxy.async: what a thread has stored before is there for products. Other fences change nothing here."""
    if "proxy" not in instruction.op:
        return lambda gang, mask: None

    def step(gang: Any, mask: Mask) -> None:
        gang.shared.fence(np.ones(gang.shape, bool) if mask is None else mask)

    return step


MAKERS |= {"wgmma": _maker, "fence": _fence}
