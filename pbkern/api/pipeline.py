"""Decorated function -> compiled program: the whole pipeline on one screen.

    function --trace--> pbkern_call(jaxpr) --fuse.plan--> Plan --target.compile--> code

`build_plan` and `compile_programs` are that line; the lowering rule of `pbkern_call` runs them while jax.jit compiles,
and what decorated functions show of themselves (api/decorators.py) on request. Tracing and transformations are
frontends/jax/call.py; what XLA keeps is the fuser's decision.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core as jex
from jax.interpreters import mlir

from pbkern import _jax, fuse
from pbkern.core import config
from pbkern.core.errors import OptionError, TargetError
from pbkern.core.jaxprs import equations
from pbkern.core.options import CompileOptions
from pbkern.core.process import gc_pause, progress
from pbkern.dsl import checks
from pbkern.dsl.build_programs import kernel_program, repeated
from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.trace import kernel_p
from pbkern.dsl.verify import verify
from pbkern.frontends.jax import call
from pbkern.targets import get_target

from . import stages, tuned_choices

# --- the pipeline ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Build:
    """Programs on their way to machine code: of a fused function, or of one hand-written kernel (plan None).

    `compiled`, by program name, is filled by `compile_programs`.
    """

    programs: tuple[HostProgram, ...]
    record: stages.Record
    plan: fuse.Plan | None = None
    compiled: dict[str, Any] = field(default_factory=dict)

    @property
    def fused(self) -> fuse.Plan:
        """The plan of a fused function."""
        assert self.plan is not None, self.record.name
        return self.plan

    def groups(self) -> list:
        """The fused kernels' groups, in the order of their choices."""
        return fuse.groups_of(self.plan.nodes) if self.plan else []


@_jax.cached_by_jaxpr
def build_plan(
    jaxpr: jex.ClosedJaxpr, name: str, options: CompileOptions, _settings: config.Config,
    choices: tuple[fuse.Choice, ...] = (), donated: tuple[bool, ...] = (),
) -> Build:  # fmt: skip
    """Fuses a jaxpr for its target. `choices`: what tuning found for it (api/tuned_choices.py); `donated`: operands given
    up."""
    target, record = get_target(options.target), stages.Record(name)

    def verified(plan: fuse.Plan) -> None:
        for kernel in plan.kernels():
            verify(kernel)

    def fused() -> fuse.Plan:
        check_precision(jaxpr, options.mm_conv_precision_mode)
        return fuse.plan(
            jaxpr, name=name, options=options, machine=target.costs(), supports=target.supports,
            params_for=lambda semantics, **chosen: target.fused_params(semantics, options, **chosen), choices=choices,
            donated=donated,
        )  # fmt: skip

    with gc_pause.paused():
        plan = record.run("plan", fused, verify=verified)
    record.texts["jaxpr"], record.again["jaxpr"] = lambda: str(plan.jaxpr), fused
    record.texts["plan"] = lambda: "\n".join(map(str, (plan.explanation, *plan.programs())))
    record.show_kernels(plan.kernels())
    return Build(tuple(plan.programs()), record, plan)


def current_plan(jaxpr: jex.ClosedJaxpr, name: str, options: CompileOptions, donated: tuple[bool, ...] = ()) -> Build:
    """The plan under the present configuration and what tuning has found for this program."""
    return build_plan(jaxpr, name, options, config.current(), tuned_choices.choices_for(jaxpr, options), donated)


def build_kernel(kernel: Kernel) -> Build:
    """A hand-written kernel as a program of one launch."""
    program, record = kernel_program(kernel), stages.Record(kernel.name)
    record.texts["plan"] = lambda: str(program)
    record.show_kernels([kernel])
    return Build((program,), record)


def compile_programs(build: Build, options: CompileOptions) -> Build:
    """Compiles the programs of a build, once; reports and dumps as options and environment say."""
    target, record = get_target(options.target), build.record
    if target.STAGES[0] in record.texts:
        return build
    for program in build.programs:
        compiled = record.run(f"compile {program.name}", target.compile, repeated(program, options.num_iters), options)
        build.compiled[program.name] = compiled
        record.milliseconds |= {f"  {stage} of {program.name}": ms for stage, ms in compiled.times.items()}
    for stage in target.STAGES:
        # Programs that are alike share their code.
        record.texts[stage] = lambda s=stage: "\n".join(target.text(c, s) for c in dict.fromkeys(build.compiled.values()))
    record.again["nests"] = lambda: [target.lower_again(c) for c in dict.fromkeys(build.compiled.values())]
    if options.debug:
        stages.report(record)
    if config.current().dump is not None:
        stages.dump(record, config.current().dump)
    return build


def check_precision(jaxpr: jex.ClosedJaxpr, mode: str | None) -> None:
    """Raises OptionError where an integer mode meets a contraction of floats."""
    if mode not in ("int32", "mixed_int8_int32"):
        return
    for eqn in equations(jaxpr.jaxpr):
        if eqn.primitive.name in ("dot_general", "conv_general_dilated") and eqn.invars[0].aval.dtype.kind not in "iu":
            raise OptionError(
                f"mm_conv_precision_mode {mode!r} takes integer operands", at=_jax.user_line(eqn),
                why=f"{eqn.primitive.name} of {' and '.join(a.aval.str_short() for a in eqn.invars)}",
                hint="convert the operands to integers in the function, or choose a float mode",
            )  # fmt: skip


# --- lowering rules -------------------------------------------------------------------------------------------------


def _lower_call(ctx, *operands, jaxpr, name, options, donated):
    platforms = ctx.platforms or ctx.module_context.platforms

    def traced(*args):
        if _jax.is_for_export(ctx):
            return jex.jaxpr_as_fun(jaxpr)(*args)
        target = get_target(options.target)

        def run(program: HostProgram, operands) -> list:
            return checks.after(program.kernels(), target.call(build.compiled[program.name], *operands))

        if tuple(platforms) != (target.platform,):
            raise TargetError(
                f"`{name}` is compiled for target `{target.name}` but its arguments are on {', '.join(platforms)}",
                why="compiled kernels run where their target is",
                hint=f"jax.device_put(x, jax.devices('{target.platform}')[0]), or jax.jit for other devices",
            )  # fmt: skip
        warn_of_gathering(name, _jax.partitioned_over(ctx))
        with _jax.untyped_manual_axes():
            with progress.compiling(name), gc_pause.paused():
                build = compile_programs(current_plan(jaxpr, name, options, donated), options)
            return build.plan.evaluate(args, run)

    return mlir.lower_fun(traced, multiple_results=True)(ctx, *operands)


def warn_of_gathering(name: str, devices: int) -> None:
    """XLA cannot divide a compiled program: it gathers sharded operands on every device."""
    if devices > 1:
        warnings.warn(
            f"`{name}` runs whole on each of {devices} devices, on gathered operands; "
            "jax.shard_map divides the work: each device then compiles its own part",
            stacklevel=2,
        )


def _lower_kernel(ctx, *operands, kernel: Kernel):
    if _jax.is_for_export(ctx):
        raise TargetError(
            f"kernel `{kernel.name}` cannot be exported", at=kernel.defined_at or None,
            why="its machine code belongs to this process, and it has no equations that XLA could run instead",
            hint="export a function without hand-written kernels",
        )  # fmt: skip

    def traced(*args):
        with _jax.untyped_manual_axes():
            (compiled,) = compile_programs(build_kernel(kernel), CompileOptions()).compiled.values()
            return checks.after([kernel], get_target("cpu").call(compiled, *args))

    return mlir.lower_fun(traced, multiple_results=True)(ctx, *operands)


mlir.register_lowering(call.call_p, _lower_call)
mlir.register_lowering(kernel_p, _lower_kernel, platform="cpu")
