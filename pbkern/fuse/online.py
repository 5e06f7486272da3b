"""Group -> Online: reductions over a long dimension run by run, where exponentials are summed and multiplied.

    m = max(x)   p = exp(x - m)   l = sum(p)   o = dot(p, v)

A run of columns gives a new maximum m'. What was summed up before was divided by exp(m) and is to be divided by exp(m'): it is
multiplied by exp(m - m'), and so is whatever is linear in p. Neither x nor p is then needed as a whole. Source: Milakov &
Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention".

Sums that need the results of these, as of gradients, are a second pass over the columns, which computes x and p again. Where
maxima are given, as for gradients with respect to keys and values, there is such a pass alone.

`find` looks at equations alone, `at` at their blocks. Emission is online_kernel.py.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.extend import core as jex

from ..affine import Affine
from .access import ELEMENTWISE, Access, NeedsWhole, Pull, Span, is_whole
from .blocks import Requests, Step, Unfusable, request, step_of, volume

# The run's number, beside the grid axes that spans count in.
RUN = 1 << 16
# Columns of a run: enough for deep products, few enough for a hundred rows of them to stay in L2.
COLUMNS = 512
EXPONENTIALS = ("exp", "exp2")

_allowed: contextvars.ContextVar[bool] = contextvars.ContextVar("sums may be taken in runs", default=True)


@contextlib.contextmanager
def runs_allowed(allowed: bool) -> Iterator[None]:
    """In a `with` block, whether sums may be taken in runs: it changes their order."""
    token = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(token)


Places = tuple  # per dimension of a value: the dimension of x that it is; None: it repeats, or has one element


@dataclass(frozen=True)
class Online:
    """What is reduced in runs.

    Attributes:
      columns: how many elements are reduced.
      level: the equation of the maximum m = reduce_max(x); None: there is no first pass.
      function: "exp", or "exp2".
      sums: equations that are linear in exp(x - m), and for each the dimension of x that each of its result's dimensions is.
      before: equations that x, and the sums' operands, are made of.
      totals: equations of the second pass.
      again: equations that their operands are made of, given m and the sums.
      after: equations that make the group's results of m, the sums and the totals.
    """

    columns: int
    level: object
    function: str
    sums: tuple[tuple[object, Places], ...]
    before: tuple
    totals: tuple
    again: tuple
    after: tuple

    @property
    def first(self) -> list:
        """The level and the sums, as values."""
        return [e.outvars[0] for e in (self.level, *(e for e, _ in self.sums)) if e is not None]

    @property
    def second(self) -> list:
        return [e.outvars[0] for e in self.totals]

    def places_of_level(self) -> Places:
        return tuple(d for d in range(self.level.invars[0].aval.ndim) if d not in self.level.params["axes"])


def find(eqns: Sequence, outputs: Sequence) -> Online | None:
    """The reductions of a group, given in program order, that runs can take; None without a contraction."""
    names = {e.primitive.name for e in eqns}
    if not _allowed.get() or "dot_general" not in names or names.isdisjoint(EXPONENTIALS):
        return None
    for level in filter(_is_long, eqns):
        x, axis = level.invars[0], int(level.params["axes"][0])
        linear = _Linear(level)
        sums = tuple(linear.sums(eqns))
        first = {e.outvars[0] for e in (level, *(e for e, _ in sums))}
        before = _ancestors(eqns, {a for e in (level, *(e for e, _ in sums)) for a in _atoms(e)}, {level.outvars[0]})
        if not sums or any(v in first for e in before for v in e.outvars):
            continue
        totals = [e for e in _totals(eqns, x).get(axis, ()) if e.outvars[0] not in first]
        found = _complete(eqns, outputs, x.aval.shape[axis], (level, linear.function, sums, before), totals)
        if found is not None:
            return found
    for root in eqns:
        if root.primitive.name == "dot_general":
            for axis, totals in _totals(eqns, root.outvars[0]).items():
                columns = root.outvars[0].aval.shape[axis]
                found = columns >= 2 * COLUMNS and _complete(eqns, outputs, columns, (None, "", (), ()), totals)
                if found and any(e.primitive.name in EXPONENTIALS for e in found.again):
                    return found
    return None


def _complete(eqns, outputs, columns: int, first_pass: tuple, totals) -> Online | None:
    """With what the second pass, if there is one, and the results are made of. first_pass: (level, function, sums, before)."""
    level, _, sums, before = first_pass
    first = {e.outvars[0] for e in (level, *(e for e, _ in sums)) if e is not None}
    needed = {v for e in _ancestors(eqns, set(outputs), first) for v in e.outvars}
    totals = [e for e in totals if e.outvars[0] in needed]
    second = {e.outvars[0] for e in totals}
    again = _ancestors(eqns, {a for e in totals for a in _atoms(e)}, first)
    products = any(e.primitive.name == "dot_general" for e in (*totals, *again, *before, *(e for e, _ in sums)))
    if not products or any(v in second for e in again for v in e.outvars):
        return None
    after = _ancestors(eqns, set(outputs), first | second)
    return Online(columns, level, first_pass[1], sums, tuple(before), tuple(totals), tuple(again), tuple(after))


def _totals(eqns: Sequence, root) -> dict[int, list]:
    """Dimension of `root` -> sums and products over it of what is made of the root element by element."""
    known, found = {root: tuple(range(root.aval.ndim))}, {}
    for e in eqns:
        places = [None if isinstance(a, jex.Literal) else known.get(a) for a in e.invars]
        if not any(places) or root in e.outvars:
            continue
        name, shape = e.primitive.name, e.outvars[0].aval.shape
        if name in ("transpose", "broadcast_in_dim", "squeeze", "reshape"):
            moved = _moved(e, places[0])
        elif name in ELEMENTWISE and len({p for p in places if p}) == 1:
            moved = next(p for p in places if p) if len(shape) == len(next(p for p in places if p)) else None
        else:
            moved = None
            for axis in _summed_over(e, places):
                found.setdefault(axis, []).append(e)
        if moved is not None:
            known[e.outvars[0]] = moved
    return found


def _summed_over(e, places: Sequence) -> list[int]:
    """The dimension of the root that a sum or a product goes over, if it is one."""
    if e.primitive.name == "reduce_sum":
        over = [places[0][d] for d in e.params["axes"] if e.invars[0].aval.shape[d] > 1]
    elif e.primitive.name == "dot_general" and sum(map(bool, places)) == 1:
        side = 0 if places[0] else 1
        over = [places[side][d] for d in e.params["dimension_numbers"][0][side] if e.invars[side].aval.shape[d] > 1]
    else:
        return []
    return over if len(over) == 1 and over[0] is not None else []


def _is_long(eqn) -> bool:
    """Whether an equation is the maximum of floats over one dimension of several runs."""
    if eqn.primitive.name != "reduce_max" or len(eqn.params["axes"]) != 1 or isinstance(eqn.invars[0], jex.Literal):
        return False
    aval = eqn.invars[0].aval
    return jnp.issubdtype(aval.dtype, jnp.floating) and aval.shape[int(eqn.params["axes"][0])] >= 2 * COLUMNS


def _atoms(eqn) -> list:
    return [a for a in eqn.invars if not isinstance(a, jex.Literal)]


def _ancestors(eqns: Sequence, wanted: set, given: set) -> list:
    """Equations that make the wanted values of the given ones."""
    wanted, found = wanted - given, []
    for e in reversed(eqns):
        if any(v in wanted for v in e.outvars):
            found.append(e)
            wanted |= set(_atoms(e)) - given
    return found[::-1]


class _Linear:
    """Follows x, its maximum and what is linear in exp(x - maximum) through a group, with the places of their dimensions.

    Any other value that is made of the maximum, or of exponentials, is `other`: it changes from run to run. So is a choice
    between exponentials and zero: of rows of which all is -inf, it leaves some NaN and some not, which sums so far cannot tell.
    """

    def __init__(self, level):
        x, m = level.invars[0], level.outvars[0]
        self.level, self.axis = level, int(level.params["axes"][0])
        dims = tuple(range(x.aval.ndim))
        self.known: dict = {x: ("x", dims), m: ("level", tuple(d for d in dims if d != self.axis))}
        self.other: set = set()
        self.function: str | None = None
        self.found: list[tuple[object, Places]] = []

    def sums(self, eqns: Sequence) -> list[tuple[object, Places]]:
        ended: set = set()  # sums, and what is made of them: it waits for all runs
        for e in eqns:
            if e is self.level:
                continue
            atoms = _atoms(e)
            if any(a in ended for a in atoms):
                ended.update(e.outvars)
                continue
            if any(a in self.other for a in atoms):
                self.other.update(e.outvars)
            elif any(a in self.known for a in atoms):
                place = self._result(e)
                if place is None:
                    self.other.update(e.outvars if any(self.known.get(a, "x")[0] != "x" for a in atoms) else ())
                elif place[0] == "sum":
                    self.found.append((e, place[1]))
                    ended.update(e.outvars)
                else:
                    self.known[e.outvars[0]] = place
        return self.found

    def _result(self, e) -> tuple[str, Places] | None:
        name, operands = e.primitive.name, [None if isinstance(a, jex.Literal) else self.known.get(a) for a in e.invars]
        first = operands[0]
        if name in ("transpose", "broadcast_in_dim", "squeeze", "reshape") and first:
            places = _moved(e, first[1])
            return places and (first[0], places)
        if name == "sub" and all(operands):
            (kind, places), (other, levels) = operands
            return ("difference", places) if (kind, other) == ("x", "level") and self._fits(levels, places) else None
        if name in EXPONENTIALS and first[0] == "difference" and self.function in (None, name):
            self.function = name
            return "weight", first[1]
        if not all(o is None or o[0] == "weight" for o in operands):
            return None
        if name in ("mul", "neg", "convert_element_type", "div") and sum(map(bool, operands)) == 1 and (first or name == "mul"):
            return "weight", next(o for o in operands if o)[1]
        if name == "reduce_sum":
            return self._summed(first[1], e.params["axes"], e.invars[0].aval.shape)
        return self._product(e, operands) if name == "dot_general" and sum(map(bool, operands)) == 1 else None

    def _fits(self, levels: Places, places: Places) -> bool:
        """Whether every element meets the maximum of its own row."""
        shape = self.level.invars[0].aval.shape
        return len(levels) == len(places) and all(a == b or a is None or shape[a] == 1 for a, b in zip(levels, places))

    def _summed(self, places: Places, axes, shape) -> tuple[str, Places] | None:
        over = [places[d] for d in axes if shape[d] > 1]
        return ("sum", tuple(p for d, p in enumerate(places) if d not in axes)) if over == [self.axis] else None

    def _product(self, e, operands) -> tuple[str, Places] | None:
        side = next(k for k, o in enumerate(operands) if o)
        contracted, batch = (pair[side] for pair in e.params["dimension_numbers"])
        made = self._summed(operands[side][1], contracted, e.invars[side].aval.shape)
        if made is None:
            return None
        places = operands[side][1]
        free = [places[d] for d in range(len(places)) if d not in (*contracted, *batch)]
        beside = [None] * (e.outvars[0].aval.ndim - len(batch) - len(free))
        return "sum", (*(places[d] for d in batch), *(free + beside if side == 0 else beside + free))


def _moved(e, places: Places) -> Places | None:
    """The places of a view's dimensions."""
    p, shape, to = e.params, e.invars[0].aval.shape, e.outvars[0].aval.shape
    match e.primitive.name:
        case "transpose":
            return tuple(places[d] for d in p["permutation"])
        case "squeeze":
            return tuple(q for d, q in enumerate(places) if d not in p["dimensions"])
        case "broadcast_in_dim":
            kept = {d: q for d, q, n in zip(p["broadcast_dimensions"], places, shape) if n == to[d]}
            return tuple(kept.get(d) for d in range(len(to)))
    if [n for n in shape if n > 1] != [n for n in to if n > 1] or p["dimensions"] is not None:
        return None
    rest = iter(q for q, n in zip(places, shape) if n > 1)
    return tuple(next(rest) if n > 1 else None for n in to)


# ---- at blocks


@dataclass(frozen=True)
class Run:
    """One run of a pass: what it reads and computes. Spans may count in RUN.

    Attributes:
      requests: of the equations that the reductions' operands are made of.
      products: the steps of the reductions on a run's columns; of the first pass the level's comes first.
    """

    requests: Requests
    products: tuple[Step, ...]

    def steps(self) -> list[Step]:
        return [*self.requests.steps, *self.products]


@dataclass(frozen=True)
class Pass:
    """`count` full runs of COLUMNS columns, and a shorter last one, if any."""

    full: Run
    count: int
    rest: Run | None

    @property
    def kept(self) -> list[Access]:
        """The block of each reduction's result."""
        return [s.out for s in self.full.products]


@dataclass(frozen=True)
class Blocks:
    """An Online at the blocks of one program; `columns`: of a run; `after`: what follows the passes."""

    online: Online
    columns: int
    first: Pass | None
    second: Pass | None
    after: Requests

    def parts(self) -> dict:
        """Value -> the part of its block that a run holds."""
        steps = [s for p in (self.first, self.second) if p for s in p.full.steps()]
        read = ((a, access) for s in steps for a, access in zip(s.eqn.invars, s.pull.inputs) if not isinstance(a, jex.Literal))
        return dict.fromkeys((a for a, access in read if access and moves(access)), self.columns / self.online.columns)

    def repeated(self) -> set:
        """ids of equations that both passes compute."""
        if self.first is None or self.second is None:
            return set()
        both = [{id(s.eqn) for s in p.full.requests.steps if moves(s.out)} for p in (self.first, self.second)]
        return both[0] & both[1]


def moves(access: Access) -> bool:
    """Whether a block goes along with the runs."""
    return any(RUN in s.start.symbols for s in access)


def at(online: Online, outputs: Sequence[tuple[object, Access]]) -> Blocks | None:
    """The runs of a program that makes these blocks; None where they do not suit."""
    try:
        after = request(online.after, outputs)
        asked = [after]
        second = _pass(online, online.totals, online.again, [_only(asked, v) for v in online.second])
        first = None
        if second is not None:
            asked.append(second.full.requests)
        if online.level is not None:
            sums = [e for e, _ in online.sums]
            kept = [_only(asked, v) for v in online.first]
            first = _pass(online, sums, online.before, kept[1:], online.level, kept[0])
            level = first.kept[0]
            for access, (_, places) in zip(first.kept[1:], online.sums):
                _check_aligned(level, online.places_of_level(), access, places)
    except (NeedsWhole, Unfusable):
        return None
    left = {id(e) for e in online.after}
    if any(id(s.eqn) in left and _has_rows(s.out) for p in (first, second) if p for s in p.full.requests.steps):
        return None
    return Blocks(online, COLUMNS, first, second, after)


def _has_rows(access: Access) -> bool:
    """Whether a run's block is more than a vector along its columns, such as their positions: results need no such value."""
    return moves(access) and volume(access) > COLUMNS


def _only(asked: Sequence[Requests], v) -> Access | None:
    """The block that is asked for of a value; None for a value that nothing asks for. Raises Unfusable for several."""
    hulls = list(dict.fromkeys(h for r in asked for h in r.hulls.get(v, ())))
    if len(hulls) > 1:
        raise Unfusable("a reduction in runs is needed at several places")
    return hulls[0] if hulls else None


def _pass(
    online: Online, sums: Sequence, eqns: Sequence, kept: Sequence[Access | None], level=None, of_level: Access | None = None
) -> Pass | None:
    """The runs that make these sums, and the level's. None for no sums at all. Raises Unfusable."""
    if not sums:
        return None
    if None in kept:
        raise Unfusable("a reduction in runs is not needed")
    count, rest = divmod(online.columns, COLUMNS)
    spans = [Span(Affine.symbol(RUN, COLUMNS), COLUMNS), Span(Affine((), count * COLUMNS), rest)]
    full, last = (_run(sums, eqns, kept, s, level, of_level) if s.size else None for s in spans)
    return Pass(full, count, last)


def _run(sums: Sequence, eqns: Sequence, kept: Sequence[Access], columns: Span, level, of_level: Access | None) -> Run:
    """What the columns of one run are made of."""
    products = [_narrowed(e, access, columns) for e, access in zip(sums, kept)]
    wanted = [(a, access) for s in products for a, access in zip(s.eqn.invars, s.pull.inputs) if not isinstance(a, jex.Literal)]
    requests = request(eqns, wanted)
    if level is not None:
        inner = _only([requests], level.outvars[0])
        if inner is None or of_level not in (None, inner):
            raise Unfusable("a maximum in runs is needed at several places")
        products.insert(0, _narrowed(level, inner, columns))
        requests = request(eqns, [*wanted, (level.invars[0], products[0].pull.inputs[0])])
        _only([requests], level.outvars[0])
    made = {v for s in requests.steps for v in s.eqn.outvars}
    read = [(v, h) for v, hulls in requests.hulls.items() if v not in made for h in hulls]  # also by the reductions themselves
    return Run(replace(requests, inputs=read), tuple(products))


def _narrowed(eqn, out: Access, columns: Span) -> Step:
    """A reduction's step on some columns. Raises Unfusable where it does more than bind its operation."""
    step = step_of(eqn, out)
    pulled = step.pull
    if pulled.compute is not None or step.out != out:
        raise Unfusable("a reduction in runs would be computed otherwise")
    name, p = eqn.primitive.name, eqn.params
    over = p["dimension_numbers"][0] if name == "dot_general" else (p["axes"],)
    inputs = []
    for dims, access, a in zip(over, pulled.inputs, eqn.invars):
        long = [d for d in dims if a.aval.shape[d] > 1]
        if len(long) != 1 or not is_whole(access[long[0]], a.aval.shape[long[0]]):
            raise Unfusable("a reduction in runs is not over one dimension")
        inputs.append(tuple(columns if d == long[0] else s for d, s in enumerate(access)))
    return Step(eqn, out, Pull(tuple(inputs), pulled.params))


def _check_aligned(level: Access, of_level: Places, access: Access, places: Places) -> None:
    """Raises Unfusable unless each row of a block of sums belongs to one row of the level's block."""
    spans = dict(zip(of_level, level))
    alike = all(p is None or spans[p] == s or s.size == 1 == spans[p].size for p, s in zip(places, access))
    if not alike or not all(p in places or spans[p].size == 1 for p in of_level):
        raise Unfusable("sums in runs have other blocks than their maximum")
