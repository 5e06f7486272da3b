"""scan, while and cond in bodies. Values they carry live in scratch buffers; Refs pass through.

A carry that only counts (init + step * iteration) becomes an index expression instead, so that
subscripts made from it stay affine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.affine import Affine
from pbkern.core.jax_types import array_aval
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.rules import RuleTable
from pbkern.lower.nest.context import INT32_MAX
from pbkern.lower.nest.ir import Buf, For, If, Stmt, While
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
    from pbkern.core.jaxprs.walks import inner_jaxprs

    buffers: set[Buf] = set()
    for eqn in eqns:
        if eqn.primitive.name in STATE and eqn.invars[0] in refs:
            buffers.add(refs[eqn.invars[0]].buf)
        for inner in inner_jaxprs(eqn):
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
            local = _operands(builder, env, branch, eqn.invars[1:])
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
    local = _operands(builder, env, closed, atoms)
    builder.scan_equations(closed.jaxpr, local)
    env.update(zip(eqn.outvars, [builder.read(local, outvar) for outvar in closed.jaxpr.outvars]))


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


@dataclass(frozen=True)
class _Carries:
    """Values that a loop carries from step to step, in buffers; those that only count are index expressions inside.

    Attributes:
      variables: of the body.
      init: what they begin with.
      results: the buffer of each, which has its last value when the loop ends.
      steps: position of one that counts -> its step; starts: its first value.
    """

    builder: Any
    variables: Sequence[jex.Var]
    init: Sequence
    results: list[Stored]
    steps: Mapping[int, int]
    starts: Mapping[int, Affine]

    @property
    def stored(self) -> list[int]:
        """Positions of those that do not count."""
        return [k for k in range(len(self.variables)) if k not in self.steps]

    def begin(self, env: dict) -> None:
        """Stores the first values."""
        values = [self.builder.read(env, self.init[k]) for k in self.stored]
        for k, value in zip(self.stored, values):
            self.builder.store_value(self.results[k], value, lambda ix: ix)

    def bind(self, local: dict, counter: str) -> None:
        """Binds the variables to buffers, or to what they count in step `counter`."""
        for k, var in enumerate(self.variables):
            local[var] = (
                self._count(
                    k, Affine.symbol(counter) * self.steps[k], np.dtype(array_aval(var).dtype)
                )
                if k in self.steps
                else self.builder.whole(self.results[k].buf)
            )

    def _count(self, k: int, distance: Affine, dtype: np.dtype) -> Value:
        return index_value((), dtype, lambda ix: self.starts[k] + distance, self.builder)

    def store(self, env: dict, values: Sequence[Value]) -> None:
        """Stores the next values; a carry passed through unchanged needs nothing.

        The body sees each carry as a value of its own: what a buffer holds differs before and after
        the stores.
        """
        moved = [k for k in self.stored if values[k] is not env[self.variables[k]]]
        _store_all(self.builder, [self.results[k] for k in moved], [values[k] for k in moved])

    def store_counts(self, trips: Affine) -> None:
        """Stores what those that count have reached after so many steps."""
        for k, step in self.steps.items():
            last = self._count(k, trips * step, self.results[k].dtype)
            self.builder.store_value(self.results[k], last, lambda ix: ix)


def _counting(
    builder, env: dict, jaxpr: jex.Jaxpr, variables, outvars, init
) -> tuple[dict[int, int], dict[int, Affine]]:
    """(steps, starts) of the carries that count."""
    steps = _counter_steps(jaxpr, variables, outvars)
    return steps, {k: builder.index_symbol(builder.read(env, init[k])) for k in steps}


def _operands(builder, env: dict, closed: jex.ClosedJaxpr, atoms) -> dict:
    """The environment of a body with its first variables bound to operands."""
    local: dict = {}
    for var, atom in zip(closed.jaxpr.invars, atoms):
        _bind(builder, env, local, var, atom)
    _constants(local, closed)
    return local


def _element(builder, var: jex.Var, whole: Value, row: Affine) -> Value:
    """The part of one of its xs that one step of a scan sees."""
    shape = tuple(array_aval(var).shape)
    if isinstance(whole, Literal):
        return Literal(shape, whole.dtype, whole.scalar)
    stored = builder.in_memory(whole)
    return Stored(
        shape,
        stored.dtype,
        stored.buf,
        _seen_through(stored, lambda ix: (row, *ix)),
        stored.guard,
    )


@RULES.register("scan")
def _scan(builder, eqn, env: dict) -> None:
    params = params_of(eqn)
    closed, length = params["jaxpr"], params["length"]
    n_consts, n_carry = params["num_consts"], params["num_carry"]
    jaxpr, first_x = closed.jaxpr, n_consts + n_carry
    consts, init, xs = eqn.invars[:n_consts], eqn.invars[n_consts:first_x], eqn.invars[first_x:]
    if length == 1 and not xs and len(eqn.outvars) == n_carry:
        _once(builder, closed, eqn.invars, eqn, env)
        return
    variables = jaxpr.invars[n_consts:first_x]
    counting = _counting(builder, env, jaxpr, variables, jaxpr.outvars[:n_carry], init)
    results = _results(builder, eqn, env)
    carries = _Carries(builder, variables, init, results[:n_carry], *counting)
    counter = builder.names("%i")
    builder.bounds[counter] = (0, max(length - 1, 0))
    row = Affine.symbol(counter)
    if params["reverse"]:
        row = row * -1 + (length - 1)

    def run() -> None:
        local = _operands(builder, env, closed, consts)
        carries.begin(env)
        carries.bind(local, counter)
        for var, atom in zip(jaxpr.invars[first_x:], xs):
            local[var] = _element(builder, var, builder.read(env, atom), row)

        def finish(inner_env: dict) -> None:
            outs = [builder.read(inner_env, outvar) for outvar in jaxpr.outvars]
            _store_all(builder, results[n_carry:], outs[n_carry:], lambda ix: (row, *ix))
            carries.store(inner_env, outs)

        if length:
            builder.stmts.append(For(counter, length, tuple(builder.region(jaxpr, local, finish))))
        carries.store_counts(Affine((), length))

    _control(builder, eqn, env, results, run)


@RULES.register("while")
def _while(builder, eqn, env: dict) -> None:
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    consts, init = eqn.invars[n_cond : n_cond + n_body], eqn.invars[n_cond + n_body :]
    variables = body.jaxpr.invars[n_body:]
    counted = _fori(cond.jaxpr, body.jaxpr, n_cond, n_body)
    trips = None
    counting: tuple[dict[int, int], dict[int, Affine]] = {}, {}
    if counted is not None:
        position, limit = counted
        bound = init[limit] if isinstance(limit, int) else limit
        trips = _trip_count(builder, builder.read(env, init[position]), builder.read(env, bound))
        if trips == 1:
            _once(builder, body, (*consts, *init), eqn, env)
            return
        counting = _counting(builder, env, body.jaxpr, variables, body.jaxpr.outvars, init)
    carries = _Carries(builder, variables, init, _results(builder, eqn, env), *counting)

    def run() -> None:
        carries.begin(env)
        local = _operands(builder, env, body, consts)
        counter = builder.names("%i")
        if trips is not None:
            most = trips if isinstance(trips, int) else builder.bounds[trips.terms[0][0]][1]
            builder.bounds[counter] = (0, max(most - 1, 0))
        carries.bind(local, counter)

        def finish(inner_env: dict) -> None:
            carries.store(
                inner_env, [builder.read(inner_env, outvar) for outvar in body.jaxpr.outvars]
            )

        stmts = tuple(builder.region(body.jaxpr, local, finish))
        if trips is None:
            test = _operands(builder, env, cond, eqn.invars[:n_cond])
            builder.stmts.append(_loop_while(builder, cond.jaxpr, test, carries.results, stmts))
            return
        count = trips if isinstance(trips, int) else trips.terms[0][0]
        builder.stmts.append(For(counter, count, stmts))
        carries.store_counts(Affine((), trips) if isinstance(trips, int) else trips)

    _control(builder, eqn, env, carries.results, run)


def _loop_while(
    builder, cond: jex.Jaxpr, local: dict, carries: Sequence[Stored], body: tuple[Stmt, ...]
) -> While:
    """The loop while `cond` holds of the carries; `local` has its other operands."""
    variables = cond.invars[len(cond.invars) - len(carries) :]
    local.update((var, builder.whole(carry.buf)) for var, carry in zip(variables, carries))
    predicate: list[Affine] = []

    def finish(inner_env: dict) -> None:
        predicate.append(builder.index_symbol(builder.read(inner_env, cond.outvars[0])))

    condition = builder.region(cond, local, finish)
    test = predicate[0]
    return While(tuple(condition), test.terms[0][0] if test.terms else str(test.const), body)


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
