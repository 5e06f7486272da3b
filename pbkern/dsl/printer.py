"""Kernel -> DSL source that rebuilds it, and back. Fused, hand-written and adopted kernels all print this way.

dsl/text/body_printer.py prints the body, this file what stands around it. Running the text traces a Kernel with the same
jaxprs (jaxpr_digest.same).
"""

from __future__ import annotations

import ast
import itertools
import linecache
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

from pbkern.core.errors import ArgumentError, KernelError, shown
from pbkern.core.jaxprs.walks import inner_jaxprs, literal_value
from pbkern.core.process.jaxpr_digest import same
from pbkern.dsl.kernel import (
    ArrayType,
    Blocked,
    BlockMapping,
    Element,
    Kernel,
    Squeezed,
    print_as_source,
)
from pbkern.dsl.primitives.ref_access import is_ref_access
from pbkern.dsl.text import named_sizes
from pbkern.dsl.text.body_printer import JaxprPrinter, letter_names, subscripted
from pbkern.dsl.text.identifiers import RESERVED, identifier, unused
from pbkern.dsl.text.spelling import (
    Spelled,
    SpellingScope,
    dtype_name,
    plain_number,
    spell,
    spell_param,
)
from pbkern.dsl.trace import KernelFunction, body_dtypes, needs_x64

IMPORTS = "import jax\nimport jax.numpy as jnp\nfrom jax import lax\n\nimport pbkern\n"
# Columns of the longest line that is not broken: the line length of this project.
LINE_WIDTH = 100


def source(kernel: Kernel) -> str:
    """DSL source of a kernel: imports, its last stage, index maps that need statements, decorator, body.

    The text is a program: `rebuild` makes the same kernel of it.

    Examples:
      >>> (traced,) = pbkern.jit(lambda x: x * 2).kernels(jax.ShapeDtypeStruct((8,), "float32"))
      >>> "out0[...] = b" in pbkern.source(traced)
      True
    """
    return joined_source([kernel])


print_as_source.append(source)


def joined_source(kernels: Sequence[Kernel], rest: Callable[[set[str]], str] | None = None) -> str:
    """Source of several kernels as one module.

    Args:
      kernels: of different names.
      rest: adds to the module's imports, and returns what stands behind the kernels.
    """
    imports: set[str] = set()

    # Names of the module, which operands of bodies and constants do not have.
    names = {stage.name for kernel in kernels for stage in (kernel, kernel.finish) if stage}
    prefixes: set[str] = set()

    parts = []
    for kernel in kernels:
        prefix = unused(f"{kernel.name.upper()}_", prefixes) if len(kernels) > 1 else ""
        prefixes.add(prefix)
        taken = names | set(named_sizes.constant_names(kernel, prefix))

        def text(kernel: Kernel, taken: set[str] = taken) -> str:
            stages = filter(None, (kernel.finish, kernel))
            return "\n".join(
                line for stage in stages for line in _definition(stage, imports, taken)
            )

        parts += named_sizes.constants_and_text(kernel, text, prefix)
    parts += [rest(imports)] if rest else []
    return "\n".join(
        [IMPORTS + "".join(f"import {module}\n" for module in sorted(imports)), *parts]
    )


def _definition(kernel: Kernel, imports: set[str], taken: set[str]) -> list[str]:
    """Lines of one stage. Adds the modules that they use to `imports`; `taken` are names of the module."""
    refs = _ref_names(kernel, taken)
    printer = JaxprPrinter(reserved={*refs, kernel.name}, x64=_x64(kernel))
    index_maps: list[str] = []
    options: list[tuple[str, str | list[str]]] = [
        ("grid", spell_param(kernel.grid, printer.imports))
    ]
    specs = []
    for n, operand in enumerate(kernel.inputs + kernel.outputs):
        text, definition = _spec(operand, f"{kernel.name}_block_{n}", printer)
        specs.append(text)
        index_maps += definition
    options += [
        ("in_specs", specs[kernel.num_scalar_prefetch : len(kernel.inputs)]),
        ("out_specs", specs[len(kernel.inputs) :]),
        ("in_types", [_struct(type_) for type_ in kernel.in_types]),
        (
            "out_shape",
            _struct(kernel.outputs[0].array)
            if len(kernel.outputs) == 1
            else [_struct(output.array) for output in kernel.outputs],
        ),
        *_other_options(kernel, printer),
    ]
    body = printer.function(
        kernel.name, refs, kernel.body.jaxpr, dict(zip(kernel.body.jaxpr.invars, refs))
    )
    imports |= printer.imports
    decorator = ["@pbkern.kernel(", *(line for option in options for line in _option(*option)), ")"]
    return [*index_maps, *decorator, *body, ""]


def rebuild(text: str, **constants: int) -> Kernel:
    """Runs DSL source and traces the (last) kernel that it defines. It must give in_types.

    Args:
      text: as `source` writes it, edited or not. It is run as a program of its own.
      **constants: other values of constants of the text, such as ROWS.
    Returns a Kernel, which can be called. Raises KernelError where the text defines no kernel with
    in_types or no such constant, or where a constant cannot have the value; ArgumentError for what
    is no text, such as a path; and what running the text raises.

    Examples:
      >>> (traced,) = pbkern.jit(lambda x: x * 2).kernels(jax.ShapeDtypeStruct((8,), "float32"))
      >>> pbkern.rebuild(traced.source()).content == traced.content
      True
    """
    _check_text(text)
    for name, value in constants.items():
        line = re.compile(rf"^{re.escape(name)} = (.*)$", re.MULTILINE)
        before = line.search(text)
        if before is None:
            raise KernelError(
                f"the source has no constant `{name}`", hint="a line such as ROWS = 64"
            )
        written = f"{name} = {_constant(name, value, before[1])}"
        text = line.sub(written.replace("\\", r"\\"), text)
    filename = f"<pbkern kernel {abs(hash(text)):x}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict = {"__name__": "pbkern_rebuilt"}
    exec(compile(text, filename, "exec"), namespace)
    kernels = [value for value in namespace.values() if isinstance(value, KernelFunction)]
    if not kernels:
        raise KernelError(
            "the source defines no kernel", hint="a function under @pbkern.kernel(...)"
        )
    return kernels[-1].trace()


def _check_text(text: Any) -> None:
    """Raises ArgumentError for text that is no source, such as a path."""
    is_path = isinstance(text, os.PathLike)
    if isinstance(text, str):
        is_path = "\n" not in text and (text.strip().endswith(".py") or os.path.isfile(text))
        if not is_path:
            return
    if is_path:
        hint = f"pbkern.rebuild(pathlib.Path({shown(os.fspath(text))}).read_text())"
    else:
        hint = "kernel.source(), or what read_text() of a file returns"
    raise ArgumentError(
        "the source of a kernel is due, not a path" if is_path else "a kernel's source is no text",
        why=f"given {shown(text)}",
        hint=hint,
    )


def _constant(name: str, value: Any, before: str) -> str:
    """The value of a constant as source. Raises KernelError for a value that cannot take the place of `before`.

    Args:
      name: the constant's.
      value: integers of any kind; other numbers, texts and tuples where `before` is no integer.
      before: what stands in the source.
    """
    if not isinstance(value, bool):
        try:
            return str(operator.index(value))
        except TypeError:
            pass
    value = value.item() if isinstance(value, np.generic) else value
    if re.fullmatch(r"-?\d+\s*(#.*)?", before):
        raise KernelError(
            f"the constant `{name}` has to be an integer",
            why=f"{name}={shown(value)} of type {type(value).__name__}; the source has {name} = {before}",
            hint=f"{name}=16, known when the source is written",
        )
    try:
        ast.literal_eval(repr(value))
    except (ValueError, SyntaxError):
        raise KernelError(
            f"the constant `{name}` cannot be written as source",
            why=f"{name}={shown(value)} of type {type(value).__name__}",
            hint="a number, a text or a tuple of them; edit the text for others",
        ) from None
    return repr(value)


def same_kernel(kernel: Kernel, other: Kernel) -> bool:
    """Whether two kernels are equal, except for the place of their definition and names of their arrays in messages."""

    def plain(candidate: Kernel) -> tuple:
        mappings = [
            (operand.array, operand.dims, operand.memory_space)
            for operand in candidate.inputs + candidate.outputs
        ]
        return (
            candidate.name,
            candidate.grid,
            mappings,
            candidate.scratch,
            candidate.aliases,
            dict(candidate.compiler_params),
            candidate.num_scalar_prefetch,
            candidate.dynamic_grid,
        )

    index_maps = zip(kernel.inputs + kernel.outputs, other.inputs + other.outputs)
    return (
        plain(kernel) == plain(other)
        and same(kernel.body, other.body)
        and all(same(left.index_map, right.index_map) for left, right in index_maps)
        and (
            kernel.finish is other.finish
            or bool(kernel.finish and other.finish and same_kernel(kernel.finish, other.finish))
        )
    )


# --- the decorator
# -----------------------------------------------------------------------------------------------


def _x64(kernel: Kernel) -> bool:
    """Whether the body is traced in 64-bit mode."""
    return needs_x64(body_dtypes(kernel.body.jaxpr))


def _block_dtypes(kernel: Kernel) -> list[np.dtype]:
    """Dtypes by which the decorator decides on 64-bit mode."""
    return [operand.array.dtype for operand in kernel.inputs + kernel.outputs] + [
        scratch.dtype for scratch in kernel.scratch
    ]


def _compiler_params(params: dict, printer: JaxprPrinter) -> str:
    """Prints parameters as short as `kernel` accepts: parameters that know their target need no dictionary."""
    if all(getattr(param, "target_name", None) == target for target, param in params.items()):
        only = tuple(params.values())
        return spell_param(only[0] if len(only) == 1 else only, printer.imports)
    return spell_param(params, printer.imports)


def _other_options(kernel: Kernel, printer: JaxprPrinter) -> Iterator[tuple[str, str | list[str]]]:
    """(name, value) of the decorator's options that are not the default."""
    if kernel.scratch:
        yield (
            "scratch_shapes",
            [
                f"pbkern.Scratch({scratch.shape!r}, {dtype_name(scratch.dtype)}{_memory_space(scratch.memory_space)}"
                f"{', scoped=True' if scratch.scoped else ''})"
                for scratch in kernel.scratch
            ],
        )
    if kernel.aliases:
        yield "input_output_aliases", repr(dict(kernel.aliases))
    if kernel.compiler_params:
        yield "compiler_params", _compiler_params(dict(kernel.compiler_params), printer)
    if kernel.dynamic_grid:
        yield "dynamic_grid", repr(dict(kernel.dynamic_grid))
    if kernel.num_scalar_prefetch:
        yield "num_scalar_prefetch", str(kernel.num_scalar_prefetch)
    if _x64(kernel) != needs_x64(_block_dtypes(kernel)):
        yield "x64", str(_x64(kernel))
    if kernel.finish:
        yield "finish", kernel.finish.name


def _option(name: str, value: str | list[str]) -> list[str]:
    """Lines of one option; a list that is too long for one line has a line per entry."""
    if isinstance(value, str):
        return [f"    {name}={value},"]
    line = f"    {name}=[{', '.join(value)}],"
    if len(line) <= LINE_WIDTH:
        return [line]
    return [f"    {name}=[", *(f"        {entry}," for entry in value), "    ],"]


def _struct(array_type: ArrayType) -> str:
    return f"jax.ShapeDtypeStruct({array_type.shape!r}, {dtype_name(array_type.dtype)})"


def _memory_space(space: str) -> str:
    return "" if space == "any" else f", memory_space={space!r}"


def _ref_names(kernel: Kernel, taken: set[str]) -> list[str]:
    """The body's own names for its Refs where messages show them, else in0, out0, scratch0; none hides another name."""
    plain = [f"in{n}" for n in range(len(kernel.inputs))] + [
        f"out{n}" for n in range(len(kernel.outputs))
    ]
    plain += [f"scratch{n}" for n in range(len(kernel.scratch))]
    matches = [re.search(r"`(\w+)`", operand.origin) for operand in kernel.inputs + kernel.outputs]
    names: list[str] = []
    for match, fallback in itertools.zip_longest(matches, plain):
        name = identifier(match.group(1), fallback) if match else fallback
        names.append(unused(name, RESERVED | taken | set(names)))
    return names


def _spec(mapping: BlockMapping, name: str, printer: JaxprPrinter) -> tuple[str, list[str]]:
    """(BlockSpec source, lines of a function for an index map that is no single expression)."""
    jaxpr = mapping.index_map.jaxpr
    zero = all(isinstance(var, jex.Literal) and literal_value(var) == 0 for var in jaxpr.outvars)
    whole = all(
        isinstance(dim, Blocked) and dim.size == size
        for dim, size in zip(mapping.dims, mapping.array.shape)
    )
    space = _memory_space(mapping.memory_space)
    if whole and zero:
        return f"pbkern.BlockSpec({space.removeprefix(', ')})", []
    dims = "".join(f"{_dim(dim)}, " for dim in mapping.dims)
    shape = f"({dims.rstrip()})" if len(mapping.dims) == 1 else f"({dims.removesuffix(', ')})"
    if zero:
        return f"pbkern.BlockSpec({shape}{space})", []
    indices = list(letter_names("ijklmnopqrstuvwxyz", printer.reserved, len(jaxpr.invars)))
    inline = _inline(jaxpr, indices, printer)
    if inline is not None:
        return f"pbkern.BlockSpec({shape}, lambda {', '.join(indices)}: {inline}{space})", []
    local = JaxprPrinter(printer.reserved | set(indices), x64=False)
    lines = local.function(name, indices, jaxpr, dict(zip(jaxpr.invars, indices)), result=_indices)
    return f"pbkern.BlockSpec({shape}, {name}{space})", [*lines, ""]


def _dim(dim) -> str:
    match dim:
        case Squeezed():
            return "None"
        case Element(size, padding):
            return f"pbkern.Element({size}, padding={padding!r})"
        case _:
            return str(dim.size)


def _inline(jaxpr: jex.Jaxpr, names: Sequence[str], printer: JaxprPrinter) -> str | None:
    """An index map as one expression, or None if a value is used twice or is no expression."""
    uses = Counter(
        var for equation in jaxpr.eqns for var in equation.invars if isinstance(var, jex.Var)
    )
    uses.update(var for var in jaxpr.outvars if isinstance(var, jex.Var))
    scope = SpellingScope({var: Spelled(name) for var, name in zip(jaxpr.invars, names)})
    for eqn in jaxpr.eqns:
        if (
            len(eqn.outvars) != 1
            or uses[eqn.outvars[0]] != 1
            or any(True for _ in inner_jaxprs(eqn))
        ):
            return None
        if eqn.primitive.name == "get":
            scope.names[eqn.outvars[0]] = Spelled(subscripted(eqn, scope))
        elif is_ref_access(eqn):
            return None
        else:
            scope.names[eqn.outvars[0]] = spell(scope, eqn)
    printer.imports |= scope.imports
    return _indices(jaxpr.outvars, scope)


def _indices(atoms: Sequence, scope: SpellingScope) -> str:
    shown = [
        plain_number(literal_value(atom)) if isinstance(atom, jex.Literal) else scope.text(atom)
        for atom in atoms
    ]
    return f"({', '.join(shown)}{',' if len(shown) == 1 else ''})"
