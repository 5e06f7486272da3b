"""Python function on JAX values -> `pbkern_call`, a primitive that carries its jaxpr through transformations.

JAX differentiates, batches and splits the jaxpr; each rule here binds the primitive again on the
result, so forward and backward reach the compiler whole. What the primitive compiles to is
api/pipeline.py. Private JAX is in _jax.py.

Parameters of the primitive: `jaxpr` (closed: what the function closes over becomes operands, except
filters of convolutions, which are constants), `name`, `options`, and `donated`, one flag per operand, which the decorator sets
and every transformation clears.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jax
from jax.extend import core as jex

from pbkern import _jax
from pbkern._jax import bind_again
from pbkern._user_lines import UserLine, raise_at
from pbkern.core.errors import OptionError
from pbkern.core.jaxprs.calls import WITH_RULES
from pbkern.core.jaxprs.evaluation import evaluate
from pbkern.core.jaxprs.walks import equations
from pbkern.core.lazy_dataclass import dataclass

from .constant_filters import constant_filters
from .constant_iotas import count_progressions
from .known_products import use_known_products
from .residuals import Residuals, choose_residuals

call_p = jex.Primitive("pbkern_call")
call_p.multiple_results = True


@call_p.def_effectful_abstract_eval
def _result_types(*_, jaxpr, name, options, donated):
    return jaxpr.out_avals, jaxpr.effects


def _find_bad_number(
    error: FloatingPointError, *operands, jaxpr: jex.ClosedJaxpr, name: str, **_
) -> None:
    """Runs the equations one by one: the first that makes a NaN or an infinity raises, at the user's line."""

    def fail(what: object, line: UserLine | None) -> NoReturn:
        raise_at(FloatingPointError(f"{what}\n  at   {line}" if line else str(what)), line)

    def bind_alone(eqn, *values):
        try:
            results = bind_again(eqn, values)
            _jax.refuse_bad_numbers(eqn.primitive.name, results)
        except FloatingPointError as at_equation:
            fail(at_equation, _jax.place_of_call(eqn))
        return results

    evaluate(jaxpr.jaxpr, jaxpr.consts, operands, bind=bind_alone)
    what = f"{error}: `{name}`, whose operations have none when they run one by one"
    fail(what, _jax.current_place())


_jax.set_eager_rule(call_p, _find_bad_number)


def _checked(operands: list, jaxpr: jex.ClosedJaxpr, *, name: str, options, donated) -> list:
    return bind([*jaxpr.consts, *operands], _jax.hoist_constants(jaxpr), f"{name}_checked", options)


def bind(operands: Iterable, jaxpr: jex.ClosedJaxpr, name: str, options, donated=None) -> list:
    """Binds the primitive; `donated`: one flag per operand, None for none."""
    operands = list(operands)
    flags = (False,) * len(operands) if donated is None else donated
    return call_p.bind(*operands, jaxpr=jaxpr, name=name, options=options, donated=flags)


# --- from Python
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Marked:
    """Arguments named by position or by name; either way of passing one finds it."""

    positions: frozenset[int]
    names: frozenset[str]

    @classmethod
    def of(cls, fn: Callable, positions, names, option: str) -> Marked:
        """Completes positions by names and names by positions, from the function's signature.

        Raises OptionError for positions that the function does not have; `option`: the one that they are given by.
        """
        found_positions = {positions} if isinstance(positions, int) else set(positions or ())
        found_names = {names} if isinstance(names, str) else set(names or ())
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        named = [
            parameter.name
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        takes_more = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
        for position in sorted(found_positions) if parameters else ():
            if position < -len(named) or (position >= len(named) and not takes_more):
                raise OptionError(
                    f"{option} of `{getattr(fn, '__name__', 'the function')}` names an argument that it lacks",
                    why=f"{option}={positions}, {len(named)} positional arguments",
                    hint=f"numbers from {-len(named)} to {len(named) - 1}",
                )
        found_positions = {
            position + len(named) if position < 0 else position for position in found_positions
        }
        keywords = {
            parameter.name
            for parameter in parameters
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        }
        by_position = {
            named[position] for position in found_positions if position < len(named)
        } & keywords
        by_name = {named.index(name) for name in found_names if name in named}
        return cls(frozenset(found_positions | by_name), frozenset(found_names | by_position))

    def unmarked(self, args: tuple, kwargs: dict) -> tuple[dict[int, Any], dict[str, Any]]:
        """Arguments that are not among them, by position and by name."""
        return (
            {n: arg for n, arg in enumerate(args) if n not in self.positions},
            {k: value for k, value in kwargs.items() if k not in self.names},
        )

    def flags(self, dynamic: dict[int, Any], named: dict[str, Any]) -> tuple[bool, ...]:
        """For each leaf of the arguments that `unmarked` gave, whether its argument is among these."""
        groups = [(n in self.positions, argument) for n, argument in dynamic.items()]
        groups += [(name in self.names, named[name]) for name in sorted(named)]
        return tuple(flag for flag, argument in groups for _ in jax.tree.leaves(argument))

    def these(self, args: tuple, kwargs: dict) -> tuple:
        """Arguments that are among them: (position or name, type, value)."""
        return (
            *((n, type(arg), arg) for n, arg in enumerate(args) if n in self.positions),
            *((k, type(value), value) for k, value in sorted(kwargs.items()) if k in self.names),
        )

    def as_jit(self, verb: str) -> dict[str, tuple]:
        """Arguments of jax.jit: {verb}_argnums and {verb}_argnames."""
        both = {
            f"{verb}_argnums": tuple(sorted(self.positions)),
            f"{verb}_argnames": tuple(sorted(self.names)),
        }
        return {k: value for k, value in both.items() if value}


@dataclass(frozen=True)
class Traced:
    """A function, traced.

    Attributes:
      closed: what the function closes over are its first operands, except filters of convolutions, which are constants.
      held: those values, then the leaves of the arguments that are not static. constants: how many
        of the former there are.
      donated: one flag per operand.
      results: the pytree of the results' types.
    """

    closed: jex.ClosedJaxpr
    held: list
    constants: int
    donated: tuple[bool, ...]
    results: Any


def trace(fn: Callable, static: Marked, donated: Marked, args: tuple, kwargs: dict) -> Traced:
    """Traces `fn` on `args`, arrays or types of arrays."""
    dynamic, named = static.unmarked(args, kwargs)
    leaves = jax.tree.leaves((dynamic, named))
    fixed = tuple(n for n in range(len(args)) if n not in dynamic)

    @functools.wraps(fn)  # JAX's messages name the user's function and its parameters
    def of_dynamic(*positional, **keyword):
        return fn(*positional, **(kwargs | keyword))

    closed, results = jax.make_jaxpr(of_dynamic, static_argnums=fixed, return_shape=True)(
        *args, **named
    )
    closed = count_progressions(_jax.without_dead_code(_jax.without_refs(closed)))
    filters = constant_filters(closed)
    held = [const for n, const in enumerate(closed.consts) if n not in filters]
    flags = (False,) * len(held) + donated.flags(dynamic, named)
    hoisted = _jax.hoist_constants(closed, filters)
    return Traced(hoisted, [*held, *leaves], len(held), flags, results)


def traced_call(
    fn: Callable, static: Marked, donated: Marked, name: str, options, args: tuple, kwargs: dict
):
    """Traces `fn` on `args`, binds the primitive, and returns the function's pytree of results."""
    traced = trace(fn, static, donated, args, kwargs)
    closed, held = traced.closed, traced.held
    if any(isinstance(x, jax.core.Tracer) for x in held) and _has_rules_of_refs(closed.jaxpr):
        # A derivative's rule may write to a ref: a transformation around this call must find it.
        outs = jex.jaxpr_as_fun(closed)(*held)
        return jax.tree.unflatten(jax.tree.structure(traced.results), outs)
    pure, written = _jax.without_ref_operands(closed)
    contents = [x[...] if _jax.is_ref(jax.typeof(x)) else x for x in held]
    outs = bind(contents, pure, name, options, traced.donated)
    for n, new in zip(written, outs[len(closed.out_avals) :]):
        held[n][...] = new
    return jax.tree.unflatten(jax.tree.structure(traced.results), outs[: len(closed.out_avals)])


def _has_rules_of_refs(jaxpr: jex.Jaxpr) -> bool:
    """Whether an equation, at any depth, has a derivative of its own and takes a ref."""
    return any(
        eqn.primitive.name in WITH_RULES and any(_jax.is_ref(var.aval) for var in eqn.invars)
        for eqn in equations(jaxpr)
    )


# --- rules
# ----------------------------------------------------------------------------------------------------------


def _jvp(primals, tangents, *, jaxpr, name, options, donated):
    nonzero = [type(tangent) is not _jax.Zero for tangent in tangents]
    with _jax.types_kept(jaxpr):
        both, nonzero_out = _jax.jvp_jaxpr(jaxpr, nonzero)
    results = bind(
        [*primals, *(tangent for tangent, nz in zip(tangents, nonzero) if nz)],
        both,
        f"{name}_jvp",
        options,
    )
    count = len(jaxpr.out_avals)
    primals_out, given = results[:count], iter(results[count:])
    zeros = _jax.tangent_zeros(primals_out)
    return primals_out, [next(given) if nz else z for nz, z in zip(nonzero_out, zeros)]


@_jax.cached_by_jaxpr
def _split(jaxpr, unknown: tuple[bool, ...], reassociates: bool) -> Residuals:
    """reassociates: results of the known half may stand in place of what the other one would compute and sum up."""
    with _jax.types_kept(jaxpr):
        if reassociates:
            jaxpr = use_known_products(jaxpr)
        return choose_residuals(_jax.split_by_known(jaxpr, unknown))


def _may_reassociate(options) -> bool:
    """Whether options leave it to the compiler in which order sums are taken, and where 16-bit floats are rounded."""
    return not (
        options.disable_unsafe_math_canonicalizations
        or options.mlir_disable_fast_math
        or options.emulate_precision_casts
    )


def _partial_eval(trace, *tracers, jaxpr, name, options, donated):
    """Known operands are computed with now; what the rest needs is saved, or recomputed there where that is cheap."""
    unknown = tuple(not tracer.is_known() for tracer in tracers)
    split = _split(jaxpr, unknown, _may_reassociate(options))
    known_operands = [_jax.known_value(tracer) for tracer in tracers if tracer.is_known()]
    results = bind(known_operands, split.known, f"{name}_fwd", options)
    saved = [
        *(known_operands[operand] for operand in split.kept_operands),
        *(results[result] for result in split.kept_results),
    ]
    operands = [*saved, *(tracer for tracer in tracers if not tracer.is_known())]
    params = {
        "jaxpr": split.unknown,
        "name": f"{name}_bwd",
        "options": options,
        "donated": (False,) * len(operands),
    }
    staged = iter(
        _jax.stage_unknown(
            trace, call_p, operands, split.unknown.out_avals, params, split.unknown.effects
        )
    )
    known = iter(results)
    return [next(staged) if result else next(known) for result in split.unknown_results]


@_jax.cached_by_jaxpr
def _transposed(jaxpr, linear: tuple[bool, ...], nonzero: tuple[bool, ...]) -> tuple:
    with _jax.types_kept(jaxpr):
        return _jax.transposed_jaxpr(jaxpr, linear, nonzero)


def _transpose(cotangents, *operands, jaxpr, name, options, donated):
    linear = tuple(map(_jax.is_linear_operand, operands))
    nonzero = tuple(type(ct) is not _jax.Zero for ct in cotangents)
    back, nonzero_out = _transposed(jaxpr, linear, nonzero)
    given = [operand for operand, is_linear in zip(operands, linear) if not is_linear] + [
        ct for ct, nz in zip(cotangents, nonzero) if nz
    ]
    results, is_nonzero = iter(bind(given, back, name, options)), iter(nonzero_out)
    return [
        (next(results) if next(is_nonzero) else _jax.cotangent_zero(operand)) if is_linear else None
        for operand, is_linear in zip(operands, linear)
    ]


def _batch(axis_data, operands, dims, *, jaxpr, name, options, donated):
    with _jax.types_kept(jaxpr):
        batched, dims_out = _jax.batch_jaxpr(jaxpr, axis_data, dims)
    return bind(operands, batched, f"{name}_vmap", options), dims_out


def _dce(used_results, eqn):
    def keep(params, used):
        return dict(
            params, donated=tuple(dim for dim, is_used in zip(params["donated"], used) if is_used)
        )

    return _jax.prune_equation(used_results, eqn, keep)


def _split_params(
    unknown_in, staged_in, kept_known, kept_staged, residuals_out, residuals_in, known, staged
):
    return tuple(
        dict(params, donated=(False,) * len(params["jaxpr"].in_avals)) for params in (known, staged)
    )


_jax.set_checkify_rule(call_p, _checked)
_jax.set_transformation_rules(
    call_p,
    jvp=_jvp,
    partial_eval_rule=_partial_eval,
    transpose=_transpose,
    batch=_batch,
    dce=_dce,
    params_of_split=_split_params,
)
