"""HostProgram -> MLIR: kernel functions, one task function per launch, and @pbk_main that runs the steps.

@pbk_main(frame, buffers, arena): `frame` is the caller's context for threads (null: run on this thread), `buffers` an
array of pointers (inputs, then outputs), `arena` holds temporaries and, after them, each thread's scratch. The host
text refers to kernels by their lowered signature, so the two modules are lowered apart and joined by the target.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pbkern.core.affine import Affine
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
from pbkern.targets.cpu.schedule.task_size import tasks

from .kernel import FunctionText, LoweredKernel

# Of functions that nothing outside the module calls. MLIR's execution engine gives all others a
# second entry point.
INTERNAL = "attributes {llvm.linkage = #llvm.linkage<internal>}"
# The target's runtime provides this function.
PARALLEL = "_mlir_ciface_pbk_parallel"


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


class HostText:
    """Writes the steps of a program.

    For kernels that do not run on this processor, `_launch`, `_memcpy` and `_load` differ.
    """

    def __init__(
        self,
        program: HostProgram,
        kernels: Mapping[int, LoweredKernel],
        threads_of: Callable[[Kernel], int],
    ):
        self.program, self.kernels, self.threads_of = program, kernels, threads_of
        self.lines: list[str] = []
        self.tasks: list[str] = []
        self.count = 0
        self.counters: dict[str, str] = {}
        self.offsets, self.copies_at = self._temporaries()
        self.temp_bytes = self.copies_at + max(
            (sum(self._copy_sizes(kernel)) for kernel in program.kernels()), default=0
        )
        self.scratch: list[tuple[int, int]] = []

    def name(self) -> str:
        self.count += 1
        return f"%h{self.count}"

    def put(self, text: str) -> str:
        name = self.name()
        self.lines.append(f"{name} = {text}")
        return name

    def const(self, number: int) -> str:
        return self.put(f"arith.constant {number} : i64")

    def _temporaries(self) -> tuple[dict[str, int], int]:
        """Byte offset of each temporary in the arena; buffers with one slot share it."""
        slots: dict = {}
        for buffer in self.program.of_kind(BufferKind.TEMP):
            key = buffer.slot if buffer.slot >= 0 else buffer.name
            slots.setdefault(key, []).append(buffer)
        offsets, at = {}, 0
        for members in slots.values():
            for buffer in members:
                offsets[buffer.name] = at
            at += (
                -(-max(max(member.type.nbytes for member in members), 1) // BUFFER_ALIGNMENT)
                * BUFFER_ALIGNMENT
            )
        return offsets, at

    def copied(self, kernel: Kernel) -> Sequence[int]:
        """Operands of which a launch of `kernel` keeps a copy."""
        return list(self.kernels[id(kernel)].copies)

    def _copy_sizes(self, kernel: Kernel) -> list[int]:
        """Bytes in the arena of the copies that a launch of `kernel` makes of operands."""
        sizes = [kernel.in_types[i].nbytes for i in self.copied(kernel)]
        return [-(-size // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT for size in sizes]

    def _copies(self, step: Launch, views: list[BufferView]) -> list[str]:
        """Copies operands as the kernel asks; pointers to them."""
        found, at = [], self.copies_at
        for i, size in zip(self.copied(step.kernel), self._copy_sizes(step.kernel)):
            found.append(
                self.put(f"llvm.getelementptr %arena[{at}] : (!llvm.ptr) -> !llvm.ptr, i8")
            )
            self._memcpy(found[-1], self.pointer(views[i]), views[i].type.nbytes)
            at += size
        return found

    def _memcpy(self, destination: str, source: str, size: int) -> None:
        self.lines.append(
            f'"llvm.intr.memcpy"({destination}, {source}, {self.const(size)}) '
            "<{isVolatile = false}> : (!llvm.ptr, !llvm.ptr, i64) -> ()"
        )

    def _load(self, view: BufferView, kind: str) -> str:
        """The value of type `kind` at the start of a view."""
        return self.put(f"llvm.load {self.pointer(view)} : !llvm.ptr -> {kind}")

    def alloca(self, kind: str) -> str:
        """A place on the stack, reserved once: a loop would take another one in each of its steps."""
        size, name = self.name(), self.name()
        self.lines[:0] = [
            f"{size} = arith.constant 1 : i64",
            f"{name} = llvm.alloca {size} x {kind} : (i64) -> !llvm.ptr",
        ]
        return name

    # ---------------------------------------------------------------- steps

    def steps(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            match step:
                case Launch():
                    self._launch(step)
                case Copy(source=s, destination=d):
                    self._memcpy(self.pointer(d), self.pointer(s), s.type.nbytes)
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
                    value = self._load(p, "i8")
                    zero = self.put("arith.constant 0 : i8")
                    self.lines.append(
                        f"scf.condition({self.put(f'arith.cmpi ne, {value}, {zero} : i8')})"
                    )
                    self.lines.append("} do {")
                    self.steps(inner)
                    self.lines += ["scf.yield", "}"]
                case Cond(index=i, branches=branches):
                    size = f"i{8 * i.type.dtype.itemsize}"
                    value = self._load(i, size)
                    self._branches(
                        value
                        if size == "i32"
                        else self.put(f"arith.extui {value} : {size} to i32"),
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
        buffer = next(
            candidate for candidate in self.program.buffers if candidate.name == view.buffer
        )
        if buffer.kind is BufferKind.TEMP:
            base = self.put(
                f"llvm.getelementptr %arena[{self.offsets[view.buffer]}] : (!llvm.ptr) -> !llvm.ptr, i8"
            )
        else:
            position = buffer.position + (
                len(self.program.inputs) if buffer.kind is BufferKind.OUTPUT else 0
            )
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

    def _launch(self, step: Launch) -> None:
        lowered = self.kernels[id(step.kernel)]
        if lowered.programs == 0:
            return
        chunk, threads = tasks(step.kernel, lowered.programs, self.threads_of(step.kernel))
        aliased = {o for _, o in step.kernel.aliases}
        views = list(step.operands) + [
            result for k, result in enumerate(step.results) if k not in aliased
        ]
        for (
            i,
            output,
        ) in (
            step.kernel.aliases
        ):  # an aliased result starts as a copy of its operand unless it is the same buffer
            if step.operands[i].buffer != step.results[output].buffer:
                self._copy_unless_same(step.operands[i], step.results[output])
                views[i] = step.results[output]
        self.scratch.append((lowered.scratch_bytes, threads))
        pointers = [*map(self.pointer, views), *self._copies(step, views)]
        scratch = self.put(
            f"llvm.getelementptr %arena[{self.temp_bytes}] : (!llvm.ptr) -> !llvm.ptr, i8"
        )
        total = self.const(lowered.programs)
        if threads == 1:
            passed, types = (
                ", ".join([*pointers, scratch, self.const(0), total]),
                ", ".join(argument_types(lowered)),
            )
            self.lines.append(f"func.call @{lowered.name}({passed}) : ({types}) -> ()")
            return
        args = self.alloca(f"!llvm.array<{len(pointers) + 1} x ptr>")
        for k, argument in enumerate([*pointers, scratch]):
            slot = self.put(f"llvm.getelementptr {args}[{8 * k}] : (!llvm.ptr) -> !llvm.ptr, i8")
            self.lines.append(f"llvm.store {argument}, {slot} : !llvm.ptr, !llvm.ptr")
        task = self._task(lowered, len(pointers))
        address = self.put(f"func.constant @{task} : (!llvm.ptr, i64, i64, i64) -> ()")
        pointer = self.put(
            f"builtin.unrealized_conversion_cast {address} : (!llvm.ptr, i64, i64, i64) -> () to !llvm.ptr"
        )
        self.lines.append(
            f"func.call @{PARALLEL}(%frame, {pointer}, {args}, {total}, {self.const(chunk)}, "
            f"{self.const(threads)}) : (!llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64, i64) -> ()"
        )

    def _copy_unless_same(self, source: BufferView, destination: BufferView) -> None:
        """A caller that donates the operand passes one address for both."""
        origin, target = self.pointer(source), self.pointer(destination)
        test = self.put(f'llvm.icmp "ne" {origin}, {target} : !llvm.ptr')
        self.lines.append(f"scf.if {test} {{")
        self.steps((Copy(source, destination),))
        self.lines.append("}")

    def _task(self, lowered: LoweredKernel, count: int) -> str:
        """@task(args, low, high, slot): unpacks pointers, finds the slot's scratch, runs the kernel function."""
        name = f"pbk_task{len(self.tasks)}"
        lines = [
            f"func.func @{name}(%args: !llvm.ptr, %low: i64, %high: i64, %slot: i64) {INTERNAL} {{"
        ]
        pointers = []
        for k in range(count + 1):
            lines += [
                f"%g{k} = llvm.getelementptr %args[{8 * k}] : (!llvm.ptr) -> !llvm.ptr, i8",
                f"%p{k} = llvm.load %g{k} : !llvm.ptr -> !llvm.ptr",
            ]
            pointers.append(f"%p{k}")
        lines += [
            f"%size = arith.constant {lowered.scratch_bytes} : i64",
            "%at = arith.muli %slot, %size : i64",
            f"%mine = llvm.getelementptr {pointers[-1]}[%at] : (!llvm.ptr, i64) -> !llvm.ptr, i8",
        ]
        args, types = [*pointers[:-1], "%mine", "%low", "%high"], ", ".join(argument_types(lowered))
        lines += [f"func.call @{lowered.name}({', '.join(args)}) : ({types}) -> ()", "return", "}"]
        self.tasks.append("\n".join(lines))
        return name

    def distinct(self) -> tuple[LoweredKernel, ...]:
        """Each lowered kernel once, in order."""
        return tuple({kernel.name: kernel for kernel in self.kernels.values()}.values())

    def text(self) -> str:
        declared = []
        for lowered in self.distinct():
            declared.append(
                f"func.func private @{lowered.name}({', '.join(argument_types(lowered))})"
            )
        head = f"func.func @pbk_main(%frame: !llvm.ptr, %buffers: !llvm.ptr, %arena: !llvm.ptr) {INTERNAL} {{"
        main = [head, *self.lines, "return", "}"]
        return "\n".join([*declared, *self.tasks, *main])


def argument_types(lowered: LoweredKernel) -> list[str]:
    """Types of operands and copies, the scratch memory, and the first program and the one after the last."""
    return ["!llvm.ptr"] * (lowered.operand_count + len(lowered.copies) + 1) + ["i64", "i64"]


def default_threads() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def module_text(functions: Iterable[FunctionText]) -> str:
    """One module of several functions."""
    functions = tuple(functions)
    declared = frozenset().union(*(function.calls for function in functions)) - {
        function.declaration for function in functions
    }
    return "\n".join([*sorted(declared), *(function.text for function in functions)])


def emit_host(
    program: HostProgram, kernels: Mapping[int, LoweredKernel], threads_of: Callable[[Kernel], int]
) -> LoweredProgram:
    """MLIR of a HostProgram around the functions of its kernels, by id of a kernel."""
    host = HostText(program, kernels, threads_of)
    host.steps(program.steps)
    distinct = host.distinct()
    text = module_text(function for kernel in distinct for function in kernel.functions)
    return LoweredProgram(
        text, host.text(), host.temp_bytes, tuple(dict.fromkeys(host.scratch)), distinct
    )


def starts_anywhere(kernel: Kernel, program: HostProgram) -> bool:
    """Whether results of a kernel may start anywhere in a cache line: such are not written past the caches."""
    return any(
        launch.kernel is kernel and any(result.offset != Affine() for result in launch.results)
        for launch in program.launches()
    )
