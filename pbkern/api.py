"""Decorated function -> compiled program: the whole pipeline on one screen.

    function --trace--> pbkern_call(jaxpr) --fuse.plan--> Plan --target.compile--> code

`build_plan` and `compile_programs` are that line; the lowering rule of `pbkern_call` runs them while jax.jit compiles,
and `explain`, `kernels` and `as_text` on request. Tracing and transformations are frontends/jax.py; what XLA keeps
is the fuser's decision.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core as jex
from jax.interpreters import mlir

from . import _jax, config, fuse, progress, stages, tuned, written
from .dsl import checks
from .dsl.host import HostProgram
from .dsl.kernel import Kernel
from .dsl.programs import kernel_program, repeated
from .dsl.trace import kernel_p
from .dsl.verify import verify
from .errors import OptionError, TargetError
from .frontends import jax as front
from .jaxprs import inner_jaxprs
from .measure import kernel_seconds
from .options import CompileOptions, check_for_jax_jit
from .targets import get_target

# --- the decorator --------------------------------------------------------------------------------------------------

ARGUMENT_OPTIONS = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")


def polyblocks_jit_jax(
    fn: Callable | None = None, *, compile_options=None, static_argnums=None, static_argnames=None,
    donate_argnums=None, donate_argnames=None, **jit_kw: Any,
) -> Any:  # fmt: skip
    """Compiles a JAX function with pbkern when it is called; a decorator, with or without arguments.

    The result is a `jax.jit` function: it composes with grad, vmap, scan, remat, shard_map and other jits, has
    `.lower`, `.trace` and `.eval_shape`, and caches by types. It has besides

      .explain(*args)         what was fused and why, `str()` is a report; with measure=True, kernels are timed
      .kernels(*args)         the fused kernels; `.source()` of each is a program that rebuilds it
      .as_text(*args, stage=) "jaxpr", "plan", "kernels", "nests", "mlir", "llvm" or "asm"
      .memory_analysis(*args) bytes of arguments, results, temporaries and code

    Args:
      compile_options: dictionary of options, see pbkern.CompileOptions. Of nested decorators, the outermost decides.
      static_argnums, static_argnames: arguments that are compile-time constants; also accepted in compile_options.
      donate_argnums, donate_argnames: arguments that the caller gives up. Results take the place of those of
        equal type: at once where a kernel makes them of the argument by elementwise arithmetic, else by a copy of XLA's.
      jit_kw: passed on to jax.jit.
    Raises OptionError for unknown options and bad values; when called, TargetError, UnsupportedOp or what JAX raises.
    """
    arguments = dict(zip(ARGUMENT_OPTIONS, (static_argnums, static_argnames, donate_argnums, donate_argnames)))
    if fn is None:
        return functools.partial(polyblocks_jit_jax, compile_options=compile_options, **arguments, **jit_kw)
    if not callable(fn):
        hint = "@polyblocks_jit_jax(compile_options={...})"
        raise OptionError("polyblocks_jit_jax decorates a function", why=f"given {fn!r}", hint=hint)
    given = _merged(compile_options, arguments)
    options = CompileOptions.from_dict(given)
    check_for_jax_jit(options, given)
    return _jitted(fn, options, jit_kw)


def _merged(compile_options, arguments: dict) -> dict:
    """compile_options with the decorator's own arguments and the environment's defaults."""
    if isinstance(compile_options, CompileOptions):
        compile_options = compile_options.differing()
    CompileOptions.from_dict(compile_options)  # unknown names and bad values are reported before anything else
    given = dict(compile_options or {})
    for name, value in arguments.items():
        if value is not None and name in given:
            both = f"{value!r} and compile_options[{name!r}]={given[name]!r}"
            raise OptionError(f"`{name}` is given twice", why=both, hint="give it once")
        if value is not None:
            given[name] = value
    environment = config.current()
    given.setdefault("target", environment.target)
    if environment.debug:
        given.setdefault("debug", True)
    return given


def _jitted(fn: Callable, options: CompileOptions, jit_kw: dict) -> Callable:
    static = front.Marked.of(fn, options.static_argnums, options.static_argnames)
    donated = front.Marked.of(fn, options.donate_argnums, options.donate_argnames)
    name = getattr(fn, "__name__", type(fn).__name__)

    @functools.wraps(fn)
    def traced(*args, **kwargs):
        return front.traced_call(fn, static, donated, name, options, args, kwargs)

    jitted = jax.jit(traced, **static.as_jit("static"), **donated.as_jit("donate"), **jit_kw)
    for method in (explain, kernels, as_text, memory_analysis):
        setattr(jitted, method.__name__, functools.partial(method, jitted))
    jitted.__wrapped__ = fn  # as jax.jit's: the user's own function
    return jitted


jit = polyblocks_jit_jax


def polymage_jit_jax(fn: Callable | None = None, *, compile_options=None, **kw: Any) -> Any:
    """Runs a JAX function on the backend that compile_options["execution_backend"] names, to compare them.

    "std": plain JAX, op by op. "xla": jax.jit. "polyblocks", the default: polyblocks_jit_jax.
    """
    if fn is None:
        return functools.partial(polymage_jit_jax, compile_options=compile_options, **kw)
    given = CompileOptions.from_dict(compile_options).differing()
    backend = given.pop("execution_backend", "polyblocks")
    if backend == "polyblocks":
        return polyblocks_jit_jax(fn, compile_options=given, **kw)
    if backend == "std":
        return fn
    return jax.jit(fn, **{n: given[n] for n in ARGUMENT_OPTIONS if n in given}, **kw)


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

    def groups(self) -> list:
        """The fused kernels' groups, in the order of their choices."""
        return fuse.groups_of(self.plan.nodes) if self.plan else []


@_jax.cached_by_jaxpr
def build_plan(
    jaxpr: jex.ClosedJaxpr, name: str, options: CompileOptions, _settings: config.Config,
    choices: tuple[fuse.Choice, ...] = (), donated: tuple[bool, ...] = (),
) -> Build:  # fmt: skip
    """Fuses a jaxpr for its target. `choices`: what tuning found for it (tuned.py); `donated`: operands given up."""
    target, record = get_target(options.target), stages.Record(name)

    def verified(plan: fuse.Plan) -> None:
        for kernel in plan.kernels():
            verify(kernel)

    def fused() -> fuse.Plan:
        check_precision(jaxpr, options.mm_conv_precision_mode)
        return fuse.plan(
            jaxpr, name=name, options=options, machine=target.machine(), supports=target.supports,
            params_for=lambda semantics, **chosen: target.fused_params(semantics, options, **chosen), choices=choices,
            donated=donated,
        )  # fmt: skip

    plan = record.run("plan", fused, verify=verified)
    record.texts["jaxpr"] = lambda: str(plan.jaxpr)
    record.texts["plan"] = lambda: "\n".join(map(str, (plan.explanation, *plan.programs())))
    record.show_kernels(plan.kernels())
    return Build(tuple(plan.programs()), record, plan)


def current_plan(jaxpr: jex.ClosedJaxpr, name: str, options: CompileOptions, donated: tuple[bool, ...] = ()) -> Build:
    """The plan under the present configuration and what tuning has found for this program."""
    return build_plan(jaxpr, name, options, config.current(), tuned.choices_for(jaxpr, options), donated)


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
        record.texts[stage] = lambda s=stage: "\n".join(target.text(c, s) for c in build.compiled.values())
    if options.debug:
        stages.report(record)
    if config.current().dump is not None:
        stages.dump(record, config.current().dump)
    return build


def check_precision(jaxpr: jex.ClosedJaxpr, mode: str | None) -> None:
    """Raises OptionError where an integer mode meets a contraction of floats."""
    if mode not in ("int32", "mixed_int8_int32"):
        return
    for eqn in walk(jaxpr.jaxpr):
        if eqn.primitive.name in ("dot_general", "conv_general_dilated") and eqn.invars[0].aval.dtype.kind not in "iu":
            raise OptionError(
                f"mm_conv_precision_mode {mode!r} takes integer operands", at=_jax.user_line(eqn),
                why=f"{eqn.primitive.name} of {' and '.join(a.aval.str_short() for a in eqn.invars)}",
                hint="convert the operands to integers in the function, or choose a float mode",
            )  # fmt: skip


def walk(jaxpr: jex.Jaxpr) -> Iterator:
    """Every equation, at any depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from walk(inner.jaxpr)


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
            with progress.compiling(name):
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


mlir.register_lowering(front.call_p, _lower_call)
mlir.register_lowering(kernel_p, _lower_kernel, platform="cpu")


# --- looking inside -------------------------------------------------------------------------------------------------


def call_of(jitted: Callable, args, kwargs) -> tuple[jex.ClosedJaxpr, str, CompileOptions]:
    """(jaxpr, name, options) of what a decorated function compiles for arguments like these."""
    p = _call(jitted, args, kwargs)
    return p["jaxpr"], p["name"], p["options"]


def _call(jitted: Callable, args, kwargs) -> dict:
    """Parameters of the primitive that a decorated function binds for arguments like these."""
    return next(e.params for e in walk(jitted.trace(*args, **kwargs).jaxpr.jaxpr) if e.primitive is front.call_p)


def _build_for(jitted: Callable, args, kwargs) -> tuple[Build, CompileOptions]:
    p = _call(jitted, args, kwargs)
    return current_plan(p["jaxpr"], p["name"], p["options"], p["donated"]), p["options"]


def undonated(jitted: Callable, options: CompileOptions) -> Callable:
    """A decorated function anew, with nothing compiled yet, that leaves its arguments alone."""
    return _jitted(jitted.__wrapped__, dataclasses.replace(options, donate_argnums=(), donate_argnames=()), {})


def explain(jitted: Callable, *args, measure: bool = False, verbose: bool = False, **kwargs) -> fuse.Explanation:
    """What was fused for arguments like these, what was not, at which price, and what XLA keeps.

    Args:
      measure: compiles each fused kernel and runs it alone on random operands of its sizes, a fraction of a second
        each; the report then has the measured times beside the predicted ones. Default: nothing is compiled or run.
      verbose: lists every fusion in place of counting them.
      args, kwargs: the function's own; parameters of its own called `measure` or `verbose` are given by position.
    """
    build, options = _build_for(jitted, args, kwargs)
    native = _jax.has_cpu_lowering("pallas_call")
    found = written.explained(build.plan.explanation, build.plan.jaxpr, get_target(options.target).name, native)
    found = dataclasses.replace(found, verbose=verbose)
    if not measure:
        return found
    reported = {k.name for k in found.kernels}
    return found.with_times({k.name: kernel_seconds(k, options) for k in build.plan.kernels() if k.name in reported})


def kernels(jitted: Callable, *args, **kwargs) -> list[Kernel]:
    """The kernels that arguments like these need, in launch order."""
    return _build_for(jitted, args, kwargs)[0].plan.kernels()


def as_text(jitted: Callable, *args, stage: str = "kernels", **kwargs) -> str:
    """What one stage of compilation makes for arguments like these. Raises OptionError for an unknown stage."""
    build, options = _build_for(jitted, args, kwargs)
    if stage not in build.record.texts:
        compile_programs(build, options)
    return build.record.text(stage)


def memory_analysis(jitted: Callable, *args, **kwargs) -> stages.MemoryAnalysis:
    """Bytes that one call on arguments like these needs: arrays, temporaries, code. Compiles, runs nothing."""
    build, options = _build_for(jitted, args, kwargs)
    target = get_target(options.target)
    compiled = compile_programs(build, options).compiled.values()
    arenas, code = (sum(n) for n in zip((0, 0), *map(target.memory, compiled)))
    return stages.MemoryAnalysis.of(jitted.lower(*args, **kwargs).compile().memory_analysis(), arenas, code)


def dump(jitted: Callable, folder: pathlib.Path, *args, **kwargs) -> pathlib.Path:
    """Writes every stage for arguments like these below `folder` and returns where."""
    build, options = _build_for(jitted, args, kwargs)
    return stages.dump(compile_programs(build, options).record, folder)
