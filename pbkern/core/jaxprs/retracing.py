"""Rewriting functions by tracing them again.

Jaxprs are never built by hand: equations are bound again with `primitive.bind`, which renames variables (JAX shares inner
jaxprs between call sites) and type-checks the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.extend import core as jex

from pbkern._jax import bind_again, fresh_aval, params_of, source_context

from .calls import called_jaxpr, keeps_rules
from .walks import inner_jaxprs, literal_value, live_equations, read_variables, selector

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
        wanted = read_variables(jaxpr, live)

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
        if keeps_rules(eqn):
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
    wanted = read_variables(jaxpr, live)
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
        (called_jaxpr(eqn) is not None and not keeps_rules(eqn))
        or any(_has_calls(inner.jaxpr) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


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


_WINDOWS = ("reduce_window_sum", "reduce_window_max", "reduce_window_min")


def _keeps_value(eqn) -> bool:
    """Whether an equation returns its operand; the public functions would not make it."""
    name, params = eqn.primitive.name, eqn.params
    if name in _NEUTRAL_IF_EMPTY:
        return not params[_NEUTRAL_IF_EMPTY[name]]
    if name in ("broadcast_in_dim", "reshape", "slice"):
        same_shape = eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
        return same_shape and len(eqn.invars) == 1 and params.get("dimensions") is None
    if name in _WINDOWS and not params["window_dimensions"]:
        return True
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
