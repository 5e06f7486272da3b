"""Kernels that write past the caches, for arrays that start anywhere: a second function without, chosen by the addresses.

Such stores fault unless they are aligned to a cache line, as XLA's arrays are; those of C and NumPy
are aligned to 16 bytes. Kernels gain by them, so both ways are kept
(docs/decisions/039-results-that-start-anywhere.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.kernel import Kernel
from pbkern.lower.nest.scratch import BUFFER_ALIGNMENT
from pbkern.targets.backend import device_function, device_functions
from pbkern.targets.cpu.codegen.kernel import emit
from pbkern.targets.cpu.lower_options import NEVER_BYTES, LowerOptions
from pbkern.targets.cpu.passes import CPU_PASSES
from pbkern.targets.host.kernel_text import FunctionText, LoweredKernel

STORES_PAST_CACHES = "nontemporal = true"


@dataclass(frozen=True)
class Kernels:
    """Functions of a program's kernels.

    Attributes:
      by_id: id of a launch's kernel -> the function that the host calls.
      functions: of all kernels.
      choosing: MLIR of the functions that choose among others.
    """

    by_id: dict[int, LoweredKernel]
    functions: tuple[FunctionText, ...]
    choosing: str


def lowered_kernels(program: HostProgram, options_of: Callable[[Kernel], LowerOptions]) -> Kernels:
    """A program's kernels for results that start anywhere. Raises what lowering raises."""
    lowered = device_functions(program, options_of, CPU_PASSES, emit)
    functions = [
        function
        for lowered in {lowered.name: lowered for lowered in lowered.values()}.values()
        for function in lowered.functions
    ]
    chosen: dict[str, LoweredKernel] = {}
    texts: list[str] = []
    for kernel in program.kernels():
        aligned = lowered[id(kernel)]
        if aligned.name in chosen or STORES_PAST_CACHES not in aligned.text:
            continue
        options = dataclasses.replace(options_of(kernel), stream_bytes=NEVER_BYTES)
        anywhere = device_function(kernel, options, CPU_PASSES, emit, f"{aligned.name}_anywhere")
        functions += anywhere.functions
        name = f"{aligned.name}_either"
        texts.append(_choice(name, aligned, anywhere, len(kernel.inputs)))
        chosen[aligned.name] = dataclasses.replace(
            aligned, main=dataclasses.replace(aligned.main, name=name)
        )
    return Kernels(
        {i: chosen.get(lowered.name, lowered) for i, lowered in lowered.items()},
        tuple(functions),
        "\n".join(texts),
    )


def _choice(name: str, aligned: LoweredKernel, anywhere: LoweredKernel, inputs: int) -> str:
    """@name: calls the first function if all results start at a cache line, else the second."""
    types = aligned.argument_types
    assert types == anywhere.argument_types
    assert aligned.scratch_bytes >= anywhere.scratch_bytes
    parameters, passed = (
        ", ".join(f"%a{k}: {type_}" for k, type_ in enumerate(types)),
        ", ".join(f"%a{k}" for k in range(len(types))),
    )
    lines = [
        f"func.func private @{function.name}({', '.join(types)})"
        for function in (aligned, anywhere)
    ]
    lines += [f"func.func @{name}({parameters}) {{", "%past = arith.constant 0 : i64"]
    past = "%past"
    for k in range(inputs, aligned.operand_count):
        lines += [
            f"%at{k} = llvm.ptrtoint %a{k} : !llvm.ptr to i64",
            f"%or{k} = arith.ori {past}, %at{k} : i64",
        ]
        past = f"%or{k}"
    call = lambda function: f"func.call @{function.name}({passed}) : ({', '.join(types)}) -> ()"
    lines += [
        f"%mask = arith.constant {BUFFER_ALIGNMENT - 1} : i64",
        "%zero = arith.constant 0 : i64",
        f"%rest = arith.andi {past}, %mask : i64",
        "%is = arith.cmpi eq, %rest, %zero : i64",
        "scf.if %is {",
        call(aligned),
        "} else {",
        call(anywhere),
        "}",
        "return",
        "}",
    ]
    return "\n".join(lines)
