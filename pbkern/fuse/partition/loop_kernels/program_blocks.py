"""Loop and the values that its bodies compute -> the block of each value that one program computes by itself.

    for each of 1000 steps: h[256] = a[step, 256] * h + x[step, 256]
    -> two programs: h[128], a[1000, 128], x[1000, 128]

A grid axis cuts a dimension of the results. Access rules say which blocks of other values a block of
a result needs. The loop is cut if every value is needed in one form: cut along the same dimensions by
all that read it, or whole. Programs then need nothing of each other in any step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.affine import Affine
from pbkern.core.errors import UnsupportedOp
from pbkern.core.jax_types import Atom, array_aval
from pbkern.core.jaxprs.walks import atoms, variables
from pbkern.core.lazy_dataclass import dataclass
from pbkern.fuse.access.blocks import Unfusable, request, volume
from pbkern.fuse.access.rules import Access, NeedsWhole, Span, whole
from pbkern.fuse.graph import Node

# Per dimension of a value: the grid axis that cuts it, or None.
Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class ProgramBlocks:
    """Blocks of a loop's values.

    Attributes:
      extents: elements along the dimensions that each grid axis cuts.
      widths: how many of them one program has, per grid axis. The last program may end behind the edge.
      axes: value -> the grid axis that cuts each of its dimensions. Values that are not here are whole.
      largest_part: elements of the largest block that differs from program to program.
      largest_whole: elements of the largest that is the same in all.
    """

    extents: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    axes: Mapping[jex.Var, Axes] = field(default_factory=dict)
    largest_part: int = 1
    largest_whole: int = 1

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(-(-extent // width) for extent, width in zip(self.extents, self.widths))

    def access(self, var: jex.Var) -> Access:
        """The block of a value that one program has."""
        shape = array_aval(var).shape
        axes = self.axes.get(var, (None,) * len(shape))
        return tuple(
            whole(size) if axis is None else self._span(axis) for axis, size in zip(axes, shape)
        )

    def shape(self, var: jex.Var) -> tuple[int, ...]:
        return tuple(span.size for span in self.access(var))

    def axes_of(self, access: Access, shape: Sequence[int]) -> Axes:
        """The grid axes that cut a block. Raises Unfusable if it is neither a program's nor one of all programs."""
        axes: list[int | None] = []
        for span, extent in zip(access, shape):
            axis = next(iter(span.start.symbols), None)
            if axis is not None and (span != self._span(axis) or extent != self.extents[axis]):
                raise Unfusable("a program would need a part of another one's block")
            axes.append(axis)
        return tuple(axes)

    def with_operands(self, node: Node, most: int | None) -> ProgramBlocks | None:
        """Adds blocks of the operands of a node whose results have blocks.

        None if they would be other blocks than those known, or if a block has more than `most` elements.
        """
        wanted = [(var, self.access(var)) for var in node.outputs]
        try:
            requests = request(node.eqns, wanted)
            axes = {
                var: self.axes_of(access, array_aval(var).shape) for var, access in requests.inputs
            }
        except (NeedsWhole, UnsupportedOp, Unfusable):
            return None
        blocks = (hull for hulls in requests.hulls.values() for hull in hulls)
        if most is not None and any(volume(block) > most for block in blocks):
            return None
        if any(self.axes.get(var, of_var) != of_var for var, of_var in axes.items()):
            return None
        return replace(self, axes={**self.axes, **axes})

    def with_moved(self, eqn: jex.JaxprEqn) -> ProgramBlocks:
        """Adds the block of the result of a transpose whose operand has a block."""
        (operand,), (result,) = atoms(eqn), eqn.outvars
        axes = self.axes.get(operand, (None,) * len(array_aval(operand).shape))
        moved = tuple(axes[axis] for axis in eqn.params["permutation"])
        return replace(self, axes={**self.axes, result: moved})

    def _span(self, axis: int) -> Span:
        return Span(Affine.symbol(axis, self.widths[axis]), self.widths[axis])


WHOLE = ProgramBlocks()


def independent_parts(node: Node, results: Sequence[jex.Var]) -> ProgramBlocks | None:
    """Blocks of one element along each dimension in which elements need nothing of each other; None if there is none.

    Args:
      node: a loop.
      results: those of its results that are read.
    """
    by_size = sorted(results, key=lambda var: -math.prod(array_aval(var).shape))
    extents: tuple[int, ...] = ()
    parts: ProgramBlocks | None = None
    for extent in array_aval(by_size[0]).shape if by_size else ():
        if extent > 1:
            with_extent = (*extents, extent)
            cut = cut_loop(node, by_size, with_extent, (1,) * len(with_extent))
            if cut is not None:
                extents, parts = with_extent, cut
    return parts


def cut_loop(
    node: Node, results: Sequence[jex.Var], extents: tuple[int, ...], widths: tuple[int, ...]
) -> ProgramBlocks | None:
    """Blocks of all values of a loop, if each result is cut by each of these grid axes; None if not."""
    axes: dict[jex.Var, Axes] = {}
    walk = _BlockWalk(axes, ProgramBlocks(extents, widths, axes))
    for result in results:
        further = next(walk.with_result(node, result), None)
        if further is None:
            return None
        walk = further
    return walk.blocks


@dataclass
class _BlockWalk:
    """Walks a loop from blocks of results to blocks of operands.

    Attributes:
      axes: those found so far.
      blocks: of these axes.
      walked: group -> its results that have been followed to operands.
    """

    axes: dict[jex.Var, Axes]
    blocks: ProgramBlocks
    walked: dict[Node, list] = field(default_factory=dict)

    def with_result(self, node: Node, result: jex.Var) -> Iterator[_BlockWalk]:
        """Walks that go on from a further result, one for each way in which grid axes may cut it."""
        shape, count = array_aval(result).shape, len(self.blocks.extents)
        known = self.axes.get(result)
        if known is not None:
            if set(known) >= set(range(count)):
                yield self
            return
        for dims in itertools.permutations(range(len(shape)), count):
            if tuple(shape[dim] for dim in dims) != self.blocks.extents:
                continue
            axes = tuple(dims.index(dim) if dim in dims else None for dim in range(len(shape)))
            all_axes = {**self.axes, result: axes}
            blocks = replace(self.blocks, axes=all_axes)
            further = _BlockWalk(all_axes, blocks, dict(self.walked))
            try:
                further.control(node)
            except (NeedsWhole, UnsupportedOp, Unfusable):
                continue
            yield further

    def set(self, var: jex.Var, axes: Axes) -> None:
        """Raises Unfusable if the value is needed in another form as well."""
        if self.axes.setdefault(var, axes) != axes:
            raise Unfusable("a value is needed by parts and in other parts, or as a whole")

    def control(self, node: Node) -> None:
        """Follows results of control flow into its bodies, and to its operands.

        What a step hands on has the blocks that the next one takes, which may add results of the body.
        """
        links = list(_links(node))
        for var in _deciding(node):
            self.set(var, (None,) * len(array_aval(var).shape))
        count = -1
        while len(self.axes) > count:
            count = len(self.axes)
            for values, equals, leading in links:
                self.link(values, equals, leading)
            for inner in node.inner.values():
                for each in reversed(inner.ordered):
                    self.node(each)

    def link(self, values: Iterable[Atom], equals: Iterable[Atom], leading: int) -> None:
        """Gives equal values equal blocks. `values` have `leading` further dimensions in front, of steps."""
        for value, equal in zip(values, equals):
            if isinstance(value, jex.Literal) or isinstance(equal, jex.Literal):
                continue
            axes = self.axes.get(value)
            if axes is not None:
                if any(axis is not None for axis in axes[:leading]):
                    raise Unfusable("steps would be cut")
                self.set(equal, axes[leading:])
            elif equal in self.axes:
                self.set(value, (None,) * leading + self.axes[equal])

    def node(self, node: Node) -> None:
        """Follows those results of a node that have blocks to its operands."""
        outputs = [var for var in node.outputs if var in self.axes]
        if not outputs:
            return
        if node.kind == "control":
            self.control(node)
            return
        if self.walked.get(node) == outputs:
            return
        self.walked[node] = outputs
        wanted = [(var, self.blocks.access(var)) for var in outputs]
        requests = request(node.eqns, wanted)
        for var, access in requests.inputs:
            self.set(var, self.blocks.axes_of(access, array_aval(var).shape))
        blocks = self.blocks
        for hull in (hull for hulls in requests.hulls.values() for hull in hulls):
            if all(span.is_const for span in hull):
                blocks = replace(blocks, largest_whole=max(blocks.largest_whole, volume(hull)))
            else:
                blocks = replace(blocks, largest_part=max(blocks.largest_part, volume(hull)))
        self.blocks = blocks


def _deciding(node: Node) -> list[jex.Var]:
    """Values that decide what control flow does next: all programs need the same."""
    (eqn,) = node.eqns
    match eqn.primitive.name:
        case "cond":
            return variables(eqn.invars[:1])
        case "while":
            return variables(node.inner["cond_jaxpr"].jaxpr.outvars)
    return []


def _links(node: Node) -> Iterator[tuple[Sequence[Atom], Sequence[Atom], int]]:
    """Values outside and inside of bodies, or of one step and the next, that are equal.

    Yields:
      (values, the values that they are, dimensions of steps that the first have in front).
    """
    (eqn,) = node.eqns
    params = params_of(eqn)
    bodies = [inner.jaxpr for inner in node.inner.values()]
    match eqn.primitive.name:
        case "cond":
            for body in bodies:
                yield eqn.outvars, body.outvars, 0
                yield eqn.invars[1:], body.invars, 0
        case "scan":
            (body,) = bodies
            consts, carried = params["num_consts"], params["num_carry"]
            first = consts + carried
            yield eqn.outvars[carried:], body.outvars[carried:], 1
            yield eqn.outvars[:carried], body.outvars, 0
            yield body.outvars[:carried], body.invars[consts:first], 0
            yield eqn.invars[:first], body.invars, 0
            yield eqn.invars[first:], body.invars[first:], 1
        case _:
            of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
            cond, body = (node.inner[name].jaxpr for name in ("cond_jaxpr", "body_jaxpr"))
            start, taken = eqn.invars[of_cond + of_body :], body.invars[of_body:]
            yield eqn.outvars, body.outvars, 0
            yield body.outvars, taken, 0
            yield taken, cond.invars[of_cond:], 0
            yield start, taken, 0
            yield eqn.invars[:of_cond], cond.invars, 0
            yield eqn.invars[of_cond:], body.invars[:of_body], 0
