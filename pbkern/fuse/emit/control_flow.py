"""scan, while and cond whose whole body is fused -> native Loop, While and Cond steps.

Carries live in the buffers of the results. They are copied in before the loop, and from temporaries
at the end of a step, since every old value may be read until then. Large carries alternate between
two buffers instead (double buffering). Slices of a scan's xs and ys are views whose offset is
affine in the loop counter: they are never copied. fuse/partition/control_regions.py decides which
control flow it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.affine import Affine
from pbkern.core.jax_types import array_aval
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.host_program import BufferView, Cond, Copy, HostWhile, Loop, Step
from pbkern.fuse.graph import Inner, Node
from pbkern.fuse.partition.donation import in_place

from .group_kernel import array_type

# Below this many bytes a copy per step is cheaper than twice the steps.
ALTERNATE_BYTES = 1 << 14


def control_steps(builder, node: Node) -> list[Step]:
    """Steps of one control-flow equation."""
    (eqn,) = node.eqns
    return {"scan": _scan, "while": _while, "cond": _cond}[eqn.primitive.name](
        builder, eqn, node.inner
    )


def _operand(builder, atom) -> BufferView:
    """The view of an operand. fuse/simplify/literal_operands.py has given literals equations of their own."""
    assert not isinstance(atom, jex.Literal), "operands of control flow are values"
    return builder.place(atom)


def run_inner(
    builder, inner: Inner, arguments: Sequence[BufferView], results: Sequence[BufferView | None]
) -> tuple[list[Step], list[BufferView]]:
    """(steps, views of the results): the inner jaxpr on `arguments`; a result with a given view is written there."""
    outer = dict(builder.views)
    jaxpr = inner.jaxpr
    for var, view in zip(jaxpr.invars, arguments):
        builder.views[var] = view
    makers = _made_as(inner)
    for result, wanted in zip(jaxpr.outvars, results):
        source = None if wanted is None or isinstance(result, jex.Literal) else makers.get(result)
        if source is not None and result not in builder.views and source not in builder.views:
            builder.views[result] = wanted
            builder.views[source] = builder.typed(wanted, source.aval)
    steps = builder.steps(inner.ordered)
    views = []
    for result, wanted in zip(jaxpr.outvars, results):
        have = builder.place(result)
        if wanted is not None and have != wanted:
            steps.append(Copy(builder.typed(have, result.aval), wanted))
        views.append(builder.typed(have, result.aval) if wanted is None else wanted)
    builder.views = outer
    return steps, views


def _made_as(inner: Inner) -> dict:
    """Value -> the node's result behind it: itself, or the array that it reshapes."""
    places: dict = {}
    for node in inner.ordered:
        if node.kind != "alias":
            places.update((output, output) for output in node.outputs)
            continue
        (source, *_), (var,) = node.eqns[0].invars, node.eqns[0].outvars
        # Views of complex numbers count other elements: their places cannot be taken over.
        if source in places and (source.aval.size, source.aval.dtype) == (
            var.aval.size,
            var.aval.dtype,
        ):
            places[var] = places[source]
    return places


def _carries(builder, atoms: Sequence, results: Sequence) -> list[Copy]:
    """Copies of the first values of carries into their buffers; from and to the same place for values that take its memory."""
    return [
        Copy(
            builder.typed(_operand(builder, atom), result.aval),
            builder.place(result),
            shares=result in builder.shared,
        )
        for atom, result in zip(atoms, results)
    ]


def _needed_copies(copies: Iterable[Copy]) -> list[Step]:
    """The copies between different places."""
    return [copy for copy in copies if copy.source != copy.destination]


def _back_to_carries(
    builder, values: Sequence[BufferView], carries: Sequence[BufferView]
) -> list[Step]:
    """Copies new carries over old ones; through temporaries if one carry becomes another."""
    steps: list[Step] = []
    late: list[Step] = []
    carried_buffers = {view.buffer for view in carries}
    for value, carry in zip(values, carries):
        if value == carry:
            continue
        if value.buffer in carried_buffers:
            copy = builder.temporary(value.type)
            steps.append(Copy(value, copy))
            value = copy
        late.append(Copy(value, carry))
    return steps + late


@dataclass(frozen=True)
class _ScanSteps:
    """Emits steps of a scan.

    Attributes:
      body: one step, or several together; rest: the steps that remain behind those, or None.
      consts, xs, ys: views of the operands that never change, and of whole xs and ys.
      length: steps of the scan; reverse: whether it begins at the end.
    """

    builder: Any
    body: Inner
    rest: Inner | None
    consts: list[BufferView]
    xs: list[BufferView]
    ys: list[BufferView]
    length: int
    reverse: bool

    def step(
        self, index: Affine | None, old: Sequence[BufferView], new: Sequence[BufferView | None]
    ) -> tuple[list[Step], list[BufferView]]:
        """One step of the loop, or the remaining ones if the index is None."""
        if index is None:
            assert self.rest is not None, "no steps remain"
            jaxpr = self.rest.jaxpr
            xs = self._ends(self.xs, jaxpr.invars[len(self.consts) + len(old) :])
            ys = self._ends(self.ys, jaxpr.outvars[len(old) :])
            return run_inner(self.builder, self.rest, [*self.consts, *old, *xs], [*new, *ys])
        n_xs, n_ys = len(self.xs), len(self.ys)
        jaxpr = self.body.jaxpr
        xs = self._at_step(self.xs, jaxpr.invars[len(jaxpr.invars) - n_xs :], index)
        ys = self._at_step(self.ys, jaxpr.outvars[len(jaxpr.outvars) - n_ys :], index)
        return run_inner(self.builder, self.body, [*self.consts, *old, *xs], [*new, *ys])

    def _at_step(self, wholes: list[BufferView], elements, index: Affine) -> list[BufferView]:
        index = index * -1 + (self.length - 1) if self.reverse else index
        avals = [array_aval(var) for var in elements]
        return [
            BufferView(whole.buffer, array_type(aval), whole.offset + index * math.prod(aval.shape))
            for whole, aval in zip(wholes, avals)
        ]

    def _ends(self, wholes: list[BufferView], parts) -> list[BufferView]:
        """The elements of xs or ys that belong to the remaining steps."""
        done = self.length // self.body.steps * self.body.steps
        avals = [array_aval(var) for var in parts]
        return [
            BufferView(
                view.buffer, array_type(aval), view.offset + done * math.prod(aval.shape[1:])
            )
            for view, aval in zip(wholes, avals)
        ]


def _scan(builder, eqn, inner: dict[str, Inner]) -> list[Step]:
    params, body, rest = params_of(eqn), inner["jaxpr"], inner.get("rest")
    n_consts, n_carry, length = params["num_consts"], params["num_carry"], params["length"]
    firsts, carried = eqn.invars[n_consts : n_consts + n_carry], eqn.outvars[:n_carry]
    scan = _ScanSteps(
        builder,
        body,
        rest,
        [_operand(builder, var) for var in eqn.invars[:n_consts]],
        [_operand(builder, var) for var in eqn.invars[n_consts + n_carry :]],
        [builder.place(var) for var in eqn.outvars[n_carry:]],
        length,
        params["reverse"],
    )
    counter, turns = builder.fresh("i"), length // body.steps
    updated = in_place(body)
    fixed = [var in updated for var in body.jaxpr.outvars[:n_carry]]
    copies = _carries(builder, firsts, carried)
    carries = [copy.destination for copy in copies]
    if turns and _can_alternate(body, n_consts, fixed):
        before = _needed_copies(copy for copy, stays in zip(copies, fixed) if stays)
        old = [copy.destination if stays else copy.source for copy, stays in zip(copies, fixed)]
        steps = _alternating(
            builder, counter, turns, rest is not None, old, carries, fixed, scan.step
        )
        return [*before, *steps]
    before = _needed_copies(copies)

    def once(index: Affine | None) -> tuple[Step, ...]:
        steps, views = scan.step(index, carries, _places(body, carries, updated))
        return (*steps, *_back_to_carries(builder, views[:n_carry], carries))

    last = once(None) if rest is not None else ()
    return [*before, Loop(counter, turns, once(Affine.symbol(counter))), *last]


def _spares(builder, carries: Sequence[BufferView], fixed: Sequence[bool]) -> list[BufferView]:
    """The second set of buffers of a loop that alternates: `fixed` carries have one."""
    return [
        carry if stays else builder.temporary(carry.type) for carry, stays in zip(carries, fixed)
    ]


def _places(body: Inner, carries: Sequence[BufferView], updated: dict) -> list[BufferView | None]:
    """Views for new carries: those of `updated` over the old ones, others anywhere."""
    return [view if var in updated else None for var, view in zip(body.jaxpr.outvars, carries)]


def _can_alternate(body: Inner, n_consts: int, fixed: Sequence[bool]) -> bool:
    """Whether each new carry, except the `fixed` ones, is another equation's result and can go to another buffer."""
    places = _made_as(body)
    results = [
        None if isinstance(var, jex.Literal) else places.get(var) for var in body.jaxpr.outvars
    ]
    moving = [number for number, stays in enumerate(fixed) if not stays]
    news = {results[number] for number in moving}
    remaining = {result for number, result in enumerate(results) if number not in moving}
    olds = [body.jaxpr.invars[n_consts + number] for number in moving]
    bytes_carried = sum(array_type(old.aval).nbytes for old in olds)
    distinct = None not in news and len(news) == len(moving) and not news & remaining
    return distinct and bytes_carried >= ALTERNATE_BYTES


def _alternating(
    builder,
    counter: str,
    turns: int,
    rest: bool,
    first: Sequence[BufferView],
    carries: Sequence[BufferView],
    fixed: Sequence[bool],
    step,
) -> list[Step]:
    """Steps that alternate between two sets of buffers, without copies: the first reads operands, the last writes results."""
    sets = [list(carries), _spares(builder, carries, fixed)]
    total = turns + rest

    def target(turn: int) -> list[BufferView]:
        return sets[(total - 1 - turn) % 2]

    def turn(number: int, index: Affine | None) -> list[Step]:
        return step(index, target(number - 1) if number else first, target(number))[0]

    steps, pairs = turn(0, Affine()), (turns - 1) // 2
    if pairs:
        two = (*turn(1, Affine.symbol(counter, 2) + 1), *turn(2, Affine.symbol(counter, 2) + 2))
        steps.append(Loop(counter, pairs, two))
    if turns % 2 == 0:
        steps += turn(turns - 1, Affine((), turns - 1))
    return steps + (turn(turns, None) if rest else [])


def _while(builder, eqn, inner: dict[str, Inner]) -> list[Step]:
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts = [_operand(builder, var) for var in eqn.invars[:n_cond]]
    body_consts = [_operand(builder, var) for var in eqn.invars[n_cond : n_cond + n_body]]
    copies = _carries(builder, eqn.invars[n_cond + n_body :], eqn.outvars)
    before, carries = _needed_copies(copies), [copy.destination for copy in copies]
    body = inner["body_jaxpr"]
    updated = in_place(body)
    fixed = [var in updated for var in body.jaxpr.outvars]

    def test(at: Sequence[BufferView]) -> tuple[tuple[Step, ...], BufferView]:
        steps, (predicate,) = run_inner(builder, inner["cond_jaxpr"], [*cond_consts, *at], [None])
        return tuple(steps), predicate

    def turn(
        old: Sequence[BufferView], new: Sequence[BufferView | None]
    ) -> tuple[list[Step], list[BufferView]]:
        return run_inner(builder, body, [*body_consts, *old], new)

    condition, predicate = test(carries)
    if _can_alternate(body, n_body, fixed):
        # Two steps: the second reads the other buffers, and runs only if the first was not the
        # last.
        spares = _spares(builder, carries, fixed)
        first, second = turn(carries, spares)[0], turn(spares, carries)[0]
        between, again = test(spares)
        back = tuple(_needed_copies(map(Copy, spares, carries)))
        return [
            *before,
            HostWhile(condition, predicate, (*first, *between, Cond(again, (back, tuple(second))))),
        ]
    steps, views = turn(carries, _places(body, carries, updated))
    return [
        *before,
        HostWhile(condition, predicate, (*steps, *_back_to_carries(builder, views, carries))),
    ]


def _cond(builder, eqn, inner: dict[str, Inner]) -> list[Step]:
    index, *operands = (_operand(builder, var) for var in eqn.invars)
    results = [builder.place(var) for var in eqn.outvars]
    branches = [run_inner(builder, branch, operands, results)[0] for branch in inner.values()]
    return [Cond(index, tuple(map(tuple, branches)))]
