"""Decorated function -> compiled program: the whole pipeline on one screen.

    function --trace--> pbkern_call(jaxpr) --fuse.plan--> Plan --target.compile--> code

`build_plan` and `compile_programs` are that line; the lowering rule of `pbkern_call` runs them
while jax.jit compiles, and what decorated functions show of themselves (api/decorators.py) on
request. Tracing and transformations are frontends/jax/call.py; what XLA keeps is the fuser's
decision.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from dataclasses import field
from typing import Any

import jax
from jax.extend import core as jex
from jax.interpreters import mlir

from pbkern import _jax, fuse
from pbkern.core import config
from pbkern.core.errors import OptionError, TargetError, UnsupportedOp
from pbkern.core.jaxprs.walks import equations, primitive_names
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import CompileOptions
from pbkern.core.process import disk_cache, fallback, gc_pause, progress, recursion
from pbkern.dsl import checks
from pbkern.dsl.body_checks.verify import verify
from pbkern.dsl.build_programs import kernel_program, repeated
from pbkern.dsl.call import kernel_p
from pbkern.dsl.host_program import HostProgram, ProgramSignature
from pbkern.dsl.kernel import Kernel
from pbkern.frontends.jax import call
from pbkern.frontends.pallas.export.call import pallas_function
from pbkern.targets import get_target
from pbkern.targets.target import Target

from . import plan_store, stages
from .measured import tuned_choices

# --- the pipeline
# ---------------------------------------------------------------------------------------------------


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


@_jax.cached_by_jaxpr_alone
def build_plan(
    jaxpr: jex.ClosedJaxpr,
    name: str,
    options: CompileOptions,
    _settings: tuple,
    choices: tuple[fuse.Choice, ...] = (),
    donated: tuple[bool, ...] = (),
) -> Build:
    """Fuses a jaxpr for its target.

    Args:
      jaxpr: the function.
      name: its name.
      options: of the decorator.
      _settings: of pbkern and of JAX, as they are in force.
      choices: what tuning found for it (api/measured/tuned_choices.py).
      donated: operands given up.
    """
    _refuse_symbols(jaxpr, name)
    target, record = get_target(options.target, options.device), stages.Record(name)

    def verified(plan: fuse.Plan) -> None:
        # Kernels of one content and the same parameters, such as those of equal layers, are well-formed together.
        verified_params: dict[tuple, list] = {}
        for kernel in plan.kernels():
            alike = verified_params.setdefault(kernel.content, [])
            if kernel.compiler_params not in alike:
                verify(kernel)
                alike.append(kernel.compiler_params)

    given = weakref.ref(jaxpr)  # the build is kept as long as the jaxpr is: it must not keep it

    def fused() -> fuse.Plan:
        held = given()
        assert held is not None, name
        check_precision(held, options.mm_conv_precision_mode)
        if target.platform == "cpu" and has_native_pallas_calls(held):
            from pbkern.frontends.pallas.in_functions import kernel_call  # imports Pallas
            from pbkern.fuse.simplify.driver import retrace as rewrite_equations  # and the fuser

            rule = functools.partial(kernel_call, target=target.name)
            held = rewrite_equations(held, {"pallas_call": rule})
        return fuse.plan(
            held,
            name=name,
            options=options,
            machine=target.costs(options.device),
            supports=target.supports,
            params_for=lambda semantics, **chosen: target.fused_params(
                semantics, options, **chosen
            ),
            choices=choices,
            donated=donated,
        )

    with gc_pause.paused(), recursion.headroom(), fallback.strictly(options.strict_target):
        try:
            fallback.enter("plan")
            plan = record.run("plan", fused, verify=verified)
        except Exception as e:
            if not fallback.catches(e):
                raise
            fallback.warn(f"planning `{name}` failed", e, "XLA runs all of it")
            plan = fuse.left_whole(jaxpr, name)
    record.texts["jaxpr"], record.again["jaxpr"] = lambda: str(plan.jaxpr), fused
    record.again["partition"] = fused
    record.texts["plan"] = lambda: "\n".join(map(str, (plan.explanation, *plan.programs())))
    record.show_kernels(plan.kernels())
    return Build(tuple(plan.programs()), record, plan)


def _refuse_symbols(jaxpr: jex.ClosedJaxpr, name: str) -> None:
    """Raises UnsupportedOp for arguments whose sizes are symbols of jax.export."""
    for aval in jaxpr.in_avals:
        if any(map(_jax.is_symbolic, getattr(aval, "shape", ()))):
            raise UnsupportedOp(
                f"`{name}` is compiled for sizes that are numbers",
                why=f"an argument is {aval.str_short()}",
                hint="types with numbers; a library takes symbols: pbkern.polyblocks_aot_jax",
            )


def current_plan(
    jaxpr: jex.ClosedJaxpr, name: str, options: CompileOptions, donated: tuple[bool, ...] = ()
) -> Build:
    """The plan under the present configuration and what tuning has found for this program."""
    with _jax.types_kept(jaxpr), _jax.untyped_manual_axes(), _jax.without_mesh():
        return build_plan(
            jaxpr,
            name,
            options,
            (config.current(), _jax.tracing_settings()),
            tuned_choices.choices_for(jaxpr, options),
            donated,
        )


def ready(
    jaxpr: jex.ClosedJaxpr, name: str, options: CompileOptions, donated: tuple[bool, ...] = ()
) -> Build:
    """A function's programs, compiled: those of an earlier process, else planned now and stored."""
    with _jax.types_kept(jaxpr):
        return _ready(jaxpr, name, options, donated)


def _ready(
    jaxpr: jex.ClosedJaxpr, name: str, options: CompileOptions, donated: tuple[bool, ...]
) -> Build:
    choices = tuned_choices.choices_for(jaxpr, options)
    store = None if _jax.is_recorded() else disk_cache.current()  # records need the kernels
    key = plan_store.key(jaxpr, name, options, choices, donated) if store else None
    stored = _stored(jaxpr, name, options, key) if key else None
    if stored is not None:
        return stored
    failures = fallback.failures()
    build = compile_programs(current_plan(jaxpr, name, options, donated), options)
    if store and key and failures == fallback.failures():
        plan_store.put(store, key, build.fused, build.compiled, get_target(options.target))
    return build


@_jax.cached_by_jaxpr_alone
def _stored(jaxpr: jex.ClosedJaxpr, name: str, options: CompileOptions, key: str) -> Build | None:
    """The build that an earlier process has stored."""
    store, target = disk_cache.current(), get_target(options.target, options.device)
    plan = plan_store.get(store, key, name, jaxpr, target) if store else None
    return Build((), stages.Record(name), *plan) if plan is not None else None


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
    for kernel in (kernel for program in build.programs for kernel in program.kernels()):
        _name_unused_params(kernel, target.name)
    for program in build.programs:
        try:
            fallback.enter("machine code")
            compiled = record.run(
                f"compile {program.name}",
                target.compile,
                repeated(program, options.num_iters),
                options,
            )
        except Exception as e:
            if build.plan is None or not _leaves(program, e):
                raise
            fallback.warn(f"compiling `{program.name}` failed", e, "XLA runs its operations")
            build.plan.leave(program)
            continue
        build.compiled[program.name] = compiled
        record.milliseconds |= {
            f"  {stage} of {program.name}": ms for stage, ms in compiled.times.items()
        }
    for stage in target.STAGES:
        record.texts[stage] = functools.partial(_text, target, build, stage)
    record.again["nests"] = lambda: [
        target.lower_again(executable) for executable in dict.fromkeys(build.compiled.values())
    ]
    if options.debug:
        stages.report(record)
    folder = config.current().dump
    if folder is not None:
        stages.dump(record, folder)
    return build


def called_programs(build: Build, options: CompileOptions) -> dict[str, Any]:
    """The programs of a build that calls run, by name: its own, or those that record their calls."""
    return recorded_programs(build, options) if _jax.is_recorded() else build.compiled


def recorded_programs(build: Build, options: CompileOptions) -> dict[str, Any]:
    """Programs like those of a build that record their calls, by name. Raises TargetError."""
    target = get_target(options.target)
    reports = build.fused.explanation.kernels if build.plan and build.plan.explanation else ()
    costs = {report.name: report.cost for report in reports}
    programs = {}
    for program in build.programs:
        if program.name in build.compiled:
            recorded = target.compile(repeated(program, options.num_iters), options, recorded=True)
            recorded.costs.update(costs)
            programs[program.name] = recorded
    return programs


def _name_unused_params(kernel: Kernel, target: str) -> None:
    """Warns of a kernel of the user's that has CompilerParams for other targets alone; Python shows each warning once."""
    if kernel.defined_at and kernel.compiler_params and target not in kernel.compiler_params:
        targets = " and ".join(f"`{name}`" for name in sorted(kernel.compiler_params))
        warnings.warn(
            f"CompilerParams of kernel `{kernel.name}` ({kernel.defined_at}) are for {targets}: it is compiled for `{target}`, "
            "with the defaults of that target",
            stacklevel=2,
        )


def _leaves(program: HostProgram, error: Exception) -> bool:
    """Whether XLA can run a program that failed to compile: no kernel of the user's, and no mistake of theirs."""
    by_hand = any(kernel.defined_at for kernel in program.kernels())
    unsupported = (
        isinstance(error, UnsupportedOp) and config.current().fallback and not fallback.is_strict()
    )
    return not by_hand and (unsupported or fallback.catches(error))


def _text(target: Target, build: Build, stage: str) -> str:
    """Code of a build after a target's stage. Programs that are alike share their code."""
    return "\n".join(
        target.text(compiled, stage) for compiled in dict.fromkeys(build.compiled.values())
    )


def has_native_pallas_calls(jaxpr: jex.ClosedJaxpr) -> bool:
    """Whether a function has Pallas calls, and pbkern.pallas.install() is in force on CPUs."""
    return _jax.has_cpu_lowering("pallas_call") and any(
        eqn.primitive.name == "pallas_call" for eqn in equations(jaxpr.jaxpr)
    )


def check_precision(jaxpr: jex.ClosedJaxpr, mode: str | None) -> None:
    """Raises OptionError where an integer mode meets a contraction of floats."""
    if mode not in ("int32", "mixed_int8_int32"):
        return
    for eqn in equations(jaxpr.jaxpr):
        if (
            eqn.primitive.name in ("dot_general", "conv_general_dilated")
            and eqn.invars[0].aval.dtype.kind not in "iu"
        ):
            raise OptionError(
                f"mm_conv_precision_mode {mode!r} takes integer operands",
                at=_jax.user_line(eqn),
                why=f"{eqn.primitive.name} of {' and '.join(var.aval.str_short() for var in eqn.invars)}",
                hint="convert the operands to integers in the function, or choose a float mode",
            )


# --- lowering rules
# -------------------------------------------------------------------------------------------------


def _lower_call(ctx, *operands, jaxpr, name, options, donated):
    platforms = ctx.platforms or ctx.module_context.platforms

    def traced(*args):
        with _jax.types_kept(jaxpr):
            return call(*args)

    def call(*args):
        if _jax.is_for_export(ctx):
            warn_of_export(name)
            return jex.jaxpr_as_fun(jaxpr)(*args)
        target = get_target(options.target)

        def run(program: HostProgram | ProgramSignature, operands) -> list:
            # What an earlier process has stored checks nothing.
            kernels = program.kernels() if isinstance(program, HostProgram) else ()
            results = target.call(compiled[program.name], program.label, operands)
            return checks.after(kernels, results)

        if tuple(platforms) != (target.platform,):
            raise TargetError(
                f"`{name}` is compiled for target `{target.name}` but its arguments are on {', '.join(platforms)}",
                why="compiled kernels run where their target is",
                hint=elsewhere(target.platform),
            )
        devices = _jax.partitioned_over(ctx)
        if devices > 1:
            leave_to_partitioner(jaxpr, name, devices, options.strict_target)
            return jex.jaxpr_as_fun(jaxpr)(*args)
        with _jax.untyped_manual_axes(), _jax.without_mesh():
            with (
                progress.compiling(name),
                gc_pause.paused(),
                recursion.headroom(),
                fallback.strictly(options.strict_target),
            ):
                build = ready(jaxpr, name, options, donated)
                compiled = called_programs(build, options)
                _jax.keep_with_executable(ctx, list(compiled.values()))
            return build.plan.evaluate(args, run)

    return mlir.lower_fun(traced, multiple_results=True)(ctx, *operands)


def elsewhere(platform: str) -> str:
    """Hint of an error: arguments are not on the platform of their program's target."""
    if _jax.has_devices(platform):
        return f"jax.device_put(x, jax.devices('{platform}')[0]), or jax.jit for other devices"
    if platform == "cuda":
        return (
            "jax finds no CUDA device here: pbkern.simulate(f, *args), or PBKERN_GPU_DRIVER=simulator in the environment, "
            "runs the kernels on arrays of the CPU; f.as_text(*args, stage='ptx') shows their code"
        )
    return (
        f"jax finds no device of platform '{platform}' here: f.as_text(*args, stage='asm') shows the kernels' code; target "
        "'cpu' runs the same function"
    )


def warn_of_export(name: str) -> None:
    """Warns that an export holds operations; whoever loads it compiles them."""
    warnings.warn(
        f"`{name}` is exported without its kernels: machine code of this process cannot leave it. What XLA makes of the same "
        "operations runs where the exported function is called",
        stacklevel=_jax.user_stack_level(),
    )


def leave_to_partitioner(jaxpr: jex.ClosedJaxpr, name: str, devices: int, strict: bool) -> None:
    """Warns, or raises UnsupportedOp where `strict`, that XLA runs a function whose arguments are spread over devices.

    XLA divides operations among devices as the arguments are divided. It cannot divide compiled
    programs: they would run whole on each device, on operands that are gathered there.
    """
    what = f"XLA runs `{name}`, whose arguments are spread over {devices} devices"
    hint = (
        "compile the function inside of jax.shard_map: jax.shard_map(pbkern.jit(f), ...)"
        if "shard_map" in primitive_names(jaxpr)
        else "jax.shard_map divides the work, and each device compiles kernels for its own part"
    )
    if strict:
        raise UnsupportedOp(
            what,
            why="strict_target: kernels are compiled for whole arrays on one device",
            hint=hint,
        )
    warnings.warn(
        f"{what}: kernels are compiled for whole arrays on one device. {hint}",
        stacklevel=_jax.user_stack_level(),
    )


def warn_of_gathering(kernel: Kernel, devices: int) -> None:
    """XLA cannot divide a kernel, which has no operations: it gathers sharded operands on every device."""
    if devices > 1:
        operands = ", ".join(map(str, kernel.in_types))
        warnings.warn(
            f"kernel `{kernel.name}` runs whole on each of {devices} devices, where its operands are gathered: {operands} "
            f"({sum(type_.nbytes for type_ in kernel.in_types)} bytes). jax.shard_map divides the work, and each device "
            "runs it on its own part",
            stacklevel=_jax.user_stack_level(),
        )


def _lower_kernel(ctx, *operands, kernel: Kernel, target: str):
    if _jax.is_for_export(ctx):
        return _exported_kernel(ctx, *operands, kernel=kernel)
    warn_of_gathering(kernel, _jax.partitioned_over(ctx))

    def traced(*args):
        with _jax.untyped_manual_axes(), jax.enable_x64(True):  # all types are explicit
            options = CompileOptions(target=target)
            build = compile_programs(build_kernel(kernel), options)
            (compiled,) = called_programs(build, options).values()
            _jax.keep_with_executable(ctx, compiled)
            return checks.after([kernel], get_target(target).call(compiled, kernel.name, args))

    return mlir.lower_fun(traced, multiple_results=True)(ctx, *operands)


def _exported_kernel(ctx, *operands, kernel: Kernel):
    """Lowers a hand-written kernel in a module that leaves this process, by JAX's interpreter of Pallas."""
    if checks.can_fail(kernel):
        raise TargetError(
            f"kernel `{kernel.name}` cannot be exported",
            at=kernel.defined_at or None,
            why="it has checks, and an exported program cannot raise their errors",
            hint="leave pbkern.check and pbkern.fail out of kernels that are exported",
        )
    warn_of_export(kernel.name)
    run = pallas_function(kernel, interpret=True)
    return mlir.lower_fun(lambda *args: run(*args), multiple_results=True)(ctx, *operands)


def _lower_kernel_for_tpu(ctx, *operands, kernel: Kernel):
    """A hand-written kernel on a TPU: JAX's compiler there has it, also in modules that leave this process."""
    run = pallas_function(kernel, "tpu")
    return mlir.lower_fun(lambda *args: run(*args), multiple_results=True)(ctx, *operands)


mlir.register_lowering(kernel_p, _lower_kernel_for_tpu, platform="tpu")
mlir.register_lowering(call.call_p, _lower_call)
for _platform, _target in (("cpu", "cpu"), ("cuda", "nvgpu"), ("rocm", "amdgpu")):
    mlir.register_lowering(
        kernel_p, functools.partial(_lower_kernel, target=_target), platform=_platform
    )
