"""polyblocks_jit_tf: TensorFlow functions, by way of StableHLO. Needs the extra `tf`; nothing else of pbkern imports TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from pbkern.core.errors import OptionError, TargetError
from pbkern.core.options import ARGUMENT_OPTIONS, CompileOptions, check_for_jax_jit
from pbkern.frontends.stablehlo.importer import import_program
from pbkern.frontends.stablehlo.parse import parse

from .decorators import JitFunction


def polyblocks_jit_tf(fn: Any = None, *, input_signature: Sequence[Any] | None = None, compile_options: Any = None) -> Any:
    """Compiles a TensorFlow function when it is called; a decorator, with or without arguments.

    The function is traced as tf.function traces it, for each combination of types and shapes of its tensors and of values of
    its other arguments. Variables are read at each call, and assigned. Results are tensors in the function's structure.
    `.explain(*args)` tells what became of it.

    Args:
      input_signature: as tf.function's: arguments are converted to these types, which are checked.
      compile_options: as of polyblocks_jit_jax, without static and donated arguments.
    Raises OptionError; TargetError where TensorFlow is not installed; when called, ArgumentError for arguments that do not
    match the signature, UnsupportedOp for operations that XLA does not have and tensors that kernels cannot read.
    """
    if fn is None:
        return functools.partial(polyblocks_jit_tf, input_signature=input_signature, compile_options=compile_options)
    if not callable(fn):
        hint = "@polyblocks_jit_tf(compile_options={...})"
        raise OptionError("polyblocks_jit_tf decorates a function", why=f"given {fn!r}", hint=hint)
    options = CompileOptions.from_dict(compile_options)
    check_for_jax_jit(options)
    for name in ARGUMENT_OPTIONS:
        if getattr(options, name):
            raise OptionError(f"compile option `{name}` concerns JAX functions", why="numbers of Python are constants, tensors are not",
                              hint="leave it out")  # fmt: skip
    _tensorflow()
    return TfFunction(fn, input_signature, options)


class TfFunction:
    """A decorated function: called like it, with its attributes."""

    def __init__(self, fn: Callable, signature: Sequence[Any] | None, options: CompileOptions):
        functools.update_wrapper(self, fn)
        self.__wrapped__, self.options = fn, options
        self.input_signature = signature
        self._compiled: dict[tuple, _Compiled] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled, tensors = self._for(args, kwargs)
        return compiled(tensors)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """What was fused for arguments like these, what was not, and what XLA keeps."""
        return self._of("explain", args, kwargs)

    def kernels(self, *args: Any, **kwargs: Any) -> list:
        """The kernels that arguments like these need, in launch order."""
        return self._of("kernels", args, kwargs)

    def as_text(self, *args: Any, stage: str = "kernels", **kwargs: Any) -> str:
        """What a stage of compilation makes for arguments like these; as pbkern.jit's."""
        return self._of("as_text", args, kwargs, stage=stage)

    def _of(self, method: str, args: tuple, kwargs: dict, **options: Any) -> Any:
        compiled, _ = self._for(args, kwargs)
        with jax.enable_x64(True):
            return getattr(compiled.call, method)(*compiled.types, **options)

    def _for(self, args: tuple, kwargs: dict) -> tuple[_Compiled, Sequence[Any]]:
        """What was compiled for arguments like these, and the tensors among them."""
        from pbkern.frontends.tf import arguments

        if self.input_signature is not None:
            args, kwargs = arguments.by_signature(self.input_signature, args, kwargs), {}
        given = arguments.arguments(args, kwargs)
        found = self._compiled.get(given.key)
        if found is None:
            found = self._compiled[given.key] = _compile(self.__wrapped__, given, self.options)
        return found, given.tensors


@dataclass(frozen=True)
class _Compiled:
    """A function for arguments of some types.

    Attributes:
      captured: frontends/tf/capture.py's.
      call: of JAX arrays.
      types: of its arguments: the call's tensors, then the captures.
    """

    captured: Any
    call: JitFunction
    types: tuple[jax.ShapeDtypeStruct, ...]

    def __call__(self, tensors: Sequence[Any]) -> Any:
        values = [*tensors, *self.captured.values()]
        with jax.enable_x64(True):
            results = [_to_tensor(a) for a in self.call(*map(_to_jax, values))]
        for k, variable in self.captured.assigned:
            variable.assign(results[k])
        return self.captured.packed(results[: self.captured.count])


def _compile(fn: Callable, given: Any, options: CompileOptions) -> _Compiled:
    from pbkern.frontends.tf.capture import capture

    captured = capture(fn, given)
    imported = import_program(parse(captured.program))
    run = jex.jaxpr_as_fun(imported.jaxpr)

    def program(*arrays: jax.Array) -> list:
        return run(*arrays)

    program.__name__ = getattr(fn, "__name__", type(fn).__name__)
    types = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in imported.jaxpr.in_avals)
    return _Compiled(captured, JitFunction(program, options, {}), types)


def _tensorflow() -> Any:
    try:
        import tensorflow
    except ImportError:
        raise TargetError("TensorFlow is not installed", why="polyblocks_jit_tf compiles its functions",
                          hint="pip install 'pbkern[tf]'") from None  # fmt: skip
    return tensorflow


def _to_jax(t: Any) -> jax.Array:
    """The same memory; DLPack has no truth values of TensorFlow's."""
    return jax.numpy.asarray(t.numpy()) if t.dtype.name == "bool" else jax.dlpack.from_dlpack(t)


def _to_tensor(a: jax.Array) -> Any:
    tf = _tensorflow()
    return tf.constant(np.asarray(a)) if a.dtype == bool else tf.experimental.dlpack.from_dlpack(a.__dlpack__())
