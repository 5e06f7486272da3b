"""RootProbe: least blocks of a group's root and roles of its dimensions, from a probe with blocks of one element."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from jax.extend import core as jex

from pbkern.core.jax_types import array_aval
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.scatter import SCATTERS, ScatterForm
from pbkern.fuse.access.blocks import BlockRequests, Step, Unfusable, request, step_of
from pbkern.fuse.access.equation_kinds import current_kinds
from pbkern.fuse.access.rules import Access, NeedsWhole, Span
from pbkern.fuse.access.scatter import owned
from pbkern.fuse.access.windows_contractions import chunk_dimensions
from pbkern.fuse.cost.kinds import CONTRACTIONS, is_heavy
from pbkern.fuse.cost.model import CostModel
from pbkern.fuse.cost.steps import elements_read, tables

from .block_options import contraction_roles, multiples, options_of
from .schedule import tile


class LeastBlocks(dict):
    """Dimension of the root -> number of elements; a block's size is a multiple of it.

    Dimensions that are missing take any size.
    """

    def whole(self, shape: Sequence[int]) -> set[int]:
        """Dimensions that no block may cut."""
        return {dim for dim, elements in self.items() if elements >= shape[dim]}

    def multiples_of(self, options: Sequence[list[int]]) -> list[list[int]]:
        """The sizes of each dimension, as multiples of its least."""
        return [multiples(option, self.get(dim, 1)) for dim, option in enumerate(options)]

    def demand(self, error: NeedsWhole, dims: Iterable[int], shape: Sequence[int]) -> None:
        """Grows the blocks along `dims` as an access rule's error asks.

        Raises Unfusable if they are that large already.
        """
        has_grown = False
        for dim in dims:
            old = self.get(dim, 1)
            new = math.lcm(old, error.multiple) if error.multiple else shape[dim]
            if new == old or new >= shape[dim] or shape[dim] % new:
                new = shape[dim]
            has_grown |= new != old
            self[dim] = new
        if not has_grown:
            raise Unfusable(error.why) from None


@dataclass(frozen=True)
class RootProbe:
    """Properties of a group's root, the result that is cut into blocks.

    Attributes:
      root: the result.
      least: the least blocks that the group's equations allow.
      roles: dimension of the root -> its role in the group's contraction, scatter or split reduction
        (block_options.py).
      grain: elements that a program reads for one element of the root.
    """

    root: jex.Var
    least: LeastBlocks
    roles: Mapping[int, str]
    grain: int

    @classmethod
    def of(cls, eqns: Sequence, root: jex.Var, machine: CostModel) -> RootProbe:
        """Probes a group with the least blocks that it can have, groups that are alike once. Raises Unfusable."""
        kinds = current_kinds()
        if kinds is None:
            return cls._probed(eqns, root, machine, LeastBlocks())
        question = "probe", kinds.group(eqns, (root,))
        if question not in kinds.answers:
            probed = kinds.answers.setdefault(("groups of a root", root), [])
            grown = _Probed(frozenset(map(id, eqns)), _has_product(eqns, machine))
            try:
                answer = cls._probed(eqns, root, machine, grown.least_so_far(probed))
                probed.append(replace(grown, least=answer.least))
                kinds.answers[question] = answer
            except Unfusable as e:
                kinds.answers[question] = e.without_frames()
        answer = kinds.answers[question]
        if isinstance(answer, Unfusable):
            raise answer.without_frames()
        return replace(
            answer, root=root, least=LeastBlocks(answer.least)
        )  # searches let `least` grow

    @classmethod
    def _probed(
        cls, eqns: Sequence, root: jex.Var, machine: CostModel, least: LeastBlocks
    ) -> RootProbe:
        """Probes a group from blocks on that it needs at least."""
        requests, access, axes = _least_requests(eqns, root, least, machine)
        roles = _chunk_and_scatter_roles(requests, axes)
        for dim, role in _contraction_roles(requests, axes, machine).items():
            roles.setdefault(dim, role)
        if {"owned", "scatter batch"} & set(roles.values()):
            return cls(root, least, roles, 1)
        return cls(root, least, roles, _grain(requests, root, access, machine))

    def options(
        self, machine: CostModel, cuts_planes: bool = False
    ) -> tuple[list[list[int]], list[int]]:
        """(block sizes to try, preferred size) per dimension, as `options_of`; the sizes are multiples of the least."""
        shape = array_aval(self.root).shape
        whole, sizes = self.least.whole(shape), machine.sizes
        options, target = options_of(
            shape, whole, self.roles, sizes, self.grain, cuts_planes, machine.cores
        )
        return self.least.multiples_of(options), target


@dataclass(frozen=True)
class _Probed:
    """A group of one root.

    Attributes:
      equations: their ids.
      has_product: whether it has a heavy contraction. Such groups choose the dimensions that stay whole in another way.
      least: the least blocks, once they are known.
    """

    equations: frozenset[int]
    has_product: bool
    least: LeastBlocks = field(default_factory=LeastBlocks)

    def least_so_far(self, probed: Sequence[_Probed]) -> LeastBlocks:
        """The least blocks of the largest of the groups that this one has grown from: it needs them, too."""
        parts = [
            part
            for part in probed
            if part.has_product == self.has_product and part.equations < self.equations
        ]
        largest = max(parts, key=lambda part: len(part.equations), default=None)
        return LeastBlocks() if largest is None else LeastBlocks(largest.least)


def _least_requests(
    eqns: Sequence, root: jex.Var, least: LeastBlocks, machine: CostModel
) -> tuple[BlockRequests, Access, dict[int, int]]:
    """Grows `least` until the equations can be computed at such blocks.

    Returns:
      (requests of one program, its block of the root, grid axis -> dimension of the root).
    """
    shape = array_aval(root).shape
    is_refused = False
    while True:
        blocks = [least.get(dim, 1) for dim in range(len(shape))]
        access, grid, axes = tile(shape, blocks)
        try:
            if not is_refused:
                requests = request(eqns, [(root, access)])
                if not grid or machine.kernel_cost(requests, [(root, access)], grid) is not None:
                    return requests, access, axes
            grown = _repeating_dimension(eqns, root, blocks, axes.values(), machine)
            least[grown.dim], is_refused = shape[grown.dim], grown.is_refused
            if grown.enough is not None:
                return grown.enough
        except NeedsWhole as e:
            least.demand(e, [axes[symbol] for symbol in e.axes], shape)
            is_refused = False


def _chunk_and_scatter_roles(requests: BlockRequests, axes: Mapping[int, int]) -> dict[int, str]:
    """Dimension of the root -> role, where partial reductions and scatters give one."""
    roles: dict[int, str] = {}

    def add(role: str, spans: Iterable[Span]) -> None:
        roles.update({axes[symbol]: role for span in spans for symbol in span.start.symbols})

    for step in requests.steps:
        eqn = step.eqn
        if eqn.primitive.name == "partial_reduce":
            # A chunk is one program's work, for each index of the dimensions before it.
            params = eqn.params
            chunks = chunk_dimensions(params["axis"], params["axes"], params["outer"])
            add("chunk", step.out[: chunks.stop])
        if eqn.primitive.name in SCATTERS:
            add("scatter batch", (step.out[dim] for dim in ScatterForm.of(eqn).batch))
            add("owned", (step.out[dim] for dim in owned(eqn)))
    return roles


def _contraction_roles(
    requests: BlockRequests, axes: Mapping[int, int], machine: CostModel
) -> dict[int, str]:
    """Dimension of the root -> role in the group's last heavy contraction."""
    roles: dict[int, str] = {}
    for step in reversed(requests.steps):
        if step.eqn.primitive.name in CONTRACTIONS and is_heavy(step.eqn, machine):
            names = contraction_roles(step.eqn, machine.sizes)
            if set(names) <= {"batch"}:
                continue  # sums along rows of an elementwise product
            for name, span in zip(names, step.out):
                for symbol in span.start.symbols:
                    roles.setdefault(axes[symbol], name)
            break
    return roles


def _grain(requests: BlockRequests, root: jex.Var, access: Access, machine: CostModel) -> int:
    """Most elements that a program reads of one input for its block, of inputs that differ between programs."""
    looked_up = tables(requests, [(root, access)], machine)
    return max(
        (
            min(_elements_without_halo(hull), elements_read(requests, var, hull, looked_up))
            for var, hull in requests.inputs
            if any(span.start.terms for span in hull)
        ),
        default=1,
    )


@dataclass(frozen=True)
class _Grown:
    """A dimension that stays whole, so that programs do not compute a heavy value again.

    Attributes:
      dim: the dimension.
      enough: what `_least_requests` returns, where no other dimension has to stay whole.
      is_refused: whether the target is known to refuse these blocks.
    """

    dim: int
    enough: tuple[BlockRequests, Access, dict[int, int]] | None = None
    is_refused: bool = False


class _Refused(Exception):
    """The target refuses a step."""


def _repeating_dimension(
    eqns, root, blocks: Sequence[int], dims: Iterable[int], machine: CostModel
) -> _Grown:
    """The last dimension of `dims` that is enough by itself, as a whole, so that no heavy value is computed again.

    Where none is, or where the group has no heavy contraction, it is the last of all.
    """
    dims = sorted(dims, reverse=True)
    if len(dims) == 1 or not _has_product(eqns, machine):
        return _Grown(dims[0])
    has_scatter = any(eqn.primitive.name in SCATTERS for eqn in eqns)
    is_refused = False
    for dim in dims:
        extended = list(blocks)
        extended[dim] = root.aval.shape[dim]
        access, grid, axes = tile(root.aval.shape, extended)
        # Most walks end at the last product of the group. The first one is made to its end, because an error in front of
        # the product counts more than the product if this dimension has to stay whole.
        is_partial = dim != dims[0] and not has_scatter
        step_for = _unrefused(machine, math.prod(grid)) if is_partial else step_of
        try:
            requests = request(eqns, [(root, access)], step_for)
            if machine.kernel_cost(requests, [(root, access)], grid) is not None:
                return _Grown(dim, (requests, access, axes))
            is_refused |= dim == dims[0]
        except (NeedsWhole, _Refused):
            continue
    return _Grown(dims[0], None, is_refused)


def _unrefused(machine: CostModel, programs: int) -> Callable[[Any, Access], Step]:
    """`step_of` in a kernel of so many programs without scatters; it raises _Refused where the target refuses a step."""

    def step(eqn, out: Access) -> Step:
        computed = step_of(eqn, out)
        if programs > 1 and machine.repeats_heavy_value(computed, programs):
            raise _Refused
        return computed

    return step


def _has_product(eqns: Iterable, machine: CostModel) -> bool:
    return any(eqn.primitive.name in CONTRACTIONS and is_heavy(eqn, machine) for eqn in eqns)


def _elements_without_halo(access: Access) -> int:
    """Elements of a block that no neighbour has: along each dimension, at most its distance to the next block."""
    return math.prod(
        min(span.size, max(abs(coefficient) for _, coefficient in span.start.terms))
        if span.start.terms
        else span.size
        for span in access
    )
