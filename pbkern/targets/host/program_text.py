"""HostProgram -> MLIR of @pbk_main, which runs its steps. A target's StepHooks write launches, copies and reads of conditions.

@pbk_main(frame, buffers, arena): `frame` is what the target's launches are given (on CPUs the
caller's context for threads; null: run on this thread), `buffers` an array of pointers (inputs,
then outputs), `arena` holds temporaries and, behind them, what launches need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.host_program import (
    BufferKind,
    BufferView,
    Cond,
    Copy,
    HostProgram,
    HostWhile,
    Launch,
    Loop,
    Step,
)
from pbkern.dsl.kernel import Kernel
from pbkern.lower.nest.scratch import BUFFER_ALIGNMENT

from .kernel_text import LoweredKernel

# Attributes of functions that nothing outside the module calls. MLIR's execution engine gives all others a
# second entry point.
INTERNAL = "attributes {llvm.linkage = #llvm.linkage<internal>}"


@dataclass(frozen=True)
class LoweredProgram:
    """`kernels`: func/scf/vector text; `host`: text of the host functions; `lowered`: the kernels that differ.

    Memory of a call: `temporary_bytes`, and behind them the scratch of a launch: (bytes of a
    thread, most threads) of each.
    """

    kernels: str
    host: str
    temporary_bytes: int
    scratch: tuple[tuple[int, int], ...]
    lowered: tuple[LoweredKernel, ...]

    @property
    def arena_bytes(self) -> int:
        """Memory of one call on all threads."""
        return self.temporary_bytes + max(
            (size * threads for size, threads in self.scratch), default=0
        )


def _padded(size: int) -> int:
    return -(-size // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT


@dataclass(frozen=True)
class Temporaries:
    """Places in the arena, in bytes from its start.

    Attributes:
      offsets: of temporary buffers, by name.
      copies: of the copies that a launch keeps of operands, by id of its kernel and number of the
        operand.
      nbytes: of all of them.
    """

    offsets: Mapping[str, int]
    copies: Mapping[int, Mapping[int, int]]
    nbytes: int

    @classmethod
    def of(cls, program: HostProgram, copied: Callable[[Kernel], Sequence[int]]) -> Temporaries:
        """Buffers with one slot share it, and launches share the memory of their copies.

        copied: numbers of the operands of which a launch of a kernel keeps a copy.
        """
        slots: dict = {}
        for buffer in program.of_kind(BufferKind.TEMP):
            key = buffer.slot if buffer.slot >= 0 else buffer.name
            slots.setdefault(key, []).append(buffer)
        offsets, at = {}, 0
        for members in slots.values():
            for buffer in members:
                offsets[buffer.name] = at
            at += _padded(max(max(member.type.nbytes for member in members), 1))
        copies, nbytes = {}, at
        for kernel in program.kernels():
            places, end = {}, at
            for i in copied(kernel):
                places[i] = end
                end += _padded(kernel.in_types[i].nbytes)
            copies[id(kernel)], nbytes = places, max(nbytes, end)
        return cls(offsets, copies, nbytes)


class StepHooks(Protocol):
    """Text that a target writes where the steps of a program touch its kernels and their memory."""

    def copy(self, text: HostText, destination: str, source: str, size: int) -> None:
        """Writes a copy of `size` bytes between pointers."""

    def load(self, text: HostText, view: BufferView, kind: str) -> str:
        """The value of type `kind` at the start of a view, for a condition of the host."""

    def launch(self, text: HostText, step: Launch) -> None:
        """Writes the launch of a kernel."""


class HostText:
    """Writes the steps of a program.

    Attributes:
      lines: of @pbk_main.
      functions: texts of further functions, which @pbk_main needs.
    """

    def __init__(self, program: HostProgram, memory: Temporaries, hooks: StepHooks):
        self.program, self.memory, self.hooks = program, memory, hooks
        self.buffers = {buffer.name: buffer for buffer in program.buffers}
        self.inputs = len(program.inputs)
        self.lines: list[str] = []
        self.functions: list[str] = []
        self.count = 0
        self.counters: dict[str, str] = {}

    def name(self) -> str:
        self.count += 1
        return f"%h{self.count}"

    def put(self, text: str) -> str:
        name = self.name()
        self.lines.append(f"{name} = {text}")
        return name

    def const(self, number: int) -> str:
        return self.put(f"arith.constant {number} : i64")

    def arena(self, offset: int) -> str:
        """The place `offset` bytes behind the start of the arena."""
        return self.put(f"llvm.getelementptr %arena[{offset}] : (!llvm.ptr) -> !llvm.ptr, i8")

    def copies(self, step: Launch, views: Sequence[BufferView]) -> dict[int, str]:
        """Copies the operands of which the launch keeps a copy; pointers to them by number of the operand."""
        copies = {}
        for i, at in self.memory.copies[id(step.kernel)].items():
            copies[i] = self.arena(at)
            self.hooks.copy(self, copies[i], self.pointer(views[i]), views[i].type.nbytes)
        return copies

    def alloca(self, kind: str) -> str:
        """A place on the stack, reserved once: a loop would take another one in each of its steps."""
        size, name = self.name(), self.name()
        self.lines[:0] = [
            f"{size} = arith.constant 1 : i64",
            f"{name} = llvm.alloca {size} x {kind} : (i64) -> !llvm.ptr",
        ]
        return name

    def stored(self, pointers: Sequence[str], array: str) -> None:
        """Stores pointers in an array of them, one behind the other."""
        for k, pointer in enumerate(pointers):
            slot = self.put(f"llvm.getelementptr {array}[{8 * k}] : (!llvm.ptr) -> !llvm.ptr, i8")
            self.lines.append(f"llvm.store {pointer}, {slot} : !llvm.ptr, !llvm.ptr")

    # ---------------------------------------------------------------- steps

    def steps(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            self.step(step)

    def step(self, step: Step) -> None:
        match step:
            case Launch():
                self.hooks.launch(self, step)
            case Copy(source=s, destination=d):
                kinds = [self.buffers[view.buffer].kind for view in (s, d)]
                if kinds == [BufferKind.INPUT, BufferKind.OUTPUT]:
                    self._copy_unless_same(s, d)
                else:
                    self._copy(s, d)
            case Loop(counter=c, trip_count=n, steps=inner):
                low, high, one = self.const(0), self.const(n), self.const(1)
                iv = self.name()
                self.counters[c] = iv
                self.lines.append(f"scf.for {iv} = {low} to {high} step {one} : i64 {{")
                self.steps(inner)
                self.lines.append("}")
            case HostWhile(condition=c, predicate=p, steps=inner):
                self.lines.append("scf.while : () -> () {")
                self.steps(c)
                value = self.hooks.load(self, p, "i8")
                zero = self.put("arith.constant 0 : i8")
                self.lines.append(
                    f"scf.condition({self.put(f'arith.cmpi ne, {value}, {zero} : i8')})"
                )
                self.lines.append("} do {")
                self.steps(inner)
                self.lines += ["scf.yield", "}"]
            case Cond(index=i, branches=branches):
                size = f"i{8 * i.type.dtype.itemsize}"
                value = self.hooks.load(self, i, size)
                self._branches(
                    value if size == "i32" else self.put(f"arith.extui {value} : {size} to i32"),
                    branches,
                    0,
                )

    def _branches(self, value: str, branches, index: int) -> None:
        """Nested ifs; the first also takes indices below it, the last those above."""
        if index == len(branches) - 1:
            self.steps(branches[index])
            return
        bound = self.put(f"arith.constant {index} : i32")
        test = self.put(f"arith.cmpi sle, {value}, {bound} : i32")
        self.lines.append(f"scf.if {test} {{")
        self.steps(branches[index])
        self.lines.append("} else {")
        self._branches(value, branches, index + 1)
        self.lines.append("}")

    def pointer(self, view: BufferView) -> str:
        buffer = self.buffers[view.buffer]
        if buffer.kind is BufferKind.TEMP:
            base = self.arena(self.memory.offsets[view.buffer])
        else:
            before = self.inputs if buffer.kind is BufferKind.OUTPUT else 0
            position = buffer.position + before
            slot = self.put(
                f"llvm.getelementptr %buffers[{8 * position}] : (!llvm.ptr) -> !llvm.ptr, i8"
            )
            base = self.put(f"llvm.load {slot} : !llvm.ptr -> !llvm.ptr")
        if view.offset == Affine():
            return base
        total = self.const(view.offset.const)
        for symbol, coeff in view.offset.terms:
            term = self.put(f"arith.muli {self.counters[symbol]}, {self.const(coeff)} : i64")
            total = self.put(f"arith.addi {total}, {term} : i64")
        size = self.const(view.type.dtype.itemsize)
        total = self.put(f"arith.muli {total}, {size} : i64")
        return self.put(f"llvm.getelementptr {base}[{total}] : (!llvm.ptr, i64) -> !llvm.ptr, i8")

    def operands(self, step: Launch) -> list[BufferView]:
        """Operands of a launch; an aliased one is the result, which starts as a copy of it unless both are one buffer."""
        views = list(step.operands)
        for i, output in step.kernel.aliases:
            if step.operands[i].buffer != step.results[output].buffer:
                self._copy_unless_same(step.operands[i], step.results[output])
                views[i] = step.results[output]
        return views

    def _copy(self, source: BufferView, destination: BufferView) -> None:
        self.hooks.copy(self, self.pointer(destination), self.pointer(source), source.type.nbytes)

    def _copy_unless_same(self, source: BufferView, destination: BufferView) -> None:
        """A caller that donates the operand passes one address for both."""
        origin, target = self.pointer(source), self.pointer(destination)
        test = self.put(f'llvm.icmp "ne" {origin}, {target} : !llvm.ptr')
        self.lines.append(f"scf.if {test} {{")
        self._copy(source, destination)
        self.lines.append("}")

    def text(self) -> str:
        head = f"func.func @pbk_main(%frame: !llvm.ptr, %buffers: !llvm.ptr, %arena: !llvm.ptr) {INTERNAL} {{"
        return "\n".join([*self.functions, head, *self.lines, "return", "}"])
