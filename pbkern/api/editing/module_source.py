"""Kernels, and a function of JAX that calls them -> Python source of a module."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from keyword import iskeyword
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from pbkern.core.errors import ArgumentError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.printer import joined_source
from pbkern.dsl.text.body_printer import JaxprPrinter
from pbkern.dsl.text.identifiers import RESERVED, USED, identifier, unused
from pbkern.dsl.text.spelling import SpellingScope, dtype_name, plain_number
from pbkern.dsl.trace import body_dtypes, needs_x64

DOCSTRING = '''"""The kernels of `{name}`, and the function that calls them.

Edit a kernel, and run this file; pbkern.adopt(f, "{name}.py") takes the kernels back into the function.
"""
'''
RUN = """
if __name__ == "__main__":
    numbers = np.random.default_rng(0)
    drawn = lambda type_: jnp.asarray(numbers.uniform(0, 2, type_.shape)).astype(type_.dtype)
    print({name}(*jax.tree.map(drawn, example_args){named}))
"""


@dataclass(frozen=True)
class Signature:
    """Arguments and results of a function.

    Attributes:
      arguments: pytree of (positional arguments, named arguments).
      leaf_names: what each array of them is called.
      leaf_types: their types.
      results: pytree of what it returns.
    """

    arguments: Any
    leaf_names: Sequence[str]
    leaf_types: Sequence
    results: Any


def module_source(
    name: str, closed: jex.ClosedJaxpr, kernels: Sequence[Kernel], signature: Signature
) -> str:
    """The module's text.

    Args:
      name: the function's.
      closed: the function; its equations call `kernels`.
      kernels: of different names.
      signature: how it is called.
    """

    def rest(imports: set[str]) -> str:
        imports.add("numpy as np")
        return "\n".join(_function(name, closed, kernels, signature, imports))

    return DOCSTRING.format(name=name) + "\n" + joined_source(kernels, rest)


def _function(
    name: str,
    closed: jex.ClosedJaxpr,
    kernels: Sequence[Kernel],
    signature: Signature,
    imports: set[str],
) -> list[str]:
    """Lines of constants, of the function, and of what runs it."""
    positional, named = jax.tree.unflatten(signature.arguments, closed.jaxpr.invars)
    constants = [f"CONSTANT_{n}" for n in range(len(closed.consts))]
    module = {name, *constants, *(kernel.name for kernel in kernels)}
    # Callers pass these by name: a name that no parameter can have is looked up in `**others`.
    keywords = [key for key in named if key.isidentifier() and not iskeyword(key)]
    keywords = [key for key in keywords if key not in USED | module]
    names = _argument_names(signature, len(positional), RESERVED | module | set(keywords))
    collected = unused("others", module | {*names, *keywords})
    reserved = {*USED, *module, *names, *keywords, collected}
    wide = needs_x64(body_dtypes(closed.jaxpr))
    printer = JaxprPrinter(reserved, x64=wide)
    bound = dict(zip(closed.jaxpr.constvars, constants))
    unpack = []
    said = {key: key if key in keywords else f"{collected}[{key!r}]" for key in named}
    for called, argument in (*zip(names, positional), *((said[key], named[key]) for key in named)):
        leaves = jax.tree.leaves(argument)
        if len(leaves) == 1 and leaves[0] is argument:
            bound[argument] = called
        elif leaves:
            texts = [printer.name(leaf) for leaf in leaves]
            unpack.append(
                f"{', '.join(texts)}{',' * (len(texts) == 1)} = jax.tree.leaves({called})"
            )

    def returned(atoms: Sequence, scope: SpellingScope) -> str:
        return _pytree_text(jax.tree.unflatten(signature.results, list(map(scope.text, atoms))))

    parameters = [*names, *(["*"] if keywords else []), *keywords]
    parameters += [f"**{collected}"] if len(keywords) < len(named) else []
    lines = printer.function(name, parameters, closed.jaxpr, bound, unpack, result=returned)
    if wide:  # numbers in it are 64-bit ones
        lines = [lines[0], "    with jax.enable_x64(True):", *(f"    {line}" for line in lines[1:])]
    imports |= printer.imports
    types = jax.tree.unflatten(signature.arguments, list(map(_type_text, signature.leaf_types)))
    example = _pytree_text(types[0])
    run = RUN.format(
        name=name, named=f", **jax.tree.map(drawn, {_pytree_text(types[1])})" * bool(named)
    )
    values = [f"{text} = {_constant(value)}" for text, value in zip(constants, closed.consts)]
    return [*values, "", *lines, "", "", f"example_args = {example}", run]


def _argument_names(signature: Signature, count: int, taken: Set[str]) -> list[str]:
    """Names of positional arguments, from those of their arrays; none is taken."""
    numbered = jax.tree.unflatten(signature.arguments, list(range(len(signature.leaf_names))))[0]
    names: list[str] = []
    for n, argument in enumerate(numbered[:count]):
        leaves = jax.tree.leaves(argument)
        match = re.match(r"\w+", signature.leaf_names[leaves[0]]) if leaves else None
        name = identifier(match[0], f"arg{n}") if match else f"arg{n}"
        name = f"{name}_{n}" if name in names else name
        names.append(unused(name, taken | set(names)))
    return names


def _type_text(type_: Any) -> str:
    return f"jax.ShapeDtypeStruct({tuple(type_.shape)!r}, {dtype_name(type_.dtype)})"


def _pytree_text(tree: Any) -> str:
    """Source of a pytree whose leaves are sources. Raises ArgumentError for classes that JAX does not bring."""
    match tree:
        case str():
            return tree
        case None:
            return "None"
        case list():
            return f"[{', '.join(map(_pytree_text, tree))}]"
        case dict():
            entries = (f"{key!r}: {_pytree_text(value)}" for key, value in tree.items())
            return f"{{{', '.join(entries)}}}"
        case tuple() if type(tree) is tuple:
            return f"({', '.join(map(_pytree_text, tree))}{',' * (len(tree) == 1)})"
    raise ArgumentError(
        "a function cannot be ejected with these arguments or results",
        why=f"a {type(tree).__name__}, which a module of jax and numpy cannot make",
        hint="tuples, lists and dictionaries of arrays",
    )


def _constant(value: Any) -> str:
    array = np.asarray(value)
    numbers = ", ".join(map(plain_number, array.reshape(-1)))
    return f"np.asarray([{numbers}], {dtype_name(array.dtype)}).reshape({array.shape!r})"
