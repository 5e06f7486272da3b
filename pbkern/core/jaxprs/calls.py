"""Equations that stand for other jaxprs: calls, functions of libraries, primitives that others express."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.extend import core as jex

from pbkern._jax import cached_by_jaxpr_alone, fresh_aval

from .walks import equations

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


# Equations with a derivative of their own, other than that of the jaxpr that they call. The one that solves for the
# operands of a linear solve hides the matrix from derivatives.
WITH_RULES = (
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "custom_linear_solve",
    "stop_gradient",
)


_rules_are_kept = contextvars.ContextVar("rules_are_kept", default=False)


# Primitives -> f(*operands, **params) that computes them by others. Both are of jax 0.11; as a product of factors,
# 1 - x^2 keeps its digits near x = 1.
EXPANSIONS: dict[str, Callable] = {
    "one_minus_square": lambda x, **_: (1 + x) * (1 - x),
    "log2": lambda x, **_: jax.lax.log(x) / np.asarray(np.log(2.0), x.dtype),
}


# Elementwise primitives that may name the type in which they compute. Of JAX 0.10.2: `lax.mul(x, y, out_dtype=...)`.
_COMPUTE_IN_TYPE = frozenset(("mul",))


def called_jaxpr(eqn) -> jex.ClosedJaxpr | None:
    """The jaxpr that a call equation inlines to, or None for any other equation."""
    if not is_call(eqn):
        return None
    if eqn.primitive.name == "custom_linear_solve":
        return _solution(eqn)
    if eqn.primitive.name in EXPANSIONS:
        expansion = functools.partial(EXPANSIONS[eqn.primitive.name], **eqn.params)
        return jax.make_jaxpr(expansion)(*[fresh_aval(var.aval) for var in eqn.invars])
    if _names_type(eqn):
        return _in_type(eqn)
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
    return any(map(is_call, equations(closed.jaxpr)))


def is_call(eqn) -> bool:
    """Whether an equation may be a call, for `called_jaxpr`."""
    return _may_be_call(eqn.primitive, eqn.primitive.impl) and (
        eqn.primitive.name not in _COMPUTE_IN_TYPE or _names_type(eqn)
    )


@functools.cache
def _may_be_call(primitive, impl) -> bool:
    """Whether some equations of a primitive, which `impl` computes, are calls."""
    return (
        primitive.name in CALLS
        or primitive.name in EXPANSIONS
        or primitive.name == "custom_linear_solve"
        or primitive.name in _COMPUTE_IN_TYPE
        or _is_of_library(impl)
    )


@contextlib.contextmanager
def rules_kept() -> Iterator[None]:
    """In a `with` block, retracing keeps equations with derivatives of their own and does not inline them."""
    token = _rules_are_kept.set(True)
    try:
        yield
    finally:
        _rules_are_kept.reset(token)


def _names_type(eqn) -> bool:
    """Whether an equation computes in a type that need not be its operands'."""
    return eqn.primitive.name in _COMPUTE_IN_TYPE and eqn.params.get("out_dtype") is not None


def _in_type(eqn) -> jex.ClosedJaxpr:
    """The operands converted, then the operation: what JAX lowers such an equation to."""
    params = {**eqn.params, "out_dtype": None}
    dtype = eqn.params["out_dtype"]

    def computed(*operands):
        converted = [jax.lax.convert_element_type(x, dtype) for x in operands]
        return eqn.primitive.bind(*converted, **params)

    return jax.make_jaxpr(computed)(*[fresh_aval(var.aval) for var in eqn.invars])


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


def keeps_rules(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation is a call with derivatives of its own that stays as it is."""
    return eqn.primitive.name in WITH_RULES and _rules_are_kept.get()
