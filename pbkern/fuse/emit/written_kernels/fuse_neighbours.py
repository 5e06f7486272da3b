"""Equations beside hand-written kernels become parts of them, and chains of kernels one kernel.

    relu(kernel(x * s + b))   ->   kernel'(x, s, b)

A pass of FUSE_PASSES: groups are made of what it leaves. The author's grid, blocks, scratch and order of sums stay. Each
decision is an Edge, with its price or the reason against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import jax
from jax.extend import core as jex

from pbkern import _jax
from pbkern._jax import fresh_aval
from pbkern.core.jaxprs.walks import atoms, equations
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.ops.views import SHAPE_VIEWS
from pbkern.core.passes import threshold
from pbkern.dsl.call import kernel_p
from pbkern.fuse.access.rules import is_long, rules
from pbkern.fuse.cost.kinds import SINGLE_PASS, is_alias, nbytes
from pbkern.fuse.graph import Edge
from pbkern.fuse.options import FuseOptions
from pbkern.fuse.simplify.driver import CONTROL, keep_types

from .applied_outputs import (
    access_of_result,
    applied_output,
    check_result,
    with_applied_output,
)
from .block_places import BlockPlaces
from .calls import KernelCall, Refused
from .chained_calls import chained, check_chain, links
from .computed_inputs import ComputedInput, check_operand, computed_input, with_computed_inputs
from .prices import Prices
from .same_shapes import in_shapes_of_kernels

BEFORE = {
    *ELEMENTWISE,
    *SHAPE_VIEWS,
    "slice",
    "transpose",
    "rev",
    "iota",
}
NOT_BLOCKWISE = "it is no operation that blocks could be computed of alone"
BEHIND = {*ELEMENTWISE, *SINGLE_PASS, *SHAPE_VIEWS, "transpose"}


@dataclass(frozen=True)
class FuseNeighbours:
    """Rewrites calls of hand-written kernels together with their producers and consumers."""

    most_equations: int = threshold(
        96,
        "equations on one side of a kernel that are looked at: a limit to planning, not of the machine. 60 of them behind a "
        "kernel took 1.76 ms with it and 2.54 apart, planned in 0.12 s either way; 120 took 5.6 and 6.1, planned in 0.33 "
        "and 0.22. Zen 3, 26 November 2026",
    )
    tie: float = threshold(
        0.02,
        "part of a kernel's own time that computing an operand again may add: it saves an array. A ratio of predictions for "
        "one machine, as REPEATED_SHARE of targets/costs/model.py",
    )
    longest: int = threshold(
        512,
        "equations of a body that is joined from two: a limit to code, not of the machine. Of two bodies with 180, 360 and "
        "720 equations in all, one kernel is not faster: arithmetic outweighs the array. Zen 3, 26 November 2026",
    )
    small: int = threshold(
        1 << 12,
        "bytes of a value that is computed again though others read it: 1,024 exponentials take 0.6 us even with vectors of "
        "128 bits, an eighth of a launch, which the array would need",
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: FuseOptions) -> jex.ClosedJaxpr:
        if all(eqn.primitive is not kernel_p for eqn in equations(closed.jaxpr)):
            return closed
        return _Neighbours(in_shapes_of_kernels(closed), options, self).rewritten()


def gives_shape(item) -> bool:
    return not isinstance(item, KernelCall) and is_alias(item)


class _Neighbours:
    """One run over one jaxpr. `items`: equations and calls, in an order to run them."""

    def __init__(self, closed: jex.ClosedJaxpr, options: FuseOptions, limits: FuseNeighbours):
        self.closed, self.options, self.limits = closed, options, limits
        self.prices = Prices(options.machine)
        self.results = {var for var in closed.jaxpr.outvars if isinstance(var, jex.Var)}
        self.items: list = []
        self.apart: set = set()  # pairs of the user's calls that cannot be one kernel
        self.set_items(
            KernelCall(eqn.params["kernel"], tuple(eqn.invars), tuple(eqn.outvars), eqn)
            if eqn.primitive is kernel_p
            else eqn
            for eqn in closed.jaxpr.eqns
        )

    def set_items(self, items: Iterable) -> None:
        waiting, self.items = list(items), []
        self.makers = {var: item for item in waiting for var in item.outvars}
        self.users: dict = {}
        for item in waiting:
            for var in dict.fromkeys(atoms(item)):
                self.users.setdefault(var, []).append(item)
        done: set = set()

        def visit(item) -> None:  # depth first, as results ask for operands
            stack = [item]
            while stack:
                last = stack[-1]
                if id(last) in done:
                    stack.pop()
                    continue
                needed = [
                    maker
                    for var in atoms(last)
                    if (maker := self.makers.get(var)) is not None and id(maker) not in done
                ]
                if needed:
                    stack += needed
                    continue
                done.add(id(last))
                self.items.append(stack.pop())

        for item in waiting:
            visit(item)

    def replace(self, old: Sequence, new: KernelCall) -> None:
        gone = set(map(id, old))
        self.set_items([*(item for item in self.items if id(item) not in gone), new])

    def calls(self) -> list[KernelCall]:
        return [item for item in self.items if isinstance(item, KernelCall)]

    def readers(self, var, inside: Iterable) -> list:
        """Items that read a value, but for those that are `inside`."""
        ids = set(map(id, inside))
        return [item for item in self.users.get(var, ()) if id(item) not in ids]

    def readers_of_elements(self, var, inside: Iterable) -> list:
        """Readers of a value, also through equations that only give it another shape."""
        items = self.readers(var, inside)
        return [
            reader
            for item in items
            for reader in (
                self.readers_of_elements(item.outvars[0], inside) if gives_shape(item) else [item]
            )
        ]

    def is_result(self, var) -> bool:
        """Whether the function returns a value, maybe in another shape."""
        return var in self.results or any(
            gives_shape(item) and self.is_result(item.outvars[0])
            for item in self.users.get(var, ())
        )

    def allows(self, eqn, names: set[str]) -> bool:
        if isinstance(eqn, KernelCall) or eqn.primitive.name not in names or eqn.effects:
            return False
        shapes = [var.aval.shape for var in (*eqn.invars, *eqn.outvars)]
        return (
            len(eqn.outvars) == 1
            and not is_long(eqn)
            and all(map(math.prod, shapes))
            and self.options.supports(eqn) is None
        )

    def note(self, eqn, fused: bool, why: str, saved: int = 0, before=0.0, after=0.0) -> None:
        self.options.edges.append(Edge(eqn, fused, why, saved, before, after))

    # -- the order of decisions

    def rewritten(self) -> jex.ClosedJaxpr:
        self.join_chains()
        for call in self.calls():
            for var in call.results:
                self.apply_consumers(var)
        self.join_chains()
        for call in self.calls():
            for var in dict.fromkeys(atoms(call)):
                self.compute_producers(var)
        return self.traced()

    # -- consumers

    def apply_consumers(self, var) -> None:
        call = self.makers[var]
        direct = []
        for item in self.users.get(var, ()):
            if self.allows(item, BEHIND):
                direct.append(item)
            elif not isinstance(item, KernelCall):
                why = f"not applied to {self.label_of(call, var)}: {NOT_BLOCKWISE}"
                self.note(item, False, why, nbytes(var.aval))
        if not direct:
            return
        try:
            check_result(call, call.results.index(var))
            self.apply_best(call, var, direct)
        except Refused as e:
            why = f"not applied to {self.label_of(call, var)}: {e}"
            for eqn in direct:
                self.note(eqn, False, why, nbytes(var.aval))

    @staticmethod
    def label_of(call: KernelCall, var) -> str:
        return call.label(call.kernel.outputs[call.results.index(var)])

    def apply_best(self, call: KernelCall, var, direct: list) -> None:
        """Applies the consumers that leave least to move. Raises Refused."""
        number = call.results.index(var)
        eqns, known = self.consumers(call, number)
        if not eqns:
            raise Refused("its blocks do not correspond to those of the operation's result")
        prices = [self.price_behind(var, eqns, count) for count in range(len(eqns) + 1)]
        order = sorted(range(len(prices)), key=prices.__getitem__)
        refused = Refused("it would move as many bytes")
        for count in order:
            if count == 0 or prices[count] >= prices[0]:
                break
            chosen = eqns[:count]
            stored = [
                value
                for value in (var, *(eqn.outvars[0] for eqn in chosen))
                if value in self.results or self.readers(value, [*chosen, call])
            ]
            try:
                applied = applied_output(call, number, chosen, stored, known)
                changed = with_applied_output(call, applied)
                self.check_scratch(call, changed)
            except Refused as e:
                refused = e
                continue
            self.replace([call, *chosen], changed)
            why = f"applied to {self.label_of(call, var)}"
            for eqn in chosen:
                unstored = {atom for atom in atoms(eqn) if atom in known and atom not in stored}
                saved = sum(nbytes(atom.aval) for atom in unstored)
                self.note(eqn, True, why, saved, prices[0], prices[count])
            self.note_rest(call, var, eqns[count:], prices)
            return
        self.note_price(refused, direct, var, call, prices)

    def note_rest(self, call: KernelCall, var, eqns: Sequence, prices: Sequence[float]) -> None:
        for eqn in eqns[:1]:
            why = f"not applied to {self.label_of(call, var)}: it would move as many bytes"
            self.note(eqn, False, why, 0, min(prices), prices[-1])

    def note_price(self, refused: Refused, direct: list, var, call, prices: Sequence) -> None:
        for eqn in direct:
            why = f"not applied to {self.label_of(call, var)}: {refused}"
            self.note(eqn, False, why, nbytes(var.aval), prices[0], min(prices[1:]))

    def check_scratch(self, before: KernelCall, after: KernelCall) -> None:
        """Raises Refused where new scratch is further away than caches."""
        sizes = [math.prod(buf.shape) * buf.dtype.itemsize for buf in after.kernel.scratch]
        added = sum(sizes) - sum(
            math.prod(buf.shape) * buf.dtype.itemsize for buf in before.kernel.scratch
        )
        if added > self.options.machine.near_bytes:
            raise Refused(f"{added // 1024} KB of a program would wait for it, in memory as now")

    def consumers(self, call: KernelCall, number: int) -> tuple[list, dict]:
        """(equations whose blocks follow from those of a result, blocks of their results)."""
        var = call.results[number]
        known = {var: BlockPlaces.of(call.kernel, call.kernel.outputs[number]).access}
        late = {result for result in call.results if result is not var}
        eqns: list = []
        for item in self.items:
            reads = atoms(item)
            touches, waits = any(a in known for a in reads), any(a in late for a in reads)
            if touches and not waits and len(eqns) < self.limits.most_equations:
                access = access_of_result(item, known) if self.allows(item, BEHIND) else None
                if access is not None:
                    known[item.outvars[0]] = access
                    eqns.append(item)
                    continue
            if touches or waits:
                late.update(item.outvars)
        return eqns, known

    def price_behind(self, var, eqns: Sequence, count: int) -> float:
        """Seconds to store and read again, with the first equations applied to the result `var`."""
        chosen, rest = eqns[:count], eqns[count:]
        values = [var, *(eqn.outvars[0] for eqn in chosen)]
        outside = {value: self.readers_of_elements(value, chosen) for value in values}
        seconds = sum(
            self.prices.stored([value]) + (self.prices.moved(value) if users else 0.0)
            for value, users in outside.items()
            if users or self.is_result(value)
        )
        # What is not applied joins its readers, unless these are none that it could join.
        last = [eqn.outvars[0] for eqn in rest if not is_alias(eqn)]
        ends = [
            value
            for value in last
            if self.is_result(value)
            or any(isinstance(user, KernelCall) for user in self.readers_of_elements(value, rest))
        ]
        seconds += self.prices.stored(ends)
        seconds += self.options.machine.launch_seconds if ends else 0.0
        for part in (chosen, rest):
            along = {var, *(eqn.outvars[0] for eqn in eqns)}
            extras = {atom for eqn in part for atom in atoms(eqn) if atom not in along}
            seconds += sum(map(self.prices.moved, extras))
        return seconds

    # -- chains

    def join_chains(self) -> None:
        while True:
            pairs = (
                (first, second)
                for second in self.calls()
                for first in self.calls()
                if (id(first.eqn), id(second.eqn)) not in self.apart and links(first, second)
            )
            pair = next(pairs, None)
            if pair is None:
                return
            try:
                self.join(*pair)
            except Refused as e:
                first, second = pair
                self.apart.add((id(first.eqn), id(second.eqn)))
                number = links(first, second)[0][1]
                label = (
                    second.label(second.kernel.inputs[number])
                    if number < len(second.kernel.inputs)
                    else f"the last stage of kernel `{second.kernel.name}`"
                )
                self.note(first.eqn, False, f"not one kernel with {label}: {e}")

    def join(self, first: KernelCall, second: KernelCall) -> None:
        """Makes two calls one. Raises Refused."""
        check_chain(first, second)
        count = sum(1 for call in (first, second) for _ in equations(call.kernel.body.jaxpr))
        if count > self.limits.longest:
            raise Refused(f"together their bodies have {count} equations")
        if self.depends_otherwise(first, second):
            raise Refused("what it makes comes there by another way as well")
        passed = [first.results[result] for result, _ in links(first, second)]
        wanted = [
            var
            for var in first.results
            if var in self.results or self.readers(var, [second]) or var not in passed
        ]
        joined = chained(first, second, wanted)
        self.check_scratch(first, joined)
        self.replace([first, second], joined)
        unstored = [var for var in passed if var not in wanted]
        launch = self.options.machine.launch_seconds
        before = self.prices.traffic(first) + self.prices.traffic(second) + 2 * launch
        after = self.prices.traffic(joined) + launch
        saved = sum(nbytes(var.aval) for var in unstored)
        why = f"one kernel with {second.label(second.kernel.inputs[links(first, second)[0][1]])}"
        self.note(first.eqn, True, f"{why}, block by block", saved, before, after)

    def depends_otherwise(self, first: KernelCall, second: KernelCall) -> bool:
        late: set = set()
        for item in self.items:
            if item is not second and any(
                atom in late or atom in first.results for atom in atoms(item)
            ):
                late.update(item.outvars)
        return any(atom in late for atom in atoms(second))

    # -- producers

    def compute_producers(self, var) -> None:
        calls = [user for user in self.users.get(var, ()) if isinstance(user, KernelCall)]
        for call in calls:
            maker = self.makers.get(var)
            if maker is None or isinstance(maker, KernelCall):
                continue
            numbers = [n for n, atom in enumerate(call.operands) if atom is var]
            try:
                if not self.allows(maker, BEFORE):
                    raise Refused(NOT_BLOCKWISE)
                for number in numbers:
                    check_operand(call, number)
                self.compute_best(call, var, numbers)
            except Refused as e:
                why = f"not computed for {self.label_of_operand(call, numbers[0])}: {e}"
                self.note(maker, False, why, nbytes(var.aval))

    @staticmethod
    def label_of_operand(call: KernelCall, number: int) -> str:
        inputs = call.kernel.inputs
        return (
            call.label(inputs[number])
            if number < len(inputs)
            else f"the last stage of kernel `{call.kernel.name}`"
        )

    def may_copy(self, eqn) -> bool:
        """Whether an equation may be computed in a kernel and elsewhere too."""
        (var,) = eqn.outvars
        cheap = eqn.primitive.name not in ELEMENTWISE and eqn.primitive.name != "transpose"
        return (cheap and sum(nbytes(atom.aval) for atom in atoms(eqn)) <= self.limits.small) or (
            nbytes(var.aval) <= self.limits.small
        )

    def producers(self, call: KernelCall, var) -> list:
        """Equations that lead to an operand and nowhere else, the last one first."""
        eqns: list = []
        wanted = {var}
        for item in reversed(self.items):
            if len(eqns) == self.limits.most_equations:
                break
            if not any(result in wanted for result in item.outvars):
                continue
            if not self.allows(item, BEFORE):
                continue
            (result,) = item.outvars
            is_alone = result not in self.results and not self.readers(result, [*eqns, call])
            if is_alone or self.may_copy(item):
                eqns.append(item)
                wanted.update(atoms(item))
        return eqns

    def compute_best(self, call: KernelCall, var, numbers: Sequence[int]) -> None:
        """Computes as many producers as pay. Raises Refused."""
        candidates = self.producers(call, var)
        if not candidates:
            raise Refused("others read it too")
        options: list[tuple[float, list, list[ComputedInput]]] = []
        chosen: list = []
        refused = None
        for eqn in candidates:
            if chosen and all(
                eqn.outvars[0] not in atoms(user) for user in chosen
            ):  # behind one that was refused
                continue
            try:
                computed = [computed_input(call, number, [eqn, *chosen]) for number in numbers]
            except Refused as e:
                if not chosen:
                    raise
                refused = (eqn, e)
                continue
            chosen = [eqn, *chosen]
            options.append(
                (self.price_before(call, candidates, chosen, computed), chosen, computed)
            )
        as_is = sum(
            self.prices.read_as_is(call.kernel, one.places.mapping, var, one.times)
            for one in options[0][2]
        )
        before = as_is + self.price_of_rest(candidates, [], [var])
        after, chosen, computed = min(options, key=lambda option: option[0])
        label = self.label_of_operand(call, numbers[0])
        if after >= before + self.limits.tie * self.prices.of_kernel(call):
            why = f"not computed for {label}: computing it for each block that programs read costs more"
            self.note(candidates[0], False, why, nbytes(var.aval), before, after)
            return
        self.replace([call], with_computed_inputs(call, computed))
        gone = set(map(id, chosen))
        for item in self.items[::-1]:
            if id(item) in gone and self.is_dead(item.outvars[0]):
                self.set_items([other for other in self.items if other is not item])
        for eqn in chosen:
            saved = nbytes(eqn.outvars[0].aval)
            self.note(eqn, True, f"computed for {label}", saved, before, after)
        if refused is not None:
            eqn, error = refused
            self.note(eqn, False, f"not computed for {label}: {error}", nbytes(eqn.outvars[0].aval))

    def is_dead(self, var) -> bool:
        return var not in self.results and not self.users.get(var)

    def price_before(self, call: KernelCall, candidates, chosen, computed) -> float:
        """Seconds with `chosen` in the kernel."""
        leaves = {var for one in computed for var, _ in one.requests.inputs}
        passed = [eqn.outvars[0] for eqn in candidates if eqn.outvars[0] in leaves]
        inside = sum(self.prices.inside(call.kernel, one) for one in computed)
        joinable = [var for var in leaves if var not in passed and self.joins_maker(var, chosen)]
        return (
            inside + self.prices.stored(joinable) + self.price_of_rest(candidates, chosen, passed)
        )

    def price_of_rest(self, candidates: Sequence, chosen: Sequence, results: Sequence) -> float:
        """Seconds of producers that are computed apart, and of the groups that make their operands."""
        ids = set(map(id, chosen))
        rest = [eqn for eqn in candidates if id(eqn) not in ids and not gives_shape(eqn)]
        leaves = {atom for eqn in rest for atom in atoms(eqn)}
        leaves -= {eqn.outvars[0] for eqn in rest}
        alone = [var for var in leaves if not self.joins_maker(var, rest)]
        seconds = self.prices.apart(rest, alone, results)
        return seconds - (self.options.machine.launch_seconds if len(alone) < len(leaves) else 0.0)

    def joins_maker(self, var, readers: Sequence) -> bool:
        """Whether a value is made by equations that its readers could share a fused kernel with."""
        maker = self.makers.get(var)
        if maker is None or isinstance(maker, KernelCall) or self.readers(var, readers):
            return False
        if gives_shape(maker):
            return self.joins_maker(maker.invars[0], [maker])
        return maker.primitive.name in rules and var not in self.results

    # -- the function

    def traced(self) -> jex.ClosedJaxpr:
        jaxpr = self.closed.jaxpr

        def run(*args):
            env = dict(zip(jaxpr.constvars, self.closed.consts)) | dict(zip(jaxpr.invars, args))
            read: Callable = lambda atom: atom.val if isinstance(atom, jex.Literal) else env[atom]
            for item in self.items:
                operands = [read(atom) for atom in item.invars]
                env.update(zip(item.outvars, self.bound(item, operands)))
            return keep_types([read(atom) for atom in jaxpr.outvars], jaxpr.outvars)

        return jax.make_jaxpr(run)(*[fresh_aval(var.aval) for var in jaxpr.invars])

    def bound(self, item, operands: Sequence) -> Sequence:
        eqn = item.eqn if isinstance(item, KernelCall) else item
        with _jax.source_context(eqn):
            if isinstance(item, KernelCall):
                return kernel_p.bind(*operands, kernel=item.kernel)
            if eqn.primitive.name not in CONTROL:
                return _jax.bind_again(eqn, operands)
            params = {key: self.inner(param) for key, param in eqn.params.items()}
            return eqn.primitive.bind(*operands, **params)

    def inner(self, value):
        """A parameter of control flow, with its jaxprs rewritten."""
        if isinstance(value, jex.ClosedJaxpr):
            return self.limits(value, self.options)
        return tuple(map(self.inner, value)) if isinstance(value, tuple) and value else value
