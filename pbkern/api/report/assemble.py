"""Build -> Report: the fuser's explanation with hand-written kernels, instructions, measured times and code."""

from __future__ import annotations

import dataclasses
from typing import Any

from pbkern import _jax
from pbkern.api import plan_store
from pbkern.api.measured.measure import kernel_seconds
from pbkern.api.pipeline import Build
from pbkern.core.errors import TargetError
from pbkern.core.machine import Machine
from pbkern.core.options import CompileOptions
from pbkern.dsl.build_programs import kernel_program
from pbkern.dsl.kernel import Kernel
from pbkern.targets import get_target
from pbkern.targets.target import Target

from . import written
from .report import Report


def report_of(
    build: Build, params: dict[str, Any], measure: bool, verbose: bool, top: int
) -> Report:
    """The report of a planned function.

    Args:
      build: its plan.
      params: of the call that was planned.
      measure: runs each fused kernel alone.
      verbose: lists all in the text.
      top: most kernels and refusals that it lists otherwise.
    """
    options = params["options"]
    target = get_target(options.target, options.device)
    machine = target.costs(options.device)
    assert isinstance(machine, Machine)
    native = _jax.has_cpu_lowering("pallas_call")
    explanation = dataclasses.replace(
        written.explained(build.fused.explanation, build.fused.jaxpr, target.name, native),
        verbose=verbose,
        top=top,
        planned_anew=plan_store.reason_against(params["jaxpr"]),
        machine_note=machine.note,
    )
    reported = {kernel.name for kernel in explanation.kernels}
    kernels = {kernel.name: kernel for kernel in build.fused.kernels() if kernel.name in reported}
    explanation = explanation.with_instructions(
        {name: target.product_instructions(kernel, options) for name, kernel in kernels.items()}
    )
    if measure:
        times = {name: kernel_seconds(kernel, options) for name, kernel in kernels.items()}
        explanation = explanation.with_times(times)
    code = CodeOfKernels(kernels, target, options)
    return Report.of(
        explanation, target=target.name, machine=machine, stages=code.stages, code=code
    )


class CodeOfKernels:
    """Code of kernels, each compiled alone when somebody asks for it.

    Attributes:
      stages: "kernels", their source, and those of the target's that a reader needs.
    """

    def __init__(self, kernels: dict[str, Kernel], target: Target, options: CompileOptions):
        self.kernels, self.target, self.options = kernels, target, options
        self.compiled: dict[str, Any] = {}
        machine_code = next(stage for stage in ("asm", "ptx") if stage in target.STAGES)
        self.stages = ("kernels", "nests", "mlir", machine_code)

    def __call__(self, name: str, stage: str) -> str:
        """A kernel's text after a stage; where a tool of the stage is missing, the text says so."""
        if stage == "kernels":
            return self.kernels[name].source()
        try:
            return self.target.text(self._compiled(name), stage)
        except TargetError as e:
            return str(e)

    def _compiled(self, name: str) -> Any:
        if name not in self.compiled:
            program = kernel_program(self.kernels[name])
            self.compiled[name] = self.target.compile(program, self.options)
        return self.compiled[name]
