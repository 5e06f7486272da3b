"""HostProgram -> JAX operations: buffers are values, steps that run several times are loops of JAX.

What a host program means, apart from where its buffers are: of such operations an ejected module is
written, and a function with kernels in place of its own is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern.core.affine import Affine
from pbkern.dsl.host_program import (
    BufferView,
    Cond,
    Copy,
    HostProgram,
    HostWhile,
    Launch,
    Loop,
    Step,
    steps_inside,
)
from pbkern.dsl.kernel import Kernel

CallKernel = Callable[[Kernel, list], Sequence]
Counters = Mapping[str, jax.Array]


def run_as_jax(program: HostProgram, inputs: Sequence, call: CallKernel) -> list:
    """Results of a program, traceable.

    Args:
      program: what runs.
      inputs: arrays in the order of its inputs.
      call: kernel, operands -> results of each launch.
    """
    state = _BufferValues(program, call)
    state.values = {buf.name: value for buf, value in zip(program.inputs, inputs)}
    state.run(program.steps, {})
    return [state.value(buffer.name) for buffer in program.outputs]


class _BufferValues:
    """Values of buffers; elements are zero until something is stored."""

    def __init__(self, program: HostProgram, call: CallKernel):
        self.types = {buffer.name: buffer.type for buffer in program.buffers}
        self.values: dict[str, jax.Array] = {}
        self.call = call

    def value(self, name: str) -> jax.Array:
        if name not in self.values:
            self.values[name] = jnp.zeros(self.types[name].shape, self.types[name].dtype)
        return self.values[name]

    def run(self, steps: Sequence[Step], counters: Counters) -> None:
        for step in steps:
            match step:
                case Launch(kernel=kernel, operands=operands, results=results):
                    values = self.call(
                        kernel, [self.read(operand, counters) for operand in operands]
                    )
                    for result, value in zip(results, values):
                        self.write(result, value, counters)
                case Copy(source=source, destination=destination):
                    self.write(destination, self.read(source, counters), counters)
                case Loop():
                    self.loop(step, counters)
                case HostWhile():
                    self.while_loop(step, counters)
                case Cond():
                    self.cond(step, counters)

    # Steps in steps: they carry the buffers that they write.

    def carried(self, steps: Sequence[Step]) -> list[str]:
        return list(dict.fromkeys(_written(steps)))

    def within(self, names: list[str], values: Sequence, run: Callable[[], None]) -> list:
        """New values of buffers after `run`, which starts with `values`; the state is left as it was."""
        before = dict(self.values)
        self.values |= dict(zip(names, values))
        run()
        after = [self.value(name) for name in names]
        self.values = before
        return after

    def loop(self, step: Loop, counters: Counters) -> None:
        names = self.carried(step.steps)

        def body(count, values):
            inner = {**counters, step.counter: count}
            return self.within(names, values, lambda: self.run(step.steps, inner))

        init = [self.value(name) for name in names]
        self.values |= dict(zip(names, lax.fori_loop(0, step.trip_count, body, init)))

    def while_loop(self, step: HostWhile, counters: Counters) -> None:
        names = self.carried((*step.condition, *step.steps))

        def goes_on(values):
            before = dict(self.values)
            self.values |= dict(zip(names, values))
            predicate = self.read(step.predicate, counters)
            self.values = before
            return predicate.reshape(())

        def body(values):
            both = (*step.steps, *step.condition)
            return self.within(names, values, lambda: self.run(both, counters))

        self.run(step.condition, counters)
        init = [self.value(name) for name in names]
        self.values |= dict(zip(names, lax.while_loop(goes_on, body, init)))

    def cond(self, step: Cond, counters: Counters) -> None:
        names = self.carried([inner for branch in step.branches for inner in branch])
        index = self.read(step.index, counters).reshape(()).astype(jnp.int32)

        def branch(steps: Sequence[Step]) -> Callable:
            return lambda values: self.within(names, values, lambda: self.run(steps, counters))

        init = [self.value(name) for name in names]
        chosen = lax.switch(index, list(map(branch, step.branches)), init)
        self.values |= dict(zip(names, chosen))

    # Views

    def read(self, view: BufferView, counters: Counters) -> jax.Array:
        value = self.value(view.buffer)
        if self.is_whole(view):
            return value.reshape(view.type.shape)
        flat = _flat(value, view)
        start = (_start(view.offset, counters),)
        sizes = (math.prod(view.type.shape),)
        taken = lax.dynamic_slice(flat, start, sizes, allow_negative_indices=False)
        return taken.reshape(view.type.shape)

    def write(self, view: BufferView, value: jax.Array, counters: Counters) -> None:
        of_buffer = self.types[view.buffer]
        if self.is_whole(view):
            self.values[view.buffer] = value.reshape(of_buffer.shape)
            return
        flat = _flat(self.value(view.buffer), view)
        start = (_start(view.offset, counters),)
        flat = lax.dynamic_update_slice(
            flat, value.reshape(-1), start, allow_negative_indices=False
        )
        if flat.dtype != of_buffer.dtype:
            flat = lax.complex(flat[::2], flat[1::2])
        self.values[view.buffer] = flat.reshape(of_buffer.shape)

    def is_whole(self, view: BufferView) -> bool:
        of_buffer = self.types[view.buffer]
        return (
            view.offset == Affine()
            and view.type.dtype == of_buffer.dtype
            and math.prod(view.type.shape) == math.prod(of_buffer.shape)
        )


def _written(steps: Sequence[Step]) -> Iterator[str]:
    """Names of the buffers that steps write."""
    for step in steps_inside(steps):
        match step:
            case Launch(results=results):
                yield from (result.buffer for result in results)
            case Copy(destination=destination):
                yield destination.buffer


def _flat(value: jax.Array, view: BufferView) -> jax.Array:
    """Elements of a buffer in the view's type: of complex numbers, their parts."""
    if value.dtype == view.type.dtype:
        return value.reshape(-1)
    return jnp.stack([value.real, value.imag], -1).reshape(-1)


def _start(offset: Affine, counters: Counters):
    total: Any = np.int32(offset.const) if offset.const or not offset.terms else None
    for counter, coefficient in offset.terms:
        scaled = counters[str(counter)].astype(np.int32) * np.int32(coefficient)
        total = scaled if total is None else total + scaled
    return total
