"""The NVIDIA GPU target: HostProgram -> PTX of its kernels, and what this code says of itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pbkern.core import config
from pbkern.core.machine import Machine
from pbkern.core.options import CompileOptions
from pbkern.dsl.build_programs import in_stages
from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.primitives.breakpoint import breakpoint_p
from pbkern.lower.rules import coverage as support
from pbkern.targets.backend import device_functions

from . import driver, machine, ptxas
from .backend import NvgpuBackend
from .launched_call import launched_call
from .params import CompilerParams
from .program import Code, Compiled

if TYPE_CHECKING:
    from pbkern.fuse.cost.model import CostModel

PRINTS = ("debug_callback", "debug_print")


class NvgpuTarget:
    """See targets.target.Target."""

    name = "nvgpu"
    STAGES = ("nests", "mlir", "llvm", "ptx", "sass")
    POOLED_BYTES = 1 << 62  # results lie where XLA puts them

    def __init__(self) -> None:
        self.backend = NvgpuBackend()
        self._codes: dict[tuple, Code] = {}

    @property
    def platform(self) -> str:
        """JAX's platform of the arrays that programs run on: the CPU's, if launches are simulated."""
        return "cpu" if config.current().gpu_driver == "simulator" else "cuda"

    def machine(self) -> Machine:
        return machine.machine(self.backend.kind)

    def costs(self) -> CostModel:
        """The CPU's formulas with this device's figures: a multiprocessor in place of a core, shared memory of its L2."""
        from pbkern.targets.cpu.costs.model import CpuCosts  # imports the fuser, which `import pbkern` does not need

        return CpuCosts.of(self.machine())

    def lower_again(self, compiled: Compiled) -> Any:
        options = CompileOptions(target=self.name)
        return device_functions(compiled.program, lambda k: self.backend.build_options(k, options, compiled.program),
                                self.backend.passes, self.backend.emit)

    def supports(self, eqn) -> str | None:
        if eqn.primitive is breakpoint_p or eqn.primitive.name in PRINTS:
            return "a GPU cannot call the host process"
        return support.supports(eqn)

    def fused_params(self, semantics: tuple[str, ...], options, **chosen: Any) -> Mapping[str, Any]:
        return {self.name: CompilerParams(dimension_semantics=semantics, **chosen)}

    def variations(self) -> list[tuple[str, list]]:
        return [("num_warps", [2, 8])]

    def identity(self) -> str:
        return f"nvgpu {self.backend.kind.architecture}"

    def compile(self, program: HostProgram, options) -> Compiled:
        """Raises UnsupportedOp, ScheduleError or InternalError."""
        program, start = in_stages(program), time.perf_counter()
        backend = NvgpuBackend(options.device)
        functions = device_functions(program, lambda k: backend.build_options(k, options, program), backend.passes,
                                     backend.emit)
        codes = {}
        for k, f in functions.items():
            codes[k] = self._codes.setdefault((f.text, f.threads, backend.kind), Code(f, backend.kind))
        lowered = time.perf_counter()
        compiled = Compiled(program, codes)
        for code in compiled.distinct():
            code.ptx  # noqa: B018
        compiled.times |= {"lower": (lowered - start) * 1e3, "ptx": (time.perf_counter() - lowered) * 1e3}
        return compiled

    def call(self, compiled: Compiled, *operands) -> list:
        """Raises TargetError without a driver."""
        return launched_call(compiled, operands, driver.driver(config.current().gpu_driver))

    def call_into(self, compiled: Compiled, operands, places) -> tuple[list, Any]:
        return self.call(compiled, *operands), None

    def text(self, compiled: Compiled, stage: str) -> str:
        codes = compiled.distinct()
        match stage:
            case "nests":
                return "\n\n".join(f"{c.function.name}:\n{c.function.nests}" for c in codes)
            case "mlir":
                return "\n".join(c.function.text for c in codes)
            case "llvm":
                return "\n".join(c.llvm for c in codes)
            case "ptx":
                return "\n".join(c.ptx for c in codes)
        return "\n".join(ptxas.disassembled(c.assembled.cubin) for c in codes)

    def memory(self, compiled: Compiled) -> tuple[int, int]:
        codes = compiled.distinct()
        scratch = max((c.function.global_bytes * c.function.blocks for c in codes), default=0)
        return scratch, sum(len(c.ptx) for c in codes)

    def coverage(self) -> dict[str, list[str]]:
        return support.coverage()
