"""Instructions as functions of a gang of lanes: those of the table in ops.py, and those that touch memory or other lanes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pbkern.core.errors import InternalError

from . import ops
from .counts import WARP_THREADS, Memo
from .memory import LOCAL_BEGIN, Arrays, BlockMemory, Fault
from .operands import Reader, as_type, operand
from .parse import SIZES, Instruction, PtxProgram

Mask = np.ndarray | None
# Types of an instruction that takes 16-bit floats and computes in float32.
MIXED = {("f32", "f16"), ("f32", "bf16")}
Step = Callable[[Any, Mask], None]
SPACES = ("global", "shared", "local", "param")
_ADDRESS = re.compile(r"\[\s*([\w%$.]+)\s*(?:\+\s*(-?\w+))?\s*\]")


def compiled(program: PtxProgram, instruction: Instruction) -> Step:
    """An instruction as a function of a gang and the lanes that take part.

    Raises InternalError for unknown ones.
    """
    try:
        return MAKERS.get(instruction.op[0], _table)(program, instruction)
    except (ops.Unknown, KeyError, IndexError) as e:
        raise InternalError(
            f"PTX instruction `{'.'.join(instruction.op)}` is not simulated",
            why=f"line {instruction.line}: {instruction.text} ({e})",
            hint="add it to the table in simulate/ops.py",
        ) from None


# ---------------------------------------------------------------- computing


def _table(program: PtxProgram, instruction: Instruction) -> Step:
    """Makes a step of an instruction of ops.TABLE."""
    if instruction.op[-1].endswith("x2"):
        return _halves(program, instruction)
    if instruction.op[-2:] in MIXED:
        return _mixed(program, instruction)
    name, dtype = instruction.op[0], ops.TYPES[instruction.op[-1]]
    if name not in ops.TABLE:
        raise ops.Unknown(name)
    if not ops.TYPES.keys().isdisjoint(instruction.op[:-1]):
        raise ops.Unknown("two types")
    if name == "mov" and instruction.operands[0].startswith("{"):
        return _unpacked(program, instruction, dtype)
    if name == "mov" and instruction.operands[1].startswith("{"):
        return _packed(program, instruction, dtype)
    function, dst = ops.TABLE[name](instruction.op, dtype), instruction.operands[0]
    counts = ops.COUNTS.get(name, set())
    wide = (
        np.dtype(f"{'int' if dtype.kind == 'i' else 'uint'}{16 * dtype.itemsize}")
        if "wide" in instruction.op
        else dtype
    )
    types = [
        ops.TYPES["u32"] if k in counts else wide if k == 2 else dtype
        for k in range(len(instruction.operands) - 1)
    ]
    read = [operand(program, text, type_) for text, type_ in zip(instruction.operands[1:], types)]
    missing = ops.missing(instruction.op, dtype)
    if missing:
        raise ops.Unknown(missing)
    match read:
        case [x]:
            return lambda gang, mask: gang.put(dst, function(x(gang)), mask)
        case [x, y]:
            return lambda gang, mask: gang.put(dst, function(x(gang), y(gang)), mask)
    return lambda gang, mask: gang.put(dst, function(*(source(gang) for source in read)), mask)


def _mixed(program: PtxProgram, instruction: Instruction) -> Step:
    """An operation in float32 whose first operands are 16-bit floats."""
    (*op, half), name = instruction.op, instruction.op[0]
    missing = ops.missing(instruction.op, ops.TYPES["f32"])
    if name not in ops.WIDENED or missing:
        raise ops.Unknown(missing or name)
    function, (dst, *sources) = ops.TABLE[name](tuple(op), ops.TYPES["f32"]), instruction.operands
    widened = ops.WIDENED[name]
    read = [
        operand(program, text, ops.TYPES[half if n < widened else "f32"])
        for n, text in enumerate(sources)
    ]

    def step(gang: Any, mask: Mask) -> None:
        values = [source(gang).astype(np.float32) for source in read]
        gang.put(dst, function(*values), mask)

    return step


def _halves(program: PtxProgram, instruction: Instruction) -> Step:
    """An operation on both halves of words."""
    name, base = instruction.op[0], instruction.op[-1].removesuffix("x2")
    if name not in ops.TABLE or ops.COUNTS.get(name):
        raise ops.Unknown(instruction.op[-1])
    dtype = ops.TYPES[base]
    function, dst = ops.TABLE[name]((*instruction.op[:-1], base), dtype), instruction.operands[0]
    read = [operand(program, text, ops.TYPES["u32"]) for text in instruction.operands[1:]]

    def step(gang: Any, mask: Mask) -> None:
        words = [source(gang) for source in read]
        halves = [
            function(*((word >> np.uint32(shift)).astype(np.uint16).view(dtype) for word in words))
            for shift in (0, 16)
        ]
        low, high = (
            np.ascontiguousarray(halve).view(np.uint16).astype(np.uint32) for halve in halves
        )
        gang.put(dst, low | high << np.uint32(16), mask)

    return step


def names_of(text: str) -> list[str]:
    return re.findall(r"[^\s,{}]+", text)


def _unpacked(program: PtxProgram, instruction: Instruction, dtype: np.dtype) -> Step:
    """mov {a, b}, x: parts of a register, the low one first."""
    names, whole = names_of(instruction.operands[0]), ops.unsigned(dtype.itemsize)
    part, read = (
        ops.unsigned(dtype.itemsize // len(names)),
        operand(program, instruction.operands[1], whole),
    )

    def step(gang: Any, mask: Mask) -> None:
        x = read(gang)
        for k, name in enumerate(names):
            gang.put(name, (x >> whole.type(8 * part.itemsize * k)).astype(part), mask)

    return step


def _packed(program: PtxProgram, instruction: Instruction, dtype: np.dtype) -> Step:
    whole, names = ops.unsigned(dtype.itemsize), names_of(instruction.operands[1])
    part = ops.unsigned(dtype.itemsize // len(names))
    # Compilers leave a part that nobody reads again to a register that no instruction writes.
    reads = {
        k: operand(program, name, part)
        for k, name in enumerate(names)
        if name in program.registers or not name.startswith("%")
    }

    def step(gang: Any, mask: Mask) -> None:
        total = whole.type(0)
        for k, read in reads.items():
            total = total | read(gang).astype(whole) << whole.type(8 * part.itemsize * k)
        gang.put(instruction.operands[0], total, mask)

    return step


def _setp(program: PtxProgram, instruction: Instruction) -> Step:
    dtype = ops.TYPES[instruction.op[-1]]
    compare = ops.comparison(instruction.op[1], dtype)
    x, y, dst = (
        operand(program, instruction.operands[1], dtype),
        operand(program, instruction.operands[2], dtype),
        instruction.operands[0],
    )
    if "|" in dst or len(instruction.operands) > 3 or instruction.op[2] in ("and", "or", "xor"):
        return _setp_and(program, instruction, compare, dtype)
    return lambda gang, mask: gang.put(dst, compare(x(gang), y(gang)), mask)


def _setp_and(
    program: PtxProgram, instruction: Instruction, function: Callable, dtype: np.dtype
) -> Step:
    """setp with a second result, or combined with a predicate."""
    names = instruction.operands[0].split("|")
    x, y = (operand(program, text, dtype) for text in instruction.operands[1:3])
    joins = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    join = joins.get(instruction.op[2])
    third = instruction.operands[3].lstrip("!") if join else ""
    other = operand(program, third, np.dtype(bool)) if join else None

    def step(gang: Any, mask: Mask) -> None:
        holds = function(x(gang), y(gang))
        both = [holds, ~holds]
        if join is not None and other is not None:
            pred = ~other(gang) if instruction.operands[3].startswith("!") else other(gang)
            both = [join(b, pred) for b in both]
        for name, result in zip(names, both):
            gang.put(name, result, mask)

    return step


def _selp(program: PtxProgram, instruction: Instruction) -> Step:
    dtype, dst = ops.TYPES[instruction.op[-1]], instruction.operands[0]
    x, y, pred = (
        operand(program, text, source)
        for text, source in zip(instruction.operands[1:], (dtype, dtype, np.dtype(bool)))
    )
    return lambda gang, mask: gang.put(dst, np.where(pred(gang), x(gang), y(gang)), mask)


def _cvt(program: PtxProgram, instruction: Instruction) -> Step:
    if len(instruction.operands) == 3:
        return _cvt_pair(program, instruction)
    to, source, convert = ops.conversion(instruction.op)
    x, dst = operand(program, instruction.operands[1], source), instruction.operands[0]
    signed = to.kind == "i" and to.itemsize < 8
    return lambda gang, mask: gang.put(
        dst, _widened(convert(x(gang)), True) if signed else convert(x(gang)), mask
    )


def _cvt_pair(program: PtxProgram, instruction: Instruction) -> Step:
    """Two floats as halves of a word: the first operand is the high one."""
    if not any(modifier in instruction.op for modifier in ("f16x2", "bf16x2")):
        raise ops.Unknown("two operands")
    _to, source, convert = ops.conversion(
        tuple(modifier.removesuffix("x2") for modifier in instruction.op)
    )
    high, low, dst = (
        operand(program, instruction.operands[1], source),
        operand(program, instruction.operands[2], source),
        instruction.operands[0],
    )

    def step(gang: Any, mask: Mask) -> None:
        words = [convert(x(gang)).view(np.uint16).astype(np.uint32) for x in (high, low)]
        gang.put(dst, words[0] << np.uint32(16) | words[1], mask)

    return step


def _cvta(program: PtxProgram, instruction: Instruction) -> Step:
    """Addresses of one memory <-> generic ones: the same, but for local memory."""
    dst, dtype = instruction.operands[0], ops.TYPES[instruction.op[-1]]
    source = operand(program, instruction.operands[1], dtype)
    if "local" not in instruction.op:
        return lambda gang, mask: gang.put(dst, source(gang), mask)
    base = dtype.type(LOCAL_BEGIN)
    if "to" in instruction.op:
        return lambda gang, mask: gang.put(dst, source(gang) - base, mask)
    return lambda gang, mask: gang.put(dst, source(gang) + base, mask)


def _nothing(program: PtxProgram, instruction: Instruction) -> Step:
    """Order of memory, hints: lanes here see memory in the order of the program."""
    return lambda gang, mask: None


# ---------------------------------------------------------------- memory


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


def _load(program: PtxProgram, instruction: Instruction) -> Step:
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
            elements = _widened(
                read(gang, addresses, None, space, dtype, count, memo, used), signed
            )
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
        elements = _widened(
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


def _widened(elements: np.ndarray, signed: bool) -> np.ndarray:
    """Extends a smaller integer to a register: the sign in all bits above."""
    return elements.view(f"int{8 * elements.itemsize}").astype(np.int64) if signed else elements


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


def _store(program: PtxProgram, instruction: Instruction) -> Step:
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
    view, places, size = _view_to_write(gang, addresses, mask, space, dtype, len(values), memo)
    if len(values) == 1:
        view[places // size] = values[0]
    else:
        view[places // size] = np.stack(values, -1)


def _view_to_write(
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


# ---------------------------------------------------------------- atomics

_ATOMICS: dict[str, Callable] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, new: new,
}


def _atomic(program: PtxProgram, instruction: Instruction) -> Step:
    """atom and red: lanes one after the other, in the order of their numbers.

    Atomic accesses do not race with each other.
    """
    dtype, space, returns = (
        ops.TYPES[instruction.op[-1]],
        space_of(instruction),
        instruction.op[0] == "atom",
    )
    kind = next(
        (modifier for modifier in instruction.op[1:] if modifier in (*_ATOMICS, "cas")), None
    )
    if kind is None:
        raise ops.Unknown("operation")
    first = 1 if returns else 0
    address = address_of(program, instruction.operands[first])
    values, memo = (
        [operand(program, text, dtype) for text in instruction.operands[first + 1 :]],
        Memo(),
    )

    def step(gang: Any, mask: Mask) -> None:
        here = np.ones(gang.shape, bool) if mask is None else mask
        if not here.any():
            return
        addresses = np.broadcast_to(address(gang), gang.shape)
        arguments = [np.broadcast_to(value(gang), gang.shape)[here] for value in values]
        watched, gang.launch.arrays.shadows = gang.launch.arrays.shadows, {}
        near, gang.shared.shadow = gang.shared.shadow, None
        view, places, size = _view_to_write(
            gang, addresses, here, space, ops.unsigned(dtype.itemsize), 1, memo
        )
        gang.launch.arrays.shadows, gang.shared.shadow = watched, near
        flat, old = view.view(dtype), np.zeros(len(places), dtype)
        for k, at in enumerate(places // size):
            old[k] = flat[at]
            if kind == "cas":
                flat[at] = arguments[1][k] if old[k] == arguments[0][k] else old[k]
            else:
                flat[at] = _ATOMICS[kind](old[k], arguments[0][k])
        if returns:
            whole = np.zeros(gang.shape, dtype)
            whole[here] = old
            gang.put(instruction.operands[0], whole, here)

    return step


# ---------------------------------------------------------------- other lanes


def _shfl(program: PtxProgram, instruction: Instruction) -> Step:
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


def _vote(program: PtxProgram, instruction: Instruction) -> Step:
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


def _activemask(program: PtxProgram, instruction: Instruction) -> Step:
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


MAKERS: dict[str, Callable[[PtxProgram, Instruction], Step]] = {
    "setp": _setp,
    "selp": _selp,
    "cvt": _cvt,
    "cvta": _cvta,
    "ld": _load,
    "ldu": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "shfl": _shfl,
    "vote": _vote,
    "activemask": _activemask,
    **dict.fromkeys(("membar", "fence", "prefetch", "prefetchu", "nanosleep", "pragma"), _nothing),
}
