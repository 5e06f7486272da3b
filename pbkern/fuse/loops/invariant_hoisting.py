"""ClosedJaxpr -> the same with dear values that all steps of a loop share computed before it.

    for x in xs:  h = exp(dt * -exp(a)) * h + x    ->    b = -exp(a);  for x in xs:  h = exp(dt * b) * h + x

Moved are functions, products and reductions of what a loop never changes, and what is made of them without growing. Cheap
arithmetic stays, and so do masks: to compute them is cheaper than to read them in every step.
"""

from __future__ import annotations

import math

import jax
from jax.extend import core as jex

from pbkern._jax import bind_again, params_of
from pbkern.core.jaxprs import evaluate, inner_jaxprs
from pbkern.core.machine import Machine
from pbkern.fuse.cost.equation import CONTRACTIONS, nbytes, operations_per_element
from pbkern.fuse.simplify.driver import drop_dead, retrace

# Vector operations for each element from which on a value is dear: more than it takes to read it from L2.
DEAR_OPERATIONS = 8


def compute_once(closed: jex.ClosedJaxpr, machine: Machine) -> jex.ClosedJaxpr:
    """Loops inside loops give what they share to the outer ones."""

    def scan(eqn, operands):
        p, n = params_of(eqn), params_of(eqn)["num_consts"]
        body = compute_once(p["jaxpr"], machine)
        moved = _Moved.of(body, n, machine)
        if moved is None:
            return None
        given = [*operands[:n], *moved.values(operands[:n]), *operands[n:]]
        return bind_again(eqn, given, {**p, "jaxpr": moved.body(), "num_consts": n + len(moved.shared)})

    def loop(eqn, operands):
        p, first, n = eqn.params, eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        body = compute_once(p["body_jaxpr"], machine)
        moved = _Moved.of(body, n, machine)
        if moved is None:
            return None
        consts = operands[first : first + n]
        given = [*operands[:first], *consts, *moved.values(consts), *operands[first + n :]]
        changed = {"body_jaxpr": moved.body(), "body_nconsts": n + len(moved.shared)}
        return eqn.primitive.bind(*given, **{**p, **changed})

    has_loop = any(e.primitive.name in ("scan", "while", "cond") for e in closed.jaxpr.eqns)
    return drop_dead(retrace(closed, {"scan": scan, "while": loop})) if has_loop else closed


class _Moved:
    """What moves out of one body. `consts`: how many operands never change; `shared`: values that the body is given instead."""

    def __init__(self, closed: jex.ClosedJaxpr, consts: int, before: set, moved: set, shared: list):
        self.closed, self.consts, self.before, self.moved, self.shared = closed, consts, before, moved, shared

    @classmethod
    def of(cls, closed: jex.ClosedJaxpr, consts: int, machine: Machine) -> _Moved | None:
        jaxpr = closed.jaxpr
        fixed, dear = {*jaxpr.constvars, *jaxpr.invars[:consts]}, set()
        limit = max([machine.l2_bytes, *(nbytes(v.aval) for v in fixed)])  # what grows is made anew where it is used
        before: set = set()  # equations that can be computed before the loop, by id
        moved: set = set()
        for eqn in jaxpr.eqns:
            read = [a for a in eqn.invars if not isinstance(a, jex.Literal)]
            if eqn.effects or list(inner_jaxprs(eqn)) or not all(a in fixed for a in read):
                continue
            before.add(id(eqn))
            fixed.update(eqn.outvars)
            parts = dear.intersection(read)
            follows = bool(parts) and _size(eqn.outvars) <= _size(parts)
            if follows or _is_dear(eqn, machine) and nbytes(eqn.outvars[0].aval) <= limit:
                moved.add(id(eqn))
                dear.update(eqn.outvars)
        rest = [a for e in jaxpr.eqns if id(e) not in moved for a in e.invars]
        read = {a for a in (*rest, *jaxpr.outvars) if not isinstance(a, jex.Literal)}
        shared = [v for e in jaxpr.eqns if id(e) in moved for v in e.outvars if v in read]
        return cls(closed, consts, before, moved, shared) if shared else None

    def values(self, consts) -> list:
        """The shared values, computed of the operands that never change."""
        found: dict = {}

        def bind(eqn, *operands):
            results = bind_again(eqn, operands) if id(eqn) in self.before else [None] * len(eqn.outvars)
            found.update(zip(eqn.outvars, results))
            return results

        others = [None] * (len(self.closed.jaxpr.invars) - self.consts)
        evaluate(self.closed.jaxpr, self.closed.consts, [*consts, *others], bind=bind)
        return [found[v] for v in self.shared]

    def body(self) -> jex.ClosedJaxpr:
        """The rest, with the shared values behind the operands that never change."""
        jaxpr, n, count = self.closed.jaxpr, self.consts, len(self.shared)

        def slim(*args):
            given = dict(zip(self.shared, args[n : n + count]))

            def bind(eqn, *operands):
                return [given.get(v) for v in eqn.outvars] if id(eqn) in self.moved else bind_again(eqn, operands)

            return evaluate(jaxpr, self.closed.consts, [*args[:n], *args[n + count :]], bind=bind)

        ins = [v.aval for v in jaxpr.invars]
        return drop_dead(jax.make_jaxpr(slim)(*ins[:n], *(v.aval for v in self.shared), *ins[n:]))


def _is_dear(eqn, machine: Machine) -> bool:
    name = eqn.primitive.name
    sums = name in CONTRACTIONS or name.startswith("reduce_") and name != "reduce_precision"
    return sums or operations_per_element(eqn, machine) >= DEAR_OPERATIONS


def _size(values) -> int:
    return max(math.prod(v.aval.shape) for v in values)
