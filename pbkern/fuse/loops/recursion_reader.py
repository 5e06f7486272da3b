"""Finds the recursions that `lax.associative_scan` traces, and their combining functions.

JAX has no primitive for the function: it traces a recursion (`_scan` in its module of loops). A level of n elements along an
axis is

    reduced = f(x[0:-1:2], x[1::2])                    n // 2 elements: the next level's x
    odd     = the next level's result, or `reduced` where that has one element
    even    = concatenate(x[0:1], f(odd[:-1], x[2::2]))
    result  = pad(even) + pad(odd)                     interleaved

Each of x, odd and result is a tuple of arrays where f combines tuples. All calls of f must be equal but for the length along
the axis. Where the caller reads some arrays of the tuple only, equations that nothing reads are gone at every level. A
recursion of which something else reads an intermediate value is none: the reverse derivative does so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from jax.extend import core as jex

from pbkern._jax import bind_again, source_context
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import atoms, leading_to
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.fuse.access import dimension_map


@dataclass(frozen=True, eq=False)
class _Leaf:
    """One of the arrays of a level.

    Attributes:
      x: the level's operand.
      odd: the next level's result, and even: f(odd[:-1], x[2::2]); None where they are dead.
      result: their elements in turn; eqns: the equations that interleave them. None and () where the result is dead.
    """

    x: jex.Var
    odd: jex.Var | None = None
    even: jex.Var | None = None
    result: jex.Var | None = None
    eqns: tuple = ()


@dataclass(frozen=True, eq=False)
class Combination:
    """A combining function, by one of its calls.

    Attributes:
      left, right: per leaf its operands, None where it reads none; outputs: its results.
      eqns: the equations between them; params: theirs for one element along the axis.
      varying: values that depend on the operands.
      consts: values that the equations read beside the operands.
    """

    left: tuple
    right: tuple
    outputs: tuple
    eqns: tuple
    varying: frozenset
    params: tuple[dict, ...] = ()
    consts: tuple = ()

    def __call__(self, left: Sequence, right: Sequence, values: dict) -> list:
        """The results for one element along the axis. values: of the constants."""
        env = dict(zip((*self.left, *self.right), (*left, *right)))

        def read(atom):
            if isinstance(atom, jex.Literal):
                return atom.val
            return env[atom] if atom in env else values[atom]

        for eqn, params in zip(self.eqns, self.params):
            with source_context(eqn):
                operands = [read(var) for var in eqn.invars]
                env.update(zip(eqn.outvars, bind_again(eqn, operands, params)))
        return [read(output) for output in self.outputs]


@dataclass(frozen=True, eq=False)
class Recursion:
    """A recursion that may become a loop.

    Attributes:
      axis: along which it combines; is_reversed: whether from the last element of the operands to the first.
      operands: per leaf the array; results: the value of which the loop takes the place, None where it is dead.
    """

    axis: int
    is_reversed: bool
    operands: tuple
    results: tuple
    combination: Combination


def independent_axes(recursion: Recursion) -> list[int]:
    """Further axes of the operands along which f combines each element by itself, with elements at the same place."""
    shapes = [array_aval(x).shape for x in recursion.operands]
    return [
        axis
        for axis in range(min(map(len, shapes)))
        if axis != recursion.axis
        and len({shape[axis] for shape in shapes}) == 1
        and _is_elementwise(axis, recursion.combination, is_combined=False)
    ]


def recursions(jaxpr: jex.Jaxpr, fewest: int) -> Iterator[Recursion]:
    """The recursions of a jaxpr, outermost levels only.

    fewest: elements of the shortest one along its axis; at least 8, with which two levels have more than one element, and sizes
    of different calls tell which one is the axis's.
    """
    graph, inside = _Graph(jaxpr), set()
    for eqn in reversed(jaxpr.eqns):
        if id(eqn) in inside or (level := _interleaved(eqn, graph)) is None:
            continue
        axis, leaf = level
        if array_aval(eqn.outvars[0]).shape[axis] < fewest:
            continue
        try:
            recursion, eqns = _RecursionReader(graph, axis).recursion(leaf)
        except _Differs:
            continue
        inside |= {id(inner) for inner in eqns}
        yield recursion


class _Differs(Exception):
    """Equations are not what the recursion would be."""


class _Graph:
    """Who makes and who reads each value of a jaxpr."""

    def __init__(self, jaxpr: jex.Jaxpr) -> None:
        self.jaxpr = jaxpr
        self.producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.readers: dict = {}
        for eqn in jaxpr.eqns:
            for var in eqn.invars:
                if isinstance(var, jex.Var):
                    self.readers.setdefault(var, []).append(eqn)
        self.outputs = {var for var in jaxpr.outvars if isinstance(var, jex.Var)}

    def producer(self, var, name: str):
        """The equation of this name that makes a value, else None."""
        eqn = None if isinstance(var, jex.Literal) else self.producers.get(var)
        return eqn if eqn is not None and eqn.primitive.name == name else None


def _interleaved(eqn, graph: _Graph) -> tuple[int, _Leaf] | None:
    """The axis and the leaf whose result an equation makes."""
    if eqn.primitive.name not in ("add", "or"):
        return None
    pads = [graph.producer(var, "pad") for var in eqn.invars]
    if None in pads or any(not _is_zero(pad.invars[1]) for pad in pads):
        return None
    even, odd = (pad.params["padding_config"] for pad in pads)
    axes = [axis for axis, (_, _, interior) in enumerate(even) if interior]
    if len(axes) != 1:
        return None
    (axis,) = axes
    n = eqn.outvars[0].aval.shape[axis]
    plain = ((0, 0, 0),)
    for config, ends in ((even, (0, 1 - n % 2, 1)), (odd, (1, n % 2, 1))):
        if tuple(config) != plain * axis + (ends,) + plain * (len(config) - axis - 1):
            return None
    joined = graph.producer(pads[0].invars[0], "concatenate")
    if joined is None or len(joined.invars) != 2 or joined.params["dimension"] != axis:
        return None
    first = graph.producer(joined.invars[0], "slice")
    if first is None or _part(first, axis) != (0, 1, 1) or first.invars[0].aval.shape[axis] != n:
        return None
    eqns = (eqn, *pads, joined, first)
    return axis, _Leaf(first.invars[0], pads[1].invars[0], joined.invars[1], eqn.outvars[0], eqns)


def _is_zero(atom) -> bool:
    return isinstance(atom, jex.Literal) and not atom.val


def _part(eqn, axis: int) -> tuple[int, int, int] | None:
    """Start, limit and stride of a slice along an axis; None without that axis, or where it is no whole one of others."""
    params, shape = eqn.params, eqn.invars[0].aval.shape
    if axis >= len(shape):
        return None
    strides = params["strides"] or (1,) * len(shape)
    for other, size in enumerate(shape):
        whole = (params["start_indices"][other], params["limit_indices"][other], strides[other])
        if other != axis and whole != (0, size, 1):
            return None
    return params["start_indices"][axis], params["limit_indices"][axis], strides[axis]


class _RecursionReader:
    """Reads one recursion from its outermost level inwards."""

    def __init__(self, graph: _Graph, axis: int) -> None:
        self.graph, self.axis = graph, axis
        self.eqns: dict = {}  # id -> equation of the recursion
        # id of an equation of the outermost call -> parameters of its equal in a shorter one
        self.equals: dict = {}

    def recursion(self, leaf: _Leaf) -> tuple[Recursion, list]:
        levels = [self.level([leaf])]
        while (n := self.reduced_size(levels[-1])) > 1:
            below: list[_Leaf | None] = [
                None if each.odd is None else self.leaf_of(each.odd, n) for each in levels[-1]
            ]
            levels.append(self.level(below))
        if any(len(level) != len(levels[0]) for level in levels):
            raise _Differs
        outputs: list[list] = [[leaf.x for leaf in level] for level in levels[1:]]
        outputs.append([leaf.odd for leaf in levels[-1]])
        f = self.call(levels[0], outputs[0])
        for level, reduced in zip(levels, outputs):
            self.check(f, level, reduced)
        f = self.without_constants(f)
        self.note(*f.eqns)
        self.refuse_other_readers(levels[0])
        if not _is_elementwise(self.axis, f):
            raise _Differs
        operands, interleaved = zip(*((each.x, each.result) for each in levels[0]))
        reverses = [self.graph.producer(x, "rev") for x in operands]
        turned = [None if var is None else self.reversed_result(var) for var in interleaved]
        is_reversed = all(eqn is not None and self.is_reverse(eqn) for eqn in reverses) and all(
            (var is None) == (result is None) for var, result in zip(interleaved, turned)
        )
        if is_reversed:
            operands, interleaved = tuple(eqn.invars[0] for eqn in reverses), tuple(turned)
        recursion = Recursion(self.axis, is_reversed, operands, interleaved, f)
        return recursion, list(self.eqns.values())

    def is_reverse(self, eqn) -> bool:
        return eqn.primitive.name == "rev" and tuple(eqn.params["dimensions"]) == (self.axis,)

    def reversed_result(self, var):
        """The value that is another one in reverse, where nothing else reads that one."""
        readers = self.graph.readers.get(var, ())
        is_alone = len(readers) == 1 and var not in self.graph.outputs
        return readers[0].outvars[0] if is_alone and self.is_reverse(readers[0]) else None

    def reduced_size(self, level: Sequence[_Leaf]) -> int:
        return self.size(level[0].x) // 2

    def size(self, var) -> int:
        return var.aval.shape[self.axis]

    def note(self, *eqns) -> None:
        self.eqns.update((id(eqn), eqn) for eqn in eqns)

    def leaf_of(self, var, n: int) -> _Leaf:
        """The leaf whose result a value of n elements along the axis is."""
        eqn = self.graph.producers.get(var)
        level = None if eqn is None else _interleaved(eqn, self.graph)
        if level is None or level[0] != self.axis or self.size(var) != n:
            raise _Differs
        self.note(*level[1].eqns)
        return level[1]

    def level(self, known: Sequence[_Leaf | None]) -> tuple[_Leaf, ...]:
        """All leaves of a level, the known ones first; None in their place where the level above has one whose `odd` is dead.

        What f reads for one leaf leads to the others. One may be dead: it is what remains.
        """
        leaves = {leaf.x: leaf for leaf in known if leaf is not None}
        n, pending = self.size(next(iter(leaves))), list(leaves.values())
        xs, odds = dict.fromkeys(leaves), {leaf.odd: None for leaf in pending}
        while pending:
            leaf = pending.pop()
            self.note(*leaf.eqns)
            self.operands_of_even(leaf.even, n, xs, odds)
            new = {x: beside for x in xs if x not in leaves for beside in self.leaf_that_reads(x)}
            leaves |= new
            odds |= dict.fromkeys(beside.odd for beside in new.values())
            pending += new.values()
        live = {leaf.odd for leaf in leaves.values()}
        dead = [x for x in xs if x not in leaves]
        dead_odds = [odd for odd in odds if odd not in live]
        if len(dead) > 1 or len(dead_odds) > len(dead):
            raise _Differs
        remaining = [_Leaf(x, dead_odds[0] if dead_odds else None) for x in dead]
        ordered: list[_Leaf] = []
        for place in known:
            if place is None and not remaining:
                raise _Differs
            ordered.append(remaining.pop() if place is None else place)
        return (*ordered, *(leaf for leaf in leaves.values() if leaf not in ordered), *remaining)

    def operands_of_even(self, even, n: int, xs: dict, odds: dict) -> None:
        """Adds what f(odd[:-1], x[2::2]) reads to `xs` and `odds`."""
        pending, seen = [even], set()
        while pending:
            var = pending.pop()
            if isinstance(var, jex.Literal) or var in seen:
                continue
            seen.add(var)
            eqn = self.graph.producers.get(var)
            if eqn is None:
                continue
            if eqn.primitive.name == "slice":
                part, operand = _part(eqn, self.axis), eqn.invars[0]
                if part == (2, n, 2) and self.size(operand) == n:
                    xs[operand] = None
                    continue
                if part == (0, n // 2 - 1, 1) and self.size(operand) == n // 2:
                    odds[operand] = None
                    continue
                if part is None or part != (0, self.size(operand), 1):
                    continue  # of another level
            if n % 2 and _interleaved(eqn, self.graph) is not None:
                odds[var] = None
                continue
            pending += eqn.invars

    def leaf_that_reads(self, x) -> list[_Leaf]:
        """The leaf of an operand, by the equations that read it; none where its result is dead."""
        value, n = x, self.size(x)
        for name, part in (("slice", (0, 1, 1)), ("concatenate", None), ("pad", None)):
            readers = [
                eqn
                for eqn in self.graph.readers.get(value, ())
                if eqn.primitive.name == name and (part is None or _part(eqn, self.axis) == part)
            ]
            if len(readers) != 1:
                return []
            value = readers[0].outvars[0]
        results = [eqn.outvars[0] for eqn in self.graph.readers.get(value, ())]
        return [self.leaf_of(result, n) for result in results]

    def call(self, level: Sequence[_Leaf], outputs: Sequence) -> Combination:
        """The call of f on a level's pairs, with these results, and all equations that lead to them."""
        n = self.size(level[0].x)
        left = [self.slice_of(leaf.x, (0, n - 1, 2)) for leaf in level]
        right = [self.slice_of(leaf.x, (1, n, 2)) for leaf in level]
        given = {var for var in (*left, *right) if var is not None}
        computed = [var for var in outputs if var not in given]
        eqns = tuple(leading_to(self.graph.jaxpr.eqns, computed, given))
        varying = set(given)
        for eqn in eqns:
            if not varying.isdisjoint(atoms(eqn)):
                varying.update(eqn.outvars)
        if not varying.issuperset(outputs):
            raise _Differs
        return Combination(tuple(left), tuple(right), tuple(outputs), eqns, frozenset(varying))

    def without_constants(self, f: Combination) -> Combination:
        """f without the equations that have no equal in a shorter call: those of values that all calls read."""
        eqns = tuple(eqn for eqn in f.eqns if id(eqn) in self.equals)
        known = {*f.left, *f.right, *(var for eqn in eqns for var in eqn.outvars)}
        reads = {var: None for eqn in eqns for var in eqn.invars if isinstance(var, jex.Var)}
        consts = tuple(var for var in reads if var not in known)
        params = tuple(self.params_of_one(eqn) for eqn in eqns)
        return replace(f, eqns=eqns, params=params, consts=consts)

    def params_of_one(self, eqn) -> dict:
        """An equation's parameters for one element along the axis: sizes that are another in another call become 1."""
        return {
            name: tuple(1 if x != y else x for x, y in zip(param, self.equals[id(eqn)][name]))
            if isinstance(param, tuple)
            else param
            for name, param in eqn.params.items()
        }

    def slice_of(self, x, part: tuple):
        """The slice of an operand that f reads; None where it reads none."""
        for eqn in self.graph.readers.get(x, ()):
            if eqn.primitive.name == "slice" and _part(eqn, self.axis) == part:
                self.note(eqn)
                return eqn.outvars[0]
        return None

    def check(self, f: Combination, level: Sequence[_Leaf], outputs: Sequence) -> None:
        """Refuses a level whose calls of f differ from f, which is the outermost level's on pairs.

        outputs: results of the level's call on pairs.
        """
        n, top = self.size(level[0].x), self.size(f.outputs[0])
        if n // 2 < top:
            firsts = {var: (level[k].x, (0, n - 1, 2)) for k, var in enumerate(f.left)}
            seconds = {var: (level[k].x, (1, n, 2)) for k, var in enumerate(f.right)}
            _Match(self, f, (n // 2, top), firsts | seconds).all(f.outputs, outputs)
        odds = {var: (level[k].odd, (0, (n - 1) // 2, 1)) for k, var in enumerate(f.left)}
        seconds = {var: (level[k].x, (2, n, 2)) for k, var in enumerate(f.right)}
        evens = [leaf.even for leaf in level]
        _Match(self, f, ((n - 1) // 2, top), odds | seconds).all(f.outputs, evens)

    def refuse_other_readers(self, top: Sequence[_Leaf]) -> None:
        """Refuses a recursion of which something else reads intermediate values."""
        results = {leaf.result for leaf in top}
        for eqn in self.eqns.values():
            for var in eqn.outvars:
                if var in results:
                    continue
                readers = self.graph.readers.get(var, ())
                if var in self.graph.outputs or any(
                    id(reader) not in self.eqns for reader in readers
                ):
                    raise _Differs


class _Match:
    """Compares a call of the combining function with another one.

    Attributes:
      operands: parameter of f -> the array, and the part of it along the axis that the call reads.
      lengths: of this call and of f along the axis.
    """

    def __init__(
        self, reader: _RecursionReader, f: Combination, lengths: tuple, operands: dict
    ) -> None:
        self.reader, self.lengths, self.varying = reader, lengths, f.varying
        self.operands = {var: source for var, source in operands.items() if var is not None}
        self.producers = {var: eqn for eqn in f.eqns for var in eqn.outvars}
        self.equal: dict = {}

    def all(self, wanted: Sequence, values: Sequence) -> None:
        """Compares those that are not dead in the call."""
        for expected, value in zip(wanted, values, strict=True):
            if value is not None:
                self.value(expected, value)

    def value(self, expected, value) -> None:
        if isinstance(expected, jex.Literal):
            same = isinstance(value, jex.Literal) and value.val == expected.val
            if not same or value.aval != expected.aval:
                raise _Differs
            return
        if expected in self.equal:
            if self.equal[expected] is not value:
                raise _Differs
            return
        self.equal[expected] = value
        if expected in self.operands:
            array, part = self.operands[expected]
            self.operand(array, part, value)
        elif expected is value and expected not in self.varying:
            return
        elif expected in self.producers:
            self.equation(self.producers[expected], self.reader.graph.producers.get(value))
        else:
            raise _Differs

    def operand(self, array, part: tuple, value) -> None:
        """Refuses a value that is not this part of the array."""
        reader = self.reader
        if array is None:
            raise _Differs
        if part == (0, reader.size(array), 1) and value is array:
            return
        eqn = reader.graph.producer(value, "slice")
        if eqn is None or eqn.invars[0] is not array or _part(eqn, reader.axis) != part:
            raise _Differs
        reader.note(eqn)

    def equation(self, expected, eqn) -> None:
        product = None if eqn is None else self.product_of_one(expected, eqn)
        if product is not None:
            self.reader.note(eqn, *product)
            self.reader.equals.setdefault(id(expected), expected.params)
            *squeezes, _ = product
            self.all(expected.invars, [squeeze.invars[0] for squeeze in squeezes])
            return
        if (
            eqn is None
            or eqn.primitive is not expected.primitive
            or len(eqn.invars) != len(expected.invars)
            or len(eqn.outvars) != 1
            or not all(
                _equal_but_length(eqn.params[name], param, self.lengths)
                for name, param in expected.params.items()
            )
        ):
            raise _Differs
        self.reader.note(eqn)
        self.reader.equals[id(expected)] = eqn.params
        self.all(expected.invars, eqn.invars)

    def product_of_one(self, expected, eqn) -> list[jex.JaxprEqn] | None:
        """The equations of a product without the dimension of its one element along the axis, which `eqn` gives back.

        jnp.matmul leaves out batch dimensions of one element. Returns the squeezes of both operands, and the product.
        """
        producer = self.reader.graph.producer
        if expected.primitive.name != "dot_general" or eqn.primitive.name != "broadcast_in_dim":
            return None
        dot = producer(eqn.invars[0], "dot_general")
        if dot is None or self.lengths[0] != 1:
            return None
        squeezes = [producer(var, "squeeze") for var in dot.invars]
        if None in squeezes:
            return None
        axes = [squeeze.params["dimensions"] for squeeze in squeezes]
        contracted, batch = expected.params["dimension_numbers"]
        for place, dims in enumerate(zip(*batch)):
            rest = tuple(
                [axis - (axis > gone) for axis in each if axis != gone]
                for sides in (contracted, batch)
                for each, gone in zip(sides, dims)
            )
            given = [list(each) for sides in dot.params["dimension_numbers"] for each in sides]
            result_dims = tuple(axis for axis in range(eqn.outvars[0].aval.ndim) if axis != place)
            if (
                axes == [(dim,) for dim in dims]
                and given == list(rest)
                and eqn.params["broadcast_dimensions"] == result_dims
                and _equal_but_length(
                    eqn.outvars[0].aval.shape, expected.outvars[0].aval.shape, self.lengths
                )
                and all(
                    dot.params[name] == param
                    for name, param in expected.params.items()
                    if name != "dimension_numbers"
                )
            ):
                return [*squeezes, dot]
        return None


def _equal_but_length(param, expected, lengths: tuple[int, int]) -> bool:
    """Whether parameters are equal, or tuples of sizes that are these two lengths where they differ."""
    if not isinstance(param, tuple) or not isinstance(expected, tuple):
        return param == expected
    return len(param) == len(expected) and all(
        x == y or (x, y) == lengths for x, y in zip(param, expected)
    )


def _is_elementwise(axis: int, f: Combination, *, is_combined: bool = True) -> bool:
    """Whether f combines each element along the axis for itself: all its equations say so.

    Follows the axis through the equations. Values that do not depend on the operands have none, or are broadcast along it if
    the recursion combines along it; along other axes (`is_combined` is false) they may have any.
    """
    axes: dict = {var: axis for var in (*f.left, *f.right) if var is not None}
    for eqn, params in zip(f.eqns, f.params):
        moved = {var: axes[var] for var in eqn.invars if isinstance(var, jex.Var) and var in axes}
        if moved:
            rule = _axis_rule(eqn.primitive.name)
            place = None if rule is None else rule(eqn, moved)
        elif not is_combined or params == eqn.params:
            continue
        else:
            place = _new_axis(eqn, params)
        if place is None:
            return False
        axes.update((var, place) for var in eqn.outvars)
    return all(axes.get(var) == axis for var in f.outputs)


def _new_axis(eqn, params: dict) -> int | None:
    """The axis along which a value is broadcast to another number of elements than with these parameters."""
    if eqn.primitive.name != "broadcast_in_dim":
        return None
    sizes = zip(eqn.params["shape"], params["shape"])
    places = [place for place, (x, y) in enumerate(sizes) if x != y]
    return places[0] if len(places) == 1 else None


def _axis_rule(name: str) -> Callable | None:
    return _same_axis if name in ELEMENTWISE or name in SAME_AXES else AXIS_RULES.get(name)


SAME_AXES = ("convert_element_type", "select_n", "copy", "clamp")


def _same_axis(eqn, moved: dict) -> int | None:
    places = set(moved.values())
    return None if len(places) > 1 or len(eqn.outvars) > 1 else places.pop()


def _viewed_axis(eqn, moved: dict) -> int | None:
    place = moved[eqn.invars[0]]
    marks = tuple(axis == place for axis in range(eqn.invars[0].aval.ndim))
    to = dimension_map.moved(eqn, marks)
    return to.index(True) if to is not None and True in to else None


def _reduced_axis(eqn, moved: dict) -> int | None:
    place = moved[eqn.invars[0]]
    gone = eqn.params["axes"]
    return None if place in gone else place - sum(axis < place for axis in gone)


def _batch_axis(eqn, moved: dict) -> int | None:
    """The result's place of an axis that is a batch dimension of both operands of a contraction."""
    _, batch = eqn.params["dimension_numbers"]
    places = [
        list(dims).index(moved[var]) if var in moved and moved[var] in dims else None
        for var, dims in zip(eqn.invars, batch)
    ]
    return places[0] if places[0] == places[1] else None


AXIS_RULES: dict[str, Callable] = {
    **dict.fromkeys(dimension_map.MOVING, _viewed_axis),
    "dot_general": _batch_axis,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"), _reduced_axis),
}
