"""Updates of small windows, which write over their operand instead of copying it.

    y = dynamic_update_slice(x, window, starts)   ->   a kernel of one program that stores the window in x's memory

A scatter of few elements is such an update; so is a loop or a branch whose body updates what it was given, and a kernel
written by hand that aliases an operand. The memory must be free to be written: a loop's carry that becomes the same carry, a
donated operand that becomes the result it is paired with, or what a loop, a branch, such a kernel or another update made.
Nobody may read the operand after the update. Readers of the old value run before it (`order` in fuse/graph.py); where they
cannot, one copy is made (`HostProgramBuilder.launch`).
"""

from __future__ import annotations

from collections.abc import Mapping

from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.jaxprs.walks import atoms
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.dsl.call import kernel_p
from pbkern.fuse.cost.kinds import is_alias
from pbkern.fuse.cost.small_updates import SmallUpdates
from pbkern.fuse.simplify.driver import CONTROL

# Equations that are a step of the program each. No kernel could update their operands or results on the way.
WHOLE_STEPS = frozenset((*CONTROL, kernel_p.name))


@dataclass(frozen=True)
class UpdateLimits(SmallUpdates):
    """Which updates are steps of their own, and which copies to be made in each step of a loop."""

    most_copied_bytes: int = threshold(
        1 << 14,
        "bytes of what a step of a loop copies to scatter into it, at most: XLA copies nothing, but takes as long to begin one "
        "operation. Source: an assumption, of 16 bytes a nanosecond",
    )


@dataclass(frozen=True)
class Update:
    """An equation whose result may take its operand's memory; no kernel may hold both `readers` and equations `after` it.

    Attributes:
      readers: ids of the other equations that read the operand, or a view of it.
      after: ids of equations that depend on the result.
    """

    eqn: jex.JaxprEqn
    operand: jex.Var
    readers: frozenset[int]
    after: frozenset[int]


class InPlaceUpdates:
    """Finds updates in a jaxpr and in the bodies of its control flow."""

    def __init__(self, limits: UpdateLimits) -> None:
        self.limits = limits
        # (id of control flow, number of a result) -> position of the operand that its bodies update.
        # Without it each loop around others would ask them several times.
        self.known: dict[tuple[int, int], int | None] = {}

    def of(self, jaxpr: jex.Jaxpr, pairs: Mapping) -> dict[jex.Var, Update]:
        """Result -> the update that makes it.

        `pairs`: result of the jaxpr -> the operand that it may overwrite.
        """
        makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        operands = {
            var: operand
            for var, eqn in makers.items()
            if (operand := self.operand(eqn, var)) is not None
        }
        if not operands:
            return {}
        uses = _Uses(jaxpr)
        updates: dict[jex.Var, Update] = {}

        def accept(result: jex.Var) -> bool:
            """Whether the update that makes `result` is the last to read its operand."""
            update = uses.last(makers[result], operands[result])
            if update is not None and all(
                update.operand is not other.operand for other in updates.values()
            ):
                updates[result] = update
            return result in updates

        for result, given in pairs.items():
            chain, var = [], result
            while var in operands:
                chain.append(var)
                var = operands[var]
            if chain and var is given and not all(map(accept, chain)):
                for var in chain:
                    updates.pop(var, None)
        for result, operand in operands.items():  # in order: an operand's own update comes first
            maker = makers.get(operand)
            if maker is None or is_alias(maker) or result in updates:
                continue
            if operand in updates or not WHOLE_STEPS.isdisjoint(
                (maker.primitive.name, makers[result].primitive.name)
            ):
                accept(result)
        return updates

    def operand(self, eqn, result: jex.Var) -> jex.Var | None:
        """The operand of which `eqn` changes few elements to make `result`."""
        at = 0 if self.limits.has(eqn) else None
        if eqn.primitive is kernel_p:
            shared = {number: i for i, number in eqn.params["kernel"].shared}
            at = shared.get(eqn.outvars.index(result))
        if eqn.primitive.name in CONTROL:
            key = id(eqn), eqn.outvars.index(result)
            if key not in self.known:
                self.known[key] = self._updated_by_bodies(eqn, key[1])
            at = self.known[key]
        if at is None or isinstance(eqn.invars[at], jex.Literal):
            return None
        return eqn.invars[at]

    def _updated_by_bodies(self, eqn, number: int) -> int | None:
        """Position of the operand that every body updates to make result `number`."""
        params = params_of(eqn)
        if eqn.primitive.name == "cond":
            places = {
                self._updated_operand(branch.jaxpr, number, None) for branch in params["branches"]
            }
            (place,) = places if len(places) == 1 else (None,)
            return None if place is None else place + 1
        if eqn.primitive.name == "scan":
            body, first = params["jaxpr"].jaxpr, params["num_consts"]
            if number >= params["num_carry"]:
                return None
            before = 0
        else:
            body, first, before = (
                params["body_jaxpr"].jaxpr,
                params["body_nconsts"],
                params["cond_nconsts"],
            )
        place = self._updated_operand(body, number, first + number)
        return None if place is None else place + before

    def _updated_operand(self, body: jex.Jaxpr, number: int, place: int | None) -> int | None:
        """Position of the operand that becomes result `number` by updates; `place`: the only one that may.

        A branch may hand its operand on as it is.
        """
        makers = {var: eqn for eqn in body.eqns for var in eqn.outvars}
        result = var = body.outvars[number]
        while not isinstance(var, jex.Literal) and var in makers:
            operand = self.operand(makers[var], var)
            if operand is None:
                return None
            var = operand
        if isinstance(var, jex.Literal) or var not in body.invars:
            return None
        if var is result:
            return (
                body.invars.index(var) if place is None and body.outvars.count(var) == 1 else None
            )
        at = body.invars.index(var)
        in_place = result in self.of(body, {result: var})
        return at if in_place and place in (None, at) else None


class _Uses:
    """Readers of each value of a jaxpr, and dependences between its equations."""

    def __init__(self, jaxpr: jex.Jaxpr) -> None:
        self.eqns = jaxpr.eqns
        self.results = {var for var in jaxpr.outvars if not isinstance(var, jex.Literal)}
        self.readers: dict[jex.Var, list] = {}
        for eqn in jaxpr.eqns:
            for var in atoms(eqn):
                self.readers.setdefault(var, []).append(eqn)

    def last(self, eqn, operand: jex.Var) -> Update | None:
        """The update `eqn`; None if its operand is read afterwards."""
        seen, rest, waiting = {operand}, set[int](), [operand]
        while waiting:
            for reader in self.readers.get(waiting.pop(), ()):
                if is_alias(reader):
                    waiting += reader.outvars
                elif reader is not eqn:
                    rest.add(id(reader))
            seen |= set(waiting)
        after = self._after(eqn)
        once = sum(var in seen for var in atoms(eqn)) == 1
        if seen & self.results or not once or rest & after:
            return None
        return Update(eqn, operand, frozenset(rest), frozenset(after))

    def _after(self, eqn) -> set[int]:
        """Ids of the equations that depend on the results of `eqn`."""
        known, after = set(eqn.outvars), set()
        for reader in self.eqns:
            if not known.isdisjoint(atoms(reader)):
                known.update(reader.outvars)
                after.add(id(reader))
        return after
