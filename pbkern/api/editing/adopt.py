"""Edited kernels in place of those that fusion made: checked first, then called like any hand-written kernel.

A kernel goes by the name of the one that it replaces. Its types have to be the same, and its results
on random operands those of the other, up to rounding. What the function has besides runs as before:
its plan is evaluated as operations of JAX (host_function.py), and those are compiled again.

Derivatives: a function with adopted kernels has the derivative of its own definition, as before,
unless one of the kernels brings a rule (jax.custom_vjp, jax.custom_jvp) of its own. Then each kernel
is differentiated by its rule or, without one, by the derivative of its body.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pbkern.api.measured.measure import first_difference, kernel_call, random_operands
from pbkern.core.errors import ArgumentError, KernelError, UnsupportedOp, shown
from pbkern.core.jaxprs.calls import has_rules
from pbkern.core.options import CompileOptions, nearest
from pbkern.dsl.call import call_kernel
from pbkern.dsl.kernel import ArrayType, Kernel
from pbkern.dsl.printer import rebuild
from pbkern.dsl.trace import KernelFunction, needs_x64

from .host_function import HostOperations, host_function

Edited = Mapping[str, Callable]


def adopt(function: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """A decorated function with the kernels of a module, such as `eject` wrote, in place of its own.

    Args:
      function: a function decorated with pbkern.jit.
      module: a module, or the path of its file. What it names like a kernel of the function is
        taken; an unchanged kernel counts.
      *args: arguments, or types, for which the kernels are checked; default: the module's
        `example_args`.
      **kwargs: named ones, in the same way.
    Returns a function like `function`. Raises KernelError where a kernel has other types, or other
    results, than the one that it replaces.

    Examples:
      >>> import pathlib, tempfile
      >>> f = pbkern.jit(lambda x: jnp.exp(x).sum(1))
      >>> x = jnp.ones((64, 32))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "edited").with_suffix(".py")
      ...     text = pbkern.eject(f, x, path=path)
      ...     adopted = pbkern.adopt(f, path)
      >>> bool(jnp.allclose(adopted(x), f(x)))
      True
    """
    module = module if isinstance(module, types.ModuleType) else loaded(module)
    if args or kwargs:
        host = host_function(function, args, kwargs)
    else:
        args = getattr(module, "example_args", ())
        try:
            host = host_function(function, args, kwargs)
        except TypeError as e:
            raise ArgumentError(
                "the module's `example_args` are no arguments of the function",
                why=f"{e}; static arguments are no arrays, and not among them",
                hint="pbkern.adopt(f, module, *args) checks kernels for these arguments",
            ) from None
    edited = {name: value for name, value in vars(module).items() if name in host.kernels}
    if not edited:
        raise ArgumentError(
            f"the module has no kernel of `{host.name}`",
            why=f"`{host.name}` has {', '.join(host.kernels) or 'no kernels'} for these arguments",
            hint="pbkern.eject(f, *args, path=...) writes one",
        )
    adopted = function.with_kernels(edited)
    adopted.__wrapped__.checked(args, kwargs)
    return adopted


def loaded(path: str | os.PathLike) -> types.ModuleType:
    """The module of a file. Raises ArgumentError where there is none, and what running it raises."""
    if not isinstance(path, (str, os.PathLike)) or "\n" in os.fspath(path):
        raise ArgumentError(
            "kernels are adopted from a module, or from the path of its file",
            why=f"given {shown(path)}",
            hint='pbkern.adopt(f, "kernels.py"); a text of one kernel: f.with_kernels({name: text})',
        )
    path = pathlib.Path(path)
    if not os.path.isfile(path):
        raise ArgumentError(f"there is no file {shown(str(path))}", why=f"in {pathlib.Path.cwd()}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"{path} is no file of Python", hint="a file whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def callables(edited: Any) -> dict[str, Callable]:
    """Kernels by their names, sources rebuilt. Raises ArgumentError for what is none."""
    if not isinstance(edited, Mapping):
        raise ArgumentError(
            "edited kernels are given by the names of those that they replace",
            why=f"given {shown(edited)}",
            hint="f.with_kernels({kernel.name: edited})",
        )
    kernels: dict[str, Callable] = {}
    for name, kernel in edited.items():
        if not isinstance(name, str):
            raise ArgumentError(
                "a kernel's name is a text",
                why=f"given {shown(name)} of type {type(name).__name__}",
                hint="kernel.name of one of f.kernels(*args)",
            )
        kernel = rebuild(kernel) if isinstance(kernel, str) else kernel
        if not callable(kernel):
            raise ArgumentError(
                f"what should replace kernel `{name}` is no kernel",
                why=f"given {shown(kernel)} of type {type(kernel).__name__}",
                hint="a kernel, its source, or a function of arrays",
            )
        kernels[name] = kernel
    return kernels


class WithKernels:
    """A decorated function that calls other kernels in place of some of its own.

    Attributes:
      function: the decorated one.
      edited: kernel's name -> what is called: a kernel, or a function of arrays.
    """

    def __init__(self, function: Any, edited: Mapping[str, Callable | str]):
        self.function, self.edited = function, callables(edited)
        self.__name__ = function.__name__
        self.__wrapped__ = function.__wrapped__  # its signature
        self._agreed: dict[str, list[Kernel]] = {name: [] for name in self.edited}

    def __repr__(self) -> str:
        return f"{self.__name__} with kernels {', '.join(self.edited)}"

    def checked(self, args: tuple, kwargs: dict) -> HostOperations:
        """The function's operations for such arguments. Raises KernelError for a kernel that does not suit."""
        host = host_function(self.function, args, kwargs)
        for name, edited in self.edited.items():
            if name not in host.kernels:
                raise KernelError(
                    f"`{host.name}` has no kernel `{name}` for these arguments",
                    why=f"its kernels are {', '.join(host.kernels) or 'none'}",
                    hint=nearest(name, list(host.kernels)) or "f.kernels(*args)",
                )
            kernel = host.kernels[name]
            if not any(kernel.content == agreed.content for agreed in self._agreed[name]):
                check_agreement(kernel, edited, self.function.options)
                self._agreed[name].append(kernel)
        return host

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        host = self.checked(args, kwargs)

        def call(kernel: Kernel, operands: list) -> list:
            edited = self.edited.get(kernel.name)
            if edited is None:
                return call_kernel(kernel, *operands)
            return _as_list(edited(*operands))

        def with_kernels(leaves: list) -> list:
            return host.run(leaves, call)

        leaves = [jnp.asarray(leaf) for leaf in self._leaves(host, args, kwargs)]
        rules = {name for name in self.edited if self._has_rule(host, name)}
        run = _without_rules(with_kernels, host) if rules else _derived_as(with_kernels, host)
        return jax.tree.unflatten(jax.tree.structure(host.traced.out_info), run(leaves))

    def _leaves(self, host: HostOperations, args: tuple, kwargs: dict) -> list:
        positional, named = self.function.dynamic(args, kwargs)
        return jax.tree.leaves((positional, named))

    def _has_rule(self, host: HostOperations, name: str) -> bool:
        edited = self.edited[name]
        if isinstance(edited, (Kernel, KernelFunction)):
            return False
        types = host.kernels[name].in_types
        return has_rules(jax.make_jaxpr(edited)(*map(_struct, types)).jaxpr)


def _derived_as(with_kernels: Callable[[list], list], host: HostOperations) -> Callable:
    """The function with kernels, whose derivative is that of its definition."""
    run = jax.custom_jvp(with_kernels)

    @run.defjvp
    def derivative(primals: tuple, tangents: tuple):
        _, tangents_out = jax.jvp(host.run_as_defined, primals, tangents)
        return run(*primals), tangents_out

    return run


def _without_rules(with_kernels: Callable[[list], list], host: HostOperations) -> Callable:
    """The function with kernels, differentiated kernel by kernel. Other rules in its definition would be lost."""
    if not has_rules(host.traced.jaxpr.jaxpr):
        return with_kernels
    run = jax.custom_jvp(with_kernels)

    @run.defjvp
    def derivative(primals: tuple, tangents: tuple):
        raise UnsupportedOp(
            f"`{host.name}` with adopted kernels has no derivative",
            why="both a kernel and the function's definition have rules of their own (jax.custom_vjp, jax.custom_jvp)",
            hint="adopt the kernel without its rule, or call the ejected module's function",
        )

    return run


# --- checks
# ---------------------------------------------------------------------------------------------------


def check_agreement(kernel: Kernel, edited: Callable, options: CompileOptions) -> None:
    """Raises KernelError unless `edited` has the kernel's types, and its results on random operands."""
    given = _types_of(kernel, edited)
    wanted = (list(kernel.in_types), list(kernel.out_types))
    if given != wanted:
        shown = (
            f"({', '.join(map(str, takes))}) -> ({', '.join(map(str, returns))})"
            for takes, returns in (given, wanted)
        )
        raise KernelError(
            f"what should replace kernel `{kernel.name}` has other types",
            why=" in place of ".join(shown),
            hint="keep in_types and out_shape of the kernel's source",
        )
    wide = needs_x64(type_.dtype for type_ in (*kernel.in_types, *kernel.out_types))
    with jax.ensure_compile_time_eval(), jax.enable_x64(wide):
        operands = random_operands(kernel.in_types)
        want = list(kernel_call(kernel, options)(*operands))
        got = _as_list(_compiled(kernel, edited, options)(*operands))
    for number, (result, expected) in enumerate(zip(got, want)):
        difference = first_difference(result, expected)
        if difference is not None:
            raise KernelError(
                f"what should replace kernel `{kernel.name}` has other results",
                why=f"output {number} {difference}",
                hint="operands were random; pbkern.interpret(kernel, *arrays) checks accesses and races",
            )


def _types_of(kernel: Kernel, edited: Callable) -> tuple[list, list]:
    edited = _traced(kernel, edited)
    if isinstance(edited, Kernel):
        return list(edited.in_types), list(edited.out_types)
    results = _as_list(jax.eval_shape(edited, *map(_struct, kernel.in_types)))
    return list(kernel.in_types), [ArrayType(tuple(x.shape), np.dtype(x.dtype)) for x in results]


def _compiled(kernel: Kernel, edited: Callable, options: CompileOptions) -> Callable:
    """Runs kernels for the function's target; other functions run as they do."""
    traced = _traced(kernel, edited)
    return kernel_call(traced, options) if isinstance(traced, Kernel) else traced


def _traced(kernel: Kernel, edited: Callable) -> Callable:
    """A kernel that is not traced yet, for its own types or those of the one that it replaces."""
    if isinstance(edited, KernelFunction):
        return edited.trace(*(edited.in_types or kernel.in_types))
    return edited


def _struct(type_: ArrayType) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(type_.shape, type_.dtype)


def _as_list(results: Any) -> list:
    return list(results) if isinstance(results, (list, tuple)) else [results]
