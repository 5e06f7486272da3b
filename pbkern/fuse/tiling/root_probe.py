"""RootProbe: least blocks of a group's root and roles of its dimensions, from a probe with blocks of one element."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jax.extend import core as jex

from pbkern.core.jax_types import array_aval
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.scatter import SCATTERS, ScatterForm
from pbkern.fuse.access.blocks import BlockRequests, Unfusable, request
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
            return cls._probed(eqns, root, machine)
        question = "probe", kinds.group(eqns, (root,))
        if question not in kinds.answers:
            try:
                kinds.answers[question] = cls._probed(eqns, root, machine)
            except Unfusable as e:
                kinds.answers[question] = e.without_frames()
        answer = kinds.answers[question]
        if isinstance(answer, Unfusable):
            raise answer.without_frames()
        return replace(
            answer, root=root, least=LeastBlocks(answer.least)
        )  # searches let `least` grow

    @classmethod
    def _probed(cls, eqns: Sequence, root: jex.Var, machine: CostModel) -> RootProbe:
        least = LeastBlocks()
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


def _least_requests(
    eqns: Sequence, root: jex.Var, least: LeastBlocks, machine: CostModel
) -> tuple[BlockRequests, Access, dict[int, int]]:
    """Grows `least` until the equations can be computed at such blocks.

    Returns:
      (requests of one program, its block of the root, grid axis -> dimension of the root).
    """
    shape = array_aval(root).shape
    while True:
        blocks = [least.get(dim, 1) for dim in range(len(shape))]
        access, grid, axes = tile(shape, blocks)
        try:
            requests = request(eqns, [(root, access)])
            if not grid or machine.kernel_cost(requests, [(root, access)], grid) is not None:
                return requests, access, axes
            repeating, enough = _repeating_dimension(eqns, root, blocks, axes.values(), machine)
            least[repeating] = shape[repeating]
            if enough is not None:
                return enough
        except NeedsWhole as e:
            least.demand(e, [axes[symbol] for symbol in e.axes], shape)


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


def _repeating_dimension(
    eqns, root, blocks: Sequence[int], dims: Iterable[int], machine: CostModel
) -> tuple[int, tuple[BlockRequests, Access, dict[int, int]] | None]:
    """The dimension of `dims` that stays whole, so that programs do not compute a heavy value again.

    It is the last that is enough by itself; the second value is then what `_least_requests` returns. Where none is, or
    where the group has no heavy contraction, it is the last of all.
    """
    dims = sorted(dims, reverse=True)
    has_product = any(eqn.primitive.name in CONTRACTIONS and is_heavy(eqn, machine) for eqn in eqns)
    if len(dims) == 1 or not has_product:
        return dims[0], None
    for dim in dims:
        extended = list(blocks)
        extended[dim] = root.aval.shape[dim]
        access, grid, axes = tile(root.aval.shape, extended)
        try:
            requests = request(eqns, [(root, access)])
            if machine.kernel_cost(requests, [(root, access)], grid) is not None:
                return dim, (requests, access, axes)
        except NeedsWhole:
            continue
    return dims[0], None


def _elements_without_halo(access: Access) -> int:
    """Elements of a block that no neighbour has: along each dimension, at most its distance to the next block."""
    return math.prod(
        min(span.size, max(abs(coefficient) for _, coefficient in span.start.terms))
        if span.start.terms
        else span.size
        for span in access
    )
