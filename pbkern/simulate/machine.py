"""Runs a Program: many blocks at a time, a lane per thread, the earliest place first (block_order.py).

Registers are arrays [blocks, threads], with length 1 where a value is the same for all: NumPy
broadcasts. Lanes at one place go on together. Instructions that lanes do together (`.sync`,
`.aligned`) wait until all the lanes that they name are there; when no lane can go on, what waits is
judged: complete, or an error. A block's clock counts the instructions of its warps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field

import numpy as np

from pbkern.core.errors import SimulationError
from pbkern.core.lazy_dataclass import dataclass

from . import async_copies, matrices, ops, warpgroups  # noqa: F401 (some add rows)
from .async_copies import LaneCopies
from .block_order import JUMPS, place_order
from .counts import WARP_THREADS, Counts
from .instructions.accesses import space_of
from .instructions.table import compiled
from .memory import BLOCK_SHIFT, THREAD_BITS, Arrays, BlockMemory, Fault
from .operands import as_type, operand
from .parse import SIZES, Instruction, PtxProgram
from .warpgroups import GroupProduct

# Lanes that run at a time: their registers stay in the caches of a CPU core.
LANES_AT_ONCE = 1 << 15
# Most times that blocks that branch apart go on as gangs of their own: many small gangs take longer
# than few with masks.
MOST_FORKS = 3
# Steps after which a launch is taken to loop for ever.
MOST_SIMULATED_STEPS = 20_000_000
Mask = np.ndarray | None  # None: all lanes
Step = Callable[["Gang", Mask], None]
_MEETS = ("bar", "barrier")
CLOCKS = ("%clock64", "%globaltimer")
_EXCHANGES = ("shfl", "vote", "redux", "match", "activemask", "mma", "ldmatrix", "wgmma")
# Exchanges of all lanes of a warp, which they do not name.
_WHOLE_WARPS = ("mma", "ldmatrix", "wgmma")


@dataclass
class SimulatedLaunch:
    """One launch.

    Attributes:
      arguments: per parameter its bits, an address for arrays. written: which arrays the kernel may
        store to.
      check, unwritten: see simulate_ptx.
      order: of places; lanes at the first one go on first. clocked: places of instructions that read a clock. elapsed: what
        the clocks of blocks that have ended show at most.
    """

    program: PtxProgram
    grid: int
    block: int
    arguments: Sequence[int]
    arrays: Arrays
    shared_bytes: int
    check: bool = True
    unwritten: bool = False
    counts: Counts = field(default_factory=Counts)
    steps: list[Step | None] = field(default_factory=list)
    order: Sequence[int] = ()
    clocked: frozenset[int] = frozenset()
    elapsed: int = 0

    def run(self) -> None:
        """All blocks. Raises SimulationError."""
        self.steps = [
            None if instruction.op[0] in (*JUMPS, *_MEETS) else compiled(self.program, instruction)
            for instruction in self.program.code
        ]
        self.order = place_order(self.program)
        self.clocked = frozenset(
            k
            for k, instruction in enumerate(self.program.code)
            if instruction.operands and instruction.operands[-1] in CLOCKS
        )
        at_once = max(1, LANES_AT_ONCE // self.block)
        with np.errstate(all="ignore"):
            for first in range(0, self.grid, at_once):
                gang = Gang(self, np.arange(first, min(first + at_once, self.grid)))
                gang.run()


class Gang:
    """Some blocks of a launch that run together."""

    def __init__(self, launch: SimulatedLaunch, numbers: np.ndarray):
        self.launch, self.program, self.counts = launch, launch.program, launch.counts
        self.numbers, blocks = numbers, len(numbers)
        self.blocks, self.threads = blocks, launch.block
        self.shape = (blocks, self.threads)
        self.forks = MOST_FORKS
        self.registers: dict[str, np.ndarray] = {}
        self.tid = np.arange(self.threads, dtype=np.uint32)[None]
        self.ctaid = numbers.astype(np.uint32)[:, None]
        self.rows = np.broadcast_to(np.arange(blocks)[:, None], self.shape)
        self.epoch = np.zeros((blocks, 1), np.int64)
        self.clock = np.full((blocks, 1), launch.elapsed, np.uint64)
        cell = smallest_access(self.program, "shared")
        self.shared = BlockMemory("shared", blocks, launch.shared_bytes, cell, launch.check)
        self.local = BlockMemory("local", blocks * self.threads, self.program.local_bytes, 1, False)
        self.lanes = np.arange(blocks * self.threads).reshape(self.shape)
        self.live = np.ones(self.shape, bool)
        self.waiting: dict[int, np.ndarray] = {}  # place -> lanes
        self.copies: list[LaneCopies] = []  # under way
        self.committed = np.zeros(self.shape, np.int64)  # groups of copies of each lane
        self.products: list[GroupProduct] = []  # under way
        self.grouped = np.zeros(self.shape, np.int64)  # groups of products of each lane
        if any(instruction.op[0] == "wgmma" for instruction in self.program.code):
            self.shared.watch_products()
        self.marks()

    def marks(self) -> None:
        """Marks of this time: see memory.py."""
        block = self.ctaid.astype(np.int64) + 1
        self.base = np.broadcast_to(block << BLOCK_SHIFT | self.epoch << THREAD_BITS, self.shape)
        self.mark = self.base + self.tid.astype(np.int64)

    # ---------------------------------------------------------------- lanes at places

    def run(self, place: int = 0) -> None:
        """All lanes, from a place on."""
        groups: dict[int, Mask] = {place: None}
        steps = 0
        while groups or self.waiting:
            if not groups:
                groups = self.judge()
            place = min(groups, key=self.launch.order.__getitem__)
            mask = groups.pop(place)
            count = self._straight(groups, place, mask)
            steps += count
            if steps > MOST_SIMULATED_STEPS:
                raise SimulationError(
                    f"kernel `{self.program.name}` does not end",
                    kind="deadlock",
                    why=f"{MOST_SIMULATED_STEPS} instructions were run",
                )
        self.launch.elapsed = max(self.launch.elapsed, int(self.clock.max()))

    def _straight(self, groups: dict[int, Mask], place: int, mask: Mask) -> int:
        """Runs lanes from a place until they branch, wait, or meet others.

        The number of instructions.
        """
        code, steps, start = self.program.code, self.launch.steps, place
        clocked, seen = self.launch.clocked, place
        while True:
            instruction, step = code[place], steps[place]
            if place in clocked or (clocked and step is None):
                self._tick(place - seen, mask)
                seen = place
            try:
                if step is None:
                    self._turn(groups, place, mask, instruction)
                    break
                if instruction.op[0] in _EXCHANGES and not self._are_whole(mask, instruction):
                    self._wait(place, mask)
                    break
                step(
                    self,
                    mask if instruction.predicate is None else self._predicated(mask, instruction),
                )
            except Fault as f:
                self._check_together(place)  # why threads meet where none should
                raise self.error(instruction, f.kind, f.what, f.hint) from None
            place += 1
            if groups and (place in groups or self._is_ahead(groups, place)):
                self._join(groups, place, mask)
                break
        count = place - start + 1
        self.counts.instructions += count * self._warps(mask)
        if clocked:
            self._tick(place - seen, mask)
        return count

    def _is_ahead(self, groups: dict[int, Mask], place: int) -> bool:
        """Whether lanes that go on at a place are to wait there for others."""
        order = self.launch.order
        is_next = order[place] == order[place - 1] + 1  # no place comes between
        return not is_next and order[place] > min(order[other] for other in groups)

    def _tick(self, count: int, mask: Mask) -> None:
        """The clock of a block counts the instructions of its warps."""
        lanes = self._by_warp(np.ones(self.shape, bool) if mask is None else mask)
        self.clock = self.clock + np.uint64(count) * lanes.any(-1).sum(1, keepdims=True).astype(
            np.uint64
        )

    def _warps(self, mask: Mask) -> int:
        if mask is None:
            return self.blocks * -(-self.threads // WARP_THREADS)
        return int(np.count_nonzero(self._by_warp(mask).any(-1)))

    def _by_warp(self, lanes: np.ndarray) -> np.ndarray:
        """[blocks, warps, 32]; threads that a last warp lacks are False."""
        lanes = np.broadcast_to(lanes, self.shape)
        if self.threads % WARP_THREADS:
            lanes = np.concatenate(
                [lanes, np.zeros((self.blocks, -self.threads % WARP_THREADS), bool)], 1
            )
        return lanes.reshape(self.blocks, -1, WARP_THREADS)

    @staticmethod
    def _join(groups: dict[int, Mask], place: int, mask: Mask) -> None:
        if place in groups:
            other = groups[place]
            mask = None if mask is None or other is None else mask | other
        groups[place] = mask

    def _put(self, groups: dict[int, Mask], place: int, mask: np.ndarray) -> None:
        """Lanes, if there are any, go on at a place."""
        if mask.any():
            self._join(groups, place, None if mask.all() else mask)

    def _predicated(self, mask: Mask, instruction: Instruction) -> Mask:
        pred = self.registers[instruction.predicate or ""]
        pred = np.broadcast_to(~pred if instruction.negated else pred, self.shape)
        return pred if mask is None else pred & mask

    def _turn(
        self, groups: dict[int, Mask], place: int, mask: Mask, instruction: Instruction
    ) -> None:
        """A branch, an end, or a barrier."""
        here = np.ones(self.shape, bool) if mask is None else mask
        taking = (
            here if instruction.predicate is None else here & self._predicated(None, instruction)
        )
        match instruction.op[0]:
            case "bra":
                target = self.program.labels[instruction.operands[-1]]
                if not groups and mask is None and self._fork(taking, place + 1, target):
                    return
                self._put(groups, target, taking)
                if instruction.predicate is not None:
                    self._put(groups, place + 1, here & ~taking)
            case "brx":
                self._branch_by_index(groups, taking, instruction)
            case "ret" | "exit":
                self.live &= ~taking
                self._put(groups, place + 1, here & ~taking)
            case "trap":
                raise Fault("bounds", "the kernel stops itself")
            case _:
                self._put(groups, place + 1, here & ~taking)
                self._wait(place, taking)
                self._release(groups, place, instruction)

    def _fork(self, taking: np.ndarray, place: int, target: int) -> bool:
        """Lets blocks that branch as a whole go on as gangs of their own, which need no masks.

        Whether they did.
        """
        rows: np.ndarray = np.asarray(taking.any(1))
        if (
            not self.forks
            or self.waiting
            or self.copies
            or self.products
            or rows.all()
            or not rows.any()
            or (rows != taking.all(1)).any()
        ):
            return False
        for at, mine in ((target, rows), (place, ~rows)):
            part = Gang(self.launch, self.numbers[mine])
            part.forks, part.epoch, part.clock = self.forks - 1, self.epoch[mine], self.clock[mine]
            part.registers = {
                n: register[mine] if len(register) > 1 else register
                for n, register in self.registers.items()
            }
            part.shared, part.local = self.shared.part(mine), self.local.part(mine)
            part.marks()
            part.run(at)
        return True

    def _branch_by_index(
        self, groups: dict[int, Mask], taking: np.ndarray, instruction: Instruction
    ) -> None:
        targets = self.program.tables[instruction.operands[1]]
        index = np.broadcast_to(self.registers[instruction.operands[0]], self.shape)
        if (taking & (index >= len(targets))).any():
            raise Fault("bounds", "an index of a branch is behind its list of targets")
        for k, label in enumerate(targets):
            self._put(groups, self.program.labels[label], taking & (index == k))

    # ---------------------------------------------------------------- lanes that wait

    def _wait(self, place: int, mask: Mask) -> None:
        here = np.ones(self.shape, bool) if mask is None else mask
        before = self.waiting.get(place)
        self.waiting[place] = here if before is None else before | here

    def _release(self, groups: dict[int, Mask], place: int, instruction: Instruction) -> bool:
        """Lets blocks go on of which all threads wait at this barrier. Whether there were any."""
        waits = self.waiting[place]
        done = waits.all(1, keepdims=True)
        if not done.any():
            return False
        self._passed(np.asarray(done))
        self._go(groups, place, waits & done)
        return True

    def _passed(self, blocks: np.ndarray) -> None:
        self.epoch = self.epoch + blocks
        self.counts.barriers += int(np.count_nonzero(blocks))
        self.marks()

    def _go(self, groups: dict[int, Mask], place: int, lanes: np.ndarray) -> None:
        left = self.waiting.pop(place) & ~lanes
        if left.any():
            self.waiting[place] = left
        self._put(groups, place + 1, lanes)

    def _are_whole(self, mask: Mask, instruction: Instruction) -> bool:
        """Whether all lanes that an exchange names are here."""
        if instruction.op[0] == "activemask":
            return True
        here = np.ones(self.shape, bool) if mask is None else mask
        named = self._named(instruction)
        whole = self._by_warp(here)
        return not (whole.any(-1, keepdims=True) & named & ~whole).any()

    def _named(self, instruction: Instruction) -> np.ndarray:
        """Lanes [blocks, warps, 32] that an instruction's mask of members names, of those that there are."""
        if instruction.op[0] in _WHOLE_WARPS:
            return self._by_warp(np.ones(self.shape, bool))
        members = np.broadcast_to(
            operand(self.program, instruction.operands[-1], ops.TYPES["u32"])(self), self.shape
        )
        bits = members >> (self.tid % np.uint32(WARP_THREADS)) & np.uint32(1)
        return self._by_warp(bits.astype(bool))

    def judge(self) -> dict[int, Mask]:
        """Finds what can go on when every lane waits or has ended.

        Raises SimulationError if nothing can.
        """
        groups: dict[int, Mask] = {}
        for place in sorted(self.waiting):
            instruction = self.program.code[place]
            if instruction.op[0] not in _MEETS:
                self._resume_exchange(groups, place, instruction)
        if not groups:
            self._resume_barriers(groups)
        if not groups:
            self._stuck()
        return groups

    def _resume_exchange(
        self, groups: dict[int, Mask], place: int, instruction: Instruction
    ) -> None:
        here = self.waiting[place]
        by_warp = self._by_warp(here)
        some, missing = by_warp.any(-1, keepdims=True), self._named(instruction) & ~by_warp
        ready = some & ~missing.any(-1, keepdims=True)
        lanes = (
            here & np.broadcast_to(ready, by_warp.shape).reshape(self.blocks, -1)[:, : self.threads]
        )
        if lanes.any():
            step = self.launch.steps[place]
            assert step is not None
            step(self, lanes)
            self._go(groups, place, lanes)

    def _resume_barriers(self, groups: dict[int, Mask]) -> None:
        """Blocks whose threads wait at one barrier in several places: it is the number that counts, but warps stay together."""
        places = [p for p in self.waiting if self.program.code[p].op[0] in _MEETS]
        for number in {self._barrier(self.program.code[place]) for place in places}:
            mine = [place for place in places if self._barrier(self.program.code[place]) == number]
            together = np.logical_or.reduce([self.waiting[p] for p in mine])
            done = np.asarray(together.all(1, keepdims=True))
            for spot in mine:
                by_warp = self._by_warp(self.waiting[spot])
                split = by_warp.any(-1) & ~(
                    by_warp | ~self._by_warp(np.ones(self.shape, bool))
                ).all(-1)
                done = done & ~split.any(-1, keepdims=True)
            if done.any():
                self._passed(np.asarray(done))
                for spot in mine:
                    self._go(groups, spot, self.waiting[spot] & done)

    def _barrier(self, instruction: Instruction) -> str:
        if len(instruction.operands) != 1 or "sync" not in instruction.op:
            raise self.error(
                instruction, "deadlock", "barriers for a part of the threads are not simulated"
            )
        return instruction.operands[0]

    def _check_together(self, end: int | None = None) -> None:
        """Raises the error for lanes that wait, before place `end`, for others of their warp, which went on without them."""
        for place, lanes in sorted(self.waiting.items()):
            if end is not None and place > end:
                continue
            instruction = self.program.code[place]
            by_warp = self._by_warp(lanes)
            named = (
                self._named(instruction)
                if instruction.op[0] not in _MEETS
                else self._by_warp(np.ones(self.shape, bool))
            )
            absent = by_warp.any(-1, keepdims=True) & named & ~by_warp
            if absent.any():
                block, warp, lane = (int(coord) for coord in np.argwhere(absent)[0])
                where = self._whereabouts(block, warp * WARP_THREADS + lane)
                raise self.error(
                    instruction,
                    "divergence",
                    f"lanes of a warp wait here, but not thread {warp * WARP_THREADS + lane} of block "
                    f"{self.numbers[block]}, which {where}",
                )

    def _stuck(self) -> None:
        """Raises the error that says why nothing goes on."""
        self._check_together()
        place, lanes = min(self.waiting.items())
        block = int(np.argmax(lanes.any(1)))
        absent = np.flatnonzero(~lanes[block])
        where = self._whereabouts(block, int(absent[0]))
        raise self.error(
            self.program.code[place],
            "deadlock",
            f"{int(lanes[block].sum())} threads of block {self.numbers[block]} wait "
            f"here for {len(absent)} others, of which thread {int(absent[0])} {where}",
        )

    def _whereabouts(self, block: int, thread: int) -> str:
        for place, lanes in self.waiting.items():
            if lanes[block, thread]:
                return f"waits at line {self.program.code[place].line}"
        return "has gone on" if self.live[block, thread] else "has ended"

    def error(
        self, instruction: Instruction, kind: str, what: str, hint: str = ""
    ) -> SimulationError:
        return SimulationError(
            f"{_TITLES[kind]} in kernel `{self.program.name}`",
            kind=kind,
            at=instruction.at or None,
            why=f"{what}; PTX line {instruction.line}: {instruction.text}",
            hint=hint or _HINTS[kind],
        )

    # ---------------------------------------------------------------- registers

    def put(self, name: str, value: np.ndarray, mask: Mask) -> None:
        """A register's next value in the lanes that take part."""
        if name == "_":
            return
        if mask is not None:
            old = self.registers.get(name)
            if old is None:
                old = np.zeros((1, 1), value.dtype)
            elif old.dtype != value.dtype:
                old = as_type(old, value.dtype)
            value = np.where(mask, value, old)
        self.registers[name] = value


_TITLES = {
    "race": "threads race",
    "bounds": "an access outside of memory",
    "uninitialised": "memory is read before it is written",
    "divergence": "threads of a warp are not together",
    "deadlock": "threads wait for ever",
}
_HINTS = {
    "race": "a barrier between the two",
    "bounds": "mask the threads that have no element",
    "uninitialised": "store it first, or wait for the threads that do",
    "divergence": "take the instruction out of the branch, or name only the lanes that run it",
    "deadlock": "let every thread of the block reach the barrier",
}


_COPIES = (("cp", "async", "ca"), ("cp", "async", "cg"))
_ACCESSES = ("ld", "ldu", "st", "atom", "red")


def smallest_access(program: PtxProgram, space: str) -> int:
    """Bytes of the smallest access to a memory, also by generic addresses: who touches what is noted for so many at a time."""
    sizes = [int(code.operands[2]) for code in program.code if code.op[:3] in _COPIES]
    sizes += [
        SIZES.get(instruction.op[-1], 4)
        for instruction in program.code
        if instruction.op[0] in _ACCESSES and space_of(instruction) in (space, "generic")
    ]
    return min(sizes, default=4)
