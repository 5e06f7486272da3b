"""Groups of equations that are alike, as those of equal layers, are searched once.

What a search (schedule.py) finds depends on what the equations do, on the types of values and on which value is whose operand,
and on nothing else. A group of which all that is like an earlier one's gets the blocks found for that: one price instead of
dozens. Of 1180 searches for the gradient of eight equal layers, 183 are left. What groups try on their way there is priced for
each of them still.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
from jax.extend import core as jex

from ..contexts import during
from ..machine import Machine
from .blocks import Unfusable
from .cost import Cost
from .online import runs_allowed
from .schedule import Schedule, root_first, schedule_at, search, tall_blocks


@dataclass(frozen=True)
class _Found:
    """What a search came to: blocks of the root and whether reductions are taken in runs; none, or why there cannot be any."""

    blocks: tuple[int, ...] | None = None
    online: bool = False
    why: str = ""


@dataclass
class _Searches:
    """Those of one plan. `kinds`: what an equation does, by number; `kind_of`: id -> (equation, its kind)."""

    kinds: dict = field(default_factory=dict)
    kind_of: dict = field(default_factory=dict)
    found: dict[tuple, _Found] = field(default_factory=dict)

    def key(self, eqns: Sequence, outputs: Sequence) -> tuple:
        """Equal for groups that differ in nothing but the names of values."""
        names: dict = {}
        key: list[int] = []
        for e in eqns:
            key.append(self._kind(e))
            key += [names.setdefault(a, len(names)) for a in e.invars if not isinstance(a, jex.Literal)]
            key += [names.setdefault(v, len(names)) for v in e.outvars]
        return (*key, *(names[v] for v in outputs))

    def _kind(self, eqn) -> int:
        if id(eqn) not in self.kind_of:
            self.kind_of[id(eqn)] = eqn, self.kinds.setdefault(_description(eqn), len(self.kinds))
        return self.kind_of[id(eqn)][1]


def _description(eqn) -> tuple:
    """Operation, parameters, types and literals; of parameters that cannot be compared, the equation itself."""
    params = tuple((name, type(value), value) for name, value in sorted(eqn.params.items()))
    types = tuple(v.aval for v in (*eqn.invars, *eqn.outvars))
    literals = tuple((k, np.asarray(a.val).tobytes()) for k, a in enumerate(eqn.invars) if isinstance(a, jex.Literal))
    found = (eqn.primitive, params, types, literals)
    try:
        hash(found)
    except TypeError:
        return (id(eqn),)
    return found


_current: contextvars.ContextVar[_Searches | None] = contextvars.ContextVar("searches of one plan", default=None)


def searches_remembered() -> AbstractContextManager:
    """In a `with` block, groups that are alike are searched once. The machine stays the same within."""
    return during(_current, _Searches())


def search_once(
    eqns: Sequence, outputs: Sequence, machine: Machine, accept: Callable[[Cost], bool] | None = None
) -> Schedule:
    """What `search` finds. Raises as that does. Results of one `accept` are told apart from those of another."""
    outputs = root_first(outputs)
    return _once((accept,), eqns, outputs, machine, lambda: search(eqns, outputs, machine, accept))


def tall_blocks_once(eqns: Sequence, found: Schedule, machine: Machine) -> Schedule | None:
    """What `tall_blocks` finds."""
    outputs = [v for v, _ in found.outputs]
    return _once(("tall", found.online is None), eqns, outputs, machine, lambda: tall_blocks(eqns, found, machine))


def _once(what: tuple, eqns: Sequence, outputs: Sequence, machine: Machine, look: Callable[[], Schedule | None]):
    """look(), or its result for an earlier group that is like this one. `outputs`: as they are placed."""
    searches = _current.get()
    if searches is None:
        return look()
    key = (*what, *searches.key(eqns, outputs))
    known = searches.found.get(key)
    if known is None:
        try:
            made = look()
        except Unfusable as e:
            searches.found[key] = _Found(why=str(e))
            raise
        searches.found[key] = _Found() if made is None else _Found(made.blocks, made.online is not None)
        return made
    if known.why:
        raise Unfusable(known.why)
    if known.blocks is None:
        return None
    with nullcontext() if known.online else runs_allowed(False):
        return schedule_at(eqns, outputs, known.blocks, machine)
