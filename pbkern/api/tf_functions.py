"""polyblocks_jit_tf, polymage_jit_tf: TensorFlow functions, by way of StableHLO.

Needs the extra `tf`; nothing else of pbkern imports TensorFlow, and this only when a function is
decorated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import OptionError, TargetError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.option_uses import check_for, check_for_backend
from pbkern.core.options import CompileOptions
from pbkern.core.process.public_names import PublicNames
from pbkern.frontends.stablehlo.importer import import_program
from pbkern.frontends.stablehlo.parse import parse

from .decorators import JitFunction, merged, named_once
from .direct_plan import DirectPlan


@_jax.hides_own_frames
def polyblocks_jit_tf(
    fn: Any = None,
    *,
    input_signature: Sequence[Any] | None = None,
    compile_options: Any = None,
    runtime_args: Any = None,
) -> Any:
    """Compiles a TensorFlow function when it is called; a decorator, with or without arguments.

    The function is traced as tf.function traces it, for each combination of types and shapes of its
    tensors and of values of its other arguments. Variables are read at each call, and assigned.
    Results are tensors in the function's structure. Tapes differentiate calls. `.explain(*args)` tells
    what became of it.

    Args:
      fn: a function of tensors.
      input_signature: as tf.function's: arguments are converted to these types, which are checked.
      compile_options: as of polyblocks_jit_jax, without static and donated arguments.
      runtime_args: an older name of compile_options.
    Raises OptionError; TargetError where TensorFlow is not installed; when called, ArgumentError
    for arguments that do not match the signature, UnsupportedOp for operations that XLA does not
    have and tensors that kernels cannot read.

    Examples:
      >>> import tensorflow as tf
      >>> twice = pbkern.polyblocks_jit_tf(lambda x: x * 2)
      >>> twice(tf.constant([1.0, 2.0])).numpy().tolist()
      [2.0, 4.0]
    """
    compile_options = named_once(compile_options, runtime_args)
    if fn is None:
        return functools.partial(
            polyblocks_jit_tf, input_signature=input_signature, compile_options=compile_options
        )
    if isinstance(fn, type) or not callable(fn):
        hint = "@polyblocks_jit_tf(compile_options={...})"
        raise OptionError("polyblocks_jit_tf decorates a function", why=f"given {fn!r}", hint=hint)
    options = CompileOptions.from_dict(merged(compile_options, {}))
    check_for("polyblocks_jit_tf", options)
    _tensorflow()
    return TfFunction(fn, input_signature, options)


def polymage_jit_tf(
    fn: Any = None,
    *,
    input_signature: Sequence[Any] | None = None,
    compile_options: Any = None,
    runtime_args: Any = None,
) -> Any:
    """Runs a TensorFlow function on the backend that compile_options["execution_backend"] names, to compare them.

    "std": tf.function. "xla": tf.function with jit_compile=True. "polyblocks", the default:
    polyblocks_jit_tf. Arguments are as of polyblocks_jit_tf. Raises OptionError for options that the
    backend cannot obey.

    Examples:
      >>> import tensorflow as tf
      >>> f = pbkern.polymage_jit_tf(lambda x: x * 2, compile_options={"execution_backend": "std"})
      >>> f(tf.constant([1.0, 2.0])).numpy().tolist()
      [2.0, 4.0]
    """
    compile_options = named_once(compile_options, runtime_args)
    if fn is None:
        return functools.partial(
            polymage_jit_tf, input_signature=input_signature, compile_options=compile_options
        )
    options = CompileOptions.from_dict(compile_options)
    backend = options.execution_backend
    if backend == "polyblocks":
        return polyblocks_jit_tf(
            fn, input_signature=input_signature, compile_options=options.differing()
        )
    check_for("polyblocks_jit_tf", dataclasses.replace(options, execution_backend="polyblocks"))
    check_for_backend(options)
    return _tensorflow().function(fn, input_signature=input_signature, jit_compile=backend == "xla")


class TfFunction(PublicNames):
    """A decorated function: called like it, with its attributes."""

    def __init__(self, fn: Callable, signature: Sequence[Any] | None, options: CompileOptions):
        functools.update_wrapper(self, fn, updated=())
        self.__wrapped__, self.options = fn, options
        self.input_signature = signature
        self._compiled: dict[tuple, _Compiled] = {}
        self._of_tensors: dict[tuple, _Compiled] = {}
        self._tensor = type(_tensorflow().constant(0))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs:  # tensors alone, of types that were met before: the rest of a call takes longer than small functions
            key = tuple(
                [(arg.shape, arg.dtype) if type(arg) is self._tensor else None for arg in args]
            )
            compiled = self._of_tensors.get(key)
            if compiled is not None:
                return compiled(args)
        compiled, tensors = self._for(args, kwargs)
        if (
            not kwargs
            and self.input_signature is None
            and all(type(arg) is self._tensor for arg in args)
        ):
            self._of_tensors[tuple([(tensor.shape, tensor.dtype) for tensor in tensors])] = compiled
        return compiled(tensors)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """Reports what was fused for arguments like these, what was not, and what XLA keeps."""
        return self._of("explain", args, kwargs)

    def kernels(self, *args: Any, **kwargs: Any) -> list:
        """The kernels that arguments like these need, in launch order."""
        return self._of("kernels", args, kwargs)

    def as_text(self, *args: Any, stage: str = "kernels", **kwargs: Any) -> str:
        """Text of what a stage of compilation makes for arguments like these; stages are pbkern.jit's."""
        return self._of("as_text", args, kwargs, stage=stage)

    def _of(self, method: str, args: tuple, kwargs: dict, **options: Any) -> Any:
        compiled, _ = self._for(args, kwargs)
        with jax.enable_x64(True):
            return getattr(compiled.call, method)(*compiled.types, **options)

    def _for(self, args: tuple, kwargs: dict) -> tuple[_Compiled, Sequence[Any]]:
        """Returns what was compiled for arguments like these, and the tensors among them."""
        from pbkern.frontends.tf import arguments

        if self.input_signature is not None:
            args, kwargs = arguments.by_signature(self.input_signature, args, kwargs), {}
        given = arguments.arguments(args, kwargs)
        compiled = self._compiled.get(given.key)
        if compiled is None:
            compiled = self._compiled[given.key] = _compile(self.__wrapped__, given, self.options)
        return compiled, given.tensors


@dataclass(frozen=True)
class _Compiled:
    """A function for arguments of some types.

    Attributes:
      captured: frontends/tf/capture.py's.
      call: of JAX arrays.
      types: of its arguments: the call's tensors, then the captures.
      plan: tensors like these -> those of the results.
      is_watched: whether a tape watches one of some tensors.
      gradients: compiled when a tape first asks for them; by the numbers of the arguments that it watches.
    """

    captured: Any
    call: JitFunction
    types: tuple[jax.ShapeDtypeStruct, ...]
    plan: DirectPlan
    is_watched: Callable[[list], int]
    gradients: dict[tuple[int, ...], Callable]

    def __call__(self, tensors: Sequence[Any]) -> Any:
        operands = [*tensors, *self.captured.values()]
        results = self.recorded(operands) if self.is_watched(operands) else self.plan.run(operands)
        for k, variable in self.captured.assigned:
            variable.assign(results[k])
        return self.captured.packed(results[: self.captured.count])

    def recorded(self, operands: list) -> list:
        """The program's results, recorded by tapes that watch operands: the call's tensors, then values of the captures."""
        from pbkern.frontends.tf.gradients import recorded

        return recorded(self.plan.run, operands, self._gradient, self.captured.count)

    def _gradient(self, wanted: tuple[int, ...]) -> Callable[[list, list], list]:
        """The gradient for operands with these numbers: of the operands and of gradients of results."""
        if wanted not in self.gradients:
            self.gradients[wanted] = self._compiled_gradient(wanted)
        return self.gradients[wanted]

    def _compiled_gradient(self, wanted: tuple[int, ...]) -> Callable[[list, list], list]:
        from pbkern.frontends.tf.gradients import trace_gradient

        name, options = self.call.__name__, self.call.options
        gradient = trace_gradient(self.captured, wanted, name)
        if gradient.traced is None:
            return lambda operands, upstream: [None] * len(wanted)
        compiled = _compiled(gradient.traced, f"{name}_gradient", options, is_gradient=True)
        tensors = len(self.types) - len(self.captured.captures)
        captures = [tensors + k for k in gradient.captures]

        def run(operands: list, upstream: list) -> list:
            values = [operands[k] for k in captures]
            results = compiled.recorded([*operands[:tensors], *upstream, *values])
            return compiled.captured.packed(results)

        return run


def _compile(fn: Callable, given: Any, options: CompileOptions) -> _Compiled:
    from pbkern.frontends.tf.capture import capture

    name = getattr(fn, "__name__", type(fn).__name__)
    return _compiled(capture(fn, given), name, options)


def _compiled(
    captured: Any, name: str, options: CompileOptions, is_gradient: bool = False
) -> _Compiled:
    """Compiles a traced function; of a gradient only what it returns, not the values that variables get."""
    from pbkern.frontends.tf.gradients import check_deterministic, is_watched
    from pbkern.frontends.tf.memory import TfMemory

    jaxpr = import_program(parse(captured.program, f"`{name}`", captured.places)).jaxpr
    if is_gradient:
        returned = [k < captured.count for k in range(len(jaxpr.out_avals))]
        jaxpr, _ = _jax.needed_operands(jaxpr, returned)
        check_deterministic(jaxpr, name)
    run = jex.jaxpr_as_fun(jaxpr)

    def program(*arrays: jax.Array) -> list:
        return run(*arrays)

    program.__name__ = name
    types = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals)
    call: JitFunction = JitFunction(program, options, {})
    plan = DirectPlan(jaxpr, name, options, TfMemory())
    return _Compiled(captured, call, types, plan, is_watched, {})


def _tensorflow() -> Any:
    try:
        import tensorflow
    except ImportError:
        raise TargetError(
            "TensorFlow is not installed",
            why="polyblocks_jit_tf compiles its functions",
            hint="pip install 'pbkern[tf]'",
        ) from None
    return tensorflow
