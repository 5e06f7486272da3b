"""Equations on complex arrays -> equations on pairs of real arrays, so that kernels can contain them.

    c:c64[n] = mul a b          p:f32[n,2] = complex_as_reals a     q:f32[n,2] = complex_as_reals b
    d:f32[n] = abs c      ->    re = p[:, 0] q[:, 0] - p[:, 1] q[:, 1]      im = ...      d = sqrt(re^2 + im^2)

A function's arguments and results, and what XLA keeps, stay complex arrays; kernels see them with
re and im interleaved (views.py). Between fused equations a number is two arrays, also in carries of
loops. What a scan reads and stacks is interleaved, as in memory, so that neither is copied.
Equations without a rule, and loops and branches that contain one, stay as they are, on complex
arrays.

Rules for equations are core/ops/complex/pairs.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax
from jax.extend import core as jex

from pbkern._jax import bind_again, params_of
from pbkern.core.jaxprs.calls import called_jaxpr
from pbkern.core.jaxprs.retracing import retrace_into
from pbkern.core.jaxprs.walks import equations, inner_jaxprs, types_at_any_depth
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.complex.arithmetic import Complex
from pbkern.core.ops.complex.interleaved import deinterleave, interleave
from pbkern.core.ops.complex.pairs import (
    TERMS_PER_ROW,
    constant,
    has_rule,
    is_complex,
    results_of,
    touches,
)
from pbkern.core.passes import threshold
from pbkern.fuse.simplify.driver import CONTROL

from .views import as_complex_p, as_reals_p

# ---- complex arrays and pairs


def _mentions_complex(jaxpr: jex.Jaxpr) -> bool:
    return any(map(is_complex, types_at_any_depth(jaxpr)))


def _from_array(x):
    """An array from outside: a complex one with its parts as views."""
    return deinterleave(as_reals_p.bind(x), x) if is_complex(x) else x


def _to_array(x):
    if not isinstance(x, Complex):
        return x
    return as_complex_p.bind(interleave(x)) if x.whole is None else x.whole


# ---- equations


def _stays(eqn) -> bool:
    """Whether a loop or branch contains an equation on complex arrays without a rule."""
    inner = [
        inner_eqn
        for jaxpr in inner_jaxprs(eqn)
        for inner_eqn in equations(jaxpr.jaxpr)
        if touches(inner_eqn)
    ]
    return any(
        inner_eqn.primitive.name not in CONTROL
        and not called_jaxpr(inner_eqn)
        and not has_rule(inner_eqn)
        for inner_eqn in inner
    )


def _keep(eqn, operands: Sequence) -> list:
    """The equation as it is, on complex arrays."""
    return list(map(_from_array, bind_again(eqn, list(map(_to_array, operands)))))


def _stored(x):
    return interleave(x) if isinstance(x, Complex) else x


# ---- the pass


@dataclass(frozen=True)
class ComplexAsPairs:
    """Rewrites a function by rules for all equations on complex arrays that have one."""

    terms_per_row: float = threshold(
        TERMS_PER_ROW,
        "times more terms of each sum of a contraction than rows of its smaller operand, where these are doubled: their "
        "products are small beside the larger operand. Source: not recorded",
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: object) -> jex.ClosedJaxpr:
        if not _mentions_complex(closed.jaxpr):
            return closed

        def run(*args):
            results = retrace_into(
                closed.jaxpr, closed.consts, list(map(_from_array, args)), self._rewrite, constant
            )
            return [_to_array(result) for result in results]

        return jax.make_jaxpr(run)(
            *[jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in closed.jaxpr.invars]
        )

    def _rewrite(self, eqn, *operands) -> list | None:
        """Results of an equation on complex arrays; None for any other."""
        name = eqn.primitive.name
        if name in CONTROL and _stays(eqn):
            return _keep(eqn, operands)
        if name == "scan":
            return self._scan(eqn, operands)
        if name in CONTROL or not touches(eqn):
            return None
        if not has_rule(eqn):
            return _keep(eqn, operands)
        return results_of(eqn, operands, self.terms_per_row)

    def _scan(self, eqn, operands: Sequence) -> list:
        """A scan whose xs and ys have their parts interleaved."""
        params, body = params_of(eqn), eqn.params["jaxpr"]
        first_x = params["num_consts"] + params["num_carry"]
        consts, init, xs = (
            operands[: params["num_consts"]],
            operands[params["num_consts"] : first_x],
            operands[first_x:],
        )
        is_pair = [is_complex(var.aval) for var in body.jaxpr.invars[first_x:]]

        def step(carry, x):
            x = [
                deinterleave(operand) if paired else operand for operand, paired in zip(x, is_pair)
            ]
            out = retrace_into(
                body.jaxpr, body.consts, [*consts, *carry, *x], self._rewrite, constant
            )
            return tuple(out[: params["num_carry"]]), tuple(
                _stored(y) for y in out[params["num_carry"] :]
            )

        walked = tuple(map(_stored, xs))
        carry, ys = lax.scan(
            step,
            tuple(init),
            walked,
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        stacked = [
            deinterleave(y) if is_complex(var.aval) else y
            for y, var in zip(ys, eqn.outvars[params["num_carry"] :])
        ]
        return [*carry, *stacked]
