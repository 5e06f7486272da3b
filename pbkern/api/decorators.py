"""The decorators, and what they return: functions as jax.jit makes them, which can be looked into.

How such a function is compiled is api/pipeline.py, where its large results are is
api/result_pool.py.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

import jax
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core import config
from pbkern.core.errors import OptionError
from pbkern.core.jaxprs.walks import equations
from pbkern.core.option_uses import ARGUMENT_OPTIONS, OTHER_BACKENDS, check_for, check_for_backend
from pbkern.core.options import CompileOptions
from pbkern.core.process.pickle_by_name import PickledByName
from pbkern.core.process.public_names import PublicNames
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.trace import compile_eager_calls
from pbkern.frontends.jax import call
from pbkern.targets import get_target

from . import result_pool, stages
from .editing.adopt import WithKernels
from .pipeline import Build, called_programs, compile_programs, current_plan, ready

if TYPE_CHECKING:
    from .report.report import Report

P = ParamSpec("P")
R = TypeVar("R")


@overload
def polyblocks_jit_jax(
    fn: Callable[P, R],
    *,
    compile_options: Any = ...,
    static_argnums: Any = ...,
    static_argnames: Any = ...,
    donate_argnums: Any = ...,
    donate_argnames: Any = ...,
    runtime_args: Any = ...,
    **jit_kw: Any,
) -> JitFunction[P, R]: ...


@overload
def polyblocks_jit_jax(
    fn: None = None,
    *,
    compile_options: Any = ...,
    static_argnums: Any = ...,
    static_argnames: Any = ...,
    donate_argnums: Any = ...,
    donate_argnames: Any = ...,
    runtime_args: Any = ...,
    **jit_kw: Any,
) -> Callable[[Callable[P, R]], JitFunction[P, R]]: ...


@_jax.hides_own_frames
def polyblocks_jit_jax(
    fn: Callable | None = None,
    *,
    compile_options=None,
    static_argnums=None,
    static_argnames=None,
    donate_argnums=None,
    donate_argnames=None,
    runtime_args=None,
    **jit_kw: Any,
) -> Any:
    """Compiles a JAX function with pbkern when it is called; a decorator, with or without arguments.

    The result is what `jax.jit` makes: it composes with grad, vmap, scan, remat, shard_map and
    other jits, has `.lower`, `.trace` and `.eval_shape`, and caches by types. It has besides

      .explain(*args)         what was fused and why, `str()` is a report; with measure=True, kernels are timed
      .kernels(*args)         the fused kernels; `.source()` of each is a program that rebuilds it
      .as_text(*args, stage=) "jaxpr", "plan", "kernels", "nests", "mlir", "llvm" or "asm"; "nests:pack" after a pass
      .memory_analysis(*args) bytes of arguments, results, temporaries and code

    Args:
      fn: a function of JAX arrays.
      compile_options: dictionary of options, see pbkern.CompileOptions. Of nested decorators, the
        outermost decides.
      static_argnums: numbers of arguments that are compile-time constants; also accepted in
        compile_options.
      static_argnames: names of further ones; also accepted in compile_options.
      donate_argnums: numbers of arguments that the caller gives up. Results take the place of those
        of equal type: at once where a kernel makes them of the argument by elementwise arithmetic,
        else by a copy of XLA's.
      donate_argnames: names of further ones.
      runtime_args: an older name of compile_options.
      jit_kw: passed on to jax.jit.
    Raises OptionError for unknown options and bad values; when called, TargetError, UnsupportedOp
    or what JAX raises.

    Examples:
      >>> @pbkern.jit(compile_options={"strict_target": True})
      ... def softmax(x):
      ...     weights = jnp.exp(x - x.max(1, keepdims=True))
      ...     return weights / weights.sum(1, keepdims=True)
      >>> softmax(jnp.zeros((64, 256)))[0, 0].tolist()
      0.00390625
      >>> len(softmax.kernels(jax.ShapeDtypeStruct((64, 256), "float32")))
      1
    """
    compile_options = named_once(compile_options, runtime_args)
    arguments = dict(
        zip(ARGUMENT_OPTIONS, (static_argnums, static_argnames, donate_argnums, donate_argnames))
    )
    if fn is None:
        return functools.partial(
            polyblocks_jit_jax, compile_options=compile_options, **arguments, **jit_kw
        )
    if isinstance(fn, type) or not callable(fn):
        hint = (
            "decorate its methods or __call__"
            if isinstance(fn, type)
            else "@polyblocks_jit_jax(compile_options={...})"
        )
        raise OptionError("polyblocks_jit_jax decorates a function", why=f"given {fn!r}", hint=hint)
    given = merged(compile_options, arguments)
    options = CompileOptions.from_dict(given)
    check_for("polyblocks_jit_jax", options)
    _refuse_options(jit_kw)
    return JitFunction(fn, options, jit_kw)


def _refuse_options(jit_kw: dict) -> None:
    """Refuses options of pbkern that are given as if they were jax.jit's."""
    options = {field.name for field in dataclasses.fields(CompileOptions)} - {
        *inspect.signature(jax.jit).parameters
    }
    for name in (keyword for keyword in jit_kw if keyword in options):
        why, option = f"given {name}={jit_kw[name]!r}", f"{{{name!r}: {jit_kw[name]!r}}}"
        raise OptionError(
            f"`{name}` is a compile option, not an argument of polyblocks_jit_jax",
            why=why,
            hint=f"polyblocks_jit_jax(f, compile_options={option})",
        )


def merged(compile_options, arguments: dict) -> dict:
    """compile_options with the decorator's own arguments and the environment's defaults."""
    if isinstance(compile_options, CompileOptions):
        compile_options = compile_options.differing()
    CompileOptions.from_dict(
        compile_options
    )  # unknown names and bad values are reported before anything else
    given = dict(compile_options or {})
    for name, value in arguments.items():
        default = getattr(CompileOptions(), name)
        if value is not None and given.get(name, default) != default:
            both = f"{value!r} and compile_options[{name!r}]={given[name]!r}"
            raise OptionError(f"`{name}` is given twice", why=both, hint="give it once")
        if value is not None:
            given[name] = value
    environment = config.current()
    given.setdefault("target", environment.target)
    if environment.debug:
        given.setdefault("debug", True)
    return given


jit = polyblocks_jit_jax


@overload
def polymage_jit_jax(
    fn: Callable[P, R], *, compile_options: Any = ..., runtime_args: Any = ..., **kw: Any
) -> Callable[P, R]: ...


@overload
def polymage_jit_jax(
    fn: None = None, *, compile_options: Any = ..., runtime_args: Any = ..., **kw: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def polymage_jit_jax(
    fn: Callable | None = None, *, compile_options=None, runtime_args=None, **kw: Any
) -> Any:
    """Runs a JAX function on the backend that compile_options["execution_backend"] names, to compare them.

    "std": plain JAX, op by op. "xla": jax.jit. "polyblocks", the default: polyblocks_jit_jax.

    Args:
      fn: a function of JAX arrays.
      compile_options: as of polyblocks_jit_jax; with "std" and "xla", those alone that can act
        there.
      runtime_args: an older name of compile_options.
      kw: passed on to jax.jit; none with "std".
    Raises OptionError for options that the backend cannot obey.

    Examples:
      >>> f = pbkern.polymage_jit_jax(lambda x: x * 2, compile_options={"execution_backend": "xla"})
      >>> f(jnp.arange(3.0)).tolist()
      [0.0, 2.0, 4.0]
    """
    compile_options = named_once(compile_options, runtime_args)
    if fn is None:
        return functools.partial(polymage_jit_jax, compile_options=compile_options, **kw)
    if isinstance(fn, type):
        raise OptionError(
            "polymage_jit_jax decorates a function",
            why=f"given {fn!r}",
            hint="decorate its methods or __call__",
        )
    options = CompileOptions.from_dict(compile_options)
    check_for_backend(options)
    given = options.differing()
    backend = given.pop("execution_backend", "polyblocks")
    if backend == "polyblocks":
        return polyblocks_jit_jax(fn, compile_options=given, **kw)
    if backend == "xla":
        return jax.jit(fn, **given, **kw)
    without_effect = kw.keys() - OTHER_BACKENDS["std"]
    if without_effect:
        why = "plain JAX runs the function op by op"
        raise OptionError(
            f"`{min(without_effect)}` cannot act with execution_backend 'std'",
            why=why,
            hint="leave it out",
        )
    return fn


def named_once(compile_options, runtime_args):
    """The options under either name."""
    if compile_options is not None and runtime_args is not None:
        both = f"compile_options={compile_options!r}, runtime_args={runtime_args!r}"
        raise OptionError(
            "compile options are given twice",
            why=both,
            hint="runtime_args is an older name: give one",
        )
    return runtime_args if compile_options is None else compile_options


class JitFunction(PublicNames, PickledByName, Generic[P, R]):
    """A decorated function; it has the attributes of jax.jit's functions besides its own.

    Each is of a class of its own, whose `__call__` is jax.jit's function itself as long as no
    result is worth a pool: a method in Python would add 0.7 us to the 6 us of a small call.
    """

    INTERNAL = frozenset(
        (
            "build",
            "call_of",
            "dynamic",
            "remade",
            "undonated",
        )
    )

    def __new__(cls, *args, **kwargs):
        return super().__new__(
            type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__})
        )

    def __init__(self, fn: Callable, options: CompileOptions, jit_kw: dict):
        functools.update_wrapper(self, fn)
        self.__wrapped__ = fn  # the user's own function, as jax.jit's
        static = call.Marked.of(
            fn, options.static_argnums, options.static_argnames, "static_argnums"
        )
        donated = call.Marked.of(
            fn, options.donate_argnums, options.donate_argnames, "donate_argnums"
        )
        name = name_of(fn)
        poolable = not (donated.positions or donated.names or jit_kw)

        @functools.wraps(fn)
        def traced(*args, **kwargs):
            if _jax.runs_eagerly():
                return fn(*args, **kwargs)
            results = call.traced_call(fn, static, donated, name, options, args, kwargs)
            if poolable and _largest(results) >= get_target(options.target).POOLED_BYTES:
                type(self).__call__ = JitFunction._pooled_call  # type: ignore[method-assign]
            return results

        if not hasattr(fn, "__name__"):
            traced.__name__ = traced.__qualname__ = name
        marked: dict[str, Any] = static.as_jit("static") | donated.as_jit("donate") | jit_kw
        self._jitted: Any = jax.jit(traced, **marked)
        type(self).__call__ = staticmethod(self._jitted)  # type: ignore[assignment, method-assign]
        split = lambda args, kwargs: (static.these(args, kwargs), static.unmarked(args, kwargs))
        self._dispatch = result_pool.Dispatch(self._into_buffers, split)
        self._options, self._jit_kw, self._static = options, jit_kw, static

    @property
    def options(self) -> CompileOptions:
        """The options that the decorator was given."""
        return self._options

    def remade(self) -> tuple:
        """Pickles by the user's function, like jax.jit's functions."""
        return _remade, (self.__wrapped__, self._options, self._jit_kw)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function, like jax.jit's functions."""
        return self._jitted(*args, **kwargs)

    @_jax.hides_own_frames
    def _pooled_call(self, *args, **kwargs) -> Any:
        """Calls a function that was called with arguments that make results worth a pool."""
        if _jax.runs_eagerly() or _jax.looks_for_bad_numbers():
            return self._jitted(*args, **kwargs)
        has_run, results = self._dispatch(args, kwargs)
        return results if has_run else self._jitted(*args, **kwargs)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str):
        if name != "_jitted" and hasattr(self._jitted, name):
            return getattr(self._jitted, name)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
        )

    def __repr__(self) -> str:
        return f"<pbkern.jit of {self.__wrapped__!r}>"

    # Methods, not attributes of the instance, which functools.wraps would copy to what is made of
    # the function.

    @_jax.hides_own_frames
    def lower(self, *args, **kwargs) -> jax.stages.Lowered:
        """Lowers like jax.jit's functions; cost_analysis() of it, and of what it compiles to, counts kernels too.

        Examples:
          >>> f, x = pbkern.jit(lambda x: jnp.exp(x).sum(0)), jax.ShapeDtypeStruct((64, 32), "float32")
          >>> f.lower(x).compile().cost_analysis()["flops"] > 0
          True
        """
        traced = self._jitted.trace(*args, **kwargs)
        return stages.Lowered.of(traced.lower(), functools.partial(_costs, traced.jaxpr))

    def trace(self, *args, **kwargs) -> jax.stages.Traced:
        """Traces like jax.jit's functions.

        Examples:
          >>> f, x = pbkern.jit(lambda x: jnp.exp(x).sum(0)), jax.ShapeDtypeStruct((64, 32), "float32")
          >>> [str(out) for out in f.trace(x).jaxpr.out_avals]
          ['float32[32]']
        """
        return self._jitted.trace(*args, **kwargs)

    def eval_shape(self, *args, **kwargs) -> Any:
        """Evaluates shapes like jax.jit's functions.

        Examples:
          >>> f, x = pbkern.jit(lambda x: jnp.exp(x).sum(0)), jax.ShapeDtypeStruct((64, 32), "float32")
          >>> f.eval_shape(x).shape
          (32,)
        """
        return self._jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets what was compiled: the next call compiles again.

        Examples:
          >>> f, x = pbkern.jit(lambda x: jnp.exp(x).sum(0)), jax.ShapeDtypeStruct((64, 32), "float32")
          >>> f.clear_cache()
        """
        self._jitted.clear_cache()
        self._dispatch.known.clear()

    @_jax.hides_own_frames
    def explain(
        self, *args, measure: bool = False, verbose: bool = False, top: int = 12, **kwargs
    ) -> Report:
        """Reports what was fused for arguments like these, what was not, at which price, and what XLA keeps.

        `str()` of the report is its text, `as_dict()` its values, `html()` a page that shows where
        time goes; notebooks show the page.

        Args:
          measure: compiles each fused kernel and runs it alone on random operands of its sizes, a
            fraction of a second each; the report then has the measured times beside the predicted
            ones. Default: nothing is compiled or run.
          verbose: lists every fusion in place of counting them, and every kernel and refusal.
          top: most kernels, and most refusals, that the text lists otherwise: those that take most
            time, or would save most.
          *args: the function's own; parameters of its own called `measure`, `verbose` or `top` are
            given by position.
          **kwargs: the function's own.

        Examples:
          >>> f, x = pbkern.jit(lambda x: jnp.exp(x).sum(0)), jax.ShapeDtypeStruct((64, 32), "float32")
          >>> plan = f.explain(x)
          >>> len(plan.kernels), plan.left
          (1, ())
        """
        params = self._call(args, kwargs)
        from .report.assemble import report_of  # imports the fuser

        return report_of(self._planned(params), params, measure, verbose, top)

    @_jax.hides_own_frames
    def kernels(self, *args, **kwargs) -> list[Kernel]:
        """The kernels that arguments like these need, in launch order.

        Examples:
          >>> f, x = pbkern.jit(lambda x: jnp.exp(x).sum(0)), jax.ShapeDtypeStruct((64, 32), "float32")
          >>> [kernel.name for kernel in f.kernels(x)]
          ['lambda_reduce0']
        """
        return self.build(args, kwargs)[0].fused.kernels()

    @_jax.hides_own_frames
    def as_text(self, *args, stage: str = "kernels", **kwargs) -> str:
        """Text of what one stage of compilation makes for arguments like these.

        Stages are jaxpr, plan, kernels, nests, schedule, mlir, llvm and asm on CPUs; nests, mlir, llvm
        and ptx, sass or asm on GPUs. After one of a stage's passes: "jaxpr:simplify", "nests:merge
        nests". Raises OptionError for an unknown stage or pass.

        Examples:
          >>> f, x = pbkern.jit(lambda x: jnp.exp(x).sum(0)), jax.ShapeDtypeStruct((64, 32), "float32")
          >>> "exp" in f.as_text(x, stage="jaxpr:simplify")
          True
        """
        build, options = self.build(args, kwargs)
        name = stage.partition(":")[0]
        if name not in build.record.texts and name not in build.record.again:
            compile_programs(build, options)
        return build.record.text(stage)

    @_jax.hides_own_frames
    def memory_analysis(self, *args, **kwargs) -> stages.MemoryAnalysis:
        """Bytes that one call on arguments like these needs: arrays, temporaries, code.

        Compiles, runs nothing.

        Examples:
          >>> f, x = pbkern.jit(lambda x: jnp.exp(x).sum(0)), jax.ShapeDtypeStruct((64, 32), "float32")
          >>> f.memory_analysis(x).argument_size_in_bytes
          8192
        """
        build, options = self._ready(args, kwargs)
        target, compiled = get_target(options.target), build.compiled.values()
        arenas, code = (sum(sizes) for sizes in zip((0, 0), *map(target.memory, compiled)))
        return stages.MemoryAnalysis.of(
            self.lower(*args, **kwargs).compile().memory_analysis(), arenas, code
        )

    @_jax.hides_own_frames
    def dump(self, folder: str | os.PathLike, *args, **kwargs) -> pathlib.Path:
        """Writes every stage for arguments like these below `folder` and returns where.

        Examples:
          >>> import tempfile
          >>> f, x = pbkern.jit(lambda x: jnp.exp(x).sum(0)), jax.ShapeDtypeStruct((64, 32), "float32")
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     written = f.dump(folder, x)
          ...     (written / "1_jaxpr.txt").exists()
          True
        """
        build, options = self.build(args, kwargs)
        return stages.dump(compile_programs(build, options).record, pathlib.Path(folder))

    def with_kernels(self, kernels: Mapping[str, Callable | str]) -> JitFunction:
        """The function with other kernels in place of some of its own, which are not changed.

        At a call with arguments of new types, each kernel's types are compared with those of the
        kernel that it replaces, and its results on random operands. Derivatives are those of the
        function's definition, unless a kernel brings a rule of its own (jax.custom_vjp).

        Args:
          kernels: name of a kernel, as `f.kernels(*args)` has it -> a kernel, its source, or a function of
            arrays.
        Raises ArgumentError for what is none, and KernelError, at a call, for a name that no kernel has, and for
        kernels of other types or results.

        Examples:
          >>> f, x = pbkern.jit(lambda x: jnp.exp(x).sum(0)), jnp.ones((64, 32))
          >>> (kernel,) = f.kernels(x)
          >>> edited = f.with_kernels({kernel.name: pbkern.rebuild(kernel.source())})
          >>> bool((edited(x) == f(x)).all())
          True
        """
        return JitFunction(WithKernels(self, kernels), self._options, self._jit_kw)

    def dynamic(self, args: tuple, kwargs: dict) -> tuple[dict[int, Any], dict[str, Any]]:
        """Arguments that are not static, by position and by name."""
        return self._static.unmarked(args, kwargs)

    def undonated(self) -> JitFunction:
        """The function again, with nothing compiled yet, that leaves its arguments alone."""
        return JitFunction(
            self.__wrapped__,
            dataclasses.replace(self._options, donate_argnums=(), donate_argnames=()),
            {},
        )

    def call_of(self, *args, **kwargs) -> tuple[jex.ClosedJaxpr, str, CompileOptions]:
        """(jaxpr, name, options) of what is compiled for arguments like these."""
        params = self._call(args, kwargs)
        return params["jaxpr"], params["name"], params["options"]

    def build(self, args: tuple, kwargs: dict) -> tuple[Build, CompileOptions]:
        """The plan for arguments like these, and its options."""
        params = self._call(args, kwargs)
        return self._planned(params), params["options"]

    def _planned(self, params: dict) -> Build:
        return current_plan(params["jaxpr"], params["name"], params["options"], params["donated"])

    def _call(self, args, kwargs) -> dict:
        """Parameters of the primitive that is bound for arguments like these."""
        with jax.disable_jit(
            False
        ):  # what is compiled is asked for, whether or not calls compile now
            traced = self.trace(*args, **kwargs)
        return next(
            eqn.params for eqn in equations(traced.jaxpr.jaxpr) if eqn.primitive is call.call_p
        )

    def _into_buffers(self, args: tuple, kwargs: dict) -> result_pool.IntoBuffers | None:
        """The function, compiled for arguments like these to write large results to given places, see api/result_pool.py."""
        build, options = self._ready(args, kwargs)
        compiled = called_programs(build, options)
        return result_pool.into_buffers(
            self.trace(*args, **kwargs), build.fused, compiled, get_target(options.target)
        )

    def _ready(self, args: tuple, kwargs: dict) -> tuple[Build, CompileOptions]:
        """The compiled programs for arguments like these, and their options."""
        params = self._call(args, kwargs)
        call = params["jaxpr"], params["name"], params["options"], params["donated"]
        return ready(*call), params["options"]


def _costs(traced: jex.ClosedJaxpr) -> stages.Costs:
    """Counts the costs of what was compiled for a jaxpr that binds the primitive."""
    eqn = next(
        equation.params for equation in equations(traced.jaxpr) if equation.primitive is call.call_p
    )
    plan = current_plan(eqn["jaxpr"], eqn["name"], eqn["options"], eqn["donated"]).fused
    return stages.Costs.of(plan.explanation, len(plan.programs()))


def _remade(fn: Callable, options: CompileOptions, jit_kw: dict) -> JitFunction:
    """Classes of single functions cannot be named by what is pickled."""
    return JitFunction(fn, options, jit_kw)


def _compiled_kernel(call_of_kernel: Callable) -> Callable:
    """Compiles eager calls of a hand-written kernel: on CPUs as a decorated function, which has the pool for large results."""
    if result_pool.only_device() is None:
        return jax.jit(call_of_kernel)
    return polyblocks_jit_jax(call_of_kernel, compile_options={"target": "cpu"})


compile_eager_calls.append(_compiled_kernel)


def name_of(fn: Callable) -> str:
    """A function's name; of a partial one, that of the function it calls."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _largest(results: Any) -> int:
    """Bytes of the largest array of numbers of known size."""
    types = [
        aval
        for aval in map(jax.typeof, jax.tree.leaves(results))
        if all(isinstance(size, int) for size in aval.shape)
    ]
    return max(
        (
            math.prod(type_.shape) * type_.dtype.itemsize
            for type_ in types
            if isinstance(type_.dtype, np.dtype)
        ),
        default=0,
    )
