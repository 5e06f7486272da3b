"""polyblocks_aot_jax: a JAX function or a kernel, and arguments -> a C library."""

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
from pbkern.core.jaxprs.walks import equations
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
    """The library of a StableHLO program, which has types of its arguments if none are given."""
    given, named = (args, kwargs) if args or kwargs else program.example
    with program.types_kept():
        return compiled(*given, **named)


@_jax.hides_own_frames
def compile_library(
    fn, options: CompileOptions, output, emit, /, *args: Any, **kwargs: Any
) -> Library:
    """The library of a function or kernel for arguments like these.

    Args:
      fn: the function, KernelFunction or Kernel.
      options: all options, those of arguments among them.
      output: as for polyblocks_aot_jax.
      emit: as for polyblocks_aot_jax.
      *args: arrays or jax.ShapeDtypeStructs.
      **kwargs: the same, by name.
    """
    from .build import build_library  # with all that lowers, which `import pbkern` does not need

    is_kernel = isinstance(fn, (Kernel, KernelFunction))
    name = fn.name if isinstance(fn, Kernel) else name_of(fn)
    files = wanted(identifier(name), options, output, emit)
    if is_kernel:
        _refuse_for_kernel(name, options, (args, kwargs))
        no_weights = Weights("a kernel has none: its arrays are arguments")
        of_kernel = FunctionOfSizes((), lambda planned, _: _of_kernel(fn, args, planned))
        return build_library(files, options, of_kernel, no_weights)
    _refuse_unknown_arguments(fn, name, options)
    call_of = _Call(
        fn,
        name,
        call.Marked.of(fn, options.static_argnums, options.static_argnames, "static_argnums"),
        call.Marked.of(fn, options.donate_argnums, options.donate_argnames, "donate_argnums"),
        args,
        kwargs,
    )
    traced = call_of.traced_at(call_of.largest_sizes)
    _refuse_refs(traced)
    return build_library(
        files,
        options,
        call_of.of_sizes(traced),
        _weights(fn, options, call_of.static, args, kwargs, traced),
        any(traced.donated),
    )


def _refuse_for_kernel(name: str, options: CompileOptions, given: Any) -> None:
    """Raises OptionError for options that name arguments, and UnsupportedOp for symbolic sizes."""
    check_names_no_arguments(options, "leave it out: a kernel's arrays are all arguments")
    if _ranges(given):
        raise UnsupportedOp(
            f"kernel `{name}` is compiled for sizes that are numbers",
            why="its grid and its blocks belong to them",
            hint="a library of a function that calls it, whose grid follows from the argument's shape",
        )


def _refuse_unknown_arguments(fn: Callable, name: str, options: CompileOptions) -> None:
    """Raises OptionError for options that name arguments which the function does not have."""
    try:
        JitFunction(fn, options, {})  # which looks at the marked arguments as jax.jit does
    except ValueError as e:
        marked = {k: value for k, value in options.differing().items() if k in ARGUMENT_OPTIONS}
        raise OptionError(
            f"`{name}` has no such arguments", why=f"{marked}: {str(e).splitlines()[0]}"
        ) from None


class _Call:
    """A function with arguments, whose sizes may be symbols.

    Attributes:
      fn: the function.
      name: for messages and files.
      static, donated: the arguments that are compile-time constants, and those that may be the same arrays as results.
      args, kwargs: the arguments, or their types.
      ranges: symbol of a size -> (least, greatest).
      traced_at: number of each symbol -> the traced call.
    """

    def __init__(
        self,
        fn: Callable,
        name: str,
        static: call.Marked,
        donated: call.Marked,
        args: tuple,
        kwargs: dict,
    ) -> None:
        self.fn, self.name, self.static, self.donated = fn, name, static, donated
        self.args, self.kwargs = args, kwargs
        self.ranges = _ranges((args, kwargs))
        self.traced_at = by_sizes(self._trace)

    @property
    def largest_sizes(self) -> dict[str, int]:
        return {name: high for name, (_, high) in self.ranges.items()}

    def _trace(self, sizes: Sizes) -> call.Traced:
        given, named = jax.tree.map(functools.partial(_at, sizes), (self.args, self.kwargs))
        return call.trace(self.fn, self.static, self.donated, given, named)

    def of_sizes(self, largest: call.Traced) -> FunctionOfSizes:
        """The library's function for all sizes; `largest`: the call traced at the largest ones."""
        is_static = lambda of: of in self.static.positions or of in self.static.names
        paths = argument_paths(self.fn, self.args, self.kwargs, is_static)
        symbols = parameters_of_sizes(self.ranges, [*paths, *result_paths(largest.results)])

        def make(planned: CompileOptions, sizes: Sizes) -> LibraryFunction:
            traced = self.traced_at(by_source(symbols, sizes))
            return function_of(
                traced.closed,
                self.name,
                planned,
                paths,
                result_paths(traced.results),
                traced.held[: traced.constants],
                traced.donated,
            )

        def trace_for(sizes: Sizes) -> TracedForSizes:
            traced = self.traced_at(by_source(symbols, sizes))
            return TracedForSizes(traced.closed, tuple(traced.held[: traced.constants]))

        obstacle = ""
        if symbols:
            obstacle = _obstacle(self.fn, self.static, self.donated, self.args, self.kwargs)
        return FunctionOfSizes(symbols, make, trace_for, obstacle)


def _ranges(given: Any) -> dict[str, tuple[int, int]]:
    """Symbol of a size in the arguments' shapes -> (least, greatest).

    Such shapes come from jax.export.symbolic_shape. Raises OptionError for a symbol without a maximum.
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
    """An argument's type with numbers in place of symbols; other arguments as they are."""
    if not any(map(_jax.is_symbolic, getattr(leaf, "shape", ()))):
        return leaf
    shape = tuple(_jax.dimension_at(size, sizes) for size in leaf.shape)
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def _obstacle(
    fn: Callable, static: call.Marked, donated: call.Marked, args: tuple, kwargs: dict
) -> str:
    """The reason why a function's jaxpr differs from size to size; "" where JAX traces one for symbols."""
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
    marked = call.Marked.of(
        fn, options.weights_argnums, options.weights_argnames, "weights_argnums"
    )
    dynamic, named = static.unmarked(args, kwargs)
    given = call.Marked.of(fn, tuple(dynamic), tuple(named), "arguments")
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
    """The library's function that runs one kernel, with the body's names for its arguments."""
    kernel = fn if isinstance(fn, Kernel) else fn.trace(*args)
    count = len(kernel.in_types)
    names = (
        parameter_names(fn.body, count)
        if isinstance(fn, KernelFunction)
        else [f"in{n}" for n in range(count)]
    )
    return function_of_kernel(kernel, options, names)


def _refuse_refs(traced: call.Traced) -> None:
    """Raises UnsupportedOp for a function that takes or closes over a Ref."""
    for operand in traced.closed.in_avals:
        if isinstance(operand, jax.ref.AbstractRef):
            raise UnsupportedOp(
                "a library takes no Refs",
                why=f"an argument or a value of its scope is {operand.str_short()}",
                hint="take the array and return the new one",
            )
