"""Steps of a kernel with their prices: what a program stores, looks up, and reads of its inputs.

The same for every target.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from jax.extend import core as jex

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.scatter import SCATTERS
from pbkern.fuse.access.blocks import BlockRequests, Step, volume
from pbkern.fuse.access.rules import Access
from pbkern.fuse.access.scatter import share

from .kinds import DATA_MOVEMENT, LOOKUPS, SINGLE_PASS
from .model import CostModel, Price, price_of


@dataclass
class PricedSteps:
    """The steps of a kernel, each with its price, and sums over all of them.

    All of it is found from the last step to the first: steps in front, which read none of the
    others' values, extend it.

    Attributes:
      results: what the kernel stores.
      shares: id of a step -> the part of its block that a program evaluates, where that is not all. A
        program evaluates of updates that a scatter reads only its own.
      stored: values that a program keeps in scratch. Lowering merges equal iteration spaces into one
        nest: a value is stored only where a consumer reads it in another order or from several
        places (windows, contractions, reductions, shifted slices).
      tables: values that a program looks up, or scatters.
      scatters: whether any step is a scatter.
      totals: memo of a target's cost model, of all steps in a kernel of one program.
      behind: (`totals` of the steps that these extend, number of steps in front of theirs).
    """

    steps: list[tuple[Step, Price]]
    results: set
    shares: dict[int, float]
    stored: set
    tables: set
    scatters: bool
    # Value -> the largest part of it that a later step evaluates.
    _wanted: dict
    # Value -> number of later steps that read it.
    _reads: Counter
    # The indices of scatters, and what they are made of by arithmetic and views.
    _indices: set
    # Values that a later step reads elsewhere than in place, or a view of them.
    _moved: set
    # Values that a later step reduces, scatters or streams, which happens while they are made unless something else reads
    # them.
    _consumed: set
    # Value -> what later products and reductions read that is made of it element by element. Such operands of products are
    # computed a part at a time, unless another product makes what they are made of.
    _operands: dict[jex.Var, frozenset[jex.Var]]
    # Those that products read.
    _factors: set
    totals: Any = None
    behind: tuple[Any, int] | None = None

    @classmethod
    def of(
        cls, requests: BlockRequests, outputs: Sequence[tuple[jex.Var, Access]], costs: CostModel
    ) -> PricedSteps:
        """The steps of `requests`, priced once for the same outputs."""
        results = {var for var, _ in outputs}
        known = requests.priced
        if known is not None and known.results == results:
            return known
        priced = None
        if requests.behind is not None:
            behind, front = requests.behind
            priced = behind._extended(requests.steps[:front], results, costs)
        if priced is None:
            priced = cls._empty(
                any(price_of(step, costs).own_updates is not None for step in requests.steps)
            )
            priced._take(requests.steps, results, costs)
        requests.priced, requests.behind = priced, None
        return priced

    @classmethod
    def _empty(cls, scatters: bool) -> PricedSteps:
        return cls(
            [], set(), {}, set(), set(), scatters, {}, Counter(), set(), set(), set(), {}, set()
        )

    def _extended(
        self, front: Sequence[Step], results: set, costs: CostModel
    ) -> PricedSteps | None:
        """These steps behind those of `front`. None if the first scatter is among these."""
        scatters = any(price_of(step, costs).own_updates is not None for step in front)
        if not self.results <= results or (scatters and not self.scatters):
            return None
        priced = PricedSteps(
            self.steps, self.results, dict(self.shares), set(self.stored), set(self.tables), self.scatters,
            dict(self._wanted), self._reads.copy(), set(self._indices), set(self._moved), set(self._consumed),
            dict(self._operands), set(self._factors),
        )  # fmt: skip
        priced._take(front, results, costs)
        in_front = {var for step in front for var in step.eqn.outvars}
        # A product in front may make these store a value that they did not store before.
        if self.totals is not None and priced.stored - self.stored <= in_front:
            priced.behind = self.totals, len(front)
        return priced

    def _take(self, front: Sequence[Step], results: set, costs: CostModel) -> None:
        """Puts steps in front of those that are here."""
        self._wanted.update((result, 1.0) for result in results - self.results)
        self.results = results
        priced = [(step, price_of(step, costs)) for step in front]
        for step, price in reversed(priced):
            self._note_values(step.eqn, price)
            if self.scatters:
                self._note_share(step, price)
            self._note_reads(step.eqn, price)
        self.steps = priced + self.steps

    def _note_values(self, eqn, price: Price) -> None:
        """Says of an equation's results whether they are stored: all that reads them is known."""
        for var in eqn.outvars:
            if var in self._moved or (var in self._consumed and self._reads[var] > 1):
                if eqn.primitive.name not in DATA_MOVEMENT or not eqn.invars:
                    self.stored.add(var)
                elif not isinstance(eqn.invars[0], jex.Literal):
                    self._moved.add(eqn.invars[0])  # a view of what is stored
        if price.own_updates is not None:
            self.stored.update(var for var in eqn.outvars if var not in self.results)
        for var in eqn.outvars if price.streams else ():
            read = self._operands.get(var, frozenset())
            factors = read & self._factors
            self.stored |= factors
            if factors and len(read) > 1:  # each of them is made of sums that are stored
                self.stored.add(var)

    def _note_share(self, step: Step, price: Price) -> None:
        """Notes which part of a step's block is evaluated, and which parts of its operands."""
        share = 1.0
        if price.light:
            share = max([self._wanted.get(result, 0.0) for result in step.eqn.outvars], default=1.0)
        self.shares[id(step)] = share
        for operand in price.read:
            part = share
            if price.own_updates is not None and operand is step.eqn.invars[2]:
                part = share * price.own_updates
            if part > self._wanted.get(operand, 0.0):
                self._wanted[operand] = part
        if price.own_updates is not None:
            self._indices.add(step.eqn.invars[1])
        elif price.light and not self._indices.isdisjoint(step.eqn.outvars):
            self._indices.update(price.read)

    def _note_reads(self, eqn, price: Price) -> None:
        """Counts an equation among its operands' readers, and notes operands that it reads elsewhere than in place."""
        for operand in price.read:
            self._reads[operand] += 1
        if price.table is not None:
            self.tables.add(price.table)
        made_of: dict = {}
        if price.streams or eqn.primitive.name in SINGLE_PASS:
            made_of = {operand: frozenset((operand,)) for operand in price.read}
            self._factors.update(price.read if price.streams else ())
        elif price.light and self._operands:
            later = frozenset().union(*(self._operands.get(var, ()) for var in eqn.outvars))
            made_of = dict.fromkeys(price.read, later) if later else {}
        for operand, operands in made_of.items():
            self._operands[operand] = self._operands.get(operand, frozenset()) | operands
        name = eqn.primitive.name
        # Each index vector that is joined of others is read one number at a time.
        if price.in_place or (name == "concatenate" and eqn.outvars[0] in self._indices):
            return
        once = name in SINGLE_PASS or price.own_updates is not None or price.streams
        (self._consumed if once else self._moved).update(price.read)


def tables(requests: BlockRequests, outputs: Sequence, costs: CostModel) -> set:
    """Values that a program looks up, or scatters."""
    return PricedSteps.of(requests, outputs, costs).tables


def elements_read(requests: BlockRequests, operand, access: Access, among: Collection) -> int:
    """Elements of an input that one program reads: of a table that is only looked up, those it finds there.

    `among`: tables.
    """
    if operand not in among:
        return volume(access)
    readers = [step for step in requests.steps if operand in step.eqn.invars]
    looked_up = [
        step
        for step in readers
        if step.eqn.primitive.name in LOOKUPS and step.eqn.invars[0] is operand
    ]
    scattered = [
        step
        for step in readers
        if step.eqn.primitive.name in SCATTERS and step.eqn.invars[2] is operand
    ]
    if scattered and len(scattered) == len(readers):
        return math.ceil(
            volume(access) * min(1.0, sum(share(reader.eqn, reader.out) for reader in readers))
        )
    if len(looked_up) < len(readers) or any(
        var is operand for reader in readers for var in reader.eqn.invars[1:]
    ):
        return volume(access)
    return min(volume(access), sum(volume(step.out) for step in looked_up))


def covered(access: Access, grid: Sequence[int], shape: Sequence[int]) -> int:
    """Elements of the part of an array in which the blocks of all programs are."""
    elements = 1
    for span, extent in zip(access, shape):
        low = high = span.start.const
        if span.start.terms:
            low, high = span.start.bounds(grid.__getitem__)
        elements *= max(min(high + span.size, extent) - max(low, 0), 0)
    return elements
