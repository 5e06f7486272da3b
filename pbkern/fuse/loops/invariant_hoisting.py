"""ClosedJaxpr -> the same after loop-invariant code motion: expensive values that all steps share are computed before the loop.

    for x in xs:  h = exp(dt * -exp(a)) * h + x    ->    b = -exp(a);  for x in xs:  h = exp(dt * b) * h + x

Functions, products and reductions of loop-invariant values move, and what is computed from them
without growing. Cheap arithmetic and masks stay: computing them is cheaper than reading them in
every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jax.extend import core as jex

from pbkern._jax import bind_again, params_of
from pbkern.core.jaxprs.evaluation import evaluate
from pbkern.core.jaxprs.walks import equations, inner_jaxprs
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.cost.kinds import CONTRACTIONS, nbytes
from pbkern.fuse.cost.model import CostModel
from pbkern.fuse.simplify.driver import drop_dead, retrace

# Loop -> parameters with its body, and with the number of operands that never change.
BODIES = {"scan": ("jaxpr", "num_consts"), "while": ("body_jaxpr", "body_nconsts")}


@dataclass(frozen=True)
class HoistInvariants:
    """Moves expensive values that all steps share before their loop."""

    expensive_operations: float = threshold(
        8,
        "vector operations per element of an expensive value: more than it takes to read it from near memory. Source: not "
        "recorded",
    )

    def __call__(self, closed: jex.ClosedJaxpr, options) -> jex.ClosedJaxpr:
        return self.hoisted(closed, options.machine)

    def hoisted(self, closed: jex.ClosedJaxpr, machine: CostModel) -> jex.ClosedJaxpr:
        """Moves invariant equations out of loops, also from inner loops to outer ones."""

        def scan(eqn, operands):
            params, n_consts = params_of(eqn), params_of(eqn)["num_consts"]
            body = self.hoisted(params["jaxpr"], machine)
            moved = _BodyInvariants.of(body, n_consts, self._is_expensive, machine)
            if moved is None:
                return None
            given = [*operands[:n_consts], *moved.values(operands[:n_consts]), *operands[n_consts:]]
            return bind_again(
                eqn,
                given,
                {**params, "jaxpr": moved.body(), "num_consts": n_consts + len(moved.shared)},
            )

        def loop(eqn, operands):
            params, first, n_consts = (
                eqn.params,
                eqn.params["cond_nconsts"],
                eqn.params["body_nconsts"],
            )
            body = self.hoisted(params["body_jaxpr"], machine)
            moved = _BodyInvariants.of(body, n_consts, self._is_expensive, machine)
            if moved is None:
                return None
            consts = operands[first : first + n_consts]
            given = [
                *operands[:first],
                *consts,
                *moved.values(consts),
                *operands[first + n_consts :],
            ]
            changed = {"body_jaxpr": moved.body(), "body_nconsts": n_consts + len(moved.shared)}
            return eqn.primitive.bind(*given, **{**params, **changed})

        hoists = any(
            eqn.primitive.name in BODIES and self._shares(eqn, machine)
            for eqn in equations(closed.jaxpr)
        )
        return retrace(closed, {"scan": scan, "while": loop}) if hoists else closed

    def _shares(self, eqn, machine: CostModel) -> bool:
        """Whether steps of a loop share expensive values, before loops inside have given it theirs."""
        body, consts = BODIES[eqn.primitive.name]
        count = params_of(eqn)[consts]
        return _BodyInvariants.of(eqn.params[body], count, self._is_expensive, machine) is not None

    def _is_expensive(self, eqn, machine: CostModel) -> bool:
        name = eqn.primitive.name
        sums = name in CONTRACTIONS or (name.startswith("reduce_") and name != "reduce_precision")
        return sums or machine.operations(eqn) >= self.expensive_operations


class _BodyInvariants:
    """The invariants of one body.

    `consts`: number of operands that never change; `shared`: values that become operands.
    """

    def __init__(self, closed: jex.ClosedJaxpr, consts: int, before: set, moved: set, shared: list):
        self.closed, self.consts, self.before, self.moved, self.shared = (
            closed,
            consts,
            before,
            moved,
            shared,
        )

    @classmethod
    def of(
        cls,
        closed: jex.ClosedJaxpr,
        consts: int,
        is_expensive: Callable[..., bool],
        machine: CostModel,
    ) -> _BodyInvariants | None:
        jaxpr = closed.jaxpr
        fixed, expensive = {*jaxpr.constvars, *jaxpr.invars[:consts]}, set[jex.Var]()
        limit = max(
            [machine.near_bytes, *(nbytes(var.aval) for var in fixed)]
        )  # what grows is made again where it is used
        before: set = set()  # equations that can be computed before the loop, by id
        moved: set = set()
        for eqn in jaxpr.eqns:
            read = [var for var in eqn.invars if not isinstance(var, jex.Literal)]
            if (
                eqn.effects
                or list(inner_jaxprs(eqn))
                or not all(operand in fixed for operand in read)
            ):
                continue
            before.add(id(eqn))
            fixed.update(eqn.outvars)
            parts = expensive.intersection(read)
            follows = bool(parts) and _size(eqn.outvars) <= _size(parts)
            if follows or (is_expensive(eqn, machine) and nbytes(eqn.outvars[0].aval) <= limit):
                moved.add(id(eqn))
                expensive.update(eqn.outvars)
        rest = [
            var for loop_eqn in jaxpr.eqns if id(loop_eqn) not in moved for var in loop_eqn.invars
        ]
        read_later = {atom for atom in (*rest, *jaxpr.outvars) if not isinstance(atom, jex.Literal)}
        shared = [
            var
            for moved_eqn in jaxpr.eqns
            if id(moved_eqn) in moved
            for var in moved_eqn.outvars
            if var in read_later
        ]
        return cls(closed, consts, before, moved, shared) if shared else None

    def values(self, consts) -> list:
        """The shared values, computed from the operands that never change."""
        values: dict = {}

        def bind(eqn, *operands):
            results = (
                bind_again(eqn, operands) if id(eqn) in self.before else [None] * len(eqn.outvars)
            )
            values.update(zip(eqn.outvars, results))
            return results

        unknown = [None] * (len(self.closed.jaxpr.invars) - self.consts)
        evaluate(self.closed.jaxpr, self.closed.consts, [*consts, *unknown], bind=bind)
        return [values[var] for var in self.shared]

    def body(self) -> jex.ClosedJaxpr:
        """The rest of the body, with the shared values behind the operands that never change."""
        jaxpr, consts, count = self.closed.jaxpr, self.consts, len(self.shared)

        def slim(*args):
            given = dict(zip(self.shared, args[consts : consts + count]))

            def bind(eqn, *operands):
                return (
                    [given.get(var) for var in eqn.outvars]
                    if id(eqn) in self.moved
                    else bind_again(eqn, operands)
                )

            return evaluate(
                jaxpr, self.closed.consts, [*args[:consts], *args[consts + count :]], bind=bind
            )

        ins = [var.aval for var in jaxpr.invars]
        return drop_dead(
            jax.make_jaxpr(slim)(*ins[:consts], *(var.aval for var in self.shared), *ins[consts:])
        )


def _size(values) -> int:
    return max(math.prod(value.aval.shape) for value in values)
