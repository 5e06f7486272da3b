"""Kernel -> DSL source that rebuilds it, and back. Fused, hand-written and adopted kernels all print this way.

One line per equation (dsl/text/spelling.py); Ref accesses as subscripts; control flow as nested
functions. Running the text traces a Kernel whose jaxprs are the same (jaxpr_digest.same): the text is the
kernel.
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

from pbkern import _jax
from pbkern.core.errors import ArgumentError, KernelError, shown
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs import inner_jaxprs, literal_value, live_equations, selector
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
from pbkern.dsl.primitives.ref_access import Point, Range, is_ref_access, is_whole, ref_access
from pbkern.dsl.text import named_sizes
from pbkern.dsl.text.identifiers import RESERVED, identifier, unused
from pbkern.dsl.text.spelling import (
    Spelled,
    SpellingScope,
    dtype_name,
    plain_number,
    spell,
    spell_param,
    typed_literal,
)
from pbkern.dsl.trace import KernelFunction, body_dtypes, needs_x64

from .call import kernel_p

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
    """Lines of one stage; adds to `imports` what they need. `taken`: names of the module."""
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
    """Raises ArgumentError for what is no source, paths among it."""
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
    """The value of a constant as source. Raises KernelError for what it cannot be.

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
    """Whether two kernels are equal but for where they were defined and how messages call their arrays."""

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
    return needs_x64(body_dtypes(kernel.body.jaxpr))


def _block_dtypes(kernel: Kernel) -> list[np.dtype]:
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
    indices = list(_names("ijklmnopqrstuvwxyz", printer.reserved, len(jaxpr.invars)))
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
            scope.names[eqn.outvars[0]] = Spelled(_subscripted(eqn, scope))
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


def _names(letters: str, reserved: set[str], count: int | None = None) -> Iterator[str]:
    candidates = (
        letter + (str(number) if number else "")
        for number in itertools.count()
        for letter in letters
    )
    return itertools.islice(
        (candidate for candidate in candidates if candidate not in reserved), count
    )


# --- the body
# ----------------------------------------------------------------------------------------------------


def _results(atoms: Sequence, scope: SpellingScope) -> str:
    return ", ".join(map(scope.text, atoms))


class JaxprPrinter:
    """Prints jaxprs as functions; all names are unique, so that inner functions may use outer ones."""

    def __init__(self, reserved: set[str], x64: bool):
        self.reserved, self.x64 = reserved, x64
        self.scope = SpellingScope(x64=x64)
        self.imports = self.scope.imports
        self._fresh = _names("abcdefghijklmnopqrstuvwxyz", reserved)
        self.carry = next(
            candidate
            for candidate in ("carry", "carry_", "carry__", "carry___")
            if candidate not in reserved
        )
        self.xs = next(
            candidate for candidate in ("xs", "xs_", "xs__", "xs___") if candidate not in reserved
        )
        self._functions = itertools.count()

    def function(self, name, params, jaxpr, bound, unpack=(), result=_results) -> list[str]:
        """Lines of `def name(params)`.

        `bound`: names of (some) inputs; `unpack`: lines before the equations.
        """
        self.scope.names |= {var: Spelled(text) for var, text in bound.items()}
        lines = [*unpack, *self.equations(jaxpr)]
        if returned := result(jaxpr.outvars, self.scope):
            lines.append(f"return {returned}")
        return [f"def {name}({', '.join(params)}):", *(f"    {line}" for line in lines or ["pass"])]

    def equations(self, jaxpr: jex.Jaxpr) -> list[str]:
        used = {
            var for reader in jaxpr.eqns for var in reader.invars if isinstance(var, jex.Var)
        } | {var for var in jaxpr.outvars if isinstance(var, jex.Var)}
        producers = {var: producer for producer in jaxpr.eqns for var in producer.outvars}
        lines = []
        for eqn, live in zip(jaxpr.eqns, live_equations(jaxpr)):
            if live:
                lines += self.equation(eqn, producers, used)
        return lines

    def equation(self, eqn, producers: dict, used: set) -> list[str]:
        name = eqn.primitive.name
        if name == "cond":
            return self.cond(eqn, producers)
        if name == "while":
            return self.while_loop(eqn)
        if name == "scan":
            return self.scan(eqn)
        if is_ref_access(eqn):
            return self.access(eqn, used)
        if eqn.primitive is kernel_p:
            call = f"{eqn.params['kernel'].name}({', '.join(self.scope.operands(eqn))})"
            return self.assign(eqn.outvars, call, False)
        return self.assign(eqn.outvars, spell(self.scope, eqn).text, eqn.primitive.multiple_results)

    def name(self, var) -> str:
        self.scope.names[var] = Spelled(next(self._fresh))
        return self.scope.names[var].text

    def assign(self, variables: Sequence, expression: str, is_tuple: bool) -> list[str]:
        names = [self.name(variable) for variable in variables]
        if not names:
            return [expression]
        return [f"{', '.join(names)}{',' if is_tuple and len(names) == 1 else ''} = {expression}"]

    def access(self, eqn, used: set) -> list[str]:
        name, scope = eqn.primitive.name, self.scope
        ref, accessed = scope.text(eqn.invars[0]), ref_access(eqn)
        index = _index_argument(eqn, scope)
        if name == "get":
            return self.assign(eqn.outvars, _subscripted(eqn, scope), False)
        if name == "masked_load":
            masked = f"pbkern.load({ref}, {index}, mask={scope.text(accessed.mask)}, other={scope.text(accessed.other)})"
            return self.assign(eqn.outvars, masked, False)
        if name == "masked_store":
            return [
                f"pbkern.store({ref}, {index}, {scope.text(accessed.value)}, mask={scope.text(accessed.mask)})"
            ]
        if name == "addupdate":
            return [f"jax.ref.addupdate({ref}, {index}, {scope.text(accessed.value)})"]
        if eqn.outvars[0] in used:
            return self.assign(
                eqn.outvars, f"jax.ref.swap({ref}, {index}, {scope.text(accessed.value)})", False
            )
        return [f"{_subscripted(eqn, scope)} = {_stored(accessed.value, scope)}"]

    # Control flow: inner functions see the outer names of what their jaxprs take as constants.

    def closed_over(self, atoms: Sequence, inner: Sequence) -> None:
        self.scope.names |= {var: self.scope.expr(atom) for var, atom in zip(inner, atoms)}

    def function_name(self, kind: str) -> str:
        while (name := f"{kind}_{next(self._functions)}") in self.reserved:
            pass
        return name

    def cond(self, eqn, producers: dict) -> list[str]:
        kind, selected = selector(eqn, producers)
        branches = eqn.params["branches"]
        for branch in branches:
            self.closed_over(eqn.invars[1:], branch.jaxpr.invars)
        if kind == "pred" and not eqn.outvars and not branches[0].jaxpr.eqns:
            lines = self.function("_", (), branches[1].jaxpr, {})
            return [f"@pbkern.when({self.scope.text(selected)})", *lines]
        names = [self.function_name("branch") for _ in branches]
        lines = [
            line
            for n, body in zip(names, branches)
            for line in self.function(n, (), body.jaxpr, {})
        ]
        if kind == "pred":
            call = f"lax.cond({self.scope.text(selected)}, {names[1]}, {names[0]})"
        else:
            call = f"lax.switch({self.scope.text(selected)}, [{', '.join(names)}])"
        return lines + self.assign(eqn.outvars, call, False)

    def while_loop(self, eqn) -> list[str]:
        params = eqn.params
        cond, body, nc = (
            params["cond_jaxpr"].jaxpr,
            params["body_jaxpr"].jaxpr,
            params["cond_nconsts"],
        )
        first = nc + params["body_nconsts"]
        self.closed_over(eqn.invars[:nc], cond.invars)
        self.closed_over(eqn.invars[nc:first], body.invars)
        names = self.function_name("condition"), self.function_name("body")
        init = self.tuple(eqn.invars[first:])
        lines = [
            *self.carrying(names[0], (self.carry,), cond, [cond.invars[nc:]]),
            *self.carrying(
                names[1], (self.carry,), body, [body.invars[first - nc :]], result=_tuple_of
            ),
        ]
        return lines + self.assign(
            eqn.outvars, f"lax.while_loop({names[0]}, {names[1]}, {init})", True
        )

    def scan(self, eqn) -> list[str]:
        params, body = _jax.params_of(eqn), eqn.params["jaxpr"].jaxpr
        consts, carries = params["num_consts"], params["num_consts"] + params["num_carry"]
        self.closed_over(eqn.invars[:consts], body.invars)
        bounds = _counted(eqn, np.dtype("int64" if self.x64 else "int32"))
        if bounds is not None:
            return self.fori_loop(eqn, *bounds)

        def result(atoms, scope):
            return f"{_tuple_of(atoms[: params['num_carry']], scope)}, {_tuple_of(atoms[params['num_carry'] :], scope)}"

        name = self.function_name("step")
        lines = self.carrying(
            name,
            (self.carry, self.xs),
            body,
            [body.invars[consts:carries], body.invars[carries:]],
            result,
        )
        init, xs = self.tuple(eqn.invars[consts:carries]), self.tuple(eqn.invars[carries:])
        options = f"length={params['length']}"
        options += ", reverse=True" if params["reverse"] else ""
        options += f", unroll={params['unroll']}" if params["unroll"] != 1 else ""
        names = [self.name(var) for var in eqn.outvars]
        targets = [
            f"({', '.join(group)}{',' if len(group) == 1 else ''})"
            for group in (names[: params["num_carry"]], names[params["num_carry"] :])
        ]
        call = f"lax.scan({name}, {init}, {xs}, {options})"
        return [*lines, f"{targets[0]}, {targets[1]} = {call}" if names else call]

    def fori_loop(self, eqn, lower: int, upper: int) -> list[str]:
        """A counted scan: pbkern.loop without carries, lax.fori_loop with."""
        body, consts = eqn.params["jaxpr"].jaxpr, _jax.params_of(eqn)["num_consts"]
        _increment, *rest = body.eqns
        counter = self.name(body.invars[consts])
        inner = body.replace(
            eqns=rest,
            outvars=body.outvars[1:],
            debug_info=body.debug_info._replace(result_paths=None),
        )
        carries = body.invars[consts + 1 :]
        if not carries:
            lines = self.function("_", (counter,), inner, {})
            return [f"@pbkern.loop({lower}, {upper})", *lines]
        name = self.function_name("body")
        lines = self.carrying(name, (counter, self.carry), inner, [carries], _tuple_of)
        init = self.tuple(eqn.invars[consts + 1 :])
        call = f"lax.fori_loop({lower}, {upper}, {name}, {init})"
        return lines + self.assign(eqn.outvars[1:], call, True)

    def carrying(self, name, params, jaxpr, groups, result=_results) -> list[str]:
        """A function whose last parameters are tuples, unpacked into `groups` of the jaxpr's inputs."""
        unpack = []
        for param, group in zip(params[len(params) - len(groups) :], groups):
            if group:
                names = [self.name(var) for var in group]
                unpack.append(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {param}")
        return self.function(name, params, jaxpr, {}, unpack, result)

    def tuple(self, atoms: Sequence) -> str:
        return _tuple_of(atoms, self.scope)


def _tuple_of(atoms: Sequence, scope: SpellingScope) -> str:
    return f"({', '.join(map(scope.text, atoms))}{',' if len(atoms) == 1 else ''})"


def _counted(eqn, counter: np.dtype) -> tuple[int, int] | None:
    """(lower, upper) of a scan that lax.fori_loop makes: no xs, and a first carry that only counts up from a literal."""
    params, body = _jax.params_of(eqn), eqn.params["jaxpr"].jaxpr
    consts = params["num_consts"]
    if (
        len(eqn.invars) != consts + params["num_carry"]
        or params["num_carry"] != len(eqn.outvars)
        or not params["num_carry"]
    ):
        return None
    start, i = eqn.invars[consts], body.invars[consts]
    if (
        params["reverse"]
        or params["unroll"] != 1
        or not isinstance(start, jex.Literal)
        or i.aval.dtype != counter
        or not body.eqns
    ):
        return None
    first = body.eqns[0]
    counts = (
        first.primitive.name == "add"
        and first.invars[0] is i
        and isinstance(first.invars[1], jex.Literal)
    )
    if (
        not counts
        or literal_value(first.invars[1]) != 1
        or body.outvars[0] is not first.outvars[0]
        or params["length"] < 1
    ):
        return None
    later = [var for equation in body.eqns[1:] for var in equation.invars] + list(body.outvars[1:])
    if any(atom is first.outvars[0] for atom in later):
        return None
    lower = int(literal_value(start))
    return lower, lower + params["length"]


# --- Ref indices
# -------------------------------------------------------------------------------------------------


def _subscripted(eqn, scope: SpellingScope) -> str:
    return f"{scope.text(eqn.invars[0])}[{_subscript(eqn, scope)}]"


def _subscript(eqn, scope: SpellingScope) -> str:
    """Prints what stands in the brackets of ref[...]."""
    access = ref_access(eqn)
    shape, _ = _jax.ref_type(eqn.invars[0].aval)
    if all(is_whole(index, size) for index, size in zip(access.indices, shape)):
        return "..."
    return ", ".join(_index(index, size, scope) for index, size in zip(access.indices, shape))


def _index(index, extent: int, scope: SpellingScope) -> str:
    match index:
        case Range(start=int(start), size=size, stride=stride):
            if is_whole(index, extent):
                return ":"
            end = start + (size - 1) * stride + 1 if size else start
            if start < 0 or end > extent:  # masked
                return f"pbkern.ds({start}, {size}{f', {stride}' if stride != 1 else ''})"
            return f"{start}:{end}" + (f":{stride}" if stride != 1 else "")
        case Range(start=start, size=size, stride=stride):
            return f"pbkern.ds({scope.text(start)}, {size}{f', {stride}' if stride != 1 else ''})"
        case Point(at=int(at)):
            return str(at)
        case _:
            return scope.text(index.at)


def _index_argument(eqn, scope: SpellingScope) -> str:
    """The index as a function argument."""
    access = ref_access(eqn)
    shape, _ = _jax.ref_type(eqn.invars[0].aval)
    if _subscript(eqn, scope) == "...":
        return "..."
    parts = []
    for index, size in zip(access.indices, shape):
        text = _index(index, size, scope)
        if ":" in text:
            text = f"slice({', '.join(text.split(':')) if text != ':' else 'None'})"
        parts.append(text)
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _stored(value, scope: SpellingScope) -> str:
    """A stored value; number literals take the Ref's type."""
    if isinstance(value, jex.Literal) and array_aval(value).dtype.kind in "ifV":
        return plain_number(literal_value(value))
    return typed_literal(value) if isinstance(value, jex.Literal) else scope.text(value)
