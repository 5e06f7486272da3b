"""from_stablehlo: StableHLO programs as functions of JAX arrays."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import ArgumentError, OptionError
from pbkern.core.options import CompileOptions
from pbkern.core.process.public_names import PublicNames
from pbkern.frontends.stablehlo.importer import ImportedProgram, import_program
from pbkern.frontends.stablehlo.parse import ProgramSource, parse

from .decorators import JitFunction, polyblocks_jit_jax

WIDE = tuple(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


@_jax.hides_own_frames
def from_stablehlo(source: Any, *, compile_options: Any = None) -> ImportedFunction:
    """A StableHLO program as a function of JAX arrays, compiled by pbkern when it is called.

    It takes the arrays that the program's function `main` takes, one positional argument each, and
    returns its result, or a tuple of several. What jax.export wrote keeps the structure of
    arguments and results of the function that it exported. It is like a function that pbkern.jit
    decorates: `.explain`, `.kernels`, `.as_text` and JAX's transformations work.

    Args:
      source: a path; bytes (MLIR's bytecode, a portable artefact, what
        jax.export.Exported.serialize gives); the program's text; a jax.export.Exported.
      compile_options: as of pbkern.jit, without static arguments.
    Raises ArgumentError for what is no StableHLO program, UnsupportedOp, which names all operations
    that cannot be imported, OptionError; when called, ArgumentError for arguments of other types
    than the program's.

    Examples:
      >>> exported = jax.export.export(jax.jit(lambda x: jnp.tanh(x) * 2))
      >>> program = exported(jax.ShapeDtypeStruct((8,), "float32"))
      >>> f = pbkern.from_stablehlo(program.serialize())
      >>> f(jnp.zeros(8)).shape
      (8,)
    """
    options = CompileOptions.from_dict(compile_options)
    for name in ("static_argnums", "static_argnames", "donate_argnames"):
        if getattr(options, name):
            why = "arguments of a program are arrays, by position"
            raise OptionError(
                f"compile option `{name}` concerns Python functions", why=why, hint="leave it out"
            )
    return ImportedFunction(parse(source), compile_options)


class ImportedFunction(PublicNames):
    """A decorated function of arguments of given types, as from_stablehlo returns it.

    Attributes:
      in_avals, out_avals: types of arguments and results, flat.
    """

    def __init__(self, source: ProgramSource, compile_options: Any):
        self._source, imported = source, import_program(source)
        self.in_avals = _arguments(source, imported)
        self.out_avals = tuple(imported.jaxpr.out_avals)
        self._is_wide = any(aval.dtype in WIDE for aval in (*self.in_avals, *self.out_avals))
        function = _function(source, imported, self.in_avals)
        self._jitted: JitFunction = polyblocks_jit_jax(function, compile_options=compile_options)
        self.__name__ = imported.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.types_kept():
            return self._jitted(*args, **kwargs)

    @property
    def jitted(self) -> JitFunction:
        """The decorated function, to be called under `types_kept`."""
        return self._jitted

    @property
    def example(self) -> tuple[tuple, dict]:
        """(arguments, keywords) of the program, as types."""
        leaves = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in self.in_avals]
        exported = self._source.exported
        return jax.tree.unflatten(exported.in_tree, leaves) if exported else (tuple(leaves), {})

    def with_options(self, compile_options: Any) -> ImportedFunction:
        """Returns the program with other options."""
        return ImportedFunction(self._source, compile_options)

    def types_kept(self) -> contextlib.AbstractContextManager:
        """64-bit arguments and results stay what they are, whatever JAX's setting is."""
        return jax.enable_x64(True) if self._is_wide else contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        attribute = getattr(self._jitted, name)
        if not callable(attribute):
            return attribute

        def method(*args: Any, **kwargs: Any) -> Any:
            with self.types_kept():
                return attribute(*args, **kwargs)

        return method

    def __repr__(self) -> str:
        types = ", ".join(aval.str_short() for aval in self.in_avals)
        return f"<pbkern.from_stablehlo `{self.__name__}` of ({types})>"


def _arguments(source: ProgramSource, imported: ImportedProgram) -> tuple[Any, ...]:
    """Types of all arguments; an export leaves out of its program those that nothing reads."""
    return tuple(source.exported.in_avals if source.exported else imported.jaxpr.in_avals)


def _function(source: ProgramSource, imported: ImportedProgram, in_avals: tuple[Any, ...]):
    """The program as a function to be traced."""
    run, exported = jex.jaxpr_as_fun(imported.jaxpr), source.exported
    used_positions = exported.module_kept_var_idx if exported else range(len(in_avals))

    def program(*args, **kwargs):
        leaves = _flat(source, imported.name, len(in_avals), args, kwargs)
        arrays = [
            _checked(leaf, aval, k, imported.name)
            for k, (leaf, aval) in enumerate(zip(leaves, in_avals))
        ]
        results = run(*[arrays[position] for position in used_positions])
        if exported:
            return jax.tree.unflatten(exported.out_tree, results)
        return results[0] if len(results) == 1 else tuple(results)

    program.__name__ = program.__qualname__ = imported.name
    return program


def _flat(source: ProgramSource, name: str, count: int, args: tuple, kwargs: dict) -> list:
    """The arrays among arguments.

    Raises ArgumentError where they are built otherwise than the program's.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    expected = (
        source.exported.in_tree if source.exported else jax.tree.structure(((0,) * count, {}))
    )
    if structure != expected:  # type: ignore[operator]
        raise ArgumentError(
            f"`{name}` is called with other arguments than it has",
            why=f"given {structure}, it takes {expected}",
            hint="arguments of the structure that was exported",
        )
    return leaves


def _checked(x: Any, expected: Any, number: int, name: str) -> jax.Array:
    given = jax.typeof(x)
    if (
        given.shape == expected.shape
        and given.weak_type
        and jnp.result_type(x, expected.dtype) == expected.dtype
    ):
        return jnp.asarray(x, expected.dtype)  # Python's numbers
    if (given.shape, given.dtype) != (expected.shape, expected.dtype):
        types = f"given {given.str_short()}, it takes {expected.str_short()}"
        raise ArgumentError(
            f"argument {number} of `{name}` has another type than the program's",
            why=types,
            hint="convert it, or export again",
        )
    return x
