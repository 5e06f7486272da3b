"""Walking and re-tracing jaxprs: the only jaxpr surgery in pbkern.

Jaxprs are never built by hand: `inline` re-traces through calls with `primitive.bind`, which
renames variables (JAX shares inner jaxprs between call sites) and type-checks the result.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import jax
import numpy as np
from jax.extend import core as jex

from pbkern._jax import (
    bind_again,
    cached_by_jaxpr,
    cached_by_jaxpr_alone,
    fresh_aval,
    only_reads,
    params_of,
    source_context,
)

from .affine import Affine
from .jax_types import Atom, array_aval

# Equations that only call another jaxpr, by the parameter that holds it.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_lin": "jaxpr",
    "pbkern_call": "jaxpr",
    "eval_jaxpr": "call_jaxpr",
}


# Equations with a derivative of their own, other than that of the jaxpr that they call.
WITH_RULES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "stop_gradient")
_rules_are_kept = contextvars.ContextVar("rules_are_kept", default=False)

# Primitives -> f(*operands, **params) that computes them by others. Both are of jax 0.11; as a product of factors,
# 1 - x^2 keeps its digits near x = 1.
EXPANSIONS: dict[str, Callable] = {
    "one_minus_square": lambda x, **_: (1 + x) * (1 - x),
    "log2": lambda x, **_: jax.lax.log(x) / np.asarray(np.log(2.0), x.dtype),
}


def atoms(eqn) -> list[jex.Var]:
    """An equation's operands that are no literals."""
    return [var for var in eqn.invars if not isinstance(var, jex.Literal)]


def leading_to(eqns: Sequence, outputs: Iterable, given: Iterable = ()) -> list:
    """Equations in program order that lead to `outputs`, except through `given` values."""
    given = set(given)
    live, needed = set(outputs) - given, []
    for eqn in reversed(eqns):
        if any(var in live for var in eqn.outvars):
            needed.append(eqn)
            live.update(atom for atom in atoms(eqn) if atom not in given)
    return needed[::-1]


def called_jaxpr(eqn) -> jex.ClosedJaxpr | None:
    """The jaxpr that a call equation inlines to, or None for any other equation."""
    if eqn.primitive.name == "custom_linear_solve":
        return _solution(eqn)
    if eqn.primitive.name in EXPANSIONS:
        expansion = functools.partial(EXPANSIONS[eqn.primitive.name], **eqn.params)
        return jax.make_jaxpr(expansion)(*[fresh_aval(var.aval) for var in eqn.invars])
    if is_of_library(eqn):
        return _definition(eqn)
    key = CALLS.get(eqn.primitive.name)
    inner = eqn.params.get(key) if key else None
    if inner is None and key:
        inner = eqn.params.get("call_jaxpr") or eqn.params.get("jaxpr")
    if inner is None:
        return None
    return inner if isinstance(inner, jex.ClosedJaxpr) else jex.ClosedJaxpr(inner, ())


@cached_by_jaxpr_alone
def has_calls(closed: jex.ClosedJaxpr) -> bool:
    """Whether an equation, at any depth, may be a call, for `called_jaxpr`."""
    return any(
        eqn.primitive.name in CALLS
        or eqn.primitive.name in EXPANSIONS
        or eqn.primitive.name == "custom_linear_solve"
        or is_of_library(eqn)
        for eqn in equations(closed.jaxpr)
    )


@contextlib.contextmanager
def rules_kept() -> Iterator[None]:
    """In a `with` block, retracing keeps equations with derivatives of their own and does not inline them."""
    token = _rules_are_kept.set(True)
    try:
        yield
    finally:
        _rules_are_kept.reset(token)


def has_rules(jaxpr: jex.Jaxpr) -> bool:
    """Whether an equation, at any depth, has a derivative of its own."""
    return any(eqn.primitive.name in WITH_RULES for eqn in equations(jaxpr))


def is_of_library(eqn) -> bool:
    """Whether an equation's primitive is neither JAX's nor pbkern's, and is defined by a function."""
    return _is_of_library(eqn.primitive.impl)


@functools.cache
def _is_of_library(impl) -> bool:
    module = getattr(impl, "__module__", None) or ""
    return inspect.isfunction(impl) and module.split(".")[0] not in ("jax", "pbkern")


def _definition(eqn) -> jex.ClosedJaxpr | None:
    """The equations that a library's primitive evaluates to; None for effects, and where its function needs arrays' values."""
    if eqn.effects:
        return None
    try:
        closed = jax.make_jaxpr(functools.partial(eqn.primitive.impl, **eqn.params))(
            *[fresh_aval(var.aval) for var in eqn.invars]
        )
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        return None
    types = [(aval.shape, aval.dtype) for aval in closed.out_avals]
    wanted = [(var.aval.shape, var.aval.dtype) for var in eqn.outvars]
    is_circular = any(inner.primitive is eqn.primitive for inner in equations(closed.jaxpr))
    return None if is_circular or types != wanted or closed.effects else closed


def _solution(eqn) -> jex.ClosedJaxpr:
    """Operands of a linear solve -> its solution. The other functions among its parameters are for its derivatives."""
    lengths, solve = eqn.params["const_lengths"], jex.jaxpr_as_fun(eqn.params["jaxprs"].solve)
    first, end = lengths.matvec + lengths.vecmat, sum(lengths)

    def solution(*operands):
        return solve(*operands[first : first + lengths.solve], *operands[end:])

    return jax.make_jaxpr(solution)(*[fresh_aval(var.aval) for var in eqn.invars])


# Types of parameters that hold no jaxpr: most parameters of most equations.
PLAIN_PARAMETERS = frozenset((bool, int, float, str, type(None)))


def inner_jaxprs(eqn) -> Iterator[jex.ClosedJaxpr]:
    """Every jaxpr among an equation's parameters; open ones close over nothing that is known here."""
    for value in eqn.params.values():
        if type(value) in PLAIN_PARAMETERS:
            continue
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(inner, jex.ClosedJaxpr):
                yield inner
            elif isinstance(inner, jex.Jaxpr):
                yield jex.ClosedJaxpr(inner, (None,) * len(inner.constvars))


def equations(jaxpr: jex.Jaxpr) -> Iterator:
    """Every equation, at any depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(inner.jaxpr)


@cached_by_jaxpr_alone
def primitive_names(closed: jex.ClosedJaxpr) -> frozenset[str]:
    """Names of the primitives of all equations, at any depth."""
    names: set[str] = set()
    for eqn in closed.jaxpr.eqns:
        names.add(eqn.primitive.name)
        names.update(*map(primitive_names, inner_jaxprs(eqn)))
    return frozenset(names)


def evaluate(
    jaxpr: jex.Jaxpr,
    consts: Sequence,
    args: Sequence,
    inline_calls: bool = True,
    bind: Callable | None = None,
) -> list:
    """Binds each equation in order on `args`.

    Args:
      jaxpr: the function.
      consts: values of its constvars.
      args: its operands.
      inline_calls: whether the equations of called jaxprs are bound in place of a call.
      bind: (eqn, *operands) -> results, in place of `bind_again`.

    Returns:
      The function's results.
    """
    env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))

    def read(atom):
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(var) for var in eqn.invars]
        inner = called_jaxpr(eqn) if inline_calls else None
        if inner is not None:
            with source_context(eqn):  # for equations of library functions, which have no line
                results = evaluate(inner.jaxpr, inner.consts, operands, inline_calls, bind)
        elif bind is not None:
            results = bind(eqn, *operands)
        else:
            results = bind_again(eqn, operands)
        env.update(zip(eqn.outvars, results))
    return [read(var) for var in jaxpr.outvars]


def inline(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Removes call equations at a function's top level."""
    avals = [var.aval for var in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: evaluate(closed.jaxpr, closed.consts, args))(*avals)


class Notes:
    """Facts of several kinds that a rewrite remembers about values, by their identity, while equations are bound again."""

    def __init__(self) -> None:
        self._noted: dict[tuple[str, int], tuple] = {}

    def note(self, kind: str, value, *what) -> list:
        """Notes facts about a value under `kind`, and returns [value]."""
        # The value stays alive, so that no other one gets its id.
        self._noted[kind, id(value)] = value, *what
        return [value]

    def bound(self, kind: str, eqn, operands, *what) -> list:
        """The result of an equation on these operands, noted."""
        return self.note(kind, *bind_again(eqn, operands), *what)

    def find(self, kind: str, x) -> tuple | None:
        """The noted facts, or None."""
        entry = self._noted.get((kind, id(x)))
        return entry and entry[1:]


def literal_value(atom: jex.Literal) -> np.generic:
    """A literal's value as a NumPy scalar of the literal's exact type."""
    return cast(
        np.generic, np.asarray(atom.val).astype(array_aval(atom).dtype)[()]
    )  # NumPy's hint says array


Rewrite = Callable[..., "list | None"]

# Each pass removes equations that died in the one before (a loop's unused carry, say); two are
# usual.
MAX_PASSES = 8


def retrace(
    closed: jex.ClosedJaxpr,
    rewrite: Rewrite | None = None,
    constant: Callable = lambda x: x,
) -> jex.ClosedJaxpr:
    """Rewrites a function to canonical form, Ref effects in order.

    Calls are inlined at every depth, weak types are erased, scalar constants become literals, uniform array constants become
    broadcasts, and equations without use or effect are gone. Control flow is bound by `lax.scan`, `lax.while_loop`,
    `lax.cond` and `lax.switch`, so that printed control flow rebuilds.

    Args:
      closed: the function.
      rewrite: (eqn, *operands) -> an equation's results, or None to keep the equation.
      constant: literal or constant -> the value in its place, at any depth.
    """
    for _ in range(MAX_PASSES):
        avals = [fresh_aval(var.aval) for var in closed.jaxpr.invars]
        traced, before = _Retrace(rewrite, constant), closed
        closed = jax.make_jaxpr(lambda *args: traced.run(before.jaxpr, before.consts, args))(*avals)  # noqa: B023
        if not _has_dead_equations(closed.jaxpr) and not _has_calls(closed.jaxpr):
            break
        rewrite = None  # already applied
    return closed


def retrace_into(
    jaxpr: jex.Jaxpr,
    consts: Sequence,
    args: Sequence,
    rewrite: Rewrite,
    constant: Callable = lambda x: x,
) -> list:
    """Like `retrace`, into the trace that is being made: equations are bound on `args`; results are returned."""
    return _Retrace(rewrite, constant).run(jaxpr, consts, args)


def while_any(goes_on: Callable, step: Callable, init: Sequence) -> list:
    """Runs several while loops at the same time, as vmap does: until none goes on.

    Args:
      goes_on: carries -> bool[*loops], whether each loop takes another step. A loop that has ended keeps its carries.
      step: carries -> new carries.
      init: carries before the first step, arrays [*loops, ...] or pytrees of such.

    Returns:
      The carries of all loops at their ends.
    """

    def step_of_running(state):
        running, *carries = state
        new = jax.tree.map(lambda x, old: _chosen(running, x, old), list(step(carries)), carries)
        return [goes_on(new), *new]

    def any_runs(state):
        return jax.lax.reduce_or(state[0], tuple(range(state[0].ndim)))

    return list(jax.lax.while_loop(any_runs, step_of_running, [goes_on(init), *init])[1:])


def _chosen(running, new, old):
    """`new` of the loops that run, `old` of the others."""
    return jax.lax.select(
        jax.lax.broadcast_in_dim(running, new.shape, range(running.ndim)), new, old
    )


class _Retrace:
    """One pass of `retrace`, with its arguments."""

    def __init__(self, rewrite: Rewrite | None, constant: Callable = lambda x: x):
        self.rewrite, self.constant = rewrite, constant

    def run(self, jaxpr: jex.Jaxpr, consts: Sequence, args: Sequence) -> list:
        env = {
            var: constant_value(self.constant(const)) for var, const in zip(jaxpr.constvars, consts)
        } | dict(zip(jaxpr.invars, args))
        live, producers = (
            live_equations(jaxpr),
            {var: producer for producer in jaxpr.eqns for var in producer.outvars},
        )
        wanted = _read_variables(jaxpr, live)

        def read(atom):
            return (
                self.constant(literal_value(atom)) if isinstance(atom, jex.Literal) else env[atom]
            )

        for eqn, used in zip(jaxpr.eqns, live):
            if used:
                with source_context(eqn):
                    if eqn.primitive.name == "cond":
                        results = self.cond(eqn, *selector(eqn, producers), read)
                    else:
                        results = self.step(eqn, [read(var) for var in eqn.invars], wanted)
                env.update(zip(eqn.outvars, results))
        return [read(var) for var in jaxpr.outvars]

    def step(self, eqn, operands: list, wanted: set) -> Sequence:
        if _keeps_rules(eqn):
            results = self.rewrite(eqn, *operands) if self.rewrite else None
            return bind_again(eqn, operands) if results is None else results
        inner = called_jaxpr(eqn)
        if inner is not None:
            return self.run(inner.jaxpr, inner.consts, operands)
        results = self.rewrite(eqn, *operands) if self.rewrite else None
        if results is not None:
            return results
        if eqn.primitive.name == "scan":
            return self.scan(eqn, operands, wanted)
        if eqn.primitive.name == "while":
            return self.while_loop(eqn, operands)
        if eqn.primitive.name in IDENTITIES or _keeps_value(eqn):
            return operands
        if eqn.primitive.name == "convert_element_type":
            return [_convert(eqn, operands[0])]
        if (
            eqn.primitive.name == "broadcast_to"
        ):  # of Ref indices; broadcast_in_dim has rules everywhere
            shape = eqn.params["shape"]
            return [
                jax.lax.broadcast_in_dim(
                    operands[0], shape, range(len(shape) - np.ndim(operands[0]), len(shape))
                )
            ]
        if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None:
            return [
                jax.lax.reshape(
                    jax.lax.transpose(operands[0], eqn.params["dimensions"]),
                    eqn.params["new_sizes"],
                )
            ]
        return bind_again(eqn, operands)

    def scan(self, eqn, operands: list, wanted: set) -> Sequence:
        """The loop without results that nothing reads: each round would store a part of them."""
        params = params_of(eqn)
        stacked = [var in wanted for var in eqn.outvars[params["num_carry"] :]]
        inner, carries = params["jaxpr"], params["num_consts"] + params["num_carry"]
        consts, init, xs = (
            operands[: params["num_consts"]],
            operands[params["num_consts"] : carries],
            operands[carries:],
        )

        def step(carry, x):
            out = self.run(inner.jaxpr, inner.consts, [*consts, *carry, *x])
            return tuple(out[: params["num_carry"]]), tuple(
                y for y, used in zip(out[params["num_carry"] :], stacked) if used
            )

        carry, ys = jax.lax.scan(
            step,
            tuple(init),
            tuple(xs),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        used_ys = iter(ys)
        return [*carry, *(next(used_ys) if used else None for used in stacked)]

    def while_loop(self, eqn, operands: list) -> Sequence:
        params = eqn.params
        cond, body, nc = params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"]
        first = nc + params["body_nconsts"]

        def goes_on(carries):
            return self.run(cond.jaxpr, cond.consts, [*operands[:nc], *carries])[0]

        def step(carries):
            return self.run(body.jaxpr, body.consts, [*operands[nc:first], *carries])

        if cond.out_avals[0].shape:
            return while_any(goes_on, step, operands[first:])
        return jax.lax.while_loop(
            goes_on, lambda carry: tuple(step(carry)), tuple(operands[first:])
        )

    def cond(self, eqn, kind: str, selected, read) -> Sequence:
        operands = [read(var) for var in eqn.invars[1:]]
        branches = [
            lambda closed=branch: tuple(self.run(closed.jaxpr, closed.consts, operands))
            for branch in eqn.params["branches"]
        ]
        choice = read(selected)
        if isinstance(choice, (np.generic, bool, int)):
            return branches[min(max(int(choice), 0), len(branches) - 1)]()
        if kind == "pred":
            return jax.lax.cond(choice, branches[1], branches[0])
        return jax.lax.switch(choice, branches)


def selector(eqn, producers: dict) -> tuple[str, Atom]:
    """Finds what a `cond` equation selects by: ("pred", bool atom) for lax.cond, ("index", int atom) for lax.switch.

    lax.cond converts its predicate and lax.switch clamps its index first; seen through here, so
    that both print as written.
    """
    made_by = producers.get(eqn.invars[0]) if isinstance(eqn.invars[0], jex.Var) else None
    if (
        (
            made_by is not None
            and made_by.primitive.name == "convert_element_type"
            and len(eqn.params["branches"]) == 2
        )
        and made_by.invars[0].aval.dtype == bool
        and not made_by.invars[0].aval.shape
    ):
        return "pred", made_by.invars[0]
    if made_by is not None and made_by.primitive.name == "clamp":
        low, index, high = made_by.invars
        bounds = [
            int(literal_value(atom)) if isinstance(atom, jex.Literal) else None
            for atom in (low, high)
        ]
        if bounds == [0, len(eqn.params["branches"]) - 1]:
            return "index", index
    return "index", eqn.invars[0]


def live_equations(jaxpr: jex.Jaxpr) -> list[bool]:
    """Per equation, whether a result or an effect needs it. A cond needs its predicate, not the index converted from it."""
    producers = {var: producer for producer in jaxpr.eqns for var in producer.outvars}
    needed = {var for var in jaxpr.outvars if isinstance(var, jex.Var)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        used = any(var in needed for var in eqn.outvars) or _acts(eqn)
        live.append(used)
        if used:
            atoms = eqn.invars
            if eqn.primitive.name == "cond":
                atoms = [selector(eqn, producers)[1], *eqn.invars[1:]]
            needed.update(atom for atom in atoms if isinstance(atom, jex.Var))
    return live[::-1]


def _read_variables(jaxpr: jex.Jaxpr, live: Sequence[bool]) -> set:
    """Variables that live equations or the results read."""
    atoms = [var for eqn, used in zip(jaxpr.eqns, live) if used for var in eqn.invars]
    return {atom for atom in (*atoms, *jaxpr.outvars) if isinstance(atom, jex.Var)}


def _acts(eqn) -> bool:
    """Whether an equation does more than to give results.

    Some of Pallas's primitives do not tell what their jaxprs do.
    """
    return not only_reads(eqn) or any(
        _acts(inner_eqn) for inner in inner_jaxprs(eqn) for inner_eqn in inner.jaxpr.eqns
    )


def _has_dead_equations(jaxpr: jex.Jaxpr) -> bool:
    """Whether retracing would drop something, at any depth.

    The index that a cond makes for itself is not dead.
    """
    selecting = {
        equation.invars[0]
        for equation in jaxpr.eqns
        if equation.primitive.name == "cond" and isinstance(equation.invars[0], jex.Var)
    }
    live = live_equations(jaxpr)
    wanted = _read_variables(jaxpr, live)
    for eqn, used in zip(jaxpr.eqns, live):
        if not used and not any(var in selecting for var in eqn.outvars):
            return True
        if eqn.primitive.name == "scan" and not wanted.issuperset(
            eqn.outvars[params_of(eqn)["num_carry"] :]
        ):
            return True
        if any(_has_dead_equations(inner.jaxpr) for inner in inner_jaxprs(eqn)):
            return True
    return False


def _has_calls(jaxpr: jex.Jaxpr) -> bool:
    """Whether there are calls to inline: functions of jax.numpy that a rewrite rule used."""
    return any(
        (called_jaxpr(eqn) is not None and not _keeps_rules(eqn))
        or any(_has_calls(inner.jaxpr) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def _keeps_rules(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation is a call with derivatives of its own that stays as it is."""
    return eqn.primitive.name in WITH_RULES and _rules_are_kept.get()


@cached_by_jaxpr
def variables_read(jaxpr: jex.Jaxpr) -> frozenset[jex.Var]:
    """Variables that an equation or the caller reads; equations inside equations aside."""
    atoms = itertools.chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns))
    return frozenset(atom for atom in atoms if not isinstance(atom, jex.Literal))


# Equations that only mean something to transformations of the caller.
IDENTITIES = ("stop_gradient", "copy")

# Equations that do nothing if this parameter is empty or, for a shape, what the operand has
# already.
_NEUTRAL_IF_EMPTY = {
    "squeeze": "dimensions",
    "rev": "dimensions",
    "reduce_sum": "axes",
    "reduce_max": "axes",
    "reduce_min": "axes",
    "reduce_prod": "axes",
    "reduce_and": "axes",
    "reduce_or": "axes",
}


def _keeps_value(eqn) -> bool:
    """Whether an equation returns its operand; the public functions would not make it."""
    name, params = eqn.primitive.name, eqn.params
    if name in _NEUTRAL_IF_EMPTY:
        return not params[_NEUTRAL_IF_EMPTY[name]]
    if name in ("broadcast_in_dim", "reshape", "slice"):
        same_shape = eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
        return same_shape and len(eqn.invars) == 1 and params.get("dimensions") is None
    if name == "transpose":
        return tuple(params["permutation"]) == tuple(range(len(params["permutation"])))
    return name == "concatenate" and len(eqn.invars) == 1


def constant_value(value):
    """A constant as retracing keeps it: scalar literal, broadcast of one, or the array."""
    if (
        isinstance(value, jax.core.Tracer)
        or not hasattr(value, "dtype")
        or not hasattr(value, "shape")
    ):
        return value
    if value.shape == ():
        return np.asarray(value)[()]
    flat = np.asarray(value).reshape(-1)
    if flat.size and flat.tobytes() == flat[:1].tobytes() * flat.size:
        return jax.lax.broadcast(flat[0], value.shape)
    return value


def _convert(eqn, x):
    """Rewrites convert_element_type without conversions that only weak types needed: to the same type, and of literals."""
    dtype = np.dtype(eqn.params["new_dtype"])
    if x.dtype == dtype:
        return x
    exact = {"f": "f", "i": "if", "u": "iuf", "b": "iufb"}
    if isinstance(x, np.generic) and dtype.kind in exact.get(x.dtype.kind, ""):
        return x.astype(dtype)
    return eqn.primitive.bind(x, **(eqn.params | {"new_dtype": dtype, "weak_type": False}))


def in_demand_order(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A pure jaxpr's equations in the order in which a nested expression of its results would evaluate them."""
    producers = {var: (eqn, n) for eqn in closed.jaxpr.eqns for n, var in enumerate(eqn.outvars)}

    def run(*args):
        env = dict(zip(closed.jaxpr.invars, args)) | dict(
            zip(closed.jaxpr.constvars, closed.consts)
        )

        def value(atom):
            if isinstance(atom, jex.Literal):
                return literal_value(atom)
            if atom not in env:
                eqn, _ = producers[atom]
                operands = [value(var) for var in eqn.invars]
                with source_context(eqn):
                    results = bind_again(eqn, operands)
                env.update(zip(eqn.outvars, results))
            return env[atom]

        return [value(var) for var in closed.jaxpr.outvars]

    return jax.make_jaxpr(run)(*[fresh_aval(var.aval) for var in closed.jaxpr.invars])


def as_dtype(param) -> np.dtype | None:
    """The dtype that an equation parameter is, if it is one: parameters hold dtypes, NumPy's and JAX's scalar types."""
    if isinstance(param, np.dtype):
        return param
    is_scalar_type = isinstance(param, type) and (
        issubclass(param, np.generic) or isinstance(param, type(jax.numpy.float32))
    )
    return np.dtype(param) if is_scalar_type else None


@cached_by_jaxpr_alone
def affine_outputs(jaxpr: jex.Jaxpr) -> tuple[Affine | None, ...]:
    """Each result as an affine expression of the inputs (symbols 0, 1, ...), None where it is not one."""
    env: dict = {var: Affine.symbol(n) for n, var in enumerate(jaxpr.invars)}

    def read(atom) -> Affine | None:
        if isinstance(atom, jex.Literal):
            return Affine((), int(atom.val)) if np.ndim(atom.val) == 0 else None
        return env.get(atom)

    def step(eqn) -> Affine | None:
        xs = [x for var in eqn.invars if (x := read(var)) is not None]
        if not xs or len(xs) < len(eqn.invars):
            return None
        name = eqn.primitive.name
        if name == "add":
            return xs[0] + xs[1]
        if name == "sub":
            return xs[0] - xs[1]
        if name == "neg":
            return xs[0] * -1
        if name == "mul" and (xs[0].is_const or xs[1].is_const):
            return xs[0] * xs[1].const if xs[1].is_const else xs[1] * xs[0].const
        if name in ("convert_element_type", "stop_gradient", "copy"):
            return xs[0]
        return None

    def run(jx: jex.Jaxpr) -> None:
        for eqn in jx.eqns:
            inner = called_jaxpr(eqn)
            if inner is not None:
                for var, atom in zip(inner.jaxpr.invars, eqn.invars):
                    env[var] = read(atom)
                run(inner.jaxpr)
                for var, atom in zip(eqn.outvars, inner.jaxpr.outvars):
                    env[var] = read(atom)
            elif len(eqn.outvars) == 1:
                env[eqn.outvars[0]] = step(eqn)

    run(jaxpr)
    return tuple(read(var) for var in jaxpr.outvars)
