"""A target without a device: it implements targets/backend.py and runs KernelNests in their NumPy interpreter.

What a new target starts from: options of its own, passes of its own, one function per kernel, one for the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pbkern.core.options import CompileOptions
from pbkern.core.passes import Pass
from pbkern.dsl.build_programs import kernel_program
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
from pbkern.dsl.interpret import poison
from pbkern.dsl.kernel import Kernel
from pbkern.lower.build_options import BuildOptions
from pbkern.lower.kernel_nests import KernelNests
from pbkern.targets.backend import lowered


@dataclass(frozen=True)
class StubFunction:
    """A kernel that is interpreted."""

    name: str
    made: KernelNests
    text: str = ""
    is_shared: bool = False

    @property
    def nests(self) -> str:
        return str(self.made)


@dataclass(frozen=True)
class StubProgram:
    """A program whose steps run one after the other on NumPy arrays."""

    program: HostProgram
    kernels: Mapping[int, StubFunction]
    host: str = ""
    arena_bytes: int = 0

    def __call__(self, *arrays: np.ndarray) -> list[np.ndarray]:
        memory = {
            b.name: np.full(math.prod(b.type.shape), poison(b.type.dtype), b.type.dtype)
            for b in self.program.buffers
        }
        for b in self.program.of_kind(BufferKind.INPUT):
            memory[b.name][:] = np.asarray(arrays[b.position]).reshape(-1)
        self._run(self.program.steps, memory, {})
        return [memory[b.name].reshape(b.type.shape) for b in self.program.outputs]

    def _run(
        self, steps: tuple[Step, ...], memory: dict[str, np.ndarray], counters: dict[str, int]
    ) -> None:
        def at(v: BufferView) -> np.ndarray:
            start = v.offset.evaluate(counters)
            return (
                memory[v.buffer]
                .view(v.type.dtype)[start : start + math.prod(v.type.shape)]
                .reshape(v.type.shape)
            )

        for step in steps:
            match step:
                case Launch(kernel=kernel, operands=operands, results=results):
                    found = self.kernels[id(kernel)].made.interpret(*map(at, operands))
                    for v, value in zip(results, found):
                        at(v)[...] = value
                case Copy(source=source, destination=destination):
                    at(destination)[...] = at(source)
                case Loop(counter=counter, trip_count=count, steps=inner):
                    for k in range(count):
                        self._run(inner, memory, counters | {counter: k})
                case HostWhile(condition=condition, predicate=predicate, steps=inner):
                    self._run(condition, memory, counters)
                    while at(predicate):
                        self._run(inner, memory, counters)
                        self._run(condition, memory, counters)
                case Cond(index=index, branches=branches):
                    self._run(
                        branches[min(max(int(at(index)), 0), len(branches) - 1)], memory, counters
                    )


@dataclass(frozen=True)
class StubBackend:
    """See targets.backend.KernelBackend."""

    passes: tuple[Pass, ...] = ()
    options: BuildOptions = BuildOptions()

    def build_options(
        self, kernel: Kernel, options, program: HostProgram | None = None
    ) -> BuildOptions:
        return self.options

    def emit(self, nests: KernelNests, name: str) -> StubFunction:
        nests.verify()
        return StubFunction(name, nests)

    def emit_host(self, program: HostProgram, kernels: Mapping[int, StubFunction]) -> StubProgram:
        return StubProgram(program, kernels)


def run(
    program: HostProgram | Kernel, *arrays: np.ndarray, backend: StubBackend = StubBackend()
) -> list[np.ndarray]:
    """Results of a program or of one kernel."""
    program = kernel_program(program) if isinstance(program, Kernel) else program
    return lowered(program, backend, CompileOptions())(*arrays)
