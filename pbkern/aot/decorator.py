"""polyblocks_aot_jax: a JAX function or a kernel, and arguments -> a library."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax

from pbkern import _jax
from pbkern.api.decorators import JitFunction, merged, name_of, named_once
from pbkern.api.stablehlo_functions import ImportedFunction
from pbkern.core.errors import OptionError, UnsupportedOp
from pbkern.core.jaxprs import equations
from pbkern.core.option_uses import ARGUMENT_OPTIONS, check_for, check_names_no_arguments
from pbkern.core.options import CompileOptions
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.trace import KernelFunction
from pbkern.frontends.jax import call

from .dynamic.sizes import (
    FunctionOfSizes,
    TracedForSizes,
    by_sizes,
    by_source,
    parameters_of_sizes,
)
from .files import wanted
from .function import LibraryFunction, function_of, function_of_kernel, words
from .interface.names import argument_paths, identifier, parameter_names, result_paths
from .interface.sizes import Sizes
from .library import Library
from .weights import Weights


@_jax.hides_own_frames
def polyblocks_aot_jax(
    fn: Callable | Kernel | None = None,
    *,
    compile_options=None,
    static_argnums=None,
    static_argnames=None,
    donate_argnums=None,
    donate_argnames=None,
    runtime_args=None,
    output: str | os.PathLike | None = None,
    emit: Iterable[str] | None = None,
) -> Any:
    """Compiles a JAX function ahead of time: an object file and a C header that need neither Python nor XLA.

        library = polyblocks_aot_jax(compile_options={"aot_name": "unsharp_mask"})(f)(img)

    The call compiles for the types of its arguments, arrays or jax.ShapeDtypeStructs, and runs
    nothing. It returns a Library: `paths` of its files, `header`, `metadata`, and `load()`, which
    makes it callable on NumPy arrays.

    Args:
      fn: a function, one that pbkern.jit or pbkern.from_stablehlo made, a pbkern.kernel or a
        Kernel. Kernels with in_types and StableHLO programs take no arguments.
      compile_options: see pbkern.CompileOptions; of AOT: aot_name, device, user_device_memory,
        openmp, num_threads, weights, weights_argnums, weights_argnames.
      static_argnums: numbers of arguments that are compile-time constants.
      static_argnames: names of further ones.
      donate_argnums: numbers of arguments that may be the same arrays as results.
      donate_argnames: names of further ones.
      runtime_args: an older name of compile_options.
      output: a folder, or the name of one file, whose end says what it is to be: .o .h .so .a .s
        .ll .mlir; None: here.
      emit: what to write: "obj", "header", "shared", "static", "asm", "llvm", "mlir", "kernels",
        "metadata", "cmake", "pkgconfig", "cpp", "bench". None: the first two.
    Raises OptionError for options, names and paths that cannot be; when called, UnsupportedOp for
    what only XLA or Python could run, TargetError for missing tools, or what JAX raises. Nothing is
    written then.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     aot = pbkern.polyblocks_aot_jax(lambda x: x * 2, output=folder, compile_options={"aot_name": "twice"})
      ...     library = aot(jax.ShapeDtypeStruct((4,), "float32"))
      ...     {kind: path.name for kind, path in library.paths.items()}
      {'obj': 'twice.o', 'header': 'twice.h'}
    """
    compile_options = named_once(compile_options, runtime_args)
    given = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
    }
    if fn is None:
        return functools.partial(
            polyblocks_aot_jax, compile_options=compile_options, output=output, emit=emit, **given
        )
    if isinstance(fn, type) or not (callable(fn) or isinstance(fn, Kernel)):
        raise OptionError(
            "polyblocks_aot_jax compiles a function",
            why=f"given {fn!r}",
            hint="polyblocks_aot_jax(compile_options={...})(fn)(*args)",
        )
    imported = fn if isinstance(fn, ImportedFunction) else None
    fn = fn if imported is None else imported.jitted
    if isinstance(fn, JitFunction):
        inner = fn.options.differing()
        compile_options = inner | (CompileOptions.from_dict(compile_options).differing())
        fn = fn.__wrapped__
    options = CompileOptions.from_dict(merged(compile_options, given))
    check_for("polyblocks_aot_jax", options)
    compiled = functools.partial(compile_library, fn, options, output, emit)
    return compiled if imported is None else functools.partial(_of_imported, imported, compiled)


def _of_imported(
    program: ImportedFunction, compiled: Callable[..., Library], /, *args: Any, **kwargs: Any
) -> Library:
    """A StableHLO program brings its types along."""
    given, named = (args, kwargs) if args or kwargs else program.example
    with program.types_kept():
        return compiled(*given, **named)


@_jax.hides_own_frames
def compile_library(
    fn, options: CompileOptions, output, emit, /, *args: Any, **kwargs: Any
) -> Library:
    """The library of a function for arguments like these."""
    from .build import build_library  # with all that lowers, which `import pbkern` does not need

    own_name = fn.name if isinstance(fn, Kernel) else name_of(fn)
    asked = wanted(identifier(own_name), options, output, emit)
    if isinstance(fn, (Kernel, KernelFunction)):
        check_names_no_arguments(options, "leave it out: a kernel's arrays are all arguments")
        if _ranges((args, kwargs)):
            raise UnsupportedOp(
                f"kernel `{own_name}` is compiled for sizes that are numbers",
                why="its grid and its blocks belong to them",
                hint="a library of a function that calls it, whose grid follows from the argument's shape",
            )
        without = Weights("a kernel has none: its arrays are arguments")
        of_kernel = FunctionOfSizes((), lambda planned, _: _of_kernel(fn, args, planned))
        return build_library(asked, options, of_kernel, without)
    static = call.Marked.of(fn, options.static_argnums, options.static_argnames)
    donated = call.Marked.of(fn, options.donate_argnums, options.donate_argnames)
    try:
        JitFunction(fn, options, {})  # which looks at the marked arguments as jax.jit does
    except ValueError as e:
        marked = {k: value for k, value in options.differing().items() if k in ARGUMENT_OPTIONS}
        raise OptionError(
            f"`{own_name}` has no such arguments", why=f"{marked}: {str(e).splitlines()[0]}"
        ) from None
    ranges = _ranges((args, kwargs))

    @by_sizes
    def traced_at(sizes: Sizes) -> call.Traced:
        given, named = jax.tree.map(functools.partial(_at, sizes), (args, kwargs))
        return call.trace(fn, static, donated, given, named)

    traced = traced_at({name: high for name, (_, high) in ranges.items()})
    _refuse_refs(traced)
    paths = argument_paths(
        fn, args, kwargs, lambda of: of in static.positions or of in static.names
    )
    symbols = parameters_of_sizes(ranges, [*paths, *result_paths(traced.results)])

    def make(planned: CompileOptions, sizes: Sizes) -> LibraryFunction:
        traced = traced_at(by_source(symbols, sizes))
        return function_of(
            traced.closed,
            own_name,
            planned,
            paths,
            result_paths(traced.results),
            traced.held[: traced.constants],
            traced.donated,
        )

    def for_sizes(sizes: Sizes) -> TracedForSizes:
        traced = traced_at(by_source(symbols, sizes))
        return TracedForSizes(traced.closed, tuple(traced.held[: traced.constants]))

    obstacle = _obstacle(fn, static, donated, args, kwargs) if symbols else ""
    return build_library(
        asked,
        options,
        FunctionOfSizes(symbols, make, for_sizes, obstacle),
        _weights(fn, options, static, args, kwargs, traced),
        any(traced.donated),
    )


def _ranges(given: Any) -> dict[str, tuple[int, int]]:
    """Symbols of arguments whose types come of jax.export.symbolic_shape, with the least and the greatest of each.

    Raises OptionError for one without a maximum.
    """
    sizes = [size for leaf in jax.tree.leaves(given) for size in getattr(leaf, "shape", ())]
    ranges = {}
    for name, (low, high) in _jax.symbol_ranges(sizes).items():
        if high is None:
            raise OptionError(
                f"size `{name}` has no maximum",
                why="a library has memory and programs for sizes up to a maximum",
                hint=f'jax.export.symbolic_shape("{name}", constraints=["{name} <= 64"])',
            )
        ranges[name] = low, high
    return ranges


def _at(sizes: Sizes, leaf: Any) -> Any:
    """A type with numbers in the place of symbols."""
    if not any(map(_jax.is_symbolic, getattr(leaf, "shape", ()))):
        return leaf
    shape = tuple(_jax.dimension_at(size, sizes) for size in leaf.shape)
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def _obstacle(
    fn: Callable, static: call.Marked, donated: call.Marked, args: tuple, kwargs: dict
) -> str:
    """The reason why a function is another one for other sizes, as JAX says it; "" where JAX can trace it for symbols."""
    try:
        traced = call.trace(fn, static, donated, args, kwargs)
    except Exception as e:
        return f"JAX cannot trace it for symbols: {str(e).splitlines()[0]}"
    for eqn in equations(traced.closed.jaxpr):
        at = f"at {_jax.user_line(eqn) or 'an unknown line'}"
        if eqn.primitive.name == _jax.SIZE_AS_VALUE:
            return f"a value depends on the size, {at}"
        for var in eqn.outvars:
            for size in getattr(var.aval, "shape", ()):
                if not _jax.is_linear(size):
                    return f"the extent {size} is no multiple of a size, {at}"
    return ""


def _weights(
    fn: Callable,
    options: CompileOptions,
    static: call.Marked,
    args: tuple,
    kwargs: dict,
    traced: call.Traced,
) -> Weights:
    """The leaves of the arguments that weights_argnums and weights_argnames name.

    Raises OptionError for names of no argument.
    """
    marked = call.Marked.of(fn, options.weights_argnums, options.weights_argnames)
    dynamic, named = static.unmarked(args, kwargs)
    given = call.Marked.of(fn, tuple(dynamic), tuple(named))
    unknown = [
        *sorted(n for n in marked.positions if n not in given.positions),
        *sorted(name for name in marked.names if name not in given.names),
    ]
    if unknown:
        raise OptionError(
            f"`{name_of(fn)}` has no such arguments: {', '.join(map(str, unknown))}",
            why=f"weights_argnums={options.weights_argnums}, weights_argnames={options.weights_argnames}",
            hint="arguments that the call gives and that are not static",
        )
    numbers = tuple(n for n, flag in enumerate(marked.flags(dynamic, named)) if flag)
    leaves, avals = traced.held[traced.constants :], traced.closed.in_avals[traced.constants :]
    return Weights(
        "weights_argnums=... names the arguments that are weights",
        numbers,
        tuple(
            None if isinstance(leaves[n], jax.ShapeDtypeStruct) else words(leaves[n], avals[n])
            for n in numbers
        ),
    )


def _of_kernel(
    fn: Kernel | KernelFunction, args: tuple, options: CompileOptions
) -> LibraryFunction:
    kernel = fn if isinstance(fn, Kernel) else fn.trace(*args)
    count = len(kernel.in_types)
    names = (
        parameter_names(fn.body, count)
        if isinstance(fn, KernelFunction)
        else [f"in{n}" for n in range(count)]
    )
    return function_of_kernel(kernel, options, names)


def _refuse_refs(traced: call.Traced) -> None:
    for operand in traced.closed.in_avals:
        if isinstance(operand, jax.ref.AbstractRef):
            raise UnsupportedOp(
                "a library takes no Refs",
                why=f"an argument or a value of its scope is {operand.str_short()}",
                hint="take the array and return the new one",
            )
