"""Kernels -> HostPrograms that are not fusion's.

They are of one launch, of many runs, and with launches of their own for last stages and for results
that start as zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax.numpy as jnp

from pbkern import _jax

from .body_checks.parallel_stores import check_parallel_stores
from .body_rewrites.complex_refs import has_complex_numbers, over_pairs, type_in_pairs
from .conditional_results import unsure_results
from .host_program import (
    Buffer,
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
from .kernel import ArrayType, Kernel
from .specs import BlockSpec
from .trace import trace_kernel

# Most bytes of a block of zeros: it fits any core's L1 cache, and is worth the start of a program.
BLOCK_BYTES = 16 << 10


def kernel_program(kernel: Kernel) -> HostProgram:
    """The HostProgram of one launch."""
    sides = (
        (kernel.in_types, BufferKind.INPUT, "in"),
        (kernel.out_types, BufferKind.OUTPUT, "out"),
    )
    buffers = [
        [Buffer(f"{stem}{n}", type_, kind, n) for n, type_ in enumerate(types)]
        for types, kind, stem in sides
    ]
    operands, results = (tuple(BufferView(buf.name, buf.type) for buf in side) for side in buffers)
    return HostProgram(
        kernel.name, (*buffers[0], *buffers[1]), (Launch(kernel, operands, results),)
    )


def repeated(program: HostProgram, times: int) -> HostProgram:
    """The program that runs `times` times on the same inputs (option num_iters)."""
    if times == 1:
        return program
    return HostProgram(program.name, program.buffers, (Loop("iteration", times, program.steps),))


def in_stages(program: HostProgram) -> HostProgram:
    """Makes a program for targets, which know no last stages: each is a launch that follows that of its kernel's programs.

    Nor do they know complex numbers: kernels get views of both parts, side by side.

    What is between them is temporary; launches share its storage. Results that values may leave
    unwritten are filled with zeros by a launch that comes first. Raises KernelError for programs in
    parallel that write the same elements.
    """
    for kernel in program.kernels():
        check_parallel_stores(kernel)
    if not any(
        program_kernel.finish
        or unsure_results(program_kernel)
        or has_complex_numbers(program_kernel)
        for program_kernel in program.kernels()
    ):
        return program
    stages = _Stages(1 + max((buffer.slot for buffer in program.buffers), default=-1))
    steps = stages.steps(program.steps)
    return HostProgram(program.name, (*program.buffers, *stages.buffers.values()), steps)


class _Stages:
    """`first_slot`: storage that the program does not use yet; `buffers`: new ones, by slot and type."""

    def __init__(self, first_slot: int) -> None:
        self.first_slot = first_slot
        self.buffers: dict[tuple[int, ArrayType], Buffer] = {}

    def steps(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(new for step in steps for new in self.step(step))

    def step(self, step: Step) -> Iterator[Step]:
        match step:
            case Launch():
                yield from self.launches(step)
            case Copy():
                yield step
            case Loop(counter=c, trip_count=n, steps=inner):
                yield Loop(c, n, self.steps(inner))
            case HostWhile(condition=c, predicate=p, steps=inner):
                yield HostWhile(self.steps(c), p, self.steps(inner))
            case Cond(index=i, branches=branches):
                yield Cond(i, tuple(map(self.steps, branches)))

    def launches(self, launch: Launch) -> Iterator[Launch]:
        programs, *last = launch.kernel.stages
        if not last:
            yield from _filled(launch)
            return
        count, (finish,) = len(programs.inputs), last
        shared = dict(finish.aliases)
        between = tuple(
            launch.results[shared[n]] if n in shared else self.temporary(n, type_)
            for n, type_ in enumerate(programs.out_types)
        )
        yield from _filled(Launch(programs, launch.operands[:count], between))
        yield from _filled(Launch(finish, between + launch.operands[count:], launch.results))

    def temporary(self, slot: int, array: ArrayType) -> BufferView:
        name = f"between{len(self.buffers)}"
        buf = self.buffers.setdefault(
            (slot, array), Buffer(name, array, BufferKind.TEMP, slot=self.first_slot + slot)
        )
        return BufferView(buf.name, buf.type)


def _filled(launch: Launch) -> Iterator[Launch]:
    """A launch of one stage, behind launches that fill its results with zeros where it may leave them unwritten."""
    for result in unsure_results(launch.kernel):
        filling = zeros(launch.kernel.out_types[result])
        yield _without_complex(Launch(filling, (), (launch.results[result],)))
    yield _without_complex(launch)


def _without_complex(launch: Launch) -> Launch:
    """A launch of one stage on pairs of real numbers, where it is one on complex numbers."""
    if not has_complex_numbers(launch.kernel):
        return launch
    operands, results = (tuple(map(_in_pairs, side)) for side in (launch.operands, launch.results))
    return Launch(over_pairs(launch.kernel), operands, results)


def _in_pairs(view: BufferView) -> BufferView:
    parts = type_in_pairs(view.type)
    return BufferView(view.buffer, parts, view.offset * (1 if parts == view.type else 2))


@functools.lru_cache(maxsize=256)
def zeros(array: ArrayType) -> Kernel:
    """A kernel without operands whose result is zero everywhere."""
    block = list(array.shape)
    for axis in range(len(block)):
        trailing = math.prod(block[axis + 1 :]) * array.dtype.itemsize
        if math.prod(block) * array.dtype.itemsize > BLOCK_BYTES:
            block[axis] = max(min(block[axis], BLOCK_BYTES // max(trailing, 1)), 1)
    grid = tuple(-(-size // max(block_size, 1)) for size, block_size in zip(array.shape, block))

    def body(out):
        out[...] = jnp.zeros(out.shape, out.dtype)

    spec = BlockSpec(tuple(block), lambda *index: index)
    return trace_kernel(
        body, in_types=(), out_types=(array,), grid=grid, out_specs=[spec], name="zeros", source=""
    )


_jax.on_clear_caches(zeros.cache_clear)
