"""A Plan on a framework's arrays: its programs are called with addresses, its jaxprs of XLA with JAX's arrays.

A call through JAX costs 60 to 160 us for its arrays alone; a call with addresses 2 to 3
(docs/decisions/044-direct-calls.md). Each framework has an adapter, an ArrayMemory:
frontends/torch/memory.py, frontends/tf/memory.py.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import jax
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.machine import LINE_BYTES
from pbkern.core.options import CompileOptions
from pbkern.dsl.checks import can_fail
from pbkern.dsl.primitives import in_range
from pbkern.fuse.access.blocks import literal
from pbkern.fuse.emit.plan import Plan, Segment
from pbkern.targets import get_target
from pbkern.targets.host import direct
from pbkern.targets.host.runtime.arena import HUGE_BYTES
from pbkern.targets.host.runtime_symbols import reports

from .decorators import JitFunction
from .pipeline import Build, compile_programs, current_plan, ready, recorded_programs

if TYPE_CHECKING:
    from .report.report import Report

Values = list[Any]


_plans: weakref.WeakSet[DirectPlan] = weakref.WeakSet()


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Calls of programs with addresses record themselves, those of plans that are made in it as well.

    Raises what compiling programs for that raises.
    """
    for plan in list(_plans):
        plan.record()
    errors: list[Exception] = []
    try:
        yield
    finally:
        for plan in list(_plans):
            errors += plan.record_no_more()
    for error in errors:
        raise error


class GpuDevice(Protocol):
    """A GPU that a framework's arrays are on."""

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Puts the calling thread on the device."""

    def stream(self) -> int:
        """The stream on which the calling thread's work goes."""


class ArrayMemory(Protocol):
    """Services that a call with addresses asks of a framework's arrays.

    Attributes:
      device: on which the arrays are; None: they are in this computer's memory.
      openmp: file of a library that is the OpenMP runtime whose threads programs run on, or is
        linked to it; None: calls go through JAX, on XLA's threads.
      address: of an array's first element.
      before_call: is called in the calling thread before a program runs; None: nothing is.
    """

    device: GpuDevice | None
    openmp: str | None
    address: Callable[[Any], int]
    before_call: Callable[[], object] | None

    def operands(self, dtypes: Sequence[np.dtype]) -> Callable[[Sequence[Any]], Values]:
        """Returns a function that makes of arrays of these types, a call's, such with their elements one after the other."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Callable[[], Any]:
        """A function that makes arrays with elements of any value, the first at a cache line."""

    def constant(self, value: np.ndarray) -> Any: ...

    def copy(self, array: Any) -> Any:
        """An array that does not change with this one."""

    def result(self, dtype: np.dtype) -> Callable[[Any], Any] | None:
        """Returns a function that makes the caller's array of one that `empty` made; None: it is one."""

    def to_jax(self, array: Any) -> jax.Array: ...

    def from_jax(self, array: jax.Array) -> Any: ...


class DirectPlan:
    """One compiled jaxpr as a function of a framework's arrays, to a list of new ones.

    The constructor compiles, and raises as compiling does. `checks` are the checks of ranges in the jaxpr, in order: a call
    with a number out of its range raises. `donated`: per operand, whether kernels may write a result over it; the result is
    then the operand.

    Attributes:
      run: the function; calling the plan is the same, and 0.1 us slower.
    """

    def __init__(
        self,
        jaxpr: jex.ClosedJaxpr,
        name: str,
        options: CompileOptions,
        memory: ArrayMemory,
        checks: Sequence[in_range.Check] = (),
        donated: tuple[bool, ...] = (),
    ):
        donated = donated if any(donated) else ()
        with jax.enable_x64(True), _jax.types_kept(jaxpr):
            self.build: Build = ready(jaxpr, name, options, donated)
        self.jaxpr, self._memory, self._target = jaxpr, memory, options.target
        self._planned = functools.partial(current_plan, jaxpr, name, options, donated)
        self._options = options
        self._redirections: list[direct.Redirection] = []
        plan = self.build.fused
        self._steps: list[Callable[[Values], Values]] = []
        self._constants: Values = []
        self._results: list[tuple[int, bool]] = []
        self._whole = None if self._is_direct(options) else self._by_jax(name, options)
        if self._whole is None:
            self._link(plan)
        self._operands = memory.operands([aval.dtype for aval in jaxpr.in_avals])
        self._result_makers = [memory.result(aval.dtype) for aval in jaxpr.out_avals]
        run = self._one_program() or self._several_steps
        self.run: Callable[[Sequence[Any]], Values] = self._checked(run, checks) if checks else run
        _plans.add(self)
        if _jax.is_recorded():
            self.record()

    def __call__(self, arrays: Sequence[Any]) -> Values:
        return self.run(arrays)

    def plan(self) -> Plan:
        """The plan with its kernels."""
        with jax.enable_x64(True):
            return self._planned().fused

    def record(self) -> None:
        """Replaces the plan's programs by programs that record themselves, until `record_no_more`."""
        for redirection in self._redirections:
            redirection.begin()

    def record_no_more(self) -> list[Exception]:
        """Ends recording. Returns the exceptions that compiling recorded programs raised."""
        for redirection in self._redirections:
            redirection.end()
        return [other.error for other in self._redirections if other.error is not None]

    def _recorded(self, name: str) -> Callable[[Any], None]:
        """One of the plan's programs, which records itself, as a function of addresses."""
        with jax.enable_x64(True):
            build = compile_programs(self._planned(), self._options)
            program = recorded_programs(build, self._options)[name]
        return direct.entry(program, self._memory.openmp)

    def report(self) -> Report:
        """Reports what was fused, what was not, at which price, and what XLA keeps."""
        from pbkern.fuse.emit.explain import TOP

        from .report.assemble import report_of  # both import the fuser

        params = {"jaxpr": self.jaxpr, "options": self._options}
        with jax.enable_x64(True):
            return report_of(self._planned(), params, measure=False, verbose=False, top=TOP)

    def _is_direct(self, options: CompileOptions) -> bool:
        """Whether programs can be called with the arrays' addresses.

        The plan must have the call's types, and complex numbers, for one, are pairs in it. Kernels with checks need JAX."""
        plan = self.build.fused
        inner: list[Any] = [var.aval for var in (*plan.jaxpr.invars, *plan.jaxpr.outvars)]
        outer: list[Any] = [*self.jaxpr.in_avals, *self.jaxpr.out_avals]
        same = [(aval.shape, aval.dtype) for aval in inner] == [
            (aval.shape, aval.dtype) for aval in outer
        ]
        on_cpu, memory = options.target == "cpu", self._memory
        here = memory.openmp is not None if on_cpu else memory.device is not None
        return (
            here
            and same
            and plan.whole is None
            and not any(can_fail(kernel) for kernel in plan.kernels())
        )

    def _several_steps(self, arrays: Sequence[Any]) -> Values:
        values = self._operands(arrays)
        if self._whole is not None:
            return self._whole(values)
        values += self._constants
        for step in self._steps:
            values += step(values)
        copy = self._memory.copy
        results = [values[k] if not copied else copy(values[k]) for k, copied in self._results]
        return [
            array if make is None else make(array)
            for make, array in zip(self._result_makers, results)
        ]

    def _one_program(self) -> Callable[[Sequence[Any]], Values] | None:
        """The function of a plan that is one program with the plan's results, in their order; None for other plans."""
        first = len(self.jaxpr.in_avals) + len(self._constants)
        in_order = [k - first for k, _ in self._results] == list(range(len(self._results)))
        if len(self._steps) != 1 or not in_order or any(copied for _, copied in self._results):
            return None
        (step,), constants, operands = self._steps, self._constants, self._operands
        if any(make is not None for make in self._result_makers):
            makers = cast(list[Callable], self._result_makers)
            return lambda arrays: [
                make(array) for make, array in zip(makers, step(operands(arrays) + constants))
            ]
        if constants:
            return lambda arrays: step(operands(arrays) + constants)
        return lambda arrays: step(operands(arrays))

    def _checked(
        self, run: Callable[[Sequence[Any]], Values], checks: Sequence[in_range.Check]
    ) -> Callable[[Sequence[Any]], Values]:
        """`run`, which then raises where a number was out of its range.

        Programs count such numbers for the whole process, which costs nothing. Only a call that sees the count change
        compares its arguments with the ranges.
        """
        counted, ranges = reports(), in_range.Ranges(self.jaxpr, checks)
        to_jax, operands = self._memory.to_jax, self._operands

        def checked(arrays: Sequence[Any]) -> Values:
            before = counted.value, in_range.reported_by_xla()
            outputs = run(arrays)
            if (counted.value, in_range.reported_by_xla()) != before:
                with jax.enable_x64(True):
                    ranges.check([to_jax(operand) for operand in operands(arrays)])
            return outputs

        return checked

    def _link(self, plan: Plan) -> None:
        """Gives every value of the plan its place in the list that a call fills."""
        inputs = list(plan.jaxpr.invars)
        constants = [
            (var, self._constant(const, var.aval))
            for var, const in zip(plan.jaxpr.constvars, plan.consts)
        ]
        outputs = plan.jaxpr.outvars
        literals = [
            (k, self._constant(literal(atom), atom.aval))
            for k, atom in enumerate(outputs)
            if isinstance(atom, jex.Literal)
        ]
        places: dict[Any, int] = {
            var: k for k, var in enumerate([*inputs, *(var for var, _ in constants + literals)])
        }
        self._constants = [const for _, const in constants + literals]
        seen, filled = set(places.values()), len(places)
        for segment in plan.segments:
            reads = [places[read] for read in segment.reads]
            program = self._program if self._target == "cpu" else self._launches
            self._steps.append(
                program(segment, reads) if segment.is_ours else self._xla_step(segment, reads)
            )
            places |= {make: filled + k for k, make in enumerate(segment.makes)}
            filled += len(segment.makes)
        for k, output in enumerate(outputs):
            place = places[k if isinstance(output, jex.Literal) else output]
            self._results.append((place, place in seen))  # inputs, constants and repeats are copied
            seen.add(place)

    def _program(self, segment: Segment, reads: list[int]) -> Callable[[Values], Values]:
        compiled, memory = self.build.compiled[segment.program.name], self._memory
        call = direct.entry(compiled, memory.openmp)
        recorded = functools.partial(self._recorded, segment.program.name)
        self._redirections.append(direct.Redirection(call, recorded))
        outputs = compiled.signature.outputs
        makers = [memory.empty(output.shape, output.dtype) for output in outputs]
        addresses = struct.Struct(f"{len(reads) + len(outputs)}P").pack
        large = [
            (k, output.nbytes) for k, output in enumerate(outputs) if output.nbytes >= HUGE_BYTES
        ]
        address, before = memory.address, memory.before_call
        taken = {result: operand for operand, result in compiled.signature.shared}
        if taken:
            large = [(k, nbytes) for k, nbytes in large if k not in taken]

        def fresh(values: Values) -> Values:
            return [make() for make in makers]

        def over_operands(values: Values) -> Values:
            """Results in the memory of donated operands; the program copies those that begin within a cache line."""
            outputs = []
            for k, make in enumerate(makers):
                operand = values[reads[taken[k]]] if k in taken else None
                usable = operand is not None and not address(operand) % LINE_BYTES
                outputs.append(operand if usable else make())
            return outputs

        make_outputs = over_operands if taken else fresh

        def step(values: Values) -> Values:
            if before is not None:
                before()
            outputs = make_outputs(values)
            for k, nbytes in large:
                direct.ask_for_huge_pages(address(outputs[k]), nbytes)
            call(
                addresses(
                    *[address(values[read]) for read in reads],
                    *[address(array) for array in outputs],
                )
            )
            return outputs

        return step

    def _launches(self, segment: Segment, reads: list[int]) -> Callable[[Values], Values]:
        """A step that runs a program on a GPU, on the stream of the calling thread, so that arrays are freed after it."""
        compiled, memory = self.build.compiled[segment.program.name], self._memory
        target: Any = get_target(self._target)
        call, temporaries = target.direct_entry(compiled)
        multiples = [target.alignment(operand.nbytes) for operand in compiled.signature.inputs]
        outputs = [(output.shape, output.dtype) for output in compiled.signature.outputs]
        makers = [memory.empty(*output) for output in outputs]
        arena = memory.empty((max(temporaries, 1),), np.dtype(np.uint8))
        addresses = struct.Struct(f"{max(len(reads) + len(outputs), 1)}P").pack
        address, device = memory.address, memory.device
        assert device is not None

        def step(values: Values) -> Values:
            with device.entered():
                outputs, held = [make() for make in makers], arena()
                read = [
                    value if not address(value) % multiple else memory.copy(value)
                    for value, multiple in zip((values[place] for place in reads), multiples)
                ]
                call(addresses(*map(address, (*read, *outputs))), address(held), device.stream())
            return outputs

        return step

    def _by_jax(self, name: str, options: CompileOptions) -> Callable[[Values], Values]:
        """A step that runs the whole jaxpr through JAX."""
        jaxpr = self.jaxpr

        def whole(*arrays: jax.Array) -> list[jax.Array]:
            return jex.jaxpr_as_fun(jaxpr)(*arrays)

        whole.__name__ = name
        return self._on_jax(JitFunction(whole, options, {}))

    def _xla_step(self, segment: Segment, reads: list[int]) -> Callable[[Values], Values]:
        call = self._on_jax(jax.jit(jex.jaxpr_as_fun(segment.body)))
        return lambda values: call([values[read] for read in reads])

    def _on_jax(self, call: Callable) -> Callable[[Values], Values]:
        """A function of JAX's arrays on the framework's."""
        to_jax, from_jax = self._memory.to_jax, self._memory.from_jax

        def run(values: Values) -> Values:
            with jax.enable_x64(True):
                return [
                    from_jax(array) for array in jax.block_until_ready(call(*map(to_jax, values)))
                ]

        return run

    def _constant(self, value: Any, aval: Any) -> Any:
        return self._memory.constant(
            np.array(np.broadcast_to(np.asarray(value, aval.dtype), aval.shape), order="C")
        )
