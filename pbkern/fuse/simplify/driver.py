"""ClosedJaxpr -> equivalent ClosedJaxpr that is easier to fuse. Re-traces; never builds jaxprs by hand.

Calls are inlined (also inside control flow), dead code dropped, equal equations merged, identities
folded, weak types erased. Padding and input dilation of convolutions and windows become `pad`, so
that they fuse like any producer; `split` becomes slices. The rewrites are in rewrites.py.
fuse/loops/dead_carries.py drops dead carries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern._jax import bind_again, copied_from, source_of, user_line
from pbkern.core.jaxprs.calls import called_jaxpr, has_calls
from pbkern.core.jaxprs.retracing import constant_value
from pbkern.core.jaxprs.walks import equations, primitive_names
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.linear_algebra import RULES
from pbkern.core.passes import threshold
from pbkern.core.process.context_values import during
from pbkern.fuse.access.blocks import literal

from .constant_factors import Factors
from .convolutions.known_filters import filtered
from .convolutions.padded import convolved
from .known_arrays import KnownArrays
from .max_pool_gradient import scatter_to_argmax
from .powers import write_out
from .rewrites import REWRITES, UNSAFE, Rewrite, first_of
from .small_factorisations import factored, in_control_flow
from .splat_operands import Splat
from .zero_sums import ZeroSums

CONTROL = ("scan", "while", "cond")


@dataclass(frozen=True)
class Simplify:
    """Runs the rewrites, then CSE and dead code elimination, as options say."""

    long_sum_terms: int = threshold(
        64, "terms of a sum whose division costs little beside it. Source: not recorded"
    )
    most_window_offsets: int = threshold(
        16,
        "offsets in a window of max pooling whose gradient is written out: each is a slice, a comparison and two selects. "
        "Source: not recorded",
    )
    largest_exponent: int = threshold(
        4,
        "exponent of a power that is written out: each product adds half a unit of error, pow itself has half a unit in all",
    )
    largest_factored_of_many: int = threshold(
        16,
        "rows or columns of the largest matrix that is factored without LAPACK in a batch outside of loops, or whose "
        "eigenvalues are found. Source: docs/decisions/097-small-linear-algebra.md",
    )
    vectors_per_program: int = threshold(
        2,
        "vectors of float32 whose lanes are the matrices that a program of a kernel factors at once. 256 of 8 x 8: QR 233, "
        "127, 97 and 99 us with 4, 8, 16 and 32 at once, LU 158, 78, 75 and 68, on vectors of 8. Zen 3, 26 November 2026",
    )
    most_filter_terms: int = threshold(
        25,
        "taps of a known filter that are written out, as many terms as the CPU's nests write out of a sum. 7 x 7: 10.4 ms, as "
        "a convolution 7.4. Zen 4, 27 November 2026",
    )
    fewest_taps_per_term: float = threshold(
        2.0,
        "taps of a known filter, per term of its dimensions one after the other, from which on these cost less than they "
        "save: an intermediate image. Source: the table of convolutions/known_filters.py",
    )
    fewest_taps_per_element: float = threshold(
        2.0,
        "taps of a convolution's filter, per element of an image, from which on the two change places. Not measured below 80: "
        "layouts of channels and images change places as well",
    )
    most_per_program: int = threshold(
        32,
        "matrices that a program factors at once, at most: scratch is that many. A warp of a GPU",
    )

    def __call__(self, closed: jex.ClosedJaxpr, options) -> jex.ClosedJaxpr:
        return simplify(
            closed,
            unsafe_math=options.unsafe,
            platform=options.platform,
            filters=options.unsafe
            and options.fast
            and (options.precision in (None, "fp32") or options.is_default_precision),
            limits=self,
            lanes=options.machine.lanes(4),
        )


def simplify(
    closed: jex.ClosedJaxpr,
    *,
    unsafe_math: bool = True,
    platform: str = "cpu",
    filters: bool = False,
    limits: Simplify | None = None,
    lanes: int = 8,
) -> jex.ClosedJaxpr:
    """Runs the rewrites, then CSE and dead code elimination.

    `unsafe_math` admits rewrites that may change rounding, except of means. Of branches for several
    platforms, only the one for `platform` stays. filters: convolutions with known filters become arithmetic
    (convolutions/known_filters.py), whatever the precision of convolutions. limits: thresholds, default those
    of the pass. lanes: float32 elements of a vector.
    """
    limits = limits or Simplify()
    sums = _long_sums(closed.jaxpr, limits.long_sum_terms) if unsafe_math else set()
    pooled = functools.partial(scatter_to_argmax, most_offsets=limits.most_window_offsets)
    solver = functools.partial(
        factored,
        largest_of_many=limits.largest_factored_of_many,
        per_program=min(limits.vectors_per_program * lanes, limits.most_per_program),
    )
    convolution = functools.partial(
        convolved, fewest_taps_per_element=limits.fewest_taps_per_element
    )
    exact = REWRITES | dict.fromkeys(RULES, solver)
    exact |= {"select_and_scatter_add": pooled, "conv_general_dilated": convolution}
    power = functools.partial(write_out, largest_exponent=limits.largest_exponent)
    inexact = UNSAFE | {"pow": power}

    def careful(name: str) -> Rewrite:
        def rewrite(eqn, operands):
            x = eqn.invars[0]
            rules = exact if not isinstance(x, jex.Literal) and x in sums else inexact
            return rules[name](eqn, operands) if name in rules else None

        return rewrite

    unsafe: dict[str, Rewrite] = {}
    if unsafe_math:
        factors = Factors(exact["mul"], careful("div"))
        unsafe = {name: careful(name) for name in inexact} | {
            "mul": factors.mul,
            "div": factors.div,
        }
        sums_with_zero = ZeroSums(exact["add"], exact["sub"])
        unsafe |= {"add": sums_with_zero.add, "sub": sums_with_zero.sub}
    if filters:
        known = functools.partial(
            filtered,
            most_terms=limits.most_filter_terms,
            fewest_taps_per_term=limits.fewest_taps_per_term,
        )
        unsafe["conv_general_dilated"] = first_of(known, exact["conv_general_dilated"])
    rewrites = exact | unsafe | {"platform_index": _branch_for(platform)}
    return _retraced(closed, rewrites, everywhere=True)


def _long_sums(jaxpr: jex.Jaxpr, fewest_terms: float) -> set:
    """Sums of many elements each, at any depth.

    Their results are few: dividing these costs nothing, and means stay exact.
    """
    long_sums: set = set()
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "reduce_sum":
            terms = math.prod(eqn.invars[0].aval.shape[axis] for axis in eqn.params["axes"])
            long_sums.update(eqn.outvars if terms >= fewest_terms else ())
        elif eqn.primitive.name in ("broadcast_in_dim", "reshape"):
            of_sum = not isinstance(eqn.invars[0], jex.Literal) and eqn.invars[0] in long_sums
            long_sums.update(eqn.outvars if of_sum else ())
    return long_sums


def _branch_for(platform: str) -> Rewrite:
    """Rewrite to the number of the platform's branch, or of the default one."""

    def rewrite(eqn, operands):
        groups = eqn.params["platforms"]
        number = next(
            (n for n, names in enumerate(groups) if names is None or platform in names), None
        )
        return None if number is None else [np.int32(number)]

    return rewrite


def retrace(
    closed: jex.ClosedJaxpr,
    rewrites: dict[str, Rewrite],
    note_constant: Callable[[object, object], None] | None = None,
) -> jex.ClosedJaxpr:
    """Rewrites equations of a function: primitive name -> Rewrite. Drops those that nothing reads then.

    Without rewrites it merges equal equations and inlines calls. With rewrites, a function that has none of their
    equations, and no calls, is returned as it is. note_constant: is told, of each constant of the function, which value the
    equations get and the constant that it stands for.
    """
    if rewrites and not _is_concerned(closed, rewrites):
        return closed
    return _retraced(
        closed, rewrites, everywhere=not rewrites, note_constant=note_constant or (lambda *_: None)
    )


def _retraced(
    closed: jex.ClosedJaxpr,
    rewrites: dict[str, Rewrite],
    *,
    everywhere: bool,
    note_constant: Callable[[object, object], None] = lambda *_: None,
) -> jex.ClosedJaxpr:
    """`everywhere`: also bodies of control flow that have none of the rewrites' equations."""
    avals = [_strong(var.aval) for var in closed.jaxpr.invars]
    traced = jax.make_jaxpr(lambda *args: _run(closed, args, rewrites, everywhere, note_constant))(
        *avals
    )
    return drop_dead(traced)


def _is_concerned(closed: jex.ClosedJaxpr, rewrites: dict[str, Rewrite]) -> bool:
    """Whether a retrace may change a function that was simplified before."""
    names = primitive_names(closed)
    return not names.isdisjoint(rewrites) or has_calls(closed)


def _strong(aval):
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _unsharded(params: dict) -> dict:
    """`params` without shardings over an empty mesh, which derivatives leave behind and which mean nothing."""
    empty = [
        key
        for key, param in params.items()
        if key.endswith("sharding") and getattr(getattr(param, "mesh", None), "empty", False)
    ]
    return params | dict.fromkeys(empty) if empty else params


def _run(
    closed: jex.ClosedJaxpr, args, rewrites: dict, everywhere: bool, note_constant: Callable
) -> list:
    """Binds every equation again. Merges equal ones and applies rewrites."""
    seen = _Seen()
    uniform = Splat(rewrites)
    known = KnownArrays(uniform)

    def copy(eqn, operands, line):
        """Results of `bind_with_rules` for an equation that no rule concerns, as most in most passes; None for others."""
        name = eqn.primitive.name
        if (
            name in rewrites
            or name in CONTROL
            or eqn.effects
            or uniform.changes(eqn, operands)
            or known.changes(operands)
        ):
            return None
        params = _unsharded(eqn.params)
        if params is not eqn.params:
            return None
        results, key = seen.find(eqn.primitive, operands, params)
        if results is None:
            results = copied_from(eqn, operands, line)
            if results is not None:
                seen.note(key, params, results)
        return results

    def bind(eqn, operands, line):
        results = copy(eqn, operands, line)
        if results is None:
            with source_of(line):
                results = bind_with_rules(eqn, operands)
        return results

    def bind_with_rules(eqn, operands):
        results = uniform.folded(eqn, operands)
        if results is None:
            operands = known.as_arrays(eqn, uniform.as_scalars(eqn, operands))
            results = bind_anew(eqn, operands)
            uniform.note(eqn, operands, results)
            known.note(eqn, operands, results)
        return results

    def constant(value):
        standing = constant_value(value)
        known.note_constant(standing, value)
        note_constant(standing, value)
        return standing

    def bind_anew(eqn, operands):
        rewrite = rewrites.get(eqn.primitive.name)
        results = rewrite(eqn, operands) if rewrite else None
        if results is not None:
            return results
        if eqn.primitive.name == "cond" and isinstance(operands[0], (np.ndarray, np.generic)):
            branches = eqn.params["branches"]
            taken = branches[int(np.clip(operands[0], 0, len(branches) - 1))]
            return keep_types(
                _run(taken, operands[1:], rewrites, everywhere, note_constant), eqn.outvars
            )
        params = _unsharded(_simplify_inner(eqn, rewrites, everywhere, note_constant))
        if eqn.effects:
            return bind_again(eqn, operands, params)
        results, key = seen.find(eqn.primitive, operands, params)
        if results is None:
            results = bind_again(eqn, operands, params)
            seen.note(key, params, results)
        return results

    return _evaluate(closed.jaxpr, closed.consts, args, bind, constant)


def _evaluate(jaxpr: jex.Jaxpr, consts, args, bind, constant, caller=None) -> list:
    """Binds each equation. constant: a constant of a function -> the value that its equations get.

    bind: (equation, operands, equation whose line the results carry) -> results. An equation without a user line, inside a
    library's function, carries the line of the call.
    """
    env = dict(zip(jaxpr.constvars, map(constant, consts))) | dict(zip(jaxpr.invars, args))

    def read(atom):
        return literal(atom) if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(var) for var in eqn.invars]
        inner = called_jaxpr(eqn)
        line = eqn if caller is None or user_line(eqn) else caller
        if inner is not None:
            results = _evaluate(inner.jaxpr, inner.consts, operands, bind, constant, line)
        else:
            results = bind(eqn, operands, line)
        env.update(zip(eqn.outvars, results))
    return [read(var) for var in jaxpr.outvars]


def _simplify_inner(eqn, rewrites: dict, everywhere: bool, note_constant: Callable) -> dict:
    """Parameters with simplified jaxprs of control flow."""
    if eqn.primitive.name not in CONTROL:
        return eqn.params

    def inner(value):
        if isinstance(value, jex.ClosedJaxpr):
            if not everywhere and not _is_concerned(value, rewrites):
                return value
            avals = [var.aval for var in value.jaxpr.invars]
            with during(in_control_flow, True):
                traced = jax.make_jaxpr(
                    lambda *args: keep_types(
                        _run(value, args, rewrites, everywhere, note_constant),
                        value.jaxpr.outvars,
                    )
                )(*avals)
            return drop_dead(traced)
        return tuple(map(inner, value)) if isinstance(value, tuple) and value else value

    return {key: inner(param) for key, param in eqn.params.items()}


def keep_types(results, atoms) -> list:
    """Keeps weak types of a control-flow body's results: they belong to the equation's type."""
    typed = []
    for result, atom in zip(results, atoms):
        weak = getattr(atom.aval, "weak_type", False)
        have = getattr(jax.typeof(result), "weak_type", False)
        typed.append(
            result
            if weak == have
            else lax.convert_element_type_p.bind(
                result, new_dtype=atom.aval.dtype, weak_type=weak, sharding=None
            )
        )
    return typed


class _Seen:
    """Computations without effects, and their results.

    Few have the primitive and the operands of another: parameters are looked at for those alone.
    """

    def __init__(self) -> None:
        self._results: dict[tuple, list[tuple[dict, list]]] = {}

    def find(self, primitive, operands, params: dict) -> tuple[list | None, tuple]:
        """(the results of an equal computation, or None; a key for `note`)."""
        key = (primitive, *map(_identity, operands))
        for earlier, results in self._results.get(key, ()):
            if _are_equal(params, earlier):
                return results, key
        return None, key

    def note(self, key: tuple, params: dict, results: list) -> None:
        self._results.setdefault(key, []).append((params, results))


def _identity(x):
    """Equal for equal values: small constants by their content."""
    if isinstance(x, (np.ndarray, np.generic)):
        return (x.dtype.str, x.shape, x.tobytes()) if x.size <= 16 else id(x)
    return id(x)


def _are_equal(params: dict, earlier: dict) -> bool:
    """Whether parameters are equal, and such that this can be told."""
    try:
        hash((*params.values(), *earlier.values()))
    except TypeError:
        return False
    return params == earlier


def drop_dead(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Drops equations without effects whose results nothing reads."""
    jaxpr = closed.jaxpr
    live = {var for var in jaxpr.outvars if not isinstance(var, jex.Literal)}
    live_eqns = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(var in live for var in eqn.outvars):
            live_eqns.append(eqn)
            live.update(var for var in eqn.invars if not isinstance(var, jex.Literal))
    if len(live_eqns) == len(jaxpr.eqns):
        return closed
    return jex.ClosedJaxpr(jaxpr.replace(eqns=live_eqns[::-1]), closed.consts)
