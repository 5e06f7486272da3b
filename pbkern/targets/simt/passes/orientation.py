"""Scratch between products -> the same stored the other way round, where the next product then finds its first operand.

for %i < 16:                                          for %i < 16:
  nest [q<64, k<64, d<64*]                              nest [k<64, q<64, d<64*]
    acc0 dot= queries[q, d], keys[k, d]                   acc0 dot= keys[k, d], queries[q, d]
    s[q, k] = exp(acc0)  (after)              ->          s[k, q] = exp(acc0)  (after)
  nest [d<64, k<64, q<64*]                              nest [k<64, d<64, q<64*]
    acc0 dot= outs[q, d], s[q, k]                         acc0 dot= s[k, q], outs[q, d]
    t[d, k] = t[d, k] + acc0  (after)                     t[k, d] = t[k, d] + acc0  (after)

Sums of one product are the first operand of the next where that has rows of theirs, and goes along them. Whether an array is
turned, and whether a product takes its operands the other way round, are unknown truths; each nest says of some of them that
they are equal, or opposite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.edit.relocate import relocated
from pbkern.lower.nest.ir import Buf, Expr, Gather, Load, Nest, Stmt, every, nodes, with_nests

from .products import Context, MatrixProduct, matrix_product

# An unknown truth: whether an array is turned, by its buffer, whether a nest is, by its id; UPRIGHT is false.
Unknown = Buf | int | str
UPRIGHT = "upright"


@dataclass
class Truths:
    """Unknowns that are equal, or opposite, to others. parents: unknown -> (another one, whether it is opposite)."""

    parents: dict[Unknown, tuple[Unknown, bool]] = field(default_factory=dict)
    is_consistent: bool = True

    def root(self, unknown: Unknown) -> tuple[Unknown, bool]:
        """(an unknown by which this one is known, whether they are opposite)."""
        if unknown not in self.parents:
            return unknown, False
        parent, is_opposite = self.parents[unknown]
        root, further = self.root(parent)
        return root, is_opposite != further

    def relate(self, one: Unknown, other: Unknown, is_opposite: bool) -> None:
        """Notes what a nest says of two unknowns."""
        (first, before), (second, behind) = self.root(one), self.root(other)
        difference = is_opposite != (before != behind)
        if first != second:
            below, top = (second, first) if first == UPRIGHT else (first, second)
            self.parents[below] = top, difference
        elif difference:
            self.is_consistent = False

    def __call__(self, unknown: Unknown) -> bool:
        """Whether an unknown has to be true."""
        root, is_opposite = self.root(unknown)
        return root == UPRIGHT and is_opposite


def turned(stmts: Sequence[Stmt], context: Context) -> list[Stmt] | None:
    """The statements with arrays and products turned such that sums are first operands; None where nothing asks for that."""
    stmts = with_nests(stmts, _apart)
    nests = [stmt for stmt in every(stmts) if isinstance(stmt, Nest)]
    arrays, truths = _arrays(nests), Truths()
    products: dict[int, MatrixProduct] = {}
    for nest in nests:
        product = matrix_product(nest, context)
        if product is not None and product.is_one_tile:
            products[id(nest)] = product
            _relate_product(product, id(nest), arrays, truths)
        elif any(buf in arrays for buf, _ in _accesses(nest)):
            _relate_nest(nest, arrays, truths)
    flipped = {buf: replace(buf, shape=_swapped(buf.shape, buf)) for buf in arrays if truths(buf)}
    if not flipped or not truths.is_consistent:
        return None

    def turn(nest: Nest) -> list[Nest]:
        if not truths(id(nest)):
            return [nest]
        if id(nest) not in products:
            return [replace(nest, dims=dict(list(nest.dims.items())[::-1]))]
        (reduction,) = nest.reductions
        return [replace(nest, reductions=(replace(reduction, args=reduction.args[::-1]),))]

    def place(buf: Buf, index: tuple) -> tuple:
        return _swapped(index, buf)

    return relocated(with_nests(stmts, turn), flipped.get, context.pool, place)


def _apart(nest: Nest) -> list[Nest]:
    """A nest for each store, where none of them stores what another one loads."""
    loaded = {load.buf.root for load in nest.loads()}
    if nest.reductions or any(store.buf.root in loaded for store in nest.stores):
        return [nest]
    return [replace(nest, stores=(store,)) for store in nest.stores]


def _relate_product(product: MatrixProduct, nest: int, arrays: set[Buf], truths: Truths) -> None:
    """Notes that arrays with sums lie as the product goes, and that operands among them are first ones."""
    args = product.nest.reductions[0].args
    operands = nodes(args)
    side = *product.rows, product.column
    for buf, index in _accesses(product.nest, but=operands):
        if buf in arrays:
            truths.relate(buf, nest, _symbols(index, buf) != side)
    for position, (arg, dim) in enumerate(zip(args, side)):
        if isinstance(arg, Load) and arg.buf in arrays:
            truths.relate(nest, UPRIGHT, position == 1)
            truths.relate(arg.buf, UPRIGHT, _symbols(arg.index, arg.buf) != (dim, product.depth))


def _relate_nest(nest: Nest, arrays: set[Buf], truths: Truths) -> None:
    """Notes that all arrays lie as the nest goes, along rows if these are reduced."""
    for buf, index in _accesses(nest):
        if buf in arrays:
            truths.relate(buf, id(nest), _symbols(index, buf) != tuple(nest.dims))
    if nest.rdims:
        truths.relate(id(nest), UPRIGHT, next(iter(nest.dims)) in nest.rdims)


def _arrays(nests: Sequence[Nest]) -> set[Buf]:
    """Scratch of rows and columns that nests of two free dimensions, or products, go over as they are."""
    stored = {store.buf for nest in nests for store in nest.stores}
    arrays = {
        buf
        for buf in stored
        if buf.arena and buf.storage is None and not buf.space and len(_long(buf.shape, buf)) == 2
    }
    for nest in nests:
        is_plain = len(nest.dims) == (3 if any(x.is_product for x in nest.reductions) else 2)
        for buf, index in _accesses(nest):
            sizes = tuple(nest.dims.get(dim, 0) for dim in _symbols(index, buf))
            if buf.root in arrays and (not is_plain or sizes != tuple(_long(buf.shape, buf))):
                arrays.discard(buf.root)
    return arrays


def _accesses(nest: Nest, but: Sequence[Expr] = ()) -> list[tuple[Buf, tuple]]:
    """Buffers and places of what a nest loads and stores."""
    loads = [load for load in nest.loads() if load not in but]
    places = [(x.buf, () if isinstance(x, Gather) or x.guard else x.index) for x in loads]
    return places + [(store.buf, store.index) for store in nest.stores]


def _symbols(index: tuple, buf: Buf) -> tuple[str, ...]:
    """The dimension along each long axis; "" where it is not one of its own."""
    if len(index) != len(buf.shape):
        return ()
    return tuple(
        place.terms[0][0] if place.terms[1:] == () and place.terms[:1] and place.terms[0][1] == 1 and not place.const else ""
        for place in _long(index, buf)
    )  # fmt: skip


def _long(values: Sequence, buf: Buf) -> tuple:
    """The values, one per axis of a buffer, of axes that have more than one place."""
    return tuple(value for value, size in zip(values, buf.shape) if size > 1)


def _swapped(values: Sequence, buf: Buf) -> tuple:
    """The values, one per axis of a buffer, those of its two long axes exchanged."""
    long = iter(_long(values, buf)[::-1])
    return tuple(next(long) if size > 1 else value for value, size in zip(values, buf.shape))
