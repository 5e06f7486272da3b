"""Functions of TensorFlow and modules of PyTorch -> libraries, by the same code as JAX functions.

What a module or function keeps between calls, parameters and variables, are inputs of the library
behind the user's; constants are in it.
"""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.api.decorators import merged, named_once
from pbkern.core.errors import ArgumentError, OptionError, TargetError, UnsupportedOp
from pbkern.core.option_uses import check_for, check_names_no_arguments
from pbkern.core.options import CompileOptions

from .dynamic.sizes import (
    FunctionOfSizes,
    TracedForSizes,
    by_sizes,
    by_source,
    parameters_of_sizes,
)
from .files import wanted
from .function import LibraryFunction, function_of
from .interface.names import identifier, parameter_names, result_paths
from .interface.sizes import Sizes
from .library import Library
from .weights import Weights

if TYPE_CHECKING:
    from pbkern.frontends.tf.capture import TracedFunction


@_jax.hides_own_frames
def polyblocks_aot_tf(
    fn: Callable | None = None,
    *,
    input_signature: Sequence[Any] | None = None,
    compile_options=None,
    runtime_args=None,
    output: str | os.PathLike | None = None,
    emit: Iterable[str] | None = None,
) -> Any:
    """Compiles a TensorFlow function ahead of time, as polyblocks_aot_jax does JAX functions.

        library = polyblocks_aot_tf(compile_options={"aot_name": "blur"})(f)(img)

    Variables that the function reads are its weights, inputs behind its own unless compile option
    `weights` places them elsewhere; it may assign none.

    Args:
      fn: a TensorFlow function.
      input_signature: as of polyblocks_jit_tf; the call needs no arguments then.
      compile_options: as of polyblocks_aot_jax.
      runtime_args: an older name of compile_options.
      output: as of polyblocks_aot_jax.
      emit: as of polyblocks_aot_jax.
    Raises what polyblocks_aot_jax and polyblocks_jit_tf raise. Nothing is written then.

    Examples:
      >>> import tensorflow as tf
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     library = pbkern.polyblocks_aot_tf(lambda x: x * 2, output=folder)(tf.ones(4))
      ...     sorted(library.paths)
      ['header', 'obj']
    """
    compile_options = named_once(compile_options, runtime_args)
    if fn is None:
        return functools.partial(
            polyblocks_aot_tf,
            input_signature=input_signature,
            compile_options=compile_options,
            output=output,
            emit=emit,
        )
    _needed("tensorflow", "tf", "polyblocks_aot_tf")
    options = _options(fn, compile_options, "polyblocks_aot_tf")
    return functools.partial(_tf_library, fn, input_signature, options, output, emit)


@_jax.hides_own_frames
def polyblocks_aot_torch(
    fn: Callable | None = None,
    *,
    compile_options=None,
    runtime_args=None,
    output: str | os.PathLike | None = None,
    emit: Iterable[str] | None = None,
) -> Any:
    """Compiles a PyTorch module or function ahead of time, as polyblocks_aot_jax does JAX functions.

        library = polyblocks_aot_torch(compile_options={"aot_name": "net"})(model.eval())(img)

    torch.export captures it. Parameters and buffers are weights: inputs behind the module's own, in
    the order of its state_dict, unless compile option `weights` places them elsewhere.

    Args:
      fn: a module, a function, or what torch.export.export returned, which takes no arguments.
      compile_options: as of polyblocks_aot_jax.
      runtime_args: an older name of compile_options.
      output: as of polyblocks_aot_jax.
      emit: as of polyblocks_aot_jax.
    Raises what polyblocks_aot_jax raises; UnsupportedOp, which names all operators that are not
    compiled, and for modules that change their buffers. Nothing is written then.

    Examples:
      >>> import tempfile, torch
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     library = pbkern.polyblocks_aot_torch(torch.nn.ReLU().eval(), output=folder)(torch.ones(4))
      ...     sorted(library.paths)
      ['header', 'obj']
    """
    compile_options = named_once(compile_options, runtime_args)
    if fn is None:
        return functools.partial(
            polyblocks_aot_torch, compile_options=compile_options, output=output, emit=emit
        )
    torch = _needed("torch", "torch", "polyblocks_aot_torch")
    given = fn.module() if isinstance(fn, torch.export.ExportedProgram) else fn
    options = _options(given, compile_options, "polyblocks_aot_torch")
    return functools.partial(_torch_library_of_call, fn, options, output, emit)


def _needed(module: str, extra: str, by: str) -> Any:
    try:
        return __import__(module)
    except ImportError:
        name = {"torch": "PyTorch", "tensorflow": "TensorFlow"}[module]
        raise TargetError(
            f"{name} is not installed",
            why=f"{by} compiles its functions",
            hint=f"pip install 'pbkern[{extra}]'",
        ) from None


def _options(fn: Any, compile_options: Any, by: str) -> CompileOptions:
    if isinstance(fn, type) or not callable(fn):
        raise OptionError(
            f"{by} compiles a function",
            why=f"given {fn!r}",
            hint=f"{by}(compile_options={{...}})(fn)(*args)",
        )
    options = CompileOptions.from_dict(merged(compile_options, {}))
    check_for("polyblocks_aot_jax", options)
    hint = "leave it out: what is no tensor is a constant already, and what is kept between calls a weight"
    check_names_no_arguments(options, hint)
    return options


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}{k}" for k in range(count)]


def _library(
    jaxpr_at: Callable[[Sizes], jex.ClosedJaxpr],
    name: str,
    options: CompileOptions,
    output: Any,
    emit: Iterable[str] | None,
    in_names: Sequence[str],
    out_names: Sequence[str],
    weights: Sequence[np.ndarray],
    held: Sequence[np.ndarray] = (),
    ranges: Mapping[str, tuple[int, int]] | None = None,
    obstacle: str = "",
) -> Library:
    """A library of jaxprs for sizes, whose last operands are `weights` and `held`, constants of the library."""
    from .build import build_library  # with all that lowers, which `import pbkern` does not need

    count = len(in_names)
    symbols = parameters_of_sizes(ranges or {}, [*in_names, *out_names])

    @by_sizes
    def traced_at(sizes: Sizes) -> TracedForSizes:
        jaxpr = jaxpr_at(by_source(symbols, sizes))
        run = jex.jaxpr_as_fun(jaxpr)
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals]
        with jax.enable_x64(True):
            turned = jax.make_jaxpr(lambda *x: run(*x[len(held) :], *x[: len(held)]))(
                *types[count:], *types[:count]
            )
            return TracedForSizes(_jax.hoist_constants(turned), (*turned.consts, *held))

    def make(planned: CompileOptions, sizes: Sizes) -> LibraryFunction:
        traced = traced_at(sizes)
        with jax.enable_x64(True), _jax.types_kept(traced.closed):
            return function_of(traced.closed, name, planned, in_names, out_names, traced.held)

    numbers = tuple(range(count - len(weights), count))
    of_module = Weights("weights are what a module or function keeps", numbers, tuple(weights))
    return build_library(
        wanted(identifier(name), options, output, emit),
        options,
        FunctionOfSizes(symbols, make, traced_at, obstacle),
        of_module,
    )


def _tf_library(
    fn, signature, options: CompileOptions, output, emit, /, *args: Any, **kwargs: Any
) -> Library:
    import tensorflow as tf

    from pbkern.frontends.stablehlo.importer import import_program
    from pbkern.frontends.stablehlo.parse import parse
    from pbkern.frontends.tf import arguments
    from pbkern.frontends.tf.capture import capture

    name = getattr(fn, "__name__", type(fn).__name__)
    if signature is not None:
        args = (
            arguments.by_signature(signature, args, kwargs)
            if args
            else tuple(tf.nest.map_structure(_zeros, list(signature)))
        )
    given = arguments.arguments(args, kwargs)
    captured = capture(fn, given)
    if captured.assigned:
        assigned = ", ".join(variable.name for _, variable in captured.assigned)
        raise UnsupportedOp(
            f"a library of `{name}` would assign variables",
            why=assigned,
            hint="return the new values",
        )
    for leaf in tf.nest.flatten(captured.results):
        if leaf is not None and not isinstance(leaf, tf.Tensor):
            raise UnsupportedOp(
                f"a library of `{name}` would return a {type(leaf).__name__}",
                why="its results are arrays",
                hint="return the tensors that it consists of",
            )
    imported = import_program(parse(captured.program, f"`{name}`", captured.places))
    variables = [source for source in captured.captures if isinstance(source, tf.Variable)]
    held = [source.numpy() for source in captured.captures if not isinstance(source, tf.Variable)]
    jaxpr = _with_held_last(
        imported.jaxpr,
        len(given.tensors),
        [isinstance(source, tf.Variable) for source in captured.captures],
    )
    single = len(given.tensors) == len(args) and not kwargs
    argument_names = (
        parameter_names(fn, len(args)) if single else [f"in{k}" for k in range(len(given.tensors))]
    )
    names = [*argument_names, *(variable.name.partition(":")[0] for variable in variables)]
    values = [variable.numpy() for variable in variables]
    return _library(
        lambda _: jaxpr,
        name,
        options,
        output,
        emit,
        names,
        _result_names(captured),
        values,
        held,
    )


def _result_names(captured: TracedFunction) -> list[str]:
    """Names of a TensorFlow function's results, by its dictionaries' keys."""
    import tensorflow as tf

    numbers = itertools.count()
    structure = tf.nest.map_structure(
        lambda leaf: None if leaf is None else next(numbers), captured.results
    )
    in_order = sorted(zip(jax.tree.leaves(structure), result_paths(structure)))
    return [name for _, name in in_order]


def _zeros(spec: Any) -> Any:
    import tensorflow as tf

    if not spec.shape.is_fully_defined():
        raise ArgumentError(
            "a library is made for known shapes",
            why=f"the input signature has {spec}",
            hint="call it with arguments",
        )
    return tf.zeros(spec.shape, spec.dtype)


def _with_held_last(
    jaxpr: jex.ClosedJaxpr, inputs: int, is_variable: Sequence[bool]
) -> jex.ClosedJaxpr:
    """The jaxpr with its operands in this order: inputs, variables, constants."""
    order = [inputs + k for k, flag in enumerate(is_variable) if flag] + [
        inputs + k for k, flag in enumerate(is_variable) if not flag
    ]
    order = [*range(inputs), *order]
    if order == list(range(len(order))):
        return jaxpr
    run, types = (
        jex.jaxpr_as_fun(jaxpr),
        [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals],
    )
    places = [order.index(k) for k in range(len(order))]
    with jax.enable_x64(True):
        return jax.make_jaxpr(lambda *x: run(*[x[place] for place in places]))(
            *[types[position] for position in order]
        )


def _torch_library_of_call(
    fn, options: CompileOptions, output, emit, /, *args: Any, **kwargs: Any
) -> Library:
    import torch

    if isinstance(fn, torch.export.ExportedProgram) and (args or kwargs):
        raise ArgumentError(
            "an exported program takes no arguments here",
            why="it has its types",
            hint="call it with none",
        )
    return _torch_library(
        fn,
        options,
        output,
        emit,
        _snake_case(getattr(fn, "__name__", type(fn).__name__)),
        args,
        kwargs,
    )


def _torch_library(
    fn,
    options: CompileOptions,
    output,
    emit,
    name: str,
    args: tuple = (),
    kwargs: dict | None = None,
) -> Library:
    from pbkern.frontends.torch.exported import exported

    program = exported(fn, args, kwargs or {})
    example = program.at({name: high for name, _, high in program.ranges})
    return _library(
        lambda sizes: program.at(sizes).jaxpr,
        name,
        options,
        output,
        emit,
        example.in_names,
        _numbered("output", len(example.jaxpr.out_avals)),
        example.values,
        ranges={name: (low, high) for name, low, high in program.ranges},
        obstacle=program.obstacle,
    )


def _snake_case(name: str) -> str:
    """ConvBiasRelu -> conv_bias_relu."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def library_of_torch_file(
    path: str, options: CompileOptions, output: Any, emit: Iterable[str] | None
) -> Library:
    """The library of a program that torch.export.save wrote."""
    torch = _needed("torch", "torch", "compile")
    check_for("polyblocks_aot_jax", options)
    why = (
        None
        if zipfile.is_zipfile(path)
        else "it is no archive"
        if pathlib.Path(path).exists()
        else "there is no such file"
    )
    try:  # Torch would print a traceback of its own
        program = torch.export.load(path) if why is None else None
    except Exception as e:
        why = f"{type(e).__name__}: {str(e).splitlines()[0]}"
    if why is not None:
        raise ArgumentError(
            f"`{path}` is no program of torch.export",
            why=why,
            hint="a file that torch.export.save wrote",
        )
    return _torch_library(program, options, output, emit, pathlib.Path(path).stem)
