"""Texts of functions and kernels for a machine by name, whichever processor the tests run on. Nothing is compiled or run.

What a schedule does with a function depends on vector width and caches. Tests that look at such choices look at those for
`TABLE`, the machine of the tables in the documents; numbers are checked on the processor at hand.
"""

import contextlib
import dataclasses
from unittest import mock

import pbkern
from pbkern.core.machine import DEFAULT_MACHINE, Machine
from pbkern.core.process import recursion
from pbkern.dsl.build_programs import kernel_program
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.trace import KernelFunction
from pbkern.targets import backend, get_target
from pbkern.targets.cpu.machines.machine import CpuMachine

TABLE = DEFAULT_MACHINE  # AVX-512, two cores


@contextlib.contextmanager
def on(machine=TABLE):
    """Plans are made, and kernels lowered, for this machine, with all its instruction sets. Do not run what comes out."""
    cpu, wide = "pbkern.targets.cpu", machine.vector_bits >= 512
    figures = {f.name: getattr(machine, f.name) for f in dataclasses.fields(Machine)}
    whole = CpuMachine(**figures, avx512=wide, bf16_pairs=wide, vnni=wide)
    with contextlib.ExitStack() as stack:
        for module in ("target", "backend"):
            stack.enter_context(mock.patch(f"{cpu}.{module}.jit_machine", return_value=whole))
        yield


def programs_of(f, *args) -> list:
    """HostPrograms of a kernel, of a decorated function, or of a plain one, on arguments like these."""
    if isinstance(f, Kernel):
        return [kernel_program(f)]
    if isinstance(f, KernelFunction):
        return [kernel_program(f.trace(*args))]
    build, _ = (f if hasattr(f, "build") else pbkern.jit(f)).build(args, {})
    return build.plan.programs()


def lowered(f, *args, stage: str = "nests", machine=TABLE) -> str:
    """`nests`, `schedule` or `mlir` of a function for this machine."""
    options = pbkern.CompileOptions()
    with on(machine), recursion.headroom():
        found = [
            backend.lowered(p, get_target("cpu").backend, options) for p in programs_of(f, *args)
        ]
    if stage == "mlir":
        return "\n".join(f"{program.kernels}\n{program.host}" for program in found)
    return "\n\n".join(
        f"{k.name}:\n{getattr(k, stage)}" for program in found for k in program.lowered
    )
