"""Steps of a kernel with their prices: what a program stores, looks up, and reads of its inputs.

The same for every target.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from jax.extend import core as jex

from pbkern.core.ops.scatter import SCATTERS
from pbkern.fuse.access.blocks import BlockRequests, Step, volume
from pbkern.fuse.access.rules import Access
from pbkern.fuse.access.scatter import share

from .kinds import LOOKUPS, SINGLE_PASS, VIEWS
from .model import CostModel, Price, price_of


@dataclass(frozen=True)
class PricedSteps:
    """The steps of a kernel, each with its price."""

    steps: list[tuple[Step, Price]]

    @classmethod
    def of(cls, requests: BlockRequests, costs: CostModel) -> PricedSteps:
        return cls([(step, price_of(step, costs)) for step in requests.steps])

    @cached_property
    def scatters(self) -> bool:
        return any(price.own_updates is not None for _, price in self.steps)

    def evaluated_shares(self, outputs: Sequence[tuple[object, Access]]) -> dict[int, float]:
        """id of a step -> the part of its block that a program evaluates, where that is not all.

        A program evaluates of updates that a scatter reads only its own.
        """
        wanted = {output: 1.0 for output, _ in outputs}
        shares: dict[int, float] = {}
        for step, price in reversed(self.steps) if self.scatters else ():
            made = step.eqn.outvars
            share = (
                max([wanted.get(result, 0.0) for result in made], default=1.0)
                if price.light
                else 1.0
            )
            shares[id(step)] = share
            for operand in price.read:
                part = (
                    share * price.own_updates
                    if price.own_updates is not None and operand is step.eqn.invars[2]
                    else share
                )
                if part > wanted.get(operand, 0.0):
                    wanted[operand] = part
        return shares

    def stored_values(self, results: set) -> set:
        """Values that a program keeps in scratch.

        Lowering merges equal iteration spaces into one nest: a value is stored only where a
        consumer reads it in another order or from several places (windows, contractions,
        reductions, shifted slices).
        """
        moving = [(step.eqn, price) for step, price in self.steps if not price.in_place]
        stored = {
            var
            for mover, price in moving
            if price.own_updates is not None
            for var in mover.outvars
            if var not in results
        }
        if not moving:
            return stored
        makers = {var: step.eqn for step, _ in self.steps for var in step.eqn.outvars}
        readers = Counter(operand for _, price in self.steps for operand in price.read)
        chosen_by = self.index_values()
        for eqn, price in moving:
            name = eqn.primitive.name
            if name == "concatenate" and eqn.outvars[0] in chosen_by:
                continue  # each index vector is read one number at a time
            once = name in SINGLE_PASS or price.own_updates is not None
            for atom in price.read:
                if once and readers[atom] == 1:
                    continue  # reduced or scattered while it is made
                while not isinstance(atom, jex.Literal) and atom in makers:
                    maker = makers[atom]
                    if maker.primitive.name not in VIEWS or not maker.invars:
                        stored.add(atom)
                        break
                    atom = maker.invars[0]  # a view of what is stored
        return stored

    def index_values(self) -> set:
        """The indices of scatters, and what they are made of by arithmetic and views."""
        found: set = set()
        for step, price in reversed(self.steps) if self.scatters else ():
            if price.own_updates is not None:
                found.add(step.eqn.invars[1])
            elif price.light and not found.isdisjoint(step.eqn.outvars):
                found.update(price.read)
        return found

    def tables(self) -> set:
        """Values that a program looks up, or scatters."""
        return {price.table for _, price in self.steps if price.table is not None}


def tables(requests: BlockRequests, costs: CostModel) -> set:
    """Values that a program looks up, or scatters."""
    return PricedSteps.of(requests, costs).tables()


def elements_read(requests: BlockRequests, operand, access: Access, among: Collection) -> int:
    """Elements of an input that one program reads: of a table that is only looked up, those it finds there.

    `among`: tables.
    """
    if operand not in among:
        return volume(access)
    looked_up = [
        step
        for step in requests.steps
        if step.eqn.primitive.name in LOOKUPS and step.eqn.invars[0] is operand
    ]
    scattered = [
        step
        for step in requests.steps
        if step.eqn.primitive.name in SCATTERS and step.eqn.invars[2] is operand
    ]
    readers = [step for step in requests.steps if any(var is operand for var in step.eqn.invars)]
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
    found = 1
    for span, extent in zip(access, shape):
        low, high = span.start.bounds(grid.__getitem__)
        found *= max(min(high + span.size, extent) - max(low, 0), 0)
    return found
