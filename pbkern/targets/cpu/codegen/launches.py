"""Launches of CPU kernels in the host's program: one task function per launch, called by the runtime's parallel loop.

The host's text refers to kernels by their lowered signature, so the two modules are lowered apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.host_program import BufferView, HostProgram, Launch
from pbkern.dsl.kernel import Kernel
from pbkern.targets.cpu.schedule.task_size import tasks
from pbkern.targets.host.kernel_text import LoweredKernel, module_text
from pbkern.targets.host.program_text import INTERNAL, HostText, LoweredProgram, Temporaries
from pbkern.targets.host.runtime.parallel import PARALLEL


@dataclass(frozen=True)
class CpuSteps:
    """See host.program_text.StepHooks.

    kernels: by id of a launch's kernel; tasks: (programs per task, threads) by the same.
    """

    kernels: Mapping[int, LoweredKernel]
    tasks: Mapping[int, tuple[int, int]]

    def copy(self, text: HostText, destination: str, source: str, size: int) -> None:
        text.lines.append(
            f'"llvm.intr.memcpy"({destination}, {source}, {text.const(size)}) '
            "<{isVolatile = false}> : (!llvm.ptr, !llvm.ptr, i64) -> ()"
        )

    def load(self, text: HostText, view: BufferView, kind: str) -> str:
        return text.put(f"llvm.load {text.pointer(view)} : !llvm.ptr -> {kind}")

    def launch(self, text: HostText, step: Launch) -> None:
        """Calls the kernel's function, on one thread itself, on several as tasks."""
        lowered = self.kernels[id(step.kernel)]
        if lowered.programs == 0:
            return
        chunk, threads = self.tasks[id(step.kernel)]
        aliased = {output for _, output in step.kernel.aliases}
        results = [result for k, result in enumerate(step.results) if k not in aliased]
        views = [*text.operands(step), *results]
        pointers = [*map(text.pointer, views), *text.copies(step, views).values()]
        scratch = text.arena(text.memory.nbytes)
        total = text.const(lowered.programs)
        if threads == 1:
            passed = ", ".join([*pointers, scratch, text.const(0), total])
            types = ", ".join(lowered.argument_types)
            text.lines.append(f"func.call @{lowered.name}({passed}) : ({types}) -> ()")
            return
        args = text.alloca(f"!llvm.array<{len(pointers) + 1} x ptr>")
        text.stored([*pointers, scratch], args)
        task = f"pbk_task{len(text.functions)}"
        text.functions.append(task_text(task, lowered, len(pointers)))
        address = text.put(f"func.constant @{task} : (!llvm.ptr, i64, i64, i64) -> ()")
        pointer = text.put(
            f"builtin.unrealized_conversion_cast {address} : (!llvm.ptr, i64, i64, i64) -> () to !llvm.ptr"
        )
        text.lines.append(
            f"func.call @{PARALLEL}(%frame, {pointer}, {args}, {total}, {text.const(chunk)}, "
            f"{text.const(threads)}) : (!llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64, i64) -> ()"
        )


def task_text(name: str, lowered: LoweredKernel, count: int) -> str:
    """@name(args, low, high, slot): the kernel on `count` pointers and on the slot's part of the scratch memory behind them."""
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
    args, types = [*pointers[:-1], "%mine", "%low", "%high"], ", ".join(lowered.argument_types)
    lines += [f"func.call @{lowered.name}({', '.join(args)}) : ({types}) -> ()", "return", "}"]
    return "\n".join(lines)


def emit_host(
    program: HostProgram,
    kernels: Mapping[int, LoweredKernel],
    threads_of: Callable[[Kernel], int],
    most_of: Callable[[Kernel], int] | None = None,
    text_of: type[HostText] = HostText,
) -> LoweredProgram:
    """MLIR of a HostProgram around the functions of its kernels, by id of a kernel.

    threads_of: the threads that tasks are sized for; most_of: those that may take part, if others;
    text_of: writes the steps.
    """
    sizes = {
        id(kernel): tasks(kernel, kernels[id(kernel)].programs, threads_of(kernel))
        for kernel in program.kernels()
    }
    for kernel in program.kernels():
        chunk, threads = sizes[id(kernel)]
        if threads > 1 and most_of is not None:
            count = -(-kernels[id(kernel)].programs // chunk)
            sizes[id(kernel)] = chunk, min(most_of(kernel), count)
    memory = Temporaries.of(program, lambda kernel: kernels[id(kernel)].copies)
    host = text_of(program, memory, CpuSteps(kernels, sizes))
    host.steps(program.steps)
    launched: dict[str, LoweredKernel] = {}
    for function, (chunk, threads) in ((kernels[kernel], sizes[kernel]) for kernel in sizes):
        tasks_text = f"programs {function.programs}, per task {chunk}, threads {threads}"
        launched.setdefault(
            function.name, replace(function, schedule=f"{tasks_text}\n{function.schedule}")
        )
    distinct = tuple(launched.values())
    declared = [
        f"func.func private @{kernel.name}({', '.join(kernel.argument_types)})"
        for kernel in distinct
    ]
    text = module_text(function for kernel in distinct for function in kernel.functions)
    scratch = dict.fromkeys(
        (kernels[kernel].scratch_bytes, threads)
        for kernel, (_, threads) in sizes.items()
        if kernels[kernel].programs
    )
    return LoweredProgram(
        text, "\n".join([*declared, host.text()]), memory.nbytes, tuple(scratch), distinct
    )
