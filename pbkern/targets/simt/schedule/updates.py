"""Loops that update elements at places that are data -> their steps, mapped to teams of threads.

for %i < 4000:                                         team t of T takes steps t, t + T, ...:
  let %s = %a1[%i]                                       let %s = %a1[%i]
  nest [d<64]                                    ->      thread d of it, as one atomic operation:
    %a2[%s, d] = add(%a2[%s, d], %a0[%i, d])               %a2[%s, d] += %a0[%i, d]

The order of the steps is lost, so that sums of floats are reassociated, differently in each run. No step waits for
another one: what they add depends on nothing that they update.
"""

from __future__ import annotations

import math

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest import effects
from pbkern.lower.nest.context import reports
from pbkern.lower.nest.ir import Expr, For, Gather, If, Let, Load, Nest, Op, Stmt, Store, nodes

from .policy import ThreadPolicy
from .threads import along_lanes

# Primitive of an update -> what MLIR calls it: of floats, of integers, of integers without a sign. Source: PTX ISA 8.7,
# section 9.7.13.6, atom: float32 and float64 are added only.
ATOMICS = {
    "add": {"f": "addf", "i": "addi", "u": "addi"},
    "max": {"i": "maxs", "u": "maxu"},
    "min": {"i": "mins", "u": "minu"},
    "and": {"i": "andi", "u": "andi"},
    "or": {"i": "ori", "u": "ori"},
}
# Bytes of elements that are updated by one operation. Source: as ATOMICS.
ATOMIC_BYTES = (4, 8)
# Points of one step, for each thread of a block, that its team takes at a time at most. Source: registers for their values,
# beside those of other steps.
MOST_POINTS = 8
# Steps that a team has under way: their updates come behind the loads of all of them. Source: Little's law; 2,048 threads
# with 4 loads of 4 bytes are the 32 KB that a multiprocessor of an H100 needs under way.
STEPS_UNDER_WAY = 4
# Threads of a block whose kernel scatters: more than of others, for one block may have all updates of its results.
UPDATE_THREADS = 512


@dataclass(frozen=True)
class Updates:
    """A loop of updates.

    Attributes:
      loops: counters and trips of loops, one in the other, the outer first.
      scalars: what each thread computes for its own step. test: name of the one that has to be 1; "" without.
      nest, store: the update, of which there is one. value: what it combines with the element. kind: see ATOMICS.
      dims: the nest's, slowest first. team: threads that take one step.
    """

    loops: tuple[tuple[str, int], ...]
    scalars: tuple[Let, ...]
    test: str
    nest: Nest
    store: Store
    value: Expr
    kind: str
    dims: tuple[tuple[str, int], ...]
    team: int

    @property
    def steps(self) -> int:
        return math.prod(trips for _, trips in self.loops)

    @property
    def points(self) -> int:
        return math.prod(size for _, size in self.dims)


def updates_of(stmt: Stmt, policy: ThreadPolicy) -> Updates | None:
    """A loop as updates; None where it is none."""
    if not policy.relaxed_atomics or not isinstance(stmt, For):
        return None
    loops = [stmt]
    while len(loops[-1].body) == 1 and isinstance(inner := loops[-1].body[0], For):
        loops.append(inner)
    *scalars, last = loops[-1].body
    lets = tuple(scalar for scalar in scalars if isinstance(scalar, Let))
    names, test = {scalar.name for scalar in lets}, ""
    if isinstance(last, If) and last.index in names and len(last.branches) == 2:
        otherwise, branch = last.branches
        if not otherwise and len(branch) == 1:
            test, last = last.index, branch[0]
    counters = tuple((loop.counter, loop.trips) for loop in loops if isinstance(loop.trips, int))
    if len(lets) < len(scalars) or not isinstance(last, Nest) or len(counters) < len(loops):
        return None
    update = _update(last, policy)
    if update is None:
        return None
    store, value, kind = update
    symbols = frozenset().union(*(place.symbols for place in store.index))
    if not symbols & names or store.buf.root in effects.read(lets):
        return None
    dims = along_lanes(last, last.dims)
    points = math.prod(dims.values())
    team = min(1 << (points - 1).bit_length(), policy.threads) if points else 0
    empty = any(trips == 0 for _, trips in counters)
    if not team or empty or policy.threads % team or points > MOST_POINTS * team:
        return None
    return Updates(counters, lets, test, last, store, value, kind, tuple(dims.items()), team)


def _update(nest: Nest, policy: ThreadPolicy) -> tuple[Store, Expr, str] | None:
    """(the store of a nest that updates elements, what it combines with them, the operation's name)."""
    if nest.reductions or nest.rdims or nest.by is not None or nest.ordered or nest.moves():
        return None
    if len(nest.stores) != 1 or nest.stores[0].mask is not None:
        return None
    (store,) = nest.stores
    buf, update = store.buf, store.value
    if buf.circular or buf.layout is not None or buf.dtype.itemsize not in ATOMIC_BYTES:
        return None
    if not isinstance(update, Op) or len(update.args) != 2 or update.dtype != buf.dtype:
        return None
    kind = ATOMICS.get(update.info.primitive, {}).get(buf.dtype.kind)
    if kind is None or (buf.dtype.kind == "f" and not policy.reassociate):
        return None
    olds = [arg for arg in update.args if _is_element(arg, store)]
    if len(olds) != 1:
        return None
    value = update.args[1 - update.args.index(olds[0])]
    loads = (node for node in nodes([value]) if isinstance(node, Load | Gather))
    if any(load.buf.root is buf.root for load in loads) or reports(value):
        return None
    return store, value, kind


def _is_element(expr: Expr, store: Store) -> bool:
    """Whether an operand is the element that is stored to."""
    return (
        isinstance(expr, Load) and expr.buf is store.buf and tuple(expr.index) == tuple(store.index)
    )
