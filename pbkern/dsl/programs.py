"""Kernels -> HostPrograms that are not fusion's: of one launch, and of many runs."""

from __future__ import annotations

from .host import Buffer, BufferKind, HostProgram, Launch, Loop, View
from .kernel import Kernel


def kernel_program(kernel: Kernel) -> HostProgram:
    """The HostProgram of one launch."""
    sides = ((kernel.in_types, BufferKind.INPUT, "in"), (kernel.out_types, BufferKind.OUTPUT, "out"))
    buffers = [[Buffer(f"{stem}{n}", t, kind, n) for n, t in enumerate(types)] for types, kind, stem in sides]
    operands, results = (tuple(View(b.name, b.type) for b in side) for side in buffers)
    return HostProgram(kernel.name, (*buffers[0], *buffers[1]), (Launch(kernel, operands, results),))


def repeated(program: HostProgram, times: int) -> HostProgram:
    """The program that runs `times` times on the same inputs (option num_iters)."""
    if times == 1:
        return program
    return HostProgram(program.name, program.buffers, (Loop("iteration", times, program.steps),))
