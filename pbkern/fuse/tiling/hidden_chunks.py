"""OnlineChunk -> ChunkMask: how a kernel tells before it reads a chunk's keys that a mask hides all of them.

    x = select(mask, scores, fill)        for example mask = positions <= position
    x = scores + bias                     for example bias = select(mask, 0, -inf)

Where no element of a chunk's mask is set, x is the fill value throughout. If exp(fill - maximum so far) is 0 in every row,
the chunk leaves maximum and sums as they are. Decoding with a cache of keys and values so reads the positions that are filled.
A bias hides scores that are far smaller than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import atoms, leading_to
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.fuse.access.blocks import Step, volume
from pbkern.fuse.access.dimension_map import MOVING
from pbkern.fuse.access.rules import Access
from pbkern.fuse.cost.kinds import DATA_MOVEMENT, contracted_size

from .online_blocks import OnlineBlocks, OnlineChunk

# Operations of a mask, at most, per multiply-add of the chunk's scores. It bounds what a test costs that never succeeds.
MASK_SHARE = 1 / 8
# Operations of a bias, likewise: many a bias hides nothing. With 1/16 and 1/32, attention with a bias per score took 15 and
# 6 % longer, with 1/64 2 %. AMD Zen 3, 28 November 2026.
BIAS_SHARE = 1 / 48
# A bias up to this hides its score, as the least numbers of float32 and bfloat16 and -inf do. Scores count as less than half
# of its size.
HIDING_BIAS = -1e30


@dataclass(frozen=True)
class ChunkMask:
    """The mask or the bias of a chunk's scores.

    Attributes:
      var, block: the mask, before it is repeated along dimensions.
      steps: what it is computed by.
      shown: mask -> whether scores are shown, elementwise.
      fill: a number that hidden scores do not exceed.
      changes: equations from hidden scores to x; each has one operand that is no literal, and their results have the
        order of their operands where the mask is a bias.
    """

    var: jex.Var
    block: Access
    steps: tuple[Step, ...]
    shown: Callable[[jax.Array], jax.Array]
    fill: np.generic
    changes: tuple

    def reads(self) -> set:
        """Values that the mask is made of, and the mask."""
        return {self.var, *(atom for step in self.steps for atom in atoms(step.eqn))}

    @property
    def hides_all(self) -> bool:
        """Whether hidden scores are -inf, and so is what they are changed to: they do not even raise a maximum of -inf."""
        return bool(self.fill == -np.inf) and all(map(_keeps_order, self.changes))


def leaves_out_hidden(blocks: OnlineBlocks) -> bool:
    """Whether a kernel leaves out the chunks that a mask hides."""
    return (
        blocks.online.leaves_out_hidden
        and blocks.online.maximum is not None
        and blocks.first is not None
        and chunk_mask(blocks.first.full) is not None
    )


def chunk_mask(chunk: OnlineChunk) -> ChunkMask | None:
    """The mask of a chunk of the first pass. None if there is none that depends on data, or if it costs too much to test.

    Masks of indices alone, as causal ones, shorten loops in another way (lower/passes/strips/masked_strips.py).
    """
    x, block = chunk.products[0].eqn.invars[0], chunk.products[0].pull.inputs[0]
    makers = {step.eqn.outvars[0]: step for step in chunk.requests.steps}
    changes: list = []
    while (maker := makers.get(x)) is not None and maker.out == block:
        name, operands = maker.eqn.primitive.name, list(_operands(maker))
        if name == "select_n":
            return _mask_of_select(maker, tuple(reversed(changes)), chunk, makers)
        if name == "add" and len(operands) == 2:
            return _bias(maker, tuple(reversed(changes)), chunk, makers)
        if name not in (*ELEMENTWISE, *MOVING) or len(operands) != 1:
            return None
        if name not in MOVING:
            changes.append(maker.eqn)
        ((x, block),) = operands
    return None


def _mask_of_select(
    select: Step, changes: tuple, chunk: OnlineChunk, makers: dict
) -> ChunkMask | None:
    """The mask of a select between scores and a literal."""
    fills = _cases(select, makers)
    if fills.count(None) != 1:
        return None
    shown = _itself if fills[1] is None else lax.bitwise_not
    literal = next(fill for fill in fills if fill is not None)
    fill = np.asarray(literal.val, array_aval(literal).dtype)[()]
    return _mask(next(_operands(select)), shown, fill, changes, chunk, makers, MASK_SHARE)


def _cases(select: Step, makers: dict) -> list[jex.Literal | None]:
    """The literals that a select by a mask has as its two cases, None for other values; [] for other selects."""
    predicate, *cases = select.eqn.invars
    if isinstance(predicate, jex.Literal) or len(cases) != 2:
        return []
    return [_literal(case, makers) for case in cases]


def _bias(add: Step, changes: tuple, chunk: OnlineChunk, makers: dict) -> ChunkMask | None:
    if not all(map(_keeps_order, changes)):
        return None
    dtype = add.eqn.outvars[0].aval.dtype
    with np.errstate(over="ignore"):  # float16 has -inf alone
        fill = np.asarray(HIDING_BIAS / 2, dtype)[()]
    masks = (
        _mask_as_bias(operand, fill, changes, chunk, makers)
        or _mask(operand, _shows, fill, changes, chunk, makers, BIAS_SHARE)
        for operand in _operands(add)
    )
    return next(filter(None, masks), None)


def _mask_as_bias(
    bias: tuple[jex.Var, Access], fill, changes: tuple, chunk: OnlineChunk, makers: dict
) -> ChunkMask | None:
    """The mask of a bias that is a select between two literals, of which one hides."""
    select = makers.get(_unmoved(bias, makers)[0])
    if select is None or select.eqn.primitive.name != "select_n":
        return None
    literals = _cases(select, makers)
    hides = [literal is not None and float(literal.val) <= HIDING_BIAS for literal in literals]
    if None in literals or sum(hides) != 1:
        return None
    shown = _itself if hides[0] else lax.bitwise_not
    return _mask(next(_operands(select)), shown, fill, changes, chunk, makers, MASK_SHARE)


def _keeps_order(eqn) -> bool:
    """Whether a larger operand never gives a smaller result."""
    match eqn.primitive.name:
        case "convert_element_type":
            return True
        case "mul" | "div":
            return isinstance(eqn.invars[1], jex.Literal) and eqn.invars[1].val > 0
    return False


def _itself(mask: jax.Array) -> jax.Array:
    return mask


def _shows(bias: jax.Array) -> jax.Array:
    """Whether a bias leaves its score visible; NaN does."""
    with np.errstate(over="ignore"):
        limit = lax.full_like(bias, HIDING_BIAS)
    return lax.bitwise_not(lax.le(bias, limit))


def _mask(
    operand: tuple[jex.Var, Access],
    shown: Callable,
    fill,
    changes: tuple,
    chunk: OnlineChunk,
    makers: dict,
    share: float,
) -> ChunkMask | None:
    """The mask that an operand is; None if it does not depend on data, or costs too much."""
    mask, block = _unmoved(operand, makers)
    steps = chunk.requests.steps
    needed = set(map(id, leading_to([step.eqn for step in steps], {mask})))
    makes_mask = tuple(step for step in steps if id(step.eqn) in needed)
    if not _depends_on_data(mask, makes_mask) or not _is_cheap(makes_mask, block, chunk, share):
        return None
    return ChunkMask(mask, block, makes_mask, shown, fill, changes)


def _unmoved(value: tuple[jex.Var, Access], makers: dict) -> tuple[jex.Var, Access]:
    """A value before its elements were moved or repeated."""
    var, block = value
    while (maker := makers.get(var)) is not None and maker.out == block:
        operands = list(_operands(maker))
        if maker.eqn.primitive.name not in MOVING or not operands:
            break
        ((var, block),) = operands
    return var, block


def _literal(atom, makers: dict) -> jex.Literal | None:
    """The literal that a value repeats; None if it is not one number."""
    while not isinstance(atom, jex.Literal):
        maker = makers.get(atom)
        if maker is None or maker.eqn.primitive.name not in MOVING:
            return None
        atom = maker.eqn.invars[0]
    return atom


def _operands(step: Step) -> Iterator[tuple[jex.Var, Access]]:
    return (
        (atom, access)
        for atom, access in zip(step.eqn.invars, step.pull.inputs)
        if not isinstance(atom, jex.Literal)
    )


def _depends_on_data(mask: jex.Var, steps: tuple[Step, ...]) -> bool:
    computed = {var for step in steps for var in step.eqn.outvars}
    return mask not in computed or any(
        atom not in computed for step in steps for atom in atoms(step.eqn)
    )


def _is_cheap(steps: tuple[Step, ...], block: Access, chunk: OnlineChunk, share: float) -> bool:
    computes = [step for step in steps if step.eqn.primitive.name in ELEMENTWISE]
    if not all(step in computes or step.eqn.primitive.name in DATA_MOVEMENT for step in steps):
        return False
    operations = sum(volume(step.out) for step in computes) or volume(block)
    products = sum(
        volume(step.out) * contracted_size(step.eqn)
        for step in chunk.requests.steps
        if step.eqn.primitive.name == "dot_general"
    )
    return operations <= share * products
