"""scan, while and cond in bodies. Values they carry live in scratch buffers; Refs pass through.

A carry that only counts (init + step * iteration) becomes an index expression instead, so that
subscripts made from it stay affine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.affine import Affine
from pbkern.core.rules import RuleTable
from pbkern.lower.nest.context import INT32_MAX
from pbkern.lower.nest.ir import Buf, For, If, While
from pbkern.lower.values.items import ControlItem, LetItem, RefView, StoreItem
from pbkern.lower.values.scalar_evolution import known_bounds, simplified
from pbkern.lower.values.values import ZERO, Index, Lazy, Literal, Stored, Value, is_index_only

from .elementwise import fold_index
from .views import index_value

RULES: RuleTable = RuleTable("control flow")
STATE = ("swap", "addupdate", "masked_store")


def _bind(builder, env: dict, local: dict, var, atom) -> None:
    """Passes an operand into an inner jaxpr: Refs by name, values by value."""
    if not isinstance(atom, jex.Literal) and atom in builder.refs:
        builder.refs[var] = builder.refs[atom]
    else:
        local[var] = builder.read(env, atom)


def written_buffers(eqns: Iterable, refs: Mapping[Any, RefView]) -> frozenset[Buf]:
    """Buffers that equations store to. `refs`: their Ref variables -> RefView."""
    from pbkern.core import jaxprs

    buffers: set[Buf] = set()
    for eqn in eqns:
        if eqn.primitive.name in STATE and eqn.invars[0] in refs:
            buffers.add(refs[eqn.invars[0]].buf)
        for inner in jaxprs.inner_jaxprs(eqn):
            outer = eqn.invars[len(eqn.invars) - len(inner.jaxpr.invars) :]
            if eqn.primitive.name == "while":
                outer = _while_operands(eqn, inner)
            mapped = {
                var: refs[atom]
                for var, atom in zip(inner.jaxpr.invars, outer)
                if not isinstance(atom, jex.Literal) and atom in refs
            }
            buffers |= written_buffers(inner.jaxpr.eqns, mapped)
    return frozenset(buffers)


def _while_operands(eqn, inner):
    nc, nb = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = eqn.invars[nc + nb :]
    return (
        eqn.invars[:nc] if inner is eqn.params["cond_jaxpr"] else eqn.invars[nc : nc + nb]
    ) + carry


def _no_refs(builder, atoms) -> list:
    return [atom for atom in atoms if isinstance(atom, jex.Literal) or atom not in builder.refs]


def _all_writes(builder, eqn) -> frozenset[Buf]:
    return written_buffers([eqn], builder.refs)


def _control(builder, eqn, env: dict, results: list[Stored], run) -> None:
    uses = tuple(
        value for value in (builder.read(env, ref) for ref in _no_refs(builder, eqn.invars))
    )
    builder.append_control(ControlItem(uses, _all_writes(builder, eqn), run), results)


def _results(builder, eqn, env: dict) -> list[Stored]:
    """Buffers for the results of an equation, known before its statements are built."""
    results = []
    for var in eqn.outvars:
        results.append(builder.new_buffer(tuple(var.aval.shape), np.dtype(var.aval.dtype)))
        env[var] = results[-1]
    return results


def _seen_through(source: Stored, place: Callable[[Index], Index]) -> Callable[[Index], Index]:
    """Index -> place in the buffer of `source`, of which the index is mapped by `place` first."""
    return lambda ix: source.place(place(ix))


def _store_all(
    builder,
    targets: list[Stored],
    values: list[Value],
    place: Callable[[Index], Index] = lambda ix: ix,
) -> None:
    for target, value in zip(targets, values):
        builder.items.append(
            StoreItem(
                target.buf,
                value.shape,
                _seen_through(target, place),
                value,
                at=None,
            )
        )


@RULES.register("cond")
def _cond(builder, eqn, env: dict) -> None:
    index = builder.read(env, eqn.invars[0])
    branch_number = builder.index_symbol(index, clamp=len(eqn.params["branches"]) - 1)
    if branch_number.is_const:
        _once(builder, eqn.params["branches"][branch_number.const], eqn.invars[1:], eqn, env)
        return
    results = _results(builder, eqn, env)

    def run() -> None:
        bodies = []
        for branch in eqn.params["branches"]:
            local: dict = {}
            for var, atom in zip(branch.jaxpr.invars, eqn.invars[1:]):
                _bind(builder, env, local, var, atom)
            _constants(local, branch)
            bodies.append(
                builder.region(
                    branch.jaxpr,
                    local,
                    lambda inner_env, closed=branch: _store_all(
                        builder,
                        results,
                        [builder.read(inner_env, outvar) for outvar in closed.jaxpr.outvars],
                    ),
                )
            )
        builder.stmts.append(If(branch_number.terms[0][0], tuple(bodies)))

    _control(builder, eqn, env, results, run)


def _constants(local: dict, closed: jex.ClosedJaxpr) -> None:
    for var, const in zip(closed.jaxpr.constvars, closed.consts):
        local[var] = Literal((), np.asarray(const).dtype, np.asarray(const)[()])


def _once(builder, closed: jex.ClosedJaxpr, atoms, eqn, env: dict) -> None:
    """The only branch of a conditional or turn of a loop that runs, as if it stood there."""
    local: dict = {}
    for var, atom in zip(closed.jaxpr.invars, atoms):
        _bind(builder, env, local, var, atom)
    _constants(local, closed)
    builder.scan_equations(closed.jaxpr, local)
    env.update(zip(eqn.outvars, [builder.read(local, outvar) for outvar in closed.jaxpr.outvars]))


def _copy_in(builder, carries: list[Stored], values: list[Value]) -> None:
    for carry, value in zip(carries, values):
        builder.store_value(carry, value, lambda ix: ix)


def _counter_steps(jaxpr: jex.Jaxpr, invars, outvars) -> dict:
    """carry position -> constant step, for integer carries whose next value is carry + constant."""
    makers = {o: producer for producer in jaxpr.eqns for o in producer.outvars}
    steps = {}
    for k, (var, outvar) in enumerate(zip(invars, outvars)):
        eqn = None if isinstance(outvar, jex.Literal) else makers.get(outvar)
        if outvar is var:
            steps[k] = 0
        elif (
            eqn is not None
            and eqn.primitive.name == "add"
            and var.aval.shape == ()
            and np.dtype(var.aval.dtype).kind in "iu"
        ):
            left, right = eqn.invars
            if left is var and isinstance(right, jex.Literal):
                steps[k] = int(right.val)
            elif right is var and isinstance(left, jex.Literal):
                steps[k] = int(left.val)
    return {
        k: step
        for k, step in steps.items()
        if invars[k].aval.shape == () and np.dtype(invars[k].aval.dtype).kind in "iu"
    }


def _counted(builder, start: Affine, step: int, counter: str, dtype) -> Value:
    return index_value(
        (), np.dtype(dtype), lambda ix: start + Affine.symbol(counter) * step, builder
    )


@RULES.register("scan")
def _scan(builder, eqn, env: dict) -> None:
    params = params_of(eqn)
    closed, length, nc = params["jaxpr"], params["length"], params["num_consts"]
    ncar = params["num_carry"]
    jaxpr = closed.jaxpr
    invars = jaxpr.invars
    init, xs = eqn.invars[nc : nc + ncar], eqn.invars[nc + ncar :]
    if length == 1 and not xs and len(eqn.outvars) == ncar:
        _once(builder, closed, eqn.invars, eqn, env)
        return
    steps = _counter_steps(jaxpr, invars[nc : nc + ncar], jaxpr.outvars[:ncar])
    starts = {step: builder.index_symbol(builder.read(env, init[step])) for step in steps}
    results = _results(builder, eqn, env)
    counter = builder.names("%i")
    builder.bounds[counter] = (0, max(length - 1, 0))

    def run() -> None:
        local: dict = {}
        for var, atom in zip(invars[:nc], eqn.invars[:nc]):
            _bind(builder, env, local, var, atom)
        _constants(local, closed)
        _copy_in(
            builder,
            [result for k, result in enumerate(results[:ncar]) if k not in steps],
            [builder.read(env, a) for k, a in enumerate(init) if k not in steps],
        )
        for k, var in enumerate(invars[nc : nc + ncar]):
            local[var] = (
                builder.whole(results[k].buf)
                if k not in steps
                else _counted(builder, starts[k], steps[k], counter, var.aval.dtype)
            )
        row = (
            Affine.symbol(counter)
            if not params["reverse"]
            else Affine.symbol(counter) * -1 + (length - 1)
        )
        for var, atom in zip(invars[nc + ncar :], xs):
            value = builder.read(env, atom)
            if isinstance(value, Literal):
                local[var] = Literal(tuple(var.aval.shape), value.dtype, value.scalar)
                continue
            stored = builder.in_memory(value)
            local[var] = Stored(
                tuple(var.aval.shape),
                stored.dtype,
                stored.buf,
                _seen_through(stored, lambda ix: (row, *ix)),
                stored.guard,
            )

        def finish(inner_env: dict) -> None:
            outs = [builder.read(inner_env, outvar) for outvar in jaxpr.outvars]
            _store_all(builder, results[ncar:], outs[ncar:], lambda ix: (row, *ix))
            _store_carries(
                builder,
                inner_env,
                [(results[k], invars[nc + k], outs[k]) for k in range(ncar) if k not in steps],
            )

        if length:
            builder.stmts.append(For(counter, length, tuple(builder.region(jaxpr, local, finish))))
        for k, step in steps.items():
            last = index_value(
                (),
                results[k].dtype,
                lambda ix, k=k, delta=step: starts[k] + delta * length,
                builder,
            )
            builder.store_value(results[k], last, lambda ix: ix)

    _control(builder, eqn, env, results, run)


def _store_carries(builder, env: dict, carries: list[tuple[Stored, jex.Var, Value]]) -> None:
    """Next values into the carry buffers; a carry passed through unchanged needs nothing.

    The body sees each carry as a value of its own: what a buffer holds differs before and after the
    stores.
    """
    moved = [(carry, value) for carry, var, value in carries if value is not env[var]]
    _store_all(builder, [carry for carry, _ in moved], [value for _, value in moved])


@RULES.register("while")
def _while(builder, eqn, env: dict) -> None:
    params = eqn.params
    nc, nb = params["cond_nconsts"], params["body_nconsts"]
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    init = eqn.invars[nc + nb :]
    carry = body.jaxpr.invars[nb:]
    counted = _fori(cond.jaxpr, body.jaxpr, nc, nb)
    trips, starts, steps = None, {}, {}
    if counted is not None:
        position, limit = counted
        bound = init[limit] if isinstance(limit, int) else limit
        trips = _trip_count(builder, builder.read(env, init[position]), builder.read(env, bound))
        if trips == 1:
            _once(builder, body, (*eqn.invars[nc : nc + nb], *init), eqn, env)
            return
        steps = _counter_steps(body.jaxpr, carry, body.jaxpr.outvars)
        starts = {step: builder.index_symbol(builder.read(env, init[step])) for step in steps}
    results = _results(builder, eqn, env)

    def bind_consts(closed, atoms) -> dict:
        local: dict = {}
        for var, atom in zip(closed.jaxpr.invars, atoms):
            _bind(builder, env, local, var, atom)
        _constants(local, closed)
        return local

    def run() -> None:
        carried = [k for k in range(len(carry)) if k not in steps]
        _copy_in(
            builder, [results[k] for k in carried], [builder.read(env, init[k]) for k in carried]
        )
        local = bind_consts(body, eqn.invars[nc : nc + nb])
        counter = builder.names("%i")
        if trips is not None:
            most = trips if isinstance(trips, int) else builder.bounds[trips.terms[0][0]][1]
            builder.bounds[counter] = (0, max(most - 1, 0))
        for k, var in enumerate(carry):
            local[var] = (
                builder.whole(results[k].buf)
                if k not in steps
                else _counted(builder, starts[k], steps[k], counter, var.aval.dtype)
            )

        def finish(inner_env: dict) -> None:
            outs = [builder.read(inner_env, outvar) for outvar in body.jaxpr.outvars]
            _store_carries(builder, inner_env, [(results[k], carry[k], outs[k]) for k in carried])

        stmts = builder.region(body.jaxpr, local, finish)
        if trips is not None:
            builder.stmts.append(
                For(counter, trips if isinstance(trips, int) else trips.terms[0][0], tuple(stmts))
            )
            for k, step in steps.items():
                total = Affine((), trips) if isinstance(trips, int) else trips
                last = index_value(
                    (),
                    results[k].dtype,
                    lambda ix, k=k, delta=step, count=total: starts[k] + count * delta,
                    builder,
                )
                builder.store_value(results[k], last, lambda ix: ix)
            return
        test = bind_consts(cond, eqn.invars[:nc])
        test.update(
            (cond_var, builder.whole(result.buf))
            for cond_var, result in zip(cond.jaxpr.invars[nc:], results)
        )
        predicate: list[Affine] = []
        condition = builder.region(
            cond.jaxpr,
            test,
            lambda cond_env: predicate.append(
                builder.index_symbol(builder.read(cond_env, cond.jaxpr.outvars[0]))
            ),
        )
        name = predicate[0].terms[0][0] if predicate[0].terms else None
        builder.stmts.append(
            While(
                tuple(condition),
                name if name is not None else str(predicate[0].const),
                tuple(stmts),
            )
        )

    _control(builder, eqn, env, results, run)


def _fori(cond: jex.Jaxpr, body: jex.Jaxpr, nc: int, nb: int):
    """(position of the counter, limit atom or carry position) if this while counts up by one, else None."""
    if len(cond.eqns) != 1 or cond.eqns[0].primitive.name != "lt":
        return None
    counter, limit = cond.eqns[0].invars
    carried = list(cond.invars[nc:])
    if cond.eqns[0].outvars[0] is not cond.outvars[0] or counter not in carried:
        return None
    index = carried.index(counter)
    if _counter_steps(body, body.invars[nb:], body.outvars).get(index) != 1:
        return None
    if isinstance(limit, jex.Literal):
        return index, limit
    if (
        limit in carried
        and body.outvars[carried.index(limit)] is body.invars[nb + carried.index(limit)]
    ):
        return index, carried.index(limit)
    return None


def _trip_count(builder, start: Value, stop: Value) -> int | Affine:
    """max(stop - start, 0) as an int or a scalar symbol."""

    def combine(pool, ix, xs):
        return fold_index(pool, "sub", stop.dtype, [xs[1], xs[0]]) or builder.op(
            "sub", stop.dtype, xs[1], xs[0]
        )

    known = is_index_only(start) and is_index_only(stop)
    difference = simplified(
        builder, Lazy((), stop.dtype, (start, stop), lambda ix: ((), ()), combine, index_only=known)
    )
    if isinstance(difference, Literal):
        return max(int(np.asarray(difference.scalar)), 0)
    name = builder.names("%s")
    builder.items.append(LetItem(name, builder.new(difference), INT32_MAX))
    builder.bounds[name] = known_bounds(builder, difference, INT32_MAX)
    return Affine.symbol(name)


__all__ = ["RULES", "ZERO"]
