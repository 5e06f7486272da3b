"""A HostProgram's kernels as PTX, and the program on NumPy arrays: every launch is simulated."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from pbkern.core.errors import InternalError, TargetError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.host_program import (
    Buffer,
    BufferKind,
    BufferView,
    Cond,
    Copy,
    HostWhile,
    Launch,
    Loop,
    Step,
)
from pbkern.dsl.interpret import poison
from pbkern.simulate.counts import Counts
from pbkern.simulate.launches import simulate_ptx
from pbkern.targets.simt import program
from pbkern.targets.simt.emit.kernel import ThreadFunction
from pbkern.targets.simt.launch import trace
from pbkern.targets.simt.launch.reports import receive

from . import compile as codegen
from . import ptxas
from .devices import NvDeviceKind


@dataclass(eq=False)
class NvKernelCode:
    """One kernel's code.

    Attributes:
      function: as MLIR, with the numbers of its launch.
    """

    function: ThreadFunction
    kind: NvDeviceKind

    @functools.cached_property
    def llvm(self) -> str:
        return codegen.llvm_ir(self.function)

    @functools.cached_property
    def ptx(self) -> str:
        return codegen.ptx(self.llvm, self.kind)

    def images(self, refused: list[str]) -> Iterator[tuple[str, bytes]]:
        """Yields what a driver may load: machine code where there is ptxas, then PTX, which the driver assembles.

        A ptxas may be newer than the driver, or older than the text, which is noted in `refused`.
        """
        if ptxas.find():
            try:
                cubin = self.assembled.cubin
            except TargetError as e:
                refused.append(f"{e.what}: {e.why}")
            else:
                yield f"machine code for {self.kind.architecture}", cubin
        yield f"PTX for {self.kind.architecture}", self.ptx.encode() + b"\0"

    def made_for(self, kind: NvDeviceKind) -> NvKernelCode | None:
        """Makes the kernel for another kind of device; None if it is the same kind or has too little shared memory."""
        if kind == self.kind or self.function.shared_bytes > kind.shared_bytes:
            return None
        return NvKernelCode(self.function, kind)

    @functools.cached_property
    def assembled(self) -> ptxas.Cubin:
        """Raises TargetError without ptxas."""
        return ptxas.assemble(self.ptx, self.kind.architecture)


class NvProgram(program.DeviceProgram[NvKernelCode]):
    """One program for NVIDIA GPUs, which the simulator runs as well."""

    def simulated(
        self, arrays: Sequence[np.ndarray], check: bool = True
    ) -> tuple[list[np.ndarray], Counts]:
        """Results on NumPy arrays, and what all launches cost together. Raises SimulationError."""
        run = _ProgramCall(self, check)
        return run(arrays), run.counts


class _ProgramCall:
    """One call of a program."""

    def __init__(self, compiled: NvProgram, check: bool):
        self.compiled, self.check = compiled, check
        self.memory: dict[str, np.ndarray] = {}  # flat
        self.types = {buffer.name: buffer.type for buffer in compiled.program.buffers}
        self.counters: dict[str, int] = {}
        self.counts = Counts()

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        program = self.compiled.program
        for buffer in program.buffers:
            self.memory[buffer.name] = self._new(buffer)
        for buffer, array in zip(program.inputs, arrays):
            self.memory[buffer.name] = np.array(array, buffer.type.dtype).reshape(-1)
        self._steps(program.steps)
        return [self.memory[output.name].reshape(output.type.shape) for output in program.outputs]

    @staticmethod
    def _new(buf: Buffer) -> np.ndarray:
        if buf.kind is BufferKind.INPUT:
            return np.empty(0, buf.type.dtype)
        size, dtype = int(np.prod(buf.type.shape)), np.dtype(buf.type.dtype)
        return np.zeros(size, dtype) if dtype.kind == "c" else np.full(size, poison(dtype), dtype)

    def _view(self, view: BufferView) -> np.ndarray:
        """The elements of a view, as they lie in memory."""
        flat = self.memory[view.buffer].view(np.uint8)
        itemsize, size = np.dtype(view.type.dtype).itemsize, int(np.prod(view.type.shape))
        start = view.offset.evaluate(self.counters) * itemsize
        return flat[start : start + size * itemsize].view(view.type.dtype)

    def _steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            match step:
                case Launch():
                    self._launch(step)
                case Copy(source=source, destination=destination):
                    self._view(destination)[:] = self._view(source)
                case Loop(counter=counter, trip_count=trips, steps=inner):
                    for k in range(trips):
                        self.counters[counter] = k
                        self._steps(inner)
                case HostWhile(condition=condition, predicate=predicate, steps=inner):
                    self._steps(condition)
                    while self._view(predicate)[0]:
                        self._steps(inner)
                        self._steps(condition)
                case Cond(index=index, branches=branches):
                    self._steps(branches[min(max(int(self._view(index)[0]), 0), len(branches) - 1)])

    def _launch(self, step: Launch) -> None:
        code = self.compiled.codes[id(step.kernel)]
        function = code.function
        views = [self._view(buffer_view) for buffer_view in (*step.operands, *step.results)]
        for (
            i,
            output,
        ) in (
            step.kernel.aliases
        ):  # an aliased result starts as a copy of its operand unless it is the same memory
            result = views[len(step.operands) + output]
            if not np.shares_memory(views[i], result):
                result[:] = views[i]
            views[i] = result
        arrays = [_padded(views[operand]) for operand in function.operands]
        if function.global_bytes:
            arrays.append(np.zeros(function.global_bytes * function.blocks, np.uint8))
        if function.profile:
            arrays.append(np.zeros(function.record_bytes // 8, np.int64))
        if function.reports:
            arrays.append(np.zeros(function.reports.nbytes // 8, np.int64))
            before = [
                view.reshape(type_.shape).copy() for view, type_ in zip(views, step.kernel.in_types)
            ]
        if function.blocks:
            self.counts += simulate_ptx(
                code.ptx,
                function.blocks,
                function.threads,
                arrays,
                shared_bytes=function.dynamic_shared_bytes,
                check=self.check,
                unwritten=function.reads_unwritten,
            )
        if function.blocks and function.profile:
            trace.write(function, arrays[len(function.operands) + bool(function.global_bytes)])
        if function.reports:
            receive(function, arrays[-1], lambda: before)


def _padded(array: np.ndarray) -> np.ndarray:
    """Empty arrays have an address as well."""
    if array.dtype.kind == "c":
        raise InternalError("a kernel takes complex numbers")
    return array if array.size else np.zeros(1, array.dtype)
