"""Instructions as functions of a gang of lanes: those of the table in ops.py, and those that touch memory or other lanes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pbkern.core.errors import InternalError

from . import ops
from .counts import WARP_THREADS, Memo
from .memory import LOCAL_BEGIN, Arrays, BlockMemory, Fault
from .operands import Reader, as_type, operand
from .parse import SIZES, Instruction, PtxProgram

Mask = np.ndarray | None
Step = Callable[[Any, Mask], None]
INT64 = np.dtype(np.int64)
SPACES = ("global", "shared", "local", "param")
_ADDRESS = re.compile(r"\[\s*([\w%$.]+)\s*(?:\+\s*(-?\w+))?\s*\]")
_VECTOR = {"v2": 2, "v4": 4, "v8": 8}


def compiled(program: PtxProgram, instruction: Instruction) -> Step:
    """An instruction as a function of a gang and the lanes that take part.

    Raises InternalError for unknown ones.
    """
    try:
        return _MAKERS.get(instruction.op[0], _table)(program, instruction)
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
    name, t = instruction.op[0], ops.TYPES[instruction.op[-1]]
    if name not in ops.TABLE:
        raise ops.Unknown(name)
    if name == "mov" and instruction.operands[0].startswith("{"):
        return _unpacked(program, instruction, t)
    if name == "mov" and instruction.operands[1].startswith("{"):
        return _packed(program, instruction, t)
    f, dst = ops.TABLE[name](instruction.op, t), instruction.operands[0]
    counts = ops.COUNTS.get(name, set())
    wide = (
        np.dtype(f"{'int' if t.kind == 'i' else 'uint'}{16 * t.itemsize}")
        if "wide" in instruction.op
        else t
    )
    types = [
        ops.TYPES["u32"] if k in counts else wide if k == 2 else t
        for k in range(len(instruction.operands) - 1)
    ]
    read = [operand(program, o, type_) for o, type_ in zip(instruction.operands[1:], types)]
    missing = ops.missing(instruction.op, t)
    if missing:
        raise ops.Unknown(missing)
    match read:
        case [x]:
            return lambda g, mask: g.put(dst, f(x(g)), mask)
        case [x, y]:
            return lambda g, mask: g.put(dst, f(x(g), y(g)), mask)
    return lambda g, mask: g.put(dst, f(*(r(g) for r in read)), mask)


def _halves(program: PtxProgram, instruction: Instruction) -> Step:
    """An operation on both halves of words."""
    name, base = instruction.op[0], instruction.op[-1].removesuffix("x2")
    if name not in ops.TABLE or ops.COUNTS.get(name):
        raise ops.Unknown(instruction.op[-1])
    t = ops.TYPES[base]
    f, dst = ops.TABLE[name]((*instruction.op[:-1], base), t), instruction.operands[0]
    read = [operand(program, o, ops.TYPES["u32"]) for o in instruction.operands[1:]]

    def step(g: Any, mask: Mask) -> None:
        words = [r(g) for r in read]
        halves = [
            f(*((word >> np.uint32(shift)).astype(np.uint16).view(t) for word in words))
            for shift in (0, 16)
        ]
        low, high = (
            np.ascontiguousarray(halve).view(np.uint16).astype(np.uint32) for halve in halves
        )
        g.put(dst, low | high << np.uint32(16), mask)

    return step


def _names(text: str) -> list[str]:
    return re.findall(r"[^\s,{}]+", text)


def _unpacked(program: PtxProgram, instruction: Instruction, dtype: np.dtype) -> Step:
    """mov {a, b}, x: parts of a register, the low one first."""
    names, whole = _names(instruction.operands[0]), ops.unsigned(dtype.itemsize)
    part, read = (
        ops.unsigned(dtype.itemsize // len(names)),
        operand(program, instruction.operands[1], whole),
    )

    def step(g: Any, mask: Mask) -> None:
        x = read(g)
        for k, name in enumerate(names):
            g.put(name, (x >> whole.type(8 * part.itemsize * k)).astype(part), mask)

    return step


def _packed(program: PtxProgram, instruction: Instruction, dtype: np.dtype) -> Step:
    whole, names = ops.unsigned(dtype.itemsize), _names(instruction.operands[1])
    part = ops.unsigned(dtype.itemsize // len(names))
    reads = [operand(program, name, part) for name in names]

    def step(g: Any, mask: Mask) -> None:
        total = reads[0](g).astype(whole)
        for k, read in enumerate(reads[1:], 1):
            total = total | read(g).astype(whole) << whole.type(8 * part.itemsize * k)
        g.put(instruction.operands[0], total, mask)

    return step


def _setp(program: PtxProgram, instruction: Instruction) -> Step:
    t = ops.TYPES[instruction.op[-1]]
    f = ops.comparison(instruction.op[1], t)
    x, y, dst = (
        operand(program, instruction.operands[1], t),
        operand(program, instruction.operands[2], t),
        instruction.operands[0],
    )
    if "|" in dst or len(instruction.operands) > 3 or instruction.op[2] in ("and", "or", "xor"):
        return _setp_and(program, instruction, f, t)
    return lambda g, mask: g.put(dst, f(x(g), y(g)), mask)


def _setp_and(
    program: PtxProgram, instruction: Instruction, function: Callable, dtype: np.dtype
) -> Step:
    """setp with a second result, or combined with a predicate."""
    names = instruction.operands[0].split("|")
    x, y = (operand(program, o, dtype) for o in instruction.operands[1:3])
    joins = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    join = joins[instruction.op[2]] if instruction.op[2] in joins else None
    third = instruction.operands[3].lstrip("!") if join else ""
    other = operand(program, third, np.dtype(bool)) if join else None

    def step(g: Any, mask: Mask) -> None:
        found = function(x(g), y(g))
        both = [found, ~found]
        if join is not None and other is not None:
            p = ~other(g) if instruction.operands[3].startswith("!") else other(g)
            both = [join(b, p) for b in both]
        for name, b in zip(names, both):
            g.put(name, b, mask)

    return step


def _selp(program: PtxProgram, instruction: Instruction) -> Step:
    t, dst = ops.TYPES[instruction.op[-1]], instruction.operands[0]
    x, y, p = (
        operand(program, o, u) for o, u in zip(instruction.operands[1:], (t, t, np.dtype(bool)))
    )
    return lambda g, mask: g.put(dst, np.where(p(g), x(g), y(g)), mask)


def _cvt(program: PtxProgram, instruction: Instruction) -> Step:
    if len(instruction.operands) == 3:
        return _cvt_pair(program, instruction)
    to, source, f = ops.conversion(instruction.op)
    x, dst = operand(program, instruction.operands[1], source), instruction.operands[0]
    signed = to.kind == "i" and to.itemsize < 8
    return lambda g, mask: g.put(dst, _widened(f(x(g)), True) if signed else f(x(g)), mask)


def _cvt_pair(program: PtxProgram, instruction: Instruction) -> Step:
    """Two floats as halves of a word: the first operand is the high one."""
    if not any(m in instruction.op for m in ("f16x2", "bf16x2")):
        raise ops.Unknown("two operands")
    to, source, f = ops.conversion(tuple(m.removesuffix("x2") for m in instruction.op))
    high, low, dst = (
        operand(program, instruction.operands[1], source),
        operand(program, instruction.operands[2], source),
        instruction.operands[0],
    )

    def step(g: Any, mask: Mask) -> None:
        words = [f(x(g)).view(np.uint16).astype(np.uint32) for x in (high, low)]
        g.put(dst, words[0] << np.uint32(16) | words[1], mask)

    return step


def _cvta(program: PtxProgram, instruction: Instruction) -> Step:
    """Addresses of one memory <-> generic ones: the same, but for local memory."""
    dst, t = instruction.operands[0], ops.TYPES[instruction.op[-1]]
    source = operand(program, instruction.operands[1], t)
    if "local" not in instruction.op:
        return lambda g, mask: g.put(dst, source(g), mask)
    base = t.type(LOCAL_BEGIN)
    if "to" in instruction.op:
        return lambda g, mask: g.put(dst, source(g) - base, mask)
    return lambda g, mask: g.put(dst, source(g) + base, mask)


def _nothing(program: PtxProgram, instruction: Instruction) -> Step:
    """Order of memory, hints: lanes here see memory in the order of the program."""
    return lambda g, mask: None


# ---------------------------------------------------------------- memory


def _address(program: PtxProgram, text: str) -> Reader:
    found = _ADDRESS.match(text)
    if found is None:
        raise ops.Unknown(f"address {text}")
    offset = int(found[2], 0) if found[2] else 0
    width = ops.TYPES["u64"]
    base = operand(program, found[1], width)

    def read(g: Any) -> np.ndarray:
        a = base(g).view(np.int64)
        return a + offset if offset else a

    return read


def _param(program: PtxProgram, instruction: Instruction, dtype: np.dtype) -> Step:
    found = _ADDRESS.match(instruction.operands[1])
    if found is None or found[2]:
        raise ops.Unknown("a part of a parameter")
    position, _ = program.parameters[found[1]]
    dst = instruction.operands[0]

    def step(g: Any, mask: Mask) -> None:
        bits = np.array([[g.launch.arguments[position] & ((1 << 64) - 1)]], np.uint64)
        g.put(dst, as_type(bits, dtype), mask)

    return step


def space_of(instruction: Instruction) -> str:
    """The memory that an access names, or "generic"."""
    return next(
        (s for s in SPACES if s in instruction.op or f"{s}::cta" in instruction.op), "generic"
    )


def _load(program: PtxProgram, instruction: Instruction) -> Step:
    dtype, space, signed = (
        ops.unsigned(SIZES[instruction.op[-1]]),
        space_of(instruction),
        instruction.op[-1].startswith("s"),
    )
    if space == "param":
        return _param(program, instruction, dtype)
    names = _names(instruction.operands[0])
    address, count, memo = _address(program, instruction.operands[1]), len(names), Memo()

    def step(g: Any, mask: Mask) -> None:
        a = address(g)
        if mask is None:
            a = a if space == "global" and not _is_watched(g, a) else np.broadcast_to(a, g.shape)
            found = _widened(read(g, a, None, space, dtype, count, memo), signed)
            parts = (
                [found]
                if count == 1
                else [np.ascontiguousarray(found[..., k]) for k in range(count)]
            )
            for name, part in zip(names, parts):
                g.put(name, part, None)
            return
        if not mask.any():
            return
        found = _widened(
            read(g, np.broadcast_to(a, g.shape), mask, space, dtype, count, memo), signed
        )
        for k, name in enumerate(names):
            whole = np.zeros(g.shape, found.dtype)
            whole[mask] = found if count == 1 else found[..., k]
            g.put(name, whole, mask)

    return step


def _widened(found: np.ndarray, signed: bool) -> np.ndarray:
    """Extends a smaller integer to a register: the sign in all bits above."""
    return found.view(f"int{8 * found.itemsize}").astype(np.int64) if signed else found


def _is_watched(g: Any, addresses: np.ndarray) -> bool:
    """Whether who reads is noted: not of arrays that the kernel never stores to."""
    return bool(g.launch.arrays.shadows)


def read(
    g: Any, addresses: np.ndarray, mask: Mask, space: str, dtype: np.dtype, count: int, memo: Memo
) -> np.ndarray:
    """Elements at addresses, flat if there is a mask; rows of `count`. Raises Fault."""
    size = dtype.itemsize * count
    a = addresses if mask is None else addresses[mask]
    if _are_apart(a, space):
        every = np.broadcast_to(addresses, g.shape)
        found = np.zeros((*g.shape, count) if count > 1 else g.shape, dtype)
        for part, its in _parts(g, every, mask, space):
            found[part] = read(g, every, part, its, dtype, count, memo)
        return found if mask is None else found[mask]
    space = _space_at(a, space)
    if space == "global":
        number, offsets = g.launch.arrays.find(a, size)
        every = np.broadcast_to(addresses, (len(addresses), g.threads))
        g.counts.add_global(
            every, mask, size, g.blocks // len(addresses) if mask is None else 1, memo
        )
        shadow = g.launch.arrays.shadows.get(number)
        if shadow is not None:
            _note(
                g,
                shadow,
                np.broadcast_to(addresses, g.shape) - Arrays.address(number),
                mask,
                size,
                store=False,
            )
        view = g.launch.arrays.view(number, dtype, count)
        return view.take(offsets // size, 0, mode="clip")
    memory: BlockMemory = g.shared if space == "shared" else g.local
    rows = (
        (g.rows if space == "shared" else g.lanes)
        if mask is None
        else (g.rows if space == "shared" else g.lanes)[mask]
    )
    places = memory.find(_offsets(a, space), rows, size)
    if space == "shared":
        g.counts.add_shared(addresses, mask, size, memo)
        if memory.shadow is not None:
            cells = _note(
                g, memory.shadow, addresses + g.rows * memory.stride, mask, size, store=False
            )
            if not g.launch.unwritten:
                memory.check_written(cells)
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
    g: Any, addresses: np.ndarray, mask: Mask, space: str
) -> Iterator[tuple[np.ndarray, str]]:
    """(lanes of one array or memory, its space), one after the other."""
    lanes = np.ones(g.shape, bool) if mask is None else mask
    homes = _home(addresses)
    for n in np.unique(homes[lanes]):
        yield lanes & (homes == n), space if space == "generic" else "global"


def _note(
    g: Any, shadow: Any, offsets: np.ndarray, mask: Mask, size: int, *, store: bool
) -> np.ndarray:
    """Marks the cells of an access. Returns them."""
    pick = (lambda v: v.reshape(-1)) if mask is None else (lambda v: v[mask])
    cells, base, marks = pick(offsets) // shadow.size, pick(g.base), pick(g.mark)
    for k in range(max(size // shadow.size, 1)):
        (shadow.store if store else shadow.load)(cells + k, base, marks)
    return cells


def _store(program: PtxProgram, instruction: Instruction) -> Step:
    dtype, space = ops.unsigned(SIZES[instruction.op[-1]]), space_of(instruction)
    names, address = _names(instruction.operands[1]), _address(program, instruction.operands[0])
    values, memo = [operand(program, name, dtype) for name in names], Memo()

    def step(g: Any, mask: Mask) -> None:
        if mask is not None and not mask.any():
            return
        found = [np.broadcast_to(value(g), g.shape) for value in values]
        found = [f.reshape(-1) if mask is None else f[mask] for f in found]
        write(g, np.broadcast_to(address(g), g.shape), mask, space, dtype, found, memo)

    return step


def write(
    g: Any,
    addresses: np.ndarray,
    mask: Mask,
    space: str,
    dtype: np.dtype,
    values: list[np.ndarray],
    memo: Memo,
) -> None:
    """Stores rows of values, flat. Raises Fault."""
    if _are_apart(addresses if mask is None else addresses[mask], space):
        for part, its in _parts(g, addresses, mask, space):
            mine = part.reshape(-1) if mask is None else part[mask]
            write(g, addresses, part, its, dtype, [value[mine] for value in values], memo)
        return
    view, places, size = _view_to_write(g, addresses, mask, space, dtype, len(values), memo)
    if len(values) == 1:
        view[places // size] = values[0]
    else:
        view[places // size] = np.stack(values, -1)


def _view_to_write(
    g: Any, addresses: np.ndarray, mask: Mask, space: str, dtype: np.dtype, count: int, memo: Memo
):
    """(memory, places in bytes, bytes of an access), checked, counted and marked."""
    size = dtype.itemsize * count
    a = addresses.reshape(-1) if mask is None else addresses[mask]
    space = _space_at(a, space)
    if space == "global":
        number, places = g.launch.arrays.find(a, size)
        g.counts.add_global(addresses, mask, size, 1, memo)
        shadow = g.launch.arrays.shadows.get(number)
        if shadow is not None:
            _note(g, shadow, addresses - Arrays.address(number), mask, size, store=True)
        return g.launch.arrays.view(number, dtype, count), places, size
    memory: BlockMemory = g.shared if space == "shared" else g.local
    rows = g.rows if space == "shared" else g.lanes
    places = memory.find(_offsets(a, space), rows.reshape(-1) if mask is None else rows[mask], size)
    if space == "shared":
        g.counts.add_shared(addresses, mask, size, memo)
        if memory.shadow is not None:
            _note(g, memory.shadow, addresses + g.rows * memory.stride, mask, size, store=True)
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
    t, space, returns = (
        ops.TYPES[instruction.op[-1]],
        space_of(instruction),
        instruction.op[0] == "atom",
    )
    kind = next((m for m in instruction.op[1:] if m in (*_ATOMICS, "cas")), None)
    if kind is None:
        raise ops.Unknown("operation")
    first = 1 if returns else 0
    address = _address(program, instruction.operands[first])
    values, memo = [operand(program, o, t) for o in instruction.operands[first + 1 :]], Memo()

    def step(g: Any, mask: Mask) -> None:
        here = np.ones(g.shape, bool) if mask is None else mask
        if not here.any():
            return
        a = np.broadcast_to(address(g), g.shape)
        found = [np.broadcast_to(value(g), g.shape)[here] for value in values]
        watched, g.launch.arrays.shadows = g.launch.arrays.shadows, {}
        near, g.shared.shadow = g.shared.shadow, None
        view, places, size = _view_to_write(g, a, here, space, ops.unsigned(t.itemsize), 1, memo)
        g.launch.arrays.shadows, g.shared.shadow = watched, near
        flat, old = view.view(t), np.zeros(len(places), t)
        for k, at in enumerate(places // size):
            old[k] = flat[at]
            if kind == "cas":
                flat[at] = found[1][k] if old[k] == found[0][k] else old[k]
            else:
                flat[at] = _ATOMICS[kind](old[k], found[0][k])
        if returns:
            whole = np.zeros(g.shape, t)
            whole[here] = old
            g.put(instruction.operands[0], whole, here)

    return step


# ---------------------------------------------------------------- other lanes


def _shfl(program: PtxProgram, instruction: Instruction) -> Step:
    kind = instruction.op[2]
    names, u32 = instruction.operands[0].split("|"), ops.TYPES["u32"]
    value, by, limits = (operand(program, o, u32) for o in instruction.operands[1:4])

    def step(g: Any, mask: Mask) -> None:
        lane = g.tid % np.uint32(WARP_THREADS)
        b, limit = by(g), limits(g)
        high, segment = limit & np.uint32(31), (limit >> np.uint32(8)) & np.uint32(31)
        low = lane & segment
        top = low | (high & ~segment)
        lane, b, low, top = (v.astype(np.int64) for v in (lane, b & np.uint32(31), low, top))
        other = {
            "bfly": lane ^ b,
            "up": lane - b,
            "down": lane + b,
            "idx": low | (b & ~segment.astype(np.int64)),
        }[kind]
        inside = other >= top if kind == "up" else other <= top
        source = np.where(inside, other, lane) + (
            g.tid.astype(np.int64) - g.tid.astype(np.int64) % WARP_THREADS
        )
        source, inside = (np.broadcast_to(v, g.shape) for v in (source, inside))
        _check_present(g, mask, source)
        v = np.broadcast_to(value(g), g.shape)
        g.put(names[0], np.take_along_axis(v, np.minimum(source, g.threads - 1), 1), mask)
        if len(names) > 1:
            g.put(names[1], inside, mask)

    return step


def _check_present(g: Any, mask: Mask, source: np.ndarray) -> None:
    """Raises Fault where a lane asks one that does not take part."""
    if int(source.max()) >= g.threads:
        raise Fault(
            "divergence", "a lane asks for the register of a thread that the block does not have"
        )
    if mask is None:
        return
    absent = mask & ~np.take_along_axis(np.broadcast_to(mask, g.shape), source, 1)
    if absent.any():
        block, thread = (int(k) for k in np.argwhere(absent)[0])
        raise Fault(
            "divergence",
            f"thread {thread} of block {g.numbers[block]} asks for the register of thread "
            f"{int(source[block, thread])}, which does not take part",
        )


def _vote(program: PtxProgram, instruction: Instruction) -> Step:
    kind, dst = instruction.op[2], instruction.operands[0]
    p = operand(program, instruction.operands[1].lstrip("!"), np.dtype(bool))

    def step(g: Any, mask: Mask) -> None:
        here = np.ones(g.shape, bool) if mask is None else mask
        v = np.broadcast_to(~p(g) if instruction.operands[1].startswith("!") else p(g), g.shape)
        lanes, votes = g._by_warp(here), g._by_warp(v & here)
        some, every = votes.any(-1, keepdims=True), (votes | ~lanes).all(-1, keepdims=True)
        if kind == "ballot":
            bits = (votes.astype(np.uint32) << np.arange(WARP_THREADS, dtype=np.uint32)).sum(
                -1, keepdims=True, dtype=np.uint32
            )
        else:
            bits = {"any": some, "all": every, "uni": every | ~some}[kind]
        g.put(dst, np.broadcast_to(bits, lanes.shape).reshape(g.blocks, -1)[:, : g.threads], mask)

    return step


def _activemask(program: PtxProgram, instruction: Instruction) -> Step:
    def step(g: Any, mask: Mask) -> None:
        lanes = g._by_warp(np.ones(g.shape, bool) if mask is None else mask)
        bits = (lanes.astype(np.uint32) << np.arange(WARP_THREADS, dtype=np.uint32)).sum(
            -1, keepdims=True, dtype=np.uint32
        )
        g.put(
            instruction.operands[0],
            np.broadcast_to(bits, lanes.shape).reshape(g.blocks, -1)[:, : g.threads],
            mask,
        )

    return step


_MAKERS: dict[str, Callable[[PtxProgram, Instruction], Step]] = {
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
