"""A planned function, or a kernel -> Function: the arrays of its C interface, and the one program that works on them.

Inputs come in the user's order, then outputs. Results that are arguments, constants or repeats are
copies behind the program; arguments that nothing reads keep their place. Arrays that the function
takes from its scope are constants of the library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.api.pipeline import Build, build_kernel, current_plan
from pbkern.core.errors import OptionError, UnsupportedOp
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import equations
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import CompileOptions
from pbkern.dsl import checks
from pbkern.dsl.build_programs import repeated
from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.kernel import ArrayType, Kernel

from .empty_arrays import computed_now
from .interface.arguments import Argument
from .interface.names import distinct

# Bytes of arrays in a library, which LLVM reads as text: 64 MB take 5 s and 1 GB of memory, 256 MB
# took 31 s and 3.3 GB. Source: a product with such a matrix, two cores of an AMD EPYC (Zen 4), 26
# November 2026.
CONSTANT_BYTES = 64 << 20
PRINTS = ("debug_callback", "debug_print")


@dataclass(frozen=True)
class ArraySource:
    """Place of an array: number `n` of the inputs ("input"), of the outputs, of the constants or of the weights."""

    kind: str
    n: int


@dataclass(frozen=True)
class LibraryFunction:
    """The computation of a library.

    Attributes:
      name: in Python.
      inputs, outputs: the arrays of its C function, in order.
      constants: arrays that the library holds.
      program: None if there is nothing to compute.
      buffers: where each input, then each output of the program is.
      copies: (output, what it becomes a copy of) behind the program.
      shared: (input, output) pairs that may be one array: what is donated.
      build: the plan, and texts of its stages.
      weights: arrays of a file, or inputs that became constants.
    """

    name: str
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    constants: tuple[np.ndarray, ...]
    program: HostProgram | None
    buffers: tuple[ArraySource, ...]
    copies: tuple[tuple[int, ArraySource], ...]
    shared: tuple[tuple[int, int], ...]
    build: Build
    weights: tuple[Argument, ...] = ()

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return (*self.inputs, *self.outputs)


class _Values:
    """Places of values of a plan's jaxpr; constants are numbered as they are asked for."""

    def __init__(self, plan, held: Sequence):
        self.inputs = {var: n for n, var in enumerate(plan.jaxpr.invars[len(held) :])}
        known = zip((*plan.jaxpr.constvars, *plan.jaxpr.invars[: len(held)]), (*plan.consts, *held))
        self.known = {var: words(x, var.aval) for var, x in known}
        self.outputs: dict = {}
        self.constants: list[np.ndarray] = []
        self.numbers: dict = {}

    def source(self, atom) -> ArraySource:
        if isinstance(atom, jex.Literal):
            return self._constant(np.asarray(atom.val, array_aval(atom).dtype))
        if atom in self.inputs:
            return ArraySource("input", self.inputs[atom])
        if atom in self.outputs:
            return ArraySource("output", self.outputs[atom])
        if atom not in self.numbers:
            self.numbers[atom] = self._constant(self.known[atom])
        return self.numbers[atom]

    def _constant(self, x: np.ndarray) -> ArraySource:
        self.constants.append(x)
        return ArraySource("constant", len(self.constants) - 1)


def words(x, aval) -> np.ndarray:
    """A value of the function's scope as NumPy's; of PRNG keys, their words."""
    is_key = hasattr(x, "dtype") and not isinstance(x.dtype, np.dtype)
    return np.asarray(jax.random.key_data(x)) if is_key else np.asarray(x, aval.dtype)


def function_of(
    closed: jex.ClosedJaxpr,
    name: str,
    options: CompileOptions,
    in_paths: Sequence[str],
    out_paths: Sequence[str],
    held: Sequence = (),
    donated: Sequence[bool] = (),
) -> LibraryFunction:
    """The function of a jaxpr.

    Args:
      closed: without constants of its own; its first operands are `held`.
      name: the name of the C function.
      options: what it is compiled with.
      in_paths: names of its further operands.
      out_paths: names of its results.
      held: arrays of the function's scope.
      donated: a flag per operand.
    Raises UnsupportedOp for what is left to XLA, and for checks and prints; OptionError for
    constants that are too large.
    """
    build = current_plan(
        computed_now(closed), name, options, tuple(donated) or (False,) * len(closed.in_avals)
    )
    plan = build.fused
    _refuse_leftovers(plan)
    for kernel in plan.kernels():
        _refuse_effects(kernel)
    values, written = (
        _Values(plan, held),
        [make for segment in plan.segments for make in segment.makes],
    )
    results = list(plan.jaxpr.outvars)
    for k, result in enumerate(results):
        if not isinstance(result, jex.Literal) and result in written:
            values.outputs.setdefault(result, k)
    read = [var for segment in plan.segments for var in segment.reads]
    buffers = tuple(map(values.source, (*read, *written)))
    copies = tuple(
        (k, values.source(atom))
        for k, atom in enumerate(results)
        if isinstance(atom, jex.Literal) or values.source(atom) != ArraySource("output", k)
    )
    _refuse_large(values.constants, name)
    (program,) = plan.programs() or (None,)
    used = {
        source.n
        for source in (*buffers, *(copied for _, copied in copies))
        if source.kind == "input"
    }
    arguments = _arguments(
        (*in_paths, *out_paths), [_type_of(atom) for atom in (*values.inputs, *results)]
    )
    inputs = tuple(
        dataclasses.replace(argument, is_used=n in used, number=n)
        for n, argument in enumerate(arguments[: len(in_paths)])
    )
    return LibraryFunction(
        name,
        inputs,
        arguments[len(in_paths) :],
        tuple(values.constants),
        program and repeated(program, options.num_iters),
        buffers,
        copies,
        _shared(program, buffers) if program else (),
        build,
    )


def _arguments(paths: Sequence[str], types: Sequence[ArrayType]) -> tuple[Argument, ...]:
    return tuple(Argument(n, path, type_) for n, path, type_ in zip(distinct(paths), paths, types))


def _shared(program: HostProgram, buffers: Sequence[ArraySource]) -> tuple[tuple[int, int], ...]:
    """(input, output) pairs of the function that share an array in its program."""
    pairs = [
        (buffers[i], buffers[len(program.inputs) + array])
        for i, array in program.shared_arrays().items()
    ]
    return tuple(
        (input_place.n, output.n) for input_place, output in pairs if input_place.kind == "input"
    )


def function_of_kernel(
    kernel: Kernel, options: CompileOptions, in_paths: Sequence[str]
) -> LibraryFunction:
    """The function of a hand-written kernel."""
    for stage in kernel.stages:
        _refuse_effects(stage)
    build = build_kernel(kernel)
    (program,) = build.programs
    outs = (
        ["out"] if len(kernel.out_types) == 1 else [f"out{n}" for n in range(len(kernel.out_types))]
    )
    given = _arguments((*in_paths, *outs), (*kernel.in_types, *kernel.out_types))
    count = len(kernel.in_types)
    buffers = (
        *(ArraySource("input", n) for n in range(count)),
        *(ArraySource("output", n) for n in range(len(outs))),
    )
    return LibraryFunction(
        kernel.name,
        given[:count],
        given[count:],
        (),
        repeated(program, options.num_iters),
        buffers,
        (),
        kernel.shared,
        build,
    )


def _type_of(atom) -> ArrayType:
    aval = array_aval(atom)
    if not all(isinstance(size, int) for size in aval.shape):
        raise UnsupportedOp(
            "a library is made for fixed sizes", why=f"one array is {aval.str_short()}"
        )
    return ArrayType(tuple(aval.shape), np.dtype(aval.dtype))


def _refuse_leftovers(plan) -> None:
    left = plan.left_to_xla()
    if left:
        ops = "; ".join(f"{x.op} at {x.at or 'an unknown line'} ({x.why})" for x in left)
        raise UnsupportedOp(
            f"`{plan.name}` cannot become a library: {len(left)} operation(s) need XLA",
            at=left[0].at,
            why=ops,
            hint="rewrite these operations, or compute them outside the function and pass their results",
        )


def _refuse_effects(kernel: Kernel) -> None:
    """Checks and prints call Python, which a library does without."""
    if checks.can_fail(kernel):
        raise UnsupportedOp(
            f"kernel `{kernel.name}` cannot become part of a library: it has checks",
            at=kernel.defined_at or None,
            why="a failed check raises an error in Python",
            hint="leave the checks out, or return what they test as a result",
        )
    for eqn in equations(kernel.body.jaxpr):
        if eqn.primitive.name in PRINTS:
            raise UnsupportedOp(
                f"kernel `{kernel.name}` cannot become part of a library: it prints",
                at=_jax.user_line(eqn),
                why="what jax.debug.print shows is printed by Python",
                hint="return the values as a result",
            )


def _refuse_large(constants: Sequence[np.ndarray], name: str) -> None:
    total = sum(constant.nbytes for constant in constants)
    if total > CONSTANT_BYTES:
        largest = max(constants, key=lambda constant: constant.nbytes)
        raise OptionError(
            f"`{name}` takes {total >> 20} MB of arrays from its scope; a library holds {CONSTANT_BYTES >> 20} at most",
            why=f"the largest is {largest.dtype}{list(largest.shape)}",
            hint="pass it as an argument",
        )
