"""HostProgram, device -> Variant: LLVM IR of kernels and host for one kind of processor, and the memory that a call takes."""

from __future__ import annotations

import functools

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import CompileOptions
from pbkern.dsl.build_programs import in_stages
from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.kernel import Kernel
from pbkern.targets import mlir
from pbkern.targets.cpu.backend import CpuBackend, own_threads
from pbkern.targets.cpu.codegen.launches import emit_host
from pbkern.targets.cpu.machines.devices import CpuDevice
from pbkern.targets.host.kernel_text import module_text
from pbkern.targets.host.runtime import openmp, serial
from pbkern.targets.llvm import literals

from .alignment import lowered_kernels

MAIN = "pbk_main"
# Threads that tasks are sized for, at least: a library is called where there are more cores than
# where it was compiled. Loops that are long enough have 16 tasks for each, enough for 256 threads.
# Source: chosen.
TASK_THREADS = 16


@dataclass(frozen=True)
class IrModule:
    """LLVM IR of one module.

    Attributes:
      text: the IR.
      has_scalar_loops: whether it has loops without vectors, for which LLVM's optimiser is worth its time.
    """

    text: str
    has_scalar_loops: bool


@dataclass(frozen=True)
class ProcessorVariant:
    """A program for one kind of processor; its entry is @pbk_main(frame, buffers, memory).

    Attributes:
      parts: modules that call each other.
      temporary_bytes: of one call.
      scratch: (bytes per thread, most threads) of each launch that has scratch.
      mlir: text of kernels and host, for people.
    """

    parts: tuple[IrModule, ...]
    temporary_bytes: int
    scratch: tuple[tuple[int, int], ...]
    mlir: str

    def memory_bytes(self, threads: int) -> int:
        """Bytes beside inputs and outputs, from a cache line's start on, on so many threads."""
        return self.temporary_bytes + max(
            (size * min(threads, most) for size, most in self.scratch), default=0
        )


def variant_of(
    program: HostProgram, options: CompileOptions, device: CpuDevice, most: int, use_openmp: bool
) -> ProcessorVariant:
    """Lowers a program for one kind of processor.

    Args:
      program: the program.
      options: the library's.
      device: the processor.
      most: threads that a launch may take.
      use_openmp: whether loops run on OpenMP's threads, not on one.

    Raises:
      UnsupportedOp, InternalError: as lowering does.
    """
    program, backend = in_stages(program), CpuBackend(device.machine)
    options_of = functools.partial(backend.build_options, options=options, program=program)

    def most_of(kernel: Kernel) -> int:
        return min(own_threads(kernel) or most, most)

    def threads_of(kernel: Kernel) -> int:
        return min(most_of(kernel), max(device.machine.cores, TASK_THREADS))

    kernels = lowered_kernels(program, options_of)
    lowered, functions = emit_host(program, kernels.by_id, threads_of, most_of), kernels.functions
    parts = []
    for is_scalar in (False, True):
        of_kind = [function for function in functions if function.has_scalar_loops is is_scalar]
        if of_kind:
            text = _llvm_ir(module_text(of_kind), mlir.KERNEL_PASSES, device)
            parts.append(IrModule(text, is_scalar))
    runtime = openmp.OPENMP if use_openmp else serial.SERIAL
    if kernels.choosing:
        parts.append(IrModule(_llvm_ir(kernels.choosing, mlir.HOST_PASSES, device), False))
    parts.append(IrModule(_llvm_ir(lowered.host + runtime, mlir.HOST_PASSES, device), False))
    return ProcessorVariant(
        tuple(parts),
        lowered.temporary_bytes,
        lowered.scratch,
        f"{module_text(functions)}\n{lowered.host}",
    )


def _llvm_ir(text: str, passes: str, device: CpuDevice) -> str:
    """MLIR -> LLVM IR that llvmlite's LLVM reads; its functions are compiled for the device."""
    module = mlir.run_passes(mlir.parse(text), passes)
    if mlir.LOOP_MARK in text:
        mlir.keep_loops(module)
    mlir.check_lowered(module)
    mlir.set_processor(module, *device.processor)
    with mlir.context():
        for op in module.body.operations:
            is_main = "sym_name" in op.attributes and op.attributes["sym_name"].value == MAIN
            if is_main and op.operation.regions[0].blocks:
                external = "#llvm.linkage<external>"
                op.attributes["linkage"] = mlir.bindings().ir.Attribute.parse(external)
    return literals.readable(mlir.llvm_ir(module))
