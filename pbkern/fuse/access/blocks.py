"""Group, blocks of its results -> BlockRequests (the block of every value that one program computes) -> body over Refs.

`request` walks equations in reverse. Requests for one value with equal linear parts share one block: the hull of their
offsets (a halo). Requests with different linear parts, or far apart, are different blocks of one array. A producer's block is
fixed when all its consumers have asked for theirs. `run_steps` then walks forward: it takes each operand as a static slice of
its hull, and binds the primitive with parameters at block shape. Access rules are in rules.py.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern._jax import ref_aval, source_context
from pbkern.core.affine import Affine
from pbkern.core.jax_types import array_aval
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.shared_products import rounded
from pbkern.core.process.context_values import during

from .equation_kinds import EquationKinds, current_kinds
from .rules import Access, NeedsWhole, Pull, Span, block_shape, pull

# Two requests share a hull if it holds at most this many times the elements that they ask for.
HULL_SLACK = 1.5
# Most blocks per equation that a program computes: it bounds code size. Where borders are mirrored, each stage of a chain
# asks for several distant blocks of the stage before, and their number multiplies.
BLOCKS_OF_EACH = 4
# Blocks that a program may compute however few equations it has. Source: not recorded.
FEW_BLOCKS = 64


class Unfusable(Exception):
    """These equations cannot share one kernel."""

    def without_frames(self) -> Unfusable:
        """A copy: see NeedsWhole."""
        return Unfusable(*self.args)


def _hull(access: Access, other: Access, slack: float) -> Access | None:
    """The least block around both; `access` itself if it contains `other`.

    None if it has more than `slack` times the elements of both.
    """
    ends = [
        (min(x.start.const, y.start.const), max(x.start.const + x.size, y.start.const + y.size))
        for x, y in zip(access, other)
    ]
    if all(
        first == x.start.const and last == first + x.size for x, (first, last) in zip(access, ends)
    ):
        return access
    if math.prod(last - first for first, last in ends) > slack * (volume(access) + volume(other)):
        return None
    return tuple(
        Span(Affine(x.start.terms, first), last - first) for x, (first, last) in zip(access, ends)
    )


def _linear(access: Access) -> tuple:
    """The linear part of each dimension's start, without its constant."""
    return tuple(span.start.terms for span in access)


def _contains(access: Access, inner: Access) -> bool:
    """Whether `inner`, which has the same linear part, is inside `access`."""
    return all(
        x.start.const <= y.start.const and y.start.const + y.size <= x.start.const + x.size
        for x, y in zip(access, inner)
    )


def volume(access: Access) -> int:
    """Elements of a block."""
    return math.prod([span.size for span in access])


@dataclass
class Hulls:
    """The blocks of one value.

    Attributes:
      by_linear: linear part -> blocks.
      asked: requests by id, as most consumers ask for the same object.
    """

    by_linear: dict[tuple, list[Access]] = field(default_factory=dict)
    asked: dict[int, Access] = field(default_factory=dict)

    @classmethod
    def of(cls, accesses: Iterable[Access]) -> Hulls:
        hulls = cls()
        for access in accesses:
            hulls.ask(access)
        return hulls

    def ask(self, access: Access, linear: tuple | None = None) -> None:
        """Adds a block that is needed; `linear`: its linear part, if known."""
        if id(access) in self.asked:
            return
        self.asked[id(access)] = access
        hulls = self.by_linear.setdefault(_linear(access) if linear is None else linear, [])
        if access in hulls:
            return
        merged = access
        for hull in list(hulls):
            joint = _hull(hull, merged, HULL_SLACK)
            if joint is not None:
                hulls.remove(hull)
                merged = joint
        hulls.append(merged)

    def copy(self) -> Hulls:
        return Hulls(
            {linear: list(hulls_of_linear) for linear, hulls_of_linear in self.by_linear.items()},
            dict(self.asked),
        )

    def find(self, access: Access) -> Access:
        """The block that contains a request."""
        return next(hull for hull in self.by_linear[_linear(access)] if _contains(hull, access))

    def listed(self) -> list[Access]:
        """All blocks. Most values have one, or blocks of one linear part."""
        if len(self.by_linear) == 1:
            (hulls,) = self.by_linear.values()
            return list(hulls)
        return [hull for hulls in self.by_linear.values() for hull in hulls]

    def __iter__(self) -> Iterator[Access]:
        return iter(self.listed())


@dataclass
class Step:
    """One equation that computes one block of its results.

    Attributes:
      eqn: the equation.
      out: the block.
      pull: blocks of the operands that it needs.
      price: memo of the target's cost model (fuse/cost/model.py).
      model: an earlier step of an equation of the same kind with the same blocks.
    """

    eqn: Any  # jex.JaxprEqn, whose parameters are untyped
    out: Access
    pull: Pull
    price: Any = field(default=None, compare=False)
    model: Step | None = field(default=None, compare=False, repr=False)

    @functools.cached_property
    def linear(self) -> tuple:
        """The linear part of `out`."""
        return _linear(self.out) if self.model is None else self.model.linear

    @functools.cached_property
    def asks(self) -> list[tuple[jex.Var, Access, tuple]]:
        """(operand, block, linear part of the block) of everything it reads."""
        atoms = self.eqn.invars
        return [(atoms[place], access, linear) for place, access, linear in self.places]

    @functools.cached_property
    def places(self) -> list[tuple[int, Access, tuple]]:
        """(number of an operand, block, linear part of the block) of everything it reads."""
        if self.model is not None:
            return self.model.places
        return [
            (place, access, _linear(access))
            for place, (atom, access) in enumerate(zip(self.eqn.invars, self.pull.inputs))
            if access is not None and not isinstance(atom, jex.Literal)
        ]


class _StepMemo:
    """Memo of one plan's steps.

    Every attempt to join groups asks for the steps of their equations, mostly for equal blocks. Equal accesses are
    interned, so that they are compared by identity. Steps of equations of one kind for one block have a model in common.
    """

    def __init__(self, kinds: EquationKinds) -> None:
        self.kinds = kinds
        self.accesses: dict[Access, Access] = {}
        self.steps: dict[tuple[int, int], Step | NeedsWhole] = {}
        self.models: dict[tuple[int, int], Step | NeedsWhole] = {}

    def interned(self, access: Access) -> Access:
        return self.accesses.setdefault(access, access)

    def step(self, eqn, out: Access) -> Step:
        step = self.steps.get((id(eqn), id(out)))
        if step is None:
            out = self.interned(out)
            step = self.steps.get((id(eqn), id(out)))
        if step is None:
            step = self.steps[id(eqn), id(out)] = self._like_model(eqn, out)
        if isinstance(step, NeedsWhole):
            raise step.without_frames()
        return step

    def _like_model(self, eqn, out: Access) -> Step | NeedsWhole:
        key = self.kinds.number(eqn), id(out)
        model = self.models.get(key)
        if model is None:
            step = self.models[key] = self._new_step(eqn, out)
            return step
        if isinstance(model, NeedsWhole):
            return model
        # What a rule computes by itself may hold the equation, by which messages name lines.
        if model.pull.compute is None:
            return Step(eqn, model.out, model.pull, model=model)
        step = self._new_step(eqn, out)
        if isinstance(step, Step) and (step.out, step.pull.inputs) == (
            model.out,
            model.pull.inputs,
        ):
            step.model = model
        return step

    def _new_step(self, eqn, out: Access) -> Step | NeedsWhole:
        try:
            step = _step(eqn, out)
        except NeedsWhole as e:
            return e.without_frames()
        inputs = tuple(
            operand if operand is None else self.interned(operand) for operand in step.pull.inputs
        )
        return Step(eqn, self.interned(step.out), dataclasses.replace(step.pull, inputs=inputs))


_memo: contextvars.ContextVar[_StepMemo | None] = contextvars.ContextVar(
    "steps of one plan", default=None
)


def steps_memoised() -> AbstractContextManager:
    """In a `with` block, an equation's step is computed once per block of its result.

    The machine and the equations must stay the same in it.
    """
    return during(_memo, _StepMemo(current_kinds() or EquationKinds()))


def step_of(eqn, out: Access) -> Step:
    """The step that computes a block of an equation's results."""
    memo = _memo.get()
    return _step(eqn, out) if memo is None else memo.step(eqn, out)


def _step(eqn, out: Access) -> Step:
    pulled = pull(eqn, out)
    return Step(eqn, out if pulled.out is None else pulled.out, pulled)


@dataclass
class BlockRequests:
    """Reads and computations of one program of a group.

    Attributes:
      hulls: value -> its blocks; values that no equation of the group makes are the group's inputs.
      steps: computations in program order.
      inputs: (value, access) of every block read from outside, in order of first use.
      priced: memo of a target's cost model, of all steps.
      behind: (`priced` of the requests that these extend, number of steps in front of theirs).
    """

    hulls: dict
    steps: list[Step]
    inputs: list[tuple[jex.Var, Access]]
    priced: Any = field(default=None, init=False, compare=False, repr=False)
    behind: tuple[Any, int] | None = field(default=None, init=False, compare=False, repr=False)

    @functools.cached_property
    def equations(self) -> set[int]:
        """Ids of the equations that are computed."""
        return {id(step.eqn) for step in self.steps}

    @functools.cached_property
    def computed(self) -> set:
        """Values that the equations make."""
        return {var for step in self.steps for var in step.eqn.outvars}

    def computes(self, var: jex.Var, access: Access) -> bool:
        """Whether this block of a result is the only one that is computed of it."""
        hulls = self.hulls.get(var)
        return hulls is not None and var in self.computed and hulls.listed() == [access]


class LaterRequests(BlockRequests):
    """Requests that are computed on first use."""

    def __init__(self, eqns: Sequence, outputs: Sequence[tuple[jex.Var, Access]]):
        self.of = tuple(eqns), outputs

    def __getattr__(self, name: str):
        if name not in ("hulls", "steps", "inputs"):
            raise AttributeError(name)
        requests = request(*self.of)
        self.hulls, self.steps, self.inputs = requests.hulls, requests.steps, requests.inputs
        return getattr(self, name)


def request(
    eqns: Sequence,
    outputs: Sequence[tuple[jex.Var, Access]],
    step_for: Callable[[Any, Access], Step] = step_of,
) -> BlockRequests:
    """Walks equations in reverse from the wanted blocks of results.

    Args:
      eqns: in program order.
      outputs: results, each with a block.
      step_for: (equation, block of its results) -> the step that computes it.

    Raises:
      NeedsWhole, UnsupportedOp, Unfusable: the equations cannot be computed at these blocks.
    """
    hulls: dict = {}
    for var, access in outputs:
        hulls.setdefault(var, Hulls()).ask(access)
    steps = _walked(eqns, hulls, 0, len(eqns), step_for)
    computed = {output for step in steps for output in step.eqn.outvars}
    read = dict.fromkeys(operand for operand in _operands(steps) if operand not in computed)
    return BlockRequests(hulls, steps, _blocks_of(read, hulls))


def request_more(
    eqns: Sequence, known: BlockRequests, wanted: Sequence[tuple[jex.Var, Access]] = ()
) -> BlockRequests:
    """Extends requests by equations in front of theirs, which do not read their values.

    It takes time for the new equations alone, and for copies of lists.

    Args:
      eqns: the new equations, in program order.
      known: the requests.
      wanted: results of the new equations that are results of the group, each with a block.

    Raises:
      NeedsWhole, UnsupportedOp, Unfusable: as `request` does.
    """
    hulls = dict(known.hulls)
    asked = dict.fromkeys(
        var for eqn in eqns for var in eqn.invars if not isinstance(var, jex.Literal)
    )
    asked.update((var, None) for var, _ in wanted)
    for var in asked:
        if var in hulls:
            hulls[var] = hulls[var].copy()
    for var, access in wanted:
        hulls.setdefault(var, Hulls()).ask(access)
    equations = len(eqns) + len(known.equations)
    steps = _walked(eqns, hulls, len(known.steps), equations)
    computed = known.computed.union(*(step.eqn.outvars for step in steps))
    operands = itertools.chain(_operands(steps), (var for var, _ in known.inputs))
    read = dict.fromkeys(operand for operand in operands if operand not in computed)
    requests = BlockRequests(hulls, steps + known.steps, _blocks_of(read, hulls))
    requests.equations = known.equations.union(id(step.eqn) for step in steps)
    requests.computed = computed
    if known.priced is not None:
        requests.behind = known.priced, len(steps)
    return requests


def _operands(steps: Iterable[Step]) -> Iterable:
    return (
        operand
        for step in steps
        for operand in step.eqn.invars
        if not isinstance(operand, jex.Literal)
    )


def _blocks_of(values: Iterable, hulls: dict) -> list[tuple[jex.Var, Access]]:
    return [(var, hull) for var in values for hull in hulls.get(var, ())]


def _walked(
    eqns: Sequence,
    hulls: dict,
    behind: int,
    equations: int,
    step_for: Callable[[Any, Access], Step] = step_of,
) -> list[Step]:
    """The steps of `eqns`, found from the last one on.

    `hulls` so far are changed in place. There are `behind` steps already, and `equations` in all.
    """
    most = max(BLOCKS_OF_EACH * equations, FEW_BLOCKS)
    memo = _memo.get()
    if step_for is step_of and memo is not None:
        step_for = memo.step
    steps: list[Step] = []
    for eqn in reversed(eqns):
        if len(eqn.outvars) == 1:
            results = hulls.get(eqn.outvars[0])
            hulls_of_results = [] if results is None else results.listed()
        else:
            hulls_of_results = [hull for output in eqn.outvars for hull in hulls.get(output, ())]
        asked: Iterable[Access] = hulls_of_results
        if len(hulls_of_results) > 1:
            asked = Hulls.of(hulls_of_results)
        if behind + len(steps) > most:
            raise Unfusable("values would be needed at too many places")
        produced = Hulls()
        for out in asked:
            step = step_for(eqn, out)
            produced.by_linear.setdefault(step.linear, []).append(step.out)
            steps.append(step)
            for atom, access, linear in step.asks:
                known = hulls.get(atom)
                if known is None:
                    known = hulls[atom] = Hulls()
                if id(access) not in known.asked:
                    known.ask(access, linear)
        for var in eqn.outvars:
            hulls[var] = produced
    steps.reverse()
    return steps


class BodyContext:
    """Gives access rules the grid indices while a body is traced. `ids`: grid axis -> its i32 scalar."""

    def __init__(self, ids: dict | None = None) -> None:
        self._ids: dict = dict(ids or {})

    def affine(self, affine: Affine, dtype):
        """`affine` at this program, as a scalar of `dtype`. Index arithmetic is int32."""
        from pbkern.dsl.primitives.grid import program_id

        total = None
        for axis, coeff in affine.terms:
            if axis not in self._ids:
                self._ids[axis] = program_id(axis)
            term = self._ids[axis] if coeff == 1 else lax.mul(self._ids[axis], np.int32(coeff))
            total = term if total is None else lax.add(total, term)
        if total is None:
            return np.asarray(affine.const, dtype)
        total = lax.add(total, np.int32(affine.const)) if affine.const else total
        return total if np.dtype(dtype) == np.int32 else lax.convert_element_type(total, dtype)


def literal(atom):
    """A literal's value, strongly typed."""
    return np.asarray(atom.val, atom.aval.dtype)


# Products that several sums read (core/ops/shared_products.py) and 16-bit floats that are compared with the greatest of
# them (core/ops/ordered_values.py), in the function whose kernels are being made.
rounded_values: contextvars.ContextVar[frozenset] = contextvars.ContextVar(
    "values rounded once", default=frozenset()
)


def run_steps(requests: BlockRequests, blocks: dict, ctx: BodyContext) -> Callable:
    """Computes all steps, given the `blocks` of inputs, (value, hull) -> array. Returns get(value or literal, access)."""
    blocks, once = dict(blocks), rounded_values.get()

    def get(atom, access):
        if access is None:
            return None
        if isinstance(atom, jex.Literal):
            return literal(atom)
        hull = requests.hulls[atom].find(access)
        block = blocks[atom, hull]
        if hull == access:
            return block
        starts = [span.start.const - outer.start.const for span, outer in zip(access, hull)]
        return lax.slice(block, starts, [start + span.size for start, span in zip(starts, access)])

    for step in requests.steps:
        operands = [get(atom, access) for atom, access in zip(step.eqn.invars, step.pull.inputs)]
        with source_context(step.eqn):  # messages name the user's line
            if step.pull.compute is not None:
                results = step.pull.compute(ctx, *operands)
            else:
                results = step.eqn.primitive.bind(*operands, **step.pull.params)
                results = results if step.eqn.primitive.multiple_results else [results]
        for var, result in zip(step.eqn.outvars, results):
            blocks[var, step.out] = rounded(result) if var in once else result
    return get


def trace_body(
    requests: BlockRequests, outputs: Sequence[tuple[jex.Var, Access]]
) -> jex.ClosedJaxpr:
    """The body over Refs (*inputs, *outputs): whole-block gets first, one swap per output last.

    Inputs that nothing asks for are not read. Outputs that are inputs share their arrays and are
    not written.
    """
    given = {var for var, _ in requests.inputs}

    def body(*refs):
        blocks = {
            (var, hull): source[...]
            for (var, hull), source in zip(requests.inputs, refs)
            if var in requests.hulls
        }
        get = run_steps(requests, blocks, BodyContext())
        for (output, access), ref in zip(outputs, refs[len(requests.inputs) :]):
            if output not in given:
                ref[...] = get(output, access)

    types = [
        ref_aval(block_shape(access), array_aval(var).dtype)
        for var, access in (*requests.inputs, *outputs)
    ]
    return jax.make_jaxpr(body)(*types)


def bounds(span: Span, grid: Sequence[int]) -> tuple[int, int]:
    """(first, one past last) element that `span` reaches over the grid."""
    lo, hi = span.start.bounds(lambda axis: grid[axis])
    return lo, hi + span.size
