"""Interface of a target between a Kernel's nests and machine code.

    Kernel --lower.kernel_nests(kernel, build_options)--> KernelNests --SHARED_PASSES, the target's own--> KernelNests
           --emit--> DeviceFunction; HostProgram, DeviceFunctions --emit_host--> HostFunction

What every target calls is in `lower/`: kernel_nests.py makes the nests and interprets them,
passes/shared.py begins to improve them, nest/scratch.py places scratch, mlir/ and math/ write
values and functions as MLIR. A target may give functions of its own by a MathTable
(lower/mlir/math_table.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pbkern._jax import user_line
from pbkern.core.passes import Pass
from pbkern.core.process import fallback
from pbkern.dsl.build_programs import in_stages
from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.text import repro
from pbkern.lower.build_options import BuildOptions
from pbkern.lower.kernel_nests import KernelNests, kernel_nests
from pbkern.lower.passes.shared import SHARED_PASSES


class DeviceFunction(Protocol):
    """One kernel's code, and what its launch needs to know, as the target's own attributes.

    Attributes:
      name: of the function. text: MLIR. nests: readable, as they were emitted.
      is_shared: whether launches of equal kernels may use it: those with numbers of print sites are
        not.
    """

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def nests(self) -> str: ...
    @property
    def is_shared(self) -> bool: ...


class HostFunction(Protocol):
    """The program around the kernels: buffers, launches, loops, conditionals.

    Attributes:
      host: MLIR. arena_bytes: memory of one call beside operands and results.
    """

    @property
    def host(self) -> str: ...
    @property
    def arena_bytes(self) -> int: ...


Device = TypeVar("Device", bound=DeviceFunction)
EmittedKernel = TypeVar("EmittedKernel", bound=DeviceFunction, covariant=True)
Host = TypeVar("Host", bound=HostFunction, covariant=True)


class KernelBackend(Protocol[EmittedKernel]):
    """One target's half of lowering a kernel.

    Attributes:
      passes: the target's own over nests, after SHARED_PASSES: caches and vectors on CPUs, staging
        and threads on GPUs.
    """

    passes: tuple[Pass, ...]

    def build_options(
        self, kernel: Kernel, options: Any, program: HostProgram | None = None
    ) -> BuildOptions:
        """Options of lowering that follow from the kernel's CompilerParams for this target, compile options and the device.

        `program`: where it is launched, if that is known.
        """

    def emit(self, nests: KernelNests, name: str) -> EmittedKernel:
        """The function of nests that have gone through all passes.

        Raises ScheduleError where CompilerParams ask for what the device does not have.
        """


class ProgramBackend(KernelBackend[Device], Protocol[Device, Host]):
    """A target whose kernels and host code are one text."""

    def emit_host(self, program: HostProgram, kernels: Mapping[int, Device]) -> Host:
        """The host's function; `kernels` by id of a launch's kernel."""


def device_function(
    kernel: Kernel,
    options: BuildOptions,
    passes: Sequence[Pass],
    emit: Callable[[KernelNests, str], Device],
    name: str,
) -> Device:
    """A kernel's function; where a pass or the emission fails, what is made without it, at last plain code.

    Raises what lowering raises where even that fails, and for errors that core/process/fallback.py does not
    catch.
    """
    used = [*SHARED_PASSES, *passes]
    while True:
        try:
            nests = kernel_nests(kernel, options).after(used)
            fallback.enter("plain emission" if options.plain else "emission")
            return emit(nests, name)
        except fallback.PassFailed as e:
            cause = e.__cause__
            assert isinstance(cause, Exception)
            _warn(kernel, f"the pass `{e.name}`", cause, "the kernel is compiled without it")
            used = [candidate for candidate in used if candidate.name != e.name]
        except Exception as e:
            if options.plain or not fallback.catches(e):
                raise
            _warn(kernel, "emission", e, "the kernel is compiled as plain code, in scalar loops")
            options, used = dataclasses.replace(options, plain=True), []


def _warn(kernel: Kernel, what: str, error: Exception, instead: str) -> None:
    if not isinstance(error, fallback.Declined):
        repro.attach(error, kernel)
    lines = (user_line(eqn) for eqn in kernel.body.jaxpr.eqns)
    fallback.warn(
        f"{what} failed on kernel `{kernel.name}`",
        error,
        instead,
        kernel.defined_at or next((at for at in lines if at), None),
    )


def device_functions(
    program: HostProgram,
    options_of: Callable[[Kernel], BuildOptions],
    passes: Sequence[Pass],
    emit: Callable[[KernelNests, str], Device],
    ready: Callable[[Device], None] = lambda function: None,
) -> dict[int, Device]:
    """id of a kernel -> its function. Equal kernels, those of equal layers for example, are lowered once.

    `ready` is called with each function before the next is made. Raises what lowering raises, with
    a file that repeats it.
    """
    functions: dict[int, Device] = {}
    shared: dict[tuple, Device] = {}
    for n, kernel in enumerate(program.kernels()):
        options = options_of(kernel)
        function = shared.get((kernel.content, options))
        if function is None:
            try:
                function = device_function(kernel, options, passes, emit, f"k{n}_{kernel.symbol}")
            except Exception as e:
                repro.attach(e, kernel)
                raise
            ready(function)
            if function.is_shared:
                shared[kernel.content, options] = function
        functions[id(kernel)] = function
    return functions


def lowered(program: HostProgram, backend: ProgramBackend[Any, Host], options: Any) -> Host:
    """A whole program, kernels and host.

    Raises UnsupportedOp where a kernel body cannot be lowered.
    """
    program = in_stages(program)
    kernels = device_functions(
        program,
        lambda kernel: backend.build_options(kernel, options, program),
        backend.passes,
        backend.emit,
    )
    return backend.emit_host(program, kernels)
