"""Which values of a region go to memory: by walking items backwards and collecting who asks for each value, where.

A value asked for at several places is stored when computing it again costs more than a store and
loads; a contraction is inlined into the single consumer that runs over exactly its result, as its
epilogue.
"""

from __future__ import annotations

import math

from pbkern.lower.nest.ir import MAX_HEIGHT

from .affine_index_arrays import row_steps
from .segments import cut_dim, parts_along
from .values import (
    Contract,
    Joined,
    Lazy,
    Literal,
    Opaque,
    Stored,
    Value,
    ValueRequests,
    dims_index,
)

# Values smaller than this are cheap wherever they are computed.
CHEAP_ELEMENTS = 64
# Points that read one element, from which on such a value is stored as well. Measured on Zen 4, per-channel factors of
# 25,088 pixels of 32 channels, float32: computed for each pixel 0.48 ms, stored 0.20.
MANY_READS = 64
# Additions of all nests that store parts of one value together. Source: first calls on Zen 4. Those of a bilateral filter of
# 5 x 5 points, 727 additions in 5 parts, take 2.8 s instead of 1.1; of Sobel's filter, 44 in 3 parts, 0.6 s instead of 0.9.
MOST_REPEATED_OPERATIONS = 500
# Elements that a vector operation is taken to compute: float32 in vectors of AVX2. Source: on Zen 4, of rows of joined pieces
# of 1 to 512 elements, float32 and int8, times the same in another order, all but seven of int8 are faster read in place.
ROW_LANES = 8
# Most small values that are computed from each other: every place that wants one, such as an index,
# computes it again.
SMALL_HEIGHT = 24
# Values that a function of indices may consist of to be computed again wherever it is wanted.
MOST_INDEX_VALUES = 16


def uses(item) -> tuple[Value, ...]:
    """Values that an item reads directly."""
    if isinstance(item, Value):
        return tuple(item.ins)
    if hasattr(item, "uses"):
        return item.uses
    mask = getattr(item, "mask", None)
    return (item.value,) if mask is None else (item.value, mask)


def decide(items: list, builder) -> StorageDecision:
    """Decides for the items of a region. Values of no effect are left out."""
    decision = StorageDecision(items, builder, set())
    while tall := decision.too_tall(items):
        decision = StorageDecision(items, builder, decision.cuts | tall)
    return decision


class StorageDecision:
    """Decisions about memory for the values of a region.

    Args:
      cuts: ids of values that are stored because expressions would be too tall.

    Attributes:
      stored: ids of the values that get memory of their own.
      layouts: id -> order of axes in memory, where it is not the usual one.
      over: id -> the partial sum that a value may be stored over.
      in_joined: ids of concatenations that are made where another one is, which alone reads them.
      cut: ids of concatenations that are read in their operands (segments.py).
    """

    def __init__(self, items: list, builder, cuts: set[int]):
        self.builder, self.cuts = builder, cuts
        self.most_parts = builder.context.options.most_parts
        self.price, self.short_row = (
            builder.context.options.store_price,
            builder.context.options.short_row,
        )
        self.requests: dict[int, ValueRequests] = {}
        self.stored: set[int] = set()
        self.in_joined: set[int] = set()
        self.cut: set[int] = set()
        self.guarded: set[int] = set()  # ids of values that are asked for beyond their ends
        # What the nest of a root stores, where it may be cut; positions between its parts, by dimension.
        self.sources: dict[object, tuple[Value, ...]] = {}
        self.edges: dict[object, dict[str, set[int]]] = {}
        self.roots: dict[object, dict[str, int]] = {}
        self.whole_stores: dict[object, int] = {}
        self.windows: dict[object, frozenset] = {}
        self.contracts = {id(value) for value in items if isinstance(value, Contract)}
        self.products = {
            id(value) for value in items if isinstance(value, Contract) and value.op == "dot"
        }
        self.ordered = {
            id(value) for value in items if isinstance(value, Contract) and value.ordered
        }
        self.hosts: set[object] = set()  # roots whose nest takes a contraction as its accumulators
        self.layouts: dict[int, tuple[int, ...]] = {}
        self.partial: set[int] = set()  # ids of values stored because they take a product
        self.over: dict[
            int, Value
        ] = {}  # id of one of these -> the one before it, which nothing else reads
        self.costs = self._costs(items)
        for item in reversed(items):
            self._visit(item)

    def _costs(self, items: list) -> dict[int, float]:
        costs: dict[int, float] = {}
        for item in items:
            if isinstance(item, Lazy) and id(item) not in self.cuts:
                costs[id(item)] = item.cost + sum(
                    costs.get(id(operand), 0.0) for operand in item.operands
                )
        return costs

    def too_tall(self, items: list) -> set[int]:
        """Values at which expressions reach the height where they are to be cut."""
        heights: dict[int, int] = {}
        tall = set()
        for item in items:
            if not isinstance(item, (Lazy, Contract, Joined)) or id(item) in self.stored:
                continue
            height = 1 + max((heights.get(id(input_), 0) for input_ in item.ins), default=0)
            if (
                isinstance(item, Lazy)
                and id(item) in self.requests
                and height >= self._largest_height(item)
            ):
                tall.add(id(item))
            else:
                heights[id(item)] = height
        return tall

    def _largest_height(self, value: Lazy) -> int:
        """Largest height of the expression of a value that others continue."""
        small = math.prod(value.shape) < CHEAP_ELEMENTS and not value.index_only
        return SMALL_HEIGHT if small else MAX_HEIGHT * 2 // 3

    def _ask(self, value: Value, place, forced: bool = False) -> None:
        request = self.requests.setdefault(id(value), ValueRequests())
        request.forced |= forced
        if place is not None:
            request.places.add(place)

    def _root(self, key, dims) -> None:
        self.roots[key] = dict(dims)

    def _visit(self, item) -> None:
        if isinstance(item, Value):
            self._visit_value(item)
        elif hasattr(item, "uses"):
            for value in item.uses:
                row_steps(self.builder, value)
                self._ask(
                    value,
                    None,
                    forced=not _is_free(value) and id(value) not in self.builder.unstored,
                )
        elif hasattr(item, "shape"):  # a store
            dims = [(f"r{k}", size) for k, size in enumerate(item.shape)]
            key = ("store", id(item))
            self._root(key, dims)
            if (
                item.mask is None
            ):  # a value that only a store wants, all of it, is made where it goes
                self.whole_stores[key] = id(item.value)
            self.sources[key] = uses(item)
            for value in self.sources[key]:
                self._ask(value, (key, dims_index(dims)))
        else:  # a scalar
            self._root(("let", id(item)), ())
            self._ask(item.value, (("let", id(item)), ()))

    def _visit_value(self, value: Value) -> None:
        request = self.requests.get(id(value))
        if request is None or isinstance(value, (Stored, Literal)):
            return
        direct = (
            not request.forced
            and len(request.places) == 1
            and self.whole_stores.get(next(iter(request.places))[0]) == id(value)
        )
        parts = None if direct else self._parts_asked_for(value, request)
        if parts is not None:
            for root, operand, i in parts:
                self._ask(operand, (root, i))
        elif isinstance(value, Opaque):
            if not (direct and value.takes_target):
                self.stored.add(id(value))
            elif next(iter(request.places))[0][0] == "opaque":
                self.in_joined.add(id(value))
            for k, operand in enumerate(value.operands):
                dims = [(f"r{j}", size) for j, size in enumerate(operand.shape)]
                key = ("opaque", id(value), k)
                self._root(key, dims)
                if isinstance(value, Joined):
                    self.sources[key] = (operand,)
                    if isinstance(operand, Joined):
                        self.whole_stores[key] = id(operand)
                self._ask(
                    operand,
                    (key, dims_index(dims)),
                    forced=value.needs_buffers and not _is_free(operand),
                )
        elif isinstance(value, Contract):
            if not self._inlines(value, request) and not direct:
                self.stored.add(id(value))
                self._lay_out(value, request)
            self._root(id(value), value.dims)
            self.windows[id(value)] = frozenset(value.rdims)
            for operand, ix in zip(value.operands, value.routes):
                self._ask(operand, (id(value), tuple(ix)))
        elif isinstance(value, Lazy):
            self._visit_lazy(value, request)
        else:
            raise AssertionError(type(value))

    def _parts_asked_for(self, value: Value, request: ValueRequests) -> list[tuple] | None:
        """(root, operand, index of it) per place, where a concatenation is read in its operands; None elsewhere."""
        if not isinstance(value, Joined) or request.forced:
            return None
        asked: list[tuple] = []
        cut: dict[object, dict[str, set[int]]] = {}
        for root, ix in request.places:
            only = value.part(ix, {})
            if only is not None:
                asked.append((root, *only))
                continue
            name = cut_dim(value, ix)
            if name is None or id(value) in self.guarded or not self._may_cut(root, name):
                return None
            parts = list(parts_along(value, ix, 0, self.roots[root][name]))
            edges = cut.setdefault(root, dict(self.edges.get(root, {})))
            before = edges.get(name, set())
            edges[name] = before | {part.start for part in parts if part.start > 0}
            if not self._pays_to_cut(root, name, len(edges[name]) - len(before), edges):
                return None
            asked += [(root, part.operand, part.place) for part in parts]
        if cut:
            self.cut.add(id(value))
            self.edges |= cut
        return asked

    def _pays_to_cut(self, root, name: str, more: int, edges: dict[str, set[int]]) -> bool:
        """Whether a root's nest is cut at `edges`, `more` of them new along the dimension `name`."""
        operations = max(self.costs.get(id(value), 0.0) for value in self.sources[root])
        parts = math.prod(len(along) + 1 for along in edges.values())
        if parts > self.most_parts or parts * operations > MOST_REPEATED_OPERATIONS:
            return False
        *_, last = self.roots[root]
        # Each part of a row ends with a vector of few elements, which costs as much as a whole one.
        size = self.roots[root][name]
        return name != last or more * operations <= self.price * size / ROW_LANES

    def _may_cut(self, root, name: str) -> bool:
        """Whether the nest of a root can be cut along a dimension: it stores elements, and sums nothing."""
        if root not in self.sources or name not in self.roots[root]:
            return False
        left, seen = list(self.sources[root]), set()
        while left:
            value = self.builder.resolve(left.pop())
            if isinstance(value, Contract):
                return False
            if id(value) not in seen and isinstance(value, (Lazy, Joined)):
                seen.add(id(value))
                left += value.ins
        return True

    def _visit_lazy(self, value: Lazy, request: ValueRequests) -> None:
        places = list(request.places)
        partial = not request.forced and self._takes_product(value, places)
        if partial:
            self._note_partial(value, places[0])
        if (
            partial
            or request.forced
            or id(value) in self.cuts
            or self._worth_storing(value, places)
        ):
            self.stored.add(id(value))
            dims = [(f"r{k}", size) for k, size in enumerate(value.shape)]
            order = self._lay_out(value, request)
            self._root(id(value), [dims[axis] for axis in order])
            self.sources[id(value)] = value.operands
            places = [(id(value), dims_index(dims))]
        if value.guard or id(value) in self.guarded:
            self.guarded |= {id(operand) for operand in value.operands}
        for root, ix in places:
            for operand, i in zip(value.operands, value.route(ix)):
                self._ask(operand, (root, tuple(i)))

    def _takes_product(self, value: Lazy, places: list) -> bool:
        """Whether to store value rather than a product that only value wants, which cannot be part of the nest of v's reader.

        So each product of a sum is added where its accumulators end, and sums are passed on instead
        of products.
        """
        if (
            len(places) != 1
            or value.is_view
            or value.guard
            or math.prod(value.shape) < CHEAP_ELEMENTS
        ):
            return False
        ((root, ix),) = places
        if root not in self.hosts and all(
            position.const == 0 and len(position.terms) <= 1 for position in ix
        ):
            return False
        return any(
            isinstance(operand, Contract)
            and id(operand) in self.products
            and operand.shape == value.shape
            and id(operand) not in self.requests
            and not self._sums_lanes(operand)
            for operand in value.operands
        )

    def _note_partial(self, value: Lazy, place) -> None:
        """Notes which partial sum may be stored over v: the next one, if it reads v at the points where it is stored."""
        root, ix = place
        self.partial.add(id(value))
        if root in self.partial and ix == dims_index(
            [(f"r{k}", size) for k, size in enumerate(value.shape)]
        ):
            self.over[root] = value

    def _lay_out(self, value: Value, request: ValueRequests) -> tuple[int, ...]:
        """Axes from outermost to innermost in memory: as all readers walk them, if they agree."""
        usual = tuple(range(len(value.shape)))
        wanted = {self._walked(root, ix, usual) for root, ix in request.places}
        order = wanted.pop() if len(wanted) == 1 and not request.forced else usual
        if order != usual:
            self.layouts[id(value)] = order
        return order

    def _walked(self, root, ix, usual: tuple[int, ...]) -> tuple[int, ...]:
        if root in self.products:
            return usual  # operands of products are packed as the microkernel wants them
        depth = {axis: k for k, axis in enumerate(self.roots[root])}
        # Where an axis is a result's plus a window's, such as 2 * row + tap, it counts as the
        # result's.
        windows = self.windows.get(root, frozenset())
        inner = [
            max(
                (
                    depth.get(symbol, -1)
                    for symbol in (position.symbols - windows or position.symbols)
                ),
                default=-1,
            )
            for position in ix
        ]
        return tuple(sorted(usual, key=lambda dim: (inner[dim], dim)))

    def _worth_storing(self, value: Lazy, places: list) -> bool:
        cost = self.costs.get(id(value), 0.0)
        if value.is_view or cost == 0 or id(value) in self.builder.unstored:
            return False
        if value.guard and any(root in self.contracts for root, _ in places):
            return True  # a padded operand of a reduction: tests would run at every step
        if any(
            self._is_contract_operand(root) and self._reuse(root, ix) > 1 for root, ix in places
        ):
            return True
        reuse = max((self._reuse(root, ix) for root, ix in places), default=1)
        if math.prod(value.shape) < CHEAP_ELEMENTS and reuse < MANY_READS:
            return False
        if cost * (len(places) - 1) > self.price:
            return True
        if cost > self.price and any(
            root in self.ordered and self._walked_along(root, ix) for root, ix in places
        ):
            return True  # one element after the other there, vectors here
        if cost > 2 * self.price and any(
            0 < self._row(root, ix) <= self.short_row for root, ix in places
        ):
            return True
        return cost > self.price and any(
            self._reuse(root, ix) >= 4 and self._varies_last(root, ix) for root, ix in places
        )

    def _row(self, root, ix) -> int:
        """Points of the root's last dimensions, in which the value stays the same and is a scalar; 0 for none."""
        used = frozenset().union(*(position.symbols for position in ix)) if ix else frozenset()
        row = 0
        for dim, size in reversed(
            [(name, extent) for name, extent in self.roots[root].items() if extent > 1]
        ):
            if dim in used:
                return row
            row = max(row, 1) * size
        return row

    def _walked_along(self, root, ix) -> bool:
        """Whether the root's reduced dimension walks the value's last axis."""
        return bool(ix) and bool(ix[-1].symbols & self.windows[root])

    def _is_contract_operand(self, root) -> bool:
        return root in self.products and bool(self.roots[root])

    def _reuse(self, root, ix) -> int:
        """Counts the points of the root's space that read one element."""
        used = frozenset().union(*(position.symbols for position in ix)) if ix else frozenset()
        return math.prod(size for dim, size in self.roots[root].items() if dim not in used)

    def _varies_last(self, root, ix) -> bool:
        """Whether the value changes along the root's last dimension, so that hoisting cannot save it."""
        dims = [dim for dim, size in self.roots[root].items() if size > 1]
        return bool(dims) and any(dims[-1] in position.symbols for position in ix)

    def _sums_lanes(self, value: Contract) -> bool:
        """Whether vectors run along a reduced dimension: the last one of an operand, in products of that which has rows."""
        symbols = [frozenset().union(*(position.symbols for position in ix)) for ix in value.routes]
        live = {dim for dim, size in value.dims if size > 1} - set(value.rdims)
        if value.op == "dot" and all(live - symbol for symbol in symbols):
            return False  # each operand has rows of its own
        rows = [ix for ix, symbol in zip(value.routes, symbols) if ix and symbol >= live]
        return bool(rows) and bool(rows[0][-1].symbols & set(value.rdims))

    def _inlines(self, value: Contract, request: ValueRequests) -> bool:
        """One consumer whose space is exactly the result's, by permutation."""
        if request.forced or len(request.places) != 1 or value.ordered:
            return False
        ((root, ix),) = request.places
        if (
            self.costs.get(root, 0.0) > 2 * self.price
            and math.prod(value.shape) >= CHEAP_ELEMENTS
            and self._sums_lanes(value)
        ):
            return False  # its results are scalars; what follows is cheaper in vectors of them
        if (
            root in self.contracts
            or root in self.hosts
            or (isinstance(root, tuple) and root[0] == "let")
        ):
            return False  # no nest of its own, or it has a contraction inside already
        space = {dim for dim, size in self.roots[root].items() if size > 1}
        named = [position for position in ix if position.terms]
        if any(
            len(affine.terms) != 1 or affine.terms[0][1] != 1 or affine.const for affine in named
        ):
            return False
        # Every dimension of the result must be a plain symbol on both sides.
        if any(
            len(out_position.terms) > 1
            or (out_position.terms and out_position.terms[0][1] != 1)
            or out_position.const
            for out_position in value.out
        ):
            return False
        if any(
            bool(out_position.terms) != bool(position.terms)
            for out_position, position in zip(value.out, ix)
        ) or any(position.const for position in ix):
            return False
        symbols = [affine.terms[0][0] for affine in named]
        if len(set(symbols)) != len(symbols) or set(symbols) != space:
            return False
        self.hosts.add(root)
        return True


def _is_free(value: Value) -> bool:
    """A stored value seen through index maps alone, or a short function of indices, such as a mask."""
    if isinstance(value, Lazy) and value.index_only:
        return _count(value, MOST_INDEX_VALUES) <= MOST_INDEX_VALUES
    while isinstance(value, Lazy) and value.is_view and len(value.operands) == 1:
        value = value.operands[0]
    return isinstance(value, (Stored, Literal))


def _count(value: Value, most: int) -> int:
    """Counts the values that `value` is made of; stops soon after `most`.

    One that costs anything is too many.
    """
    count, left = 0, [value]
    while left and count <= most:
        value = left.pop()
        count += 1 if value.cost == 0 else most + 1
        left += value.ins
    return count
