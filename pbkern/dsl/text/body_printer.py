"""Bodies of kernels as source: one line per equation, Ref accesses as subscripts, control flow as nested functions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import literal_value, live_equations, selector
from pbkern.dsl.primitives.ref_access import Point, Range, is_ref_access, is_whole, ref_access
from pbkern.dsl.text.spelling import Spelled, SpellingScope, plain_number, spell, typed_literal

# Name of the primitive that calls a kernel (dsl/call.py).
KERNEL_CALL = "pbkern_kernel"


def letter_names(letters: str, reserved: set[str], count: int | None = None) -> Iterator[str]:
    """Names a, b, ..., a1, b1, ... that are not reserved; endlessly many unless `count` is given."""
    candidates = (
        letter + (str(number) if number else "")
        for number in itertools.count()
        for letter in letters
    )
    return itertools.islice(
        (candidate for candidate in candidates if candidate not in reserved), count
    )


def _results(atoms: Sequence, scope: SpellingScope) -> str:
    """The expression that a function returns: its results, without parentheses."""
    return ", ".join(map(scope.text, atoms))


class JaxprPrinter:
    """Prints jaxprs as functions; all names are unique, so that inner functions may use outer ones.

    Attributes:
      reserved: names that no variable gets.
      x64: whether the text is traced in 64-bit mode.
      scope: spelling of each variable so far.
      imports: modules that the text needs.
      carry, xs: names of the parameters of loops' bodies.
    """

    def __init__(self, reserved: set[str], x64: bool):
        self.reserved, self.x64 = reserved, x64
        self.scope = SpellingScope(x64=x64)
        self.imports = self.scope.imports
        self._fresh = letter_names("abcdefghijklmnopqrstuvwxyz", reserved)
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

        Args:
          name: the function's.
          params: names of its parameters.
          jaxpr: its body.
          bound: input of the jaxpr -> its name, for those that have none yet.
          unpack: lines before the equations.
          result: spells the expression that it returns.
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
        """Lines of an equation; `used`: variables that some equation or the result reads."""
        name = eqn.primitive.name
        if name == "cond":
            return self.cond(eqn, producers)
        if name == "while":
            return self.while_loop(eqn)
        if name == "scan":
            return self.scan(eqn)
        if is_ref_access(eqn):
            return self.access(eqn, used)
        if name == KERNEL_CALL:
            call = f"{eqn.params['kernel'].name}({', '.join(self.scope.operands(eqn))})"
            return self.assign(eqn.outvars, call, False)
        return self.assign(eqn.outvars, spell(self.scope, eqn).text, eqn.primitive.multiple_results)

    def name(self, var) -> str:
        """Gives a variable a new name."""
        self.scope.names[var] = Spelled(next(self._fresh))
        return self.scope.names[var].text

    def assign(self, variables: Sequence, expression: str, is_tuple: bool) -> list[str]:
        """The line that assigns an expression to new names; `is_tuple`: whether its value is a tuple."""
        names = [self.name(variable) for variable in variables]
        if not names:
            return [expression]
        return [f"{', '.join(names)}{',' if is_tuple and len(names) == 1 else ''} = {expression}"]

    def access(self, eqn, used: set) -> list[str]:
        name, scope = eqn.primitive.name, self.scope
        ref, accessed = scope.text(eqn.invars[0]), ref_access(eqn)
        index = _index_argument(eqn, scope)
        if name == "get":
            return self.assign(eqn.outvars, subscripted(eqn, scope), False)
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
        return [f"{subscripted(eqn, scope)} = {_stored(accessed.value, scope)}"]

    # Control flow: constants of inner jaxprs have their outer names in inner functions.

    def closed_over(self, atoms: Sequence, inner: Sequence) -> None:
        """Gives the variables `inner` the spelling of the atoms that are their values."""
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


def subscripted(eqn, scope: SpellingScope) -> str:
    return f"{scope.text(eqn.invars[0])}[{_subscript(eqn, scope)}]"


def _subscript(eqn, scope: SpellingScope) -> str:
    """Prints the index of ref[...]."""
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
