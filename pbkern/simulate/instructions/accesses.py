"""Loads and stores: addresses, memories, bounds, and who has touched what."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pbkern.simulate import ops
from pbkern.simulate.counts import Memo
from pbkern.simulate.memory import LOCAL_BEGIN, Arrays, BlockMemory
from pbkern.simulate.operands import Mask, Reader, Step, as_type, names_of, operand, widened
from pbkern.simulate.parse import SIZES, Instruction, PtxProgram

SPACES = ("global", "shared", "local", "param")
_ADDRESS = re.compile(r"\[\s*([\w%$.]+)\s*(?:\+\s*(-?\w+))?\s*\]")


def address_of(program: PtxProgram, text: str) -> Reader:
    match = _ADDRESS.match(text)
    if match is None:
        raise ops.Unknown(f"address {text}")
    offset = int(match[2], 0) if match[2] else 0
    width = ops.TYPES["u64"]
    base = operand(program, match[1], width)

    def read(gang: Any) -> np.ndarray:
        address = base(gang).view(np.int64)
        return address + offset if offset else address

    return read


def _param(program: PtxProgram, instruction: Instruction, dtype: np.dtype) -> Step:
    match = _ADDRESS.match(instruction.operands[1])
    if match is None or match[2]:
        raise ops.Unknown("a part of a parameter")
    position, _ = program.parameters[match[1]]
    dst = instruction.operands[0]

    def step(gang: Any, mask: Mask) -> None:
        bits = np.array([[gang.launch.arguments[position] & ((1 << 64) - 1)]], np.uint64)
        gang.put(dst, as_type(bits, dtype), mask)

    return step


def space_of(instruction: Instruction) -> str:
    """The memory that an access names, or "generic"."""
    return next(
        (space for space in SPACES if space in instruction.op or f"{space}::cta" in instruction.op),
        "generic",
    )


def load(program: PtxProgram, instruction: Instruction) -> Step:
    dtype, space, signed = (
        ops.unsigned(SIZES[instruction.op[-1]]),
        space_of(instruction),
        instruction.op[-1].startswith("s"),
    )
    if space == "param":
        return _param(program, instruction, dtype)
    names = names_of(instruction.operands[0])
    address, count, memo = address_of(program, instruction.operands[1]), len(names), Memo()
    # Compilers widen loads over elements that nobody wrote, where nothing uses them.
    used = [
        k
        for k, name in enumerate(names)
        if not name.startswith("%") or name in program.used_registers
    ]

    def step(gang: Any, mask: Mask) -> None:
        addresses = address(gang)
        if mask is None:
            addresses = (
                addresses
                if space == "global" and not _is_watched(gang, addresses)
                else np.broadcast_to(addresses, gang.shape)
            )
            elements = widened(read(gang, addresses, None, space, dtype, count, memo, used), signed)
            parts = (
                [elements]
                if count == 1
                else [np.ascontiguousarray(elements[..., k]) for k in range(count)]
            )
            for name, part in zip(names, parts):
                gang.put(name, part, None)
            return
        if not mask.any():
            return
        elements = widened(
            read(
                gang, np.broadcast_to(addresses, gang.shape), mask, space, dtype, count, memo, used
            ),
            signed,
        )
        for k, name in enumerate(names):
            whole = np.zeros(gang.shape, elements.dtype)
            whole[mask] = elements if count == 1 else elements[..., k]
            gang.put(name, whole, mask)

    return step


def _is_watched(gang: Any, addresses: np.ndarray) -> bool:
    """Whether who reads is noted: not of arrays that the kernel never stores to."""
    return bool(gang.launch.arrays.shadows)


def read(
    gang: Any,
    addresses: np.ndarray,
    mask: Mask,
    space: str,
    dtype: np.dtype,
    count: int,
    memo: Memo,
    used: Sequence[int] = (0,),
) -> np.ndarray:
    """Elements at addresses, flat if there is a mask; rows of `count`.

    used: those of a row that have to be written before, in shared memory. Raises Fault.
    """
    size = dtype.itemsize * count
    active = addresses if mask is None else addresses[mask]
    if _are_apart(active, space):
        every = np.broadcast_to(addresses, gang.shape)
        elements = np.zeros((*gang.shape, count) if count > 1 else gang.shape, dtype)
        for part, its in _parts(gang, every, mask, space):
            elements[part] = read(gang, every, part, its, dtype, count, memo, used)
        return elements if mask is None else elements[mask]
    space = _space_at(active, space)
    if space == "global":
        number, offsets = gang.launch.arrays.find(active, size)
        every = np.broadcast_to(addresses, (len(addresses), gang.threads))
        gang.counts.add_global(
            every, mask, size, gang.blocks // len(addresses) if mask is None else 1, memo
        )
        shadow = gang.launch.arrays.shadows.get(number)
        if shadow is not None:
            _note(
                gang,
                shadow,
                np.broadcast_to(addresses, gang.shape) - Arrays.address(number),
                mask,
                size,
                store=False,
            )
        view = gang.launch.arrays.view(number, dtype, count)
        return view.take(offsets // size, 0, mode="clip")
    memory: BlockMemory = gang.shared if space == "shared" else gang.local
    rows = (
        (gang.rows if space == "shared" else gang.lanes)
        if mask is None
        else (gang.rows if space == "shared" else gang.lanes)[mask]
    )
    places = memory.find(_offsets(active, space), rows, size)
    if space == "shared":
        gang.counts.add_shared(addresses, mask, size, memo)
        if memory.shadow is not None:
            _note(
                gang, memory.shadow, addresses + gang.rows * memory.stride, mask, size, store=False
            )
            if not gang.launch.unwritten:
                for k in used:
                    memory.check_written((places + k * dtype.itemsize) // memory.shadow.size)
    return memory.view(dtype, count).take(places // size, 0, mode="clip")


def _space_at(addresses: np.ndarray, space: str) -> str:
    """Finds the space of generic addresses: those of shared memory are offsets, those of local memory lie below all arrays."""
    if space != "generic":
        return space
    highest = int(addresses.max())
    return (
        "global" if Arrays.number(highest) >= 0 else "local" if highest >= LOCAL_BEGIN else "shared"
    )


def _offsets(addresses: np.ndarray, space: str) -> np.ndarray:
    """In shared or local memory."""
    return (
        np.where(addresses >= LOCAL_BEGIN, addresses - LOCAL_BEGIN, addresses)
        if space == "local"
        else addresses
    )


def _are_apart(addresses: np.ndarray, space: str) -> bool:
    """Whether lanes go to several arrays, or memories: compilers choose between addresses."""
    if space not in ("global", "generic"):
        return False
    return bool(_home(addresses.min()) != _home(addresses.max()))


def _home(addresses: Any) -> Any:
    """Number of the array that addresses are in; of other memory: -1, or, of local memory, -2."""
    numbers = Arrays.number(addresses)
    return np.where((numbers < 0) & (addresses >= LOCAL_BEGIN), -2, numbers)


def _parts(
    gang: Any, addresses: np.ndarray, mask: Mask, space: str
) -> Iterator[tuple[np.ndarray, str]]:
    """(lanes of one array or memory, its space), one after the other."""
    lanes = np.ones(gang.shape, bool) if mask is None else mask
    homes = _home(addresses)
    for home in np.unique(homes[lanes]):
        yield lanes & (homes == home), space if space == "generic" else "global"


def _note(
    gang: Any, shadow: Any, offsets: np.ndarray, mask: Mask, size: int, *, store: bool
) -> None:
    """Marks the cells of an access."""
    pick = (lambda array: array.reshape(-1)) if mask is None else (lambda array: array[mask])
    cells, base, marks = pick(offsets) // shadow.size, pick(gang.base), pick(gang.mark)
    for k in range(max(size // shadow.size, 1)):
        (shadow.store if store else shadow.load)(cells + k, base, marks)


def store(program: PtxProgram, instruction: Instruction) -> Step:
    dtype, space = ops.unsigned(SIZES[instruction.op[-1]]), space_of(instruction)
    names, address = names_of(instruction.operands[1]), address_of(program, instruction.operands[0])
    values, memo = [operand(program, name, dtype) for name in names], Memo()

    def step(gang: Any, mask: Mask) -> None:
        if mask is not None and not mask.any():
            return
        stored = [np.broadcast_to(value(gang), gang.shape) for value in values]
        stored = [array.reshape(-1) if mask is None else array[mask] for array in stored]
        write(gang, np.broadcast_to(address(gang), gang.shape), mask, space, dtype, stored, memo)

    return step


def write(
    gang: Any,
    addresses: np.ndarray,
    mask: Mask,
    space: str,
    dtype: np.dtype,
    values: list[np.ndarray],
    memo: Memo,
) -> None:
    """Stores rows of values, flat. Raises Fault."""
    if _are_apart(addresses if mask is None else addresses[mask], space):
        for part, its in _parts(gang, addresses, mask, space):
            mine = part.reshape(-1) if mask is None else part[mask]
            write(gang, addresses, part, its, dtype, [value[mine] for value in values], memo)
        return
    view, places, size = view_to_write(gang, addresses, mask, space, dtype, len(values), memo)
    if len(values) == 1:
        view[places // size] = values[0]
    else:
        view[places // size] = np.stack(values, -1)


def view_to_write(
    gang: Any,
    addresses: np.ndarray,
    mask: Mask,
    space: str,
    dtype: np.dtype,
    count: int,
    memo: Memo,
):
    """(memory, places in bytes, bytes of an access), checked, counted and marked."""
    size = dtype.itemsize * count
    active = addresses.reshape(-1) if mask is None else addresses[mask]
    space = _space_at(active, space)
    if space == "global":
        number, places = gang.launch.arrays.find(active, size)
        gang.counts.add_global(addresses, mask, size, 1, memo)
        shadow = gang.launch.arrays.shadows.get(number)
        if shadow is not None:
            _note(gang, shadow, addresses - Arrays.address(number), mask, size, store=True)
        return gang.launch.arrays.view(number, dtype, count), places, size
    memory: BlockMemory = gang.shared if space == "shared" else gang.local
    rows = gang.rows if space == "shared" else gang.lanes
    places = memory.find(
        _offsets(active, space), rows.reshape(-1) if mask is None else rows[mask], size
    )
    if space == "shared":
        gang.counts.add_shared(addresses, mask, size, memo)
        threads = np.broadcast_to(gang.tid, gang.shape).astype(np.int16)
        memory.stored(places, size, threads.reshape(-1) if mask is None else threads[mask])
        if memory.shadow is not None:
            _note(
                gang, memory.shadow, addresses + gang.rows * memory.stride, mask, size, store=True
            )
    return memory.view(dtype, count), places, size
